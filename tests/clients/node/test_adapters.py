"""Both kinds of app: what passes, what is refused, what a stock app's author changes."""

import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from apps import StepClient, message_app, record, run_strategy, same
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from flwr_privacy.clients import (
    FedAvgClient,
    SchemeClient,
    SecureSumClient,
    UDPClient,
    as_mod,
    numpy_client_app,
)
from flwr_privacy.errors import DeclinedError, ProtocolError
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies import FedAvg, LoopOptions
from flwr_privacy.udp import UDPTerms
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.message import METRICS, RECORD, Header


class StrictClient(FedAvgClient):
    """A scheme that protects something: it does not train without its record."""

    bare: ClassVar[bool] = False


def ask(app: ClientApp, content: RecordDict, message_type: str = "train") -> Message:
    grid = InlineGrid(app, 1)
    with acting_as_server(grid.run_id):
        (node,) = grid.get_node_ids()
        (reply,) = grid.send_and_receive([Message(content, node, message_type)], timeout=5)
    return reply


def question() -> RecordDict:
    return RecordDict({"arrays": record(), "config": ConfigRecord({"lr": 0.1})})


@pytest.mark.parametrize("scheme", [FedAvgClient, StrictClient])
def test_bare_training_is_up_to_the_scheme(scheme: type[SchemeClient]) -> None:
    numpy_app = numpy_client_app(lambda context: scheme(StepClient(0), context))
    for app in (message_app([as_mod(scheme)]), numpy_app):
        reply = ask(app, question())
        if scheme is FedAvgClient:
            assert reply.content["metrics"]["num-examples"] == 1
        else:
            assert "works under the scheme 'fedavg' only" in reply.error.reason


def test_the_same_wrapped_app_serves_flowers_own_strategy() -> None:
    flowers = run_strategy(FlowerFedAvg(min_available_nodes=4))
    ours = run_strategy(FedAvg(min_available_nodes=4))
    for name in ("layer.weight", "0"):
        np.testing.assert_allclose(
            ours.arrays[name].numpy(), flowers.arrays[name].numpy(), rtol=1e-5
        )


def test_a_mod_can_be_sent_to_a_worker() -> None:
    assert pickle.loads(pickle.dumps(as_mod(FedAvgClient))).scheme_client is FedAvgClient


def test_client_fn_must_return_a_schemes_client() -> None:
    app = numpy_client_app(lambda context: StepClient(0))
    with pytest.raises(ProtocolError, match="none of 4 nodes said who it is"):
        run_strategy(FedAvg(), app)


def test_a_numpy_client_may_train_in_place() -> None:
    class InPlace(StepClient):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
            for array in parameters:
                array += 1
            return parameters, 1, {}

    app = numpy_client_app(lambda context: FedAvgClient(InPlace(0), context))
    start = record({"w": np.zeros(3, np.float32)})
    result = run_strategy(FedAvg(fraction_evaluate=0), app, arrays=start)
    np.testing.assert_array_equal(result.arrays["w"].numpy(), np.full(3, 3.0))


