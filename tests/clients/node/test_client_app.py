"""The client half by an import alone, and the order of the app's mods."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
from apps import StepClient, message_app, model_of, record, run_strategy
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import Client
from flwr.client import mod as legacy_mods
from flwr.clientapp import ClientApp, mod
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

import flwr_privacy.clients
from flwr_privacy.clients import (
    CentralDPClient,
    CentralDPClientApp,
    FedAvgClient,
    FedAvgClientApp,
    M2FDPClient,
    M2FDPClientApp,
    MSPClient,
    MSPClientApp,
    MSPDQClient,
    MSPDQClientApp,
    SchemeClient,
    SchemeClientApp,
    SecureSumClient,
    SecureSumClientApp,
    UDPClient,
    UDPClientApp,
    as_mod,
)
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies import (
    M2FDP,
    MSP,
    MSPDQ,
    UDP,
    CentralDP,
    DeviceNoise,
    FedAvg,
    LoopOptions,
    UserLevel,
)
from flwr_privacy.wire.message import RECORD

LOOP = LoopOptions(seed=1, experiment_id="e")
SUM = SecureSum()
TREE = TierTree.of_fanouts((2, 2), p=0.5)
APPS: list[tuple[type[SchemeClientApp], Callable[[], Any]]] = [
    (FedAvgClientApp, lambda: FedAvg(loop=LOOP)),
    (SecureSumClientApp, lambda: FedAvg(loop=LOOP, secure_sum=SUM)),
    (UDPClientApp, lambda: UDP(loop=LOOP, privacy=UserLevel())),
    (CentralDPClientApp, lambda: CentralDP(loop=LOOP, secure_sum=SUM)),
    (MSPClientApp, lambda: MSP(loop=LOOP)),
    (MSPDQClientApp, lambda: MSPDQ(loop=LOOP, secure_sum=SUM, bound=8.0)),
    (M2FDPClientApp, lambda: M2FDP(loop=LOOP, tree=TREE, privacy=DeviceNoise(clipping_norm=4.0))),
]
MODEL = {name: array for name, array in model_of(record()).items() if name != "batches"}
HALVES: dict[type[SchemeClientApp], type[SchemeClient]] = {
    CentralDPClientApp: CentralDPClient,
    FedAvgClientApp: FedAvgClient,
    M2FDPClientApp: M2FDPClient,
    MSPClientApp: MSPClient,
    MSPDQClientApp: MSPDQClient,
    SecureSumClientApp: SecureSumClient,
    UDPClientApp: UDPClient,
}


def given(client: Any, context: Context) -> Any:
    return client


def client_fn(context: Context) -> Any:
    return StepClient(int(context.node_config["partition-id"])).to_client()


def functions(app: ClientApp, mods: list[Any] | None = None) -> ClientApp:
    """Register the functions of a stock app."""
    stock = message_app([])._registered_funcs
    app.train(mods=mods)(stock["train.default"])
    app.evaluate()(stock["evaluate.default"])
    return app


def trained(app: ClientApp, strategy: Any, state: Any = None) -> dict[str, Any]:
    options = {"num_rounds": 2, "insecure_seed": 3, "state": state}
    return model_of(run_strategy(strategy, app, arrays=record(MODEL), **options).arrays)


@pytest.mark.parametrize(("app", "make"), APPS)
def test_an_import_is_the_whole_change_to_either_kind_of_app(
    app: type[SchemeClientApp], make: Callable[[], Any]
) -> None:
    assert app.scheme_client is HALVES[app]
    assert getattr(flwr_privacy.clients, app.__name__) is app
    by_mod = trained(message_app([as_mod(app.scheme_client)]), make())
    for own in (functions(app()), app(client_fn)):
        found = trained(own, make())
        assert list(found) == list(MODEL)
        for name, array in found.items():
            assert array.dtype == MODEL[name].dtype
            assert (array != MODEL[name]).all()
            if app is not M2FDPClientApp:  # there the server adds noise of its own
                np.testing.assert_array_equal(array, by_mod[name])


def query(app: ClientApp, content: RecordDict, kind: str = "train") -> Message:
    grid = InlineGrid(app, 1)
    with acting_as_server(grid.run_id):
        (node,) = grid.get_node_ids()
        (reply,) = grid.send_and_receive([Message(content, node, kind)], timeout=5)
    return reply


def test_mods_of_the_app_get_its_own_messages_and_cannot_add_to_what_leaves() -> None:
    seen: list[list[str]] = []

    def watching(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        assert message.metadata.message_type == "train"
        seen.append(sorted(message.content))
        reply = call_next(message, context)
        seen.append(sorted(reply.content))
        reply.content["beside"] = ConfigRecord({"first": 1.5})
        return reply

    left: list[set[str]] = []

    class Looking(UDP):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            replies = list(replies)
            left.extend(set(reply.content) for reply in replies)
            return super().aggregate_train(server_round, replies)

    for app in (functions(UDPClientApp(mods=[watching])), functions(UDPClientApp(), [watching])):
        seen.clear()
        trained(app, Looking(privacy=UserLevel()))
        assert seen == [["arrays", "config"], ["arrays", "metrics"]] * 8
    assert left == [{"arrays", "metrics", RECORD}] * 16


def test_mods_of_a_numpy_client_get_the_records_that_they_are_written_for() -> None:
    configs: list[dict[str, Any]] = []

    def rate(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        message.content["fitins.config"]["lr"] = 0.5
        reply = call_next(message, context)
        reply.content["fitres.num_examples"]["num_examples"] = 7
        return reply

    class Client(StepClient):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
            configs.append(config)
            return super().fit(parameters, config)

    app = FedAvgClientApp(lambda context: Client(0).to_client(), [rate])
    result = run_strategy(FedAvg(), app, num_rounds=1)
    assert configs == [{"server-round": 1, "lr": 0.5}] * 4
    assert result.train_metrics_clientapp[1] == {"loss": 0.0}


def test_a_numpy_client_serves_strategies_of_flower_too() -> None:
    app = FedAvgClientApp(client_fn)
    flowers = run_strategy(FlowerFedAvg(min_available_nodes=4), app, arrays=record(MODEL))
    ours = run_strategy(FedAvg(min_available_nodes=4), app, arrays=record(MODEL))
    for name, array in model_of(ours.arrays).items():
        np.testing.assert_allclose(array, flowers.arrays[name].numpy(), rtol=1e-5)
    for number, metrics in ours.evaluate_metrics_clientapp.items():
        assert metrics == pytest.approx(dict(flowers.evaluate_metrics_clientapp[number]))
    parameters = ArrayRecord(list(MODEL.values()))
    older = RecordDict({"fitins.parameters": parameters, "fitins.config": ConfigRecord()})
    assert "fitres.parameters" in query(app, older).content
    assert "works under the scheme 'udp' only" in query(UDPClientApp(client_fn), older).error.reason


def test_what_a_client_failed_on_stays_in_the_log_of_its_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Silent(Client):
        """A Client of Flower's that has no fit: it answers with a status."""

    class Broken(StepClient):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
            raise ValueError("secret")

    for client, log in ((Silent(), "status 3"), (Broken(0).to_client(), "secret")):
        app = FedAvgClientApp(partial(given, client))
        result = run_strategy(FedAvg(), app, num_rounds=1)
        assert result.history[1]["refused"] == {"error": 4}
        assert log in caplog.text
        assert not any(log in str(line.args) for line in caplog.records if "refused" in line.msg)


