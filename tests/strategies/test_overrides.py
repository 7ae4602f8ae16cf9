"""What users override or address by themselves, and what is refused then."""

import math
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from apps import make, message_app, record, run_strategy, same
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvgM, Krum, Strategy

from flwr_privacy.clients import FedAvgClient, MSPClient, as_mod
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import (
    M2FDP,
    MSP,
    MSPDQ,
    UDP,
    ColumnFeatures,
    DeviceNoise,
    FedAvg,
    FedVS,
    LagrangeCoding,
    LoopOptions,
    UserLevel,
)
from flwr_privacy.wire.message import RECORD


@pytest.mark.parametrize(("nodes", "options"), [(4, {}), (2, {"clients": 4})])
def test_what_is_addressed_to_one_client_goes_to_that_client_alone(
    nodes: int, options: dict[str, Any]
) -> None:
    seen: dict[str, Any] = {}

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        text = str(message)
        seen.setdefault(context.node_id, "")
        seen[context.node_id] += text
        return as_mod(Listener)(message, context, call_next)

    class Listener(FedAvgClient):
        def handle(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
            client = self.context.node_config["partition-id"]
            assert fields["secret"] == f"for-{client}"
            assert list(arrays) == [*record(), "share"]
            assert arrays["share"] == int(client)
            return train({name: arrays[name] for name in record()}).arrays, {
                "metrics": {"num-examples": 1}
            }

    class Teller(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            super().configure_train(server_round, arrays, config, grid)
            talk = self.messenger
            assigned = talk.sample(grid, server_round, "train", fraction=1.0, minimum=1)
            own = {
                client: RecordDict(
                    {
                        "arrays": record({"share": np.array(int(client))}),
                        RECORD: ConfigRecord({"secret": f"for-{client}"}),
                    }
                )
                for clients in assigned.values()
                for client in clients
            }
            content = RecordDict({"arrays": arrays, "config": config})
            return talk.ask(server_round, "train", content, assigned, own=own)

    strategy = make(Teller, fraction_evaluate=0, **options)
    result = run_strategy(strategy, message_app([spy]), nodes=nodes)
    assert [line["accumulated"] for line in result.history[1:]] == [4, 4, 4]
    for text in seen.values():
        assert sum(f"for-{client}" in text for client in range(4)) == 4 // nodes


def test_options_that_need_our_start_are_refused_under_another() -> None:
    class Own(FedAvg):
        start = Strategy.start

    with pytest.raises(ProtocolError, match="clients, quorum: works only where this strategy's"):
        run_strategy(Own(loop=LoopOptions(clients=40, quorum=1)))


def test_a_configure_train_of_ones_own_is_told_what_to_do() -> None:
    class Own(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            content = RecordDict({"arrays": arrays, "config": config})
            return self._construct_messages(content, list(grid.get_node_ids()), "train")

    with pytest.raises(ProtocolError, match=r"must return the messages of super\(\).configure_tra"):
        run_strategy(Own())


def test_overriding_as_with_fedavg() -> None:
    rates: list[float] = []

    class Decay(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            config["lr"] = 0.1 / server_round
            rates.append(config["lr"])
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return super().aggregate_train(server_round, list(replies))

    result = run_strategy(Decay(loop=LoopOptions(seed=1)))
    assert rates == [0.1, 0.05, 0.1 / 3]
    assert same(result.arrays, run_strategy(FedAvg(loop=LoopOptions(seed=1))).arrays)


CODED = {"data": ColumnFeatures(order=1), "coding": LagrangeCoding(T=1)}
OPTIONS: dict[Any, dict[str, Any]] = {
    M2FDP: {"tree": TierTree.of_fanouts((2, 2)), "privacy": DeviceNoise()},
    FedVS: {"labels": [0, 1], "server_model": Mock(), "batch_size": 2, **CODED},
}


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (MSP, "aggregate_train"),
        (MSPDQ, "aggregate_train"),
        (M2FDP, "aggregate_train"),
        (M2FDP, "configure_train"),
        (FedVS, "aggregate_train"),
        (FedVS, "configure_train"),
    ],
)
@pytest.mark.parametrize("beside", [True, False])
def test_a_method_that_the_rounds_do_not_call_is_refused_when_the_strategy_is_made(
    strategy: Any, name: str, beside: bool
) -> None:
    def method(self: Any, *given: Any) -> Any:
        return getattr(super(strategy, self), name)(*given)

    bases = (type("Mixin", (), {name: method}), strategy) if beside else (strategy,)
    own = type("Own", bases, {} if beside else {name: method})
    options = OPTIONS.get(strategy, {})
    with pytest.raises(InvalidParameterError) as refused:
        own(**options)
    said = f"{name} = '{'Mixin' if beside else 'Own'}.{name}': expected no method of your own: with"
    assert str(refused.value).startswith(f"{said} scheme '{strategy.scheme}'")
    assert "Override train_round" in str(refused.value)


def test_what_the_rounds_of_msp_call_can_be_overridden() -> None:
    called: list[str] = []

    class Own(MSP):
        def configure_train(self, *given: Any) -> Any:
            called.append("configure_train")
            return super().configure_train(*given)

        def train_round(self, grid: Any, server_round: int, arrays: Any, config: Any) -> Any:
            config["lr"] = 0.1 / server_round
            arrays, metrics = super().train_round(grid, server_round, arrays, config)
            called.append(str(arrays is not None))
            return arrays, metrics

    run_strategy(Own(), message_app([as_mod(MSPClient)]), num_rounds=2)
    assert called == ["configure_train", "True"] * 2


def test_a_training_round_of_ones_own_may_call_what_the_schemes_does_not() -> None:
    class Averaging(MSP):
        not_called = frozenset()

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return super().aggregate_train(server_round, replies)

    class Own(Averaging):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return super().aggregate_train(server_round, replies)

    assert Own().scheme == "msp"


class UnderOwnStart(UDP):
    start = Strategy.start


@pytest.mark.parametrize(
    "strategy",
    [
        lambda **given: FedAvg(secure_sum=SecureSum(), **given),
        lambda **given: UDP(privacy=UserLevel(), **given),
        lambda **given: UnderOwnStart(privacy=UserLevel(), rounds=2, **given),
        MSP,
        lambda **given: M2FDP(tree=TierTree.of_fanouts((2, 2)), privacy=DeviceNoise(), **given),
    ],
)
def test_names_to_keep_back_that_the_model_has_not_are_refused_before_a_message(
    strategy: Any,
) -> None:
    sent: list[Any] = []

    def listen(grid: Any) -> None:
        grid.push_messages = sent.append
        grid.send_and_receive = lambda messages, **_: sent.append(messages)

    made = strategy(keep_back=["layer.wieght"])
    with pytest.raises(InvalidParameterError, match=r"^keep_back = \['layer\.wieght'\]: expected"):
        run_strategy(made, before=listen)
    assert not sent


def test_more_nodes_than_simulated_clients() -> None:
    result = run_strategy(FedAvg(loop=LoopOptions(clients=4)), nodes=6)
    assert [line["asked"] for line in result.history[1:]] == [4, 4, 4]


def test_an_evaluation_with_a_nan_in_a_list_does_not_lose_the_result() -> None:
    result = run_strategy(
        FedAvg(), evaluate_fn=lambda r, _: MetricRecord({"each": [math.nan, 1.0], "all": 1.0})
    )
    assert result.evaluate_metrics_serverapp[3] == {"all": 1.0}
    assert result.history[3]["server"]["each"] == [None, 1.0]


def test_momentum_resumes(tmp_path: Any) -> None:
    def strategy(**options: Any) -> FedAvg:
        inner = FedAvgM(server_learning_rate=0.5, server_momentum=0.9)
        return make(FedAvg, seed=1, inner=inner, **options)

    start = record({"w": np.ones((2, 2), np.float32), "b": np.array(1.0, np.float32)})
    unbroken = run_strategy(strategy(), arrays=start, num_rounds=4)
    run_strategy(strategy(run_dir=tmp_path), arrays=start, num_rounds=2)
    resumed = run_strategy(strategy(run_dir=tmp_path, resume=True), arrays=start, num_rounds=4)
    assert same(unbroken.arrays, resumed.arrays)


def test_an_inner_strategy_must_work_on_the_aggregate() -> None:
    with pytest.raises(InvalidParameterError, match="inner = 'Krum': expected a strategy that"):
        FedAvg(inner=Krum())


def test_values_that_the_models_dtype_cannot_hold() -> None:
    mean = WeightedMean({"f": np.zeros(1, np.float32), "i": np.zeros(1, np.int8)})
    good = {"f": np.ones(1), "i": np.ones(1, np.int64)}
    mean.accumulate("a", good, weight=1)
    with pytest.raises(ReplyRefusedError, match="not finite"):
        mean.accumulate("b", {**good, "f": np.full(1, 1e300)}, weight=1)
    with pytest.raises(ReplyRefusedError, match="range"):
        mean.accumulate("b", {**good, "i": np.full(1, 1000)}, weight=1)
    wide = WeightedMean({"w": np.zeros(1)})
    with pytest.raises(ReplyRefusedError, match="range"):
        wide.accumulate("a", {"w": np.full(1, 1e300)}, weight=1)
    assert isinstance(record(), ArrayRecord)