@pytest.mark.parametrize("name", ["fit", "evaluate", "get_parameters", "get_properties"])
def test_a_legacy_server_gets_nothing_past_the_scheme(name: str, tmp_path: Path) -> None:
    arguments = ([np.ones(3, np.float32)], {}) if name in ("fit", "evaluate") else ({},)
    context = Context(1, 1, {"client-id": "a"}, RecordDict(), {})
    assert getattr(FedAvgClient(StepClient(2), context), name)(*arguments) is not None
    with pytest.raises(ProtocolError, match="works under the scheme 'fedavg' only"):
        getattr(StrictClient(StepClient(2), context), name)(*arguments)
    with pytest.raises(TypeError, match="FedAvgClient needs the context"):
        getattr(FedAvgClient(StepClient(2)), name)(*arguments)
    (tmp_path / "policy.toml").write_text('schemes = ["udp"]')
    context.node_config["privacy-policy"] = str(tmp_path / "policy.toml")
    with pytest.raises(DeclinedError, match="schemes = "):
        getattr(FedAvgClient(StepClient(2), context), name)(*arguments)


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ({"arrays": record()}, "it has 1 and 0"),
        ({"metrics": MetricRecord({"num-examples": 1})}, "it has 0 and 1"),
        (
            {"a": record(), "b": record(), "metrics": MetricRecord({"num-examples": 1})},
            "it has 2 and 1",
        ),
    ],
)
def test_an_app_must_reply_with_one_record_of_each(records: dict[str, Any], text: str) -> None:
    app = ClientApp(mods=[as_mod(FedAvgClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict(records), reply_to=message)

    seen: list[dict[str, Any]] = []
    run_strategy(FedAvg(fraction_evaluate=0, loop=LoopOptions(on_round=seen.append)), app)
    assert [line["refused"] for line in seen[1:]] == [{"error": 4}] * 3


def test_odd_but_legal_apps() -> None:
    """Names like "0", 0-d counters, other record keys, weights by batches, state of its own."""
    app = ClientApp(mods=[as_mod(FedAvgClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        assert message.content["cfg"]["lr"] == 0.5
        assert "flwr-privacy" not in message.content
        visits = int(context.state.metric_records.get("visits", {"n": 0})["n"]) + 1
        context.state["visits"] = MetricRecord({"n": visits})
        client = int(context.node_config["partition-id"])
        metrics = MetricRecord({"batches": client, "visits": visits})
        content = RecordDict({"weights": message.content["weights"], "stuff": metrics})
        return Message(content, reply_to=message)

    strategy = FedAvg(
        weighted_by_key="batches",
        arrayrecord_key="weights",
        configrecord_key="cfg",
        fraction_evaluate=0,
    )
    result = run_strategy(strategy, app, train_config=ConfigRecord({"lr": 0.5}))
    assert same(result.arrays, record())
    assert [line["train"]["visits"] for line in result.history[1:]] == [1, 2, 3]


def test_the_scheme_decides_what_leaves_the_node() -> None:
    class Silent(FedAvgClient):
        def handle(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
            trained = train(arrays)
            return trained.arrays, {METRICS: {"num-examples": 1}}

    result = run_strategy(FedAvg(fraction_evaluate=0), message_app([as_mod(Silent)]))
    assert [line["train"] for line in result.history[1:]] == [{}, {}, {}]


def test_a_users_round_error_is_that_clients_alone() -> None:
    class Failing(StepClient):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
            if self.client == 1:
                raise OSError("disk full")
            return super().fit(parameters, config)

    def client_fn(context: Context) -> Any:
        return FedAvgClient(Failing(int(context.node_config["partition-id"])), context)

    for clients, nodes in ((None, 4), (4, 1)):
        strategy = FedAvg(
            loop=LoopOptions(clients=clients), min_available_nodes=nodes, fraction_evaluate=0
        )
        result = run_strategy(strategy, numpy_client_app(client_fn), nodes=nodes)
        line = result.history[1]
        assert (line["accumulated"], line["refused"]) == (3, {"error": 1})


def test_evaluation_passes_through() -> None:
    app = numpy_client_app(
        lambda context: FedAvgClient(StepClient(int(context.node_config["partition-id"])), context)
    )
    assert isinstance(record(), ArrayRecord)
    by_numpy = run_strategy(FedAvg(), app).evaluate_metrics_clientapp[1]
    by_message = run_strategy(FedAvg()).evaluate_metrics_clientapp[1]
    assert by_numpy["accuracy"] == pytest.approx(by_message["accuracy"])


@pytest.mark.parametrize("client", [SecureSumClient, FedAvgClient])
def test_the_text_of_an_apps_own_error_reply_stays_on_the_node(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app = ClientApp(mods=[as_mod(client)])
    secure_sum = SecureSum() if client is SecureSumClient else None

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(Error(0, "patient J. Smith"), reply_to=message)

    with caplog.at_level("WARNING", "flwr.privacy"):
        run_strategy(FedAvg(secure_sum=secure_sum), app, arrays=record(), num_rounds=1)
    told = [entry.getMessage() for entry in caplog.records if "refused" in entry.getMessage()]
    assert any("the client's own training failed" in text for text in told)
    assert not any("Smith" in text for text in told)


def test_a_client_that_cannot_be_built_says_nothing_of_its_data_to_any_message() -> None:
    def client_fn(context: Context) -> Any:
        raise ValueError("the record is 17")

    reply = ask(numpy_client_app(client_fn), question())
    assert reply.error.reason == "the client could not be built; the log of the node says how"


@pytest.mark.parametrize(
    "change",
    [
        {"config": ConfigRecord({"lr": 0.2})},
        {"config@a": ConfigRecord({"lr": 0.2})},
        {"limits": MetricRecord({"lr": 0.2})},
        {"teacher": record({"w": [1.0]})},
    ],
)
def test_all_that_the_users_code_is_told_is_part_of_the_question(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    terms = UDPTerms(
        **{"unit": "user", "noise_multiplier": 5.0, "epsilon": 8.0, "delta": 1e-5, "gap": 1e-3},
        **{"clipping_norm": 1.0, "grid": -16},
    )
    header = Header(scheme="udp", experiment_id="e", phase="train", server_round=1)
    plain = {**question(), "teacher": record(), RECORD: ConfigRecord(header.write(write(terms)))}
    node = {"client-id": "a", "partition-id": 0, "privacy-state": str(tmp_path)}
    app = message_app([as_mod(UDPClient)])
    ledger = Ledger(tmp_path / "a.ledger", data_set="a", durable=False)
    grid = InlineGrid(app, [node])
    charges = []
    with acting_as_server(grid.run_id):
        (node_id,) = grid.get_node_ids()
        for content in (plain, plain, {**plain, **change}):
            message = Message(RecordDict(content), node_id, "train")
            (reply,) = grid.send_and_receive([message], timeout=5)
            assert not reply.has_error(), reply.error
            charges.append(len(ledger.entries()))
    assert charges == [1, 1, 2]