@pytest.mark.parametrize(
    ("mods", "text"),
    [
        ([as_mod(UDPClient)], r"'as_mod\(UDPClient\)'.* own mods: UDPClientApp brings"),
        ([mod.fixedclipping_mod], "'fixedclipping_mod'.*leave it out; UDP and CentralDP clip"),
        ([legacy_mods.adaptiveclipping_mod], "'adaptiveclipping_mod'.*leave it out"),
        ([legacy_mods.secaggplus_mod], "leave it out; secure_sum=SecureSum"),
    ],
)
def test_mods_that_cannot_stand_beside_a_scheme_are_refused_when_the_app_is_made(
    mods: list[Any], text: str
) -> None:
    for make in (
        lambda: UDPClientApp(mods=mods),
        lambda: UDPClientApp(client_fn, mods),
        lambda: UDPClientApp().train(mods=mods),
        lambda: UDPClientApp().evaluate(mods=mods),
    ):
        with pytest.raises(InvalidParameterError, match=text):
            make()


def test_what_a_client_fn_cannot_do_is_told_at_the_hello() -> None:
    half = UDPClientApp(lambda context: UDPClient(StepClient(0), context).to_client())
    text = "client_fn returned a UDPClient: UDPClientApp puts the scheme around it"
    with pytest.raises(ProtocolError, match=text):
        run_strategy(UDP(privacy=UserLevel()), half)

    def broken(context: Context) -> Any:
        raise FileNotFoundError("secret")

    with pytest.raises(ProtocolError, match="client's own client_fn failed; the log") as raised:
        run_strategy(UDP(privacy=UserLevel()), UDPClientApp(broken))
    assert "secret" not in str(raised.value)


def quiet(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    return call_next(message, context)


def needing_arrays(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    assert message.content["arrays"]
    return call_next(message, context)


def test_a_scheme_that_is_not_the_first_mod_is_refused_at_the_hello() -> None:
    text = r"the first of the app's mods: quiet would .*mods=\[as_mod\(UDPClient\), quiet\]"
    with pytest.raises(ProtocolError, match=text):
        run_strategy(UDP(privacy=UserLevel()), message_app([quiet, as_mod(UDPClient)]))
    app = functions(ClientApp(mods=[quiet]), [as_mod(UDPClient)])
    with pytest.raises(ProtocolError, match=text):
        run_strategy(UDP(privacy=UserLevel()), app)
    with pytest.raises(ProtocolError, match=r"before all mods of its own .*KeyError: 'arrays'"):
        run_strategy(UDP(privacy=UserLevel()), message_app([needing_arrays, as_mod(UDPClient)]))
    assert run_strategy(UDP(privacy=UserLevel()), message_app([as_mod(UDPClient), needing_arrays]))


def test_mods_of_flowers_strategies_behind_a_scheme_are_refused_at_the_hello(tmp_path: Any) -> None:
    text = "hello: .*'fixedclipping_mod': .*leave it out; UDP and CentralDP clip"
    for app in (
        message_app([as_mod(UDPClient), quiet, mod.fixedclipping_mod]),
        functions(ClientApp(mods=[as_mod(UDPClient)]), [quiet, mod.fixedclipping_mod]),
    ):
        with pytest.raises(ProtocolError, match=text):
            run_strategy(UDP(privacy=UserLevel()), app, state=tmp_path)
    assert not list(tmp_path.glob("*.ledger"))


def test_a_node_runs_the_clients_of_a_cohort_for_either_kind_of_app() -> None:
    loop = LoopOptions(seed=1, experiment_id="e", clients=6)
    models = [
        trained(app, UDP(loop=loop, privacy=UserLevel(), min_available_nodes=1))
        for app in (
            message_app([as_mod(UDPClient)]),
            functions(UDPClientApp()),
            UDPClientApp(client_fn),
        )
    ]
    for model in models[1:]:
        for name, array in model.items():
            np.testing.assert_array_equal(array, models[0][name])
