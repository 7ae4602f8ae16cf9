"""The end of a run says what was trained, measured and promised, and what to do next."""

import logging
from pathlib import Path
from typing import Any

import pytest
from apps import make, message_app, run_strategy
from flwr.app import MetricRecord, RecordDict

from flwr_privacy.clients import FedAvgClient, UDPClient, as_mod
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import (
    ACFL,
    MSP,
    MSPDQ,
    UDP,
    CentralDP,
    FedAvg,
    LoopOptions,
    UserLevel,
)
from flwr_privacy.strategies.state.ending import ending

VOID = Guarantee(scheme="udp", protects="a record", adversary="the server", void="a seed")


def test_a_guarantee_that_is_void_is_no_promise() -> None:
    told = ending([], planned=3, guarantee=VOID)
    assert told == [
        "trained: 0 of 3 rounds",
        "promise: VOID: a seed. Without that: udp protects a record, against the server",
    ]


def test_what_cannot_be_counted_is_not_said() -> None:
    lines = [{"round": 0, "server": {"accuracy": None}}, {"round": 1, "evaluate": {"f1": 0.25}}]
    assert ending(lines, planned=1, guarantee=None, stopped="a plan") == [
        "trained: 1 of 1 rounds; it ended early: a plan",
        "measured by the clients after round 1: f1 0.25",
    ]


def test_a_strategy_in_an_app_of_ones_own_says_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flwr.privacy")
    lost = [Fault(kind="drop", client=client, server_round=1) for client in "0123"]
    strategy = UDP(
        privacy=UserLevel(epsilon=4.0), loop=LoopOptions(seed=1, deadline=0.3, run_dir=tmp_path)
    )
    run_strategy(strategy, message_app([as_mod(UDPClient)]), num_rounds=2, faults=lost)
    trained, promise, budget, card, *commands = caplog.messages[-6:]
    assert trained == "trained: 1 of 2 rounds; no answer could be used in round 1"
    assert caplog.records[-6].levelno == logging.WARNING
    assert promise.startswith("promise: udp protects all data of a client against an honest")
    assert budget == "budget: epsilon 4 of 4 spent, 0 left"
    assert card == f"card: {tmp_path / 'privacy-card.html'}"
    assert commands == [f"next: flwr-privacy {name} {tmp_path}" for name in ("verify", "report")]


def test_metrics_are_logged_as_flower_logs_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flwr.privacy")
    run_strategy(FedAvg(), num_rounds=1, insecure_seed=3)
    shown = [text for text in caplog.messages if "MetricRecord" in text]
    assert len(shown) == 2
    assert all(text.startswith("\t└──> Aggregated MetricRecord: {") for text in shown)
    assert "loss" in shown[0]
    assert "accuracy" in shown[1]
    assert "insecure-noise" not in "".join(shown)


def test_a_budget_is_in_the_line_of_each_round(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flwr.privacy")
    strategy = UDP(privacy=UserLevel(epsilon=4.0), loop=LoopOptions(seed=1))
    run_strategy(strategy, message_app([as_mod(UDPClient)]), num_rounds=2)
    lines = [text for text in caplog.messages if text.startswith("round ")]
    assert lines[0].startswith("round 0/2: epsilon 0 of 4 spent, 4 left")
    assert lines[-1] == "round 2/2: epsilon 4 of 4 spent, 0 left"
    # What clients of UDP send beside codes is not their app's.
    assert not [text for text in caplog.messages if "Aggregated" in text]


@pytest.mark.parametrize("nodes", [4, 2])
def test_a_metrics_function_sees_what_the_app_has_sent(nodes: int) -> None:
    """As under Flower's FedAvg: without the record of this library."""
    seen: list[tuple[list[str], set[str]]] = []

    def spy(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
        seen.extend((sorted(c), set(next(iter(c.metric_records.values())))) for c in contents)
        return MetricRecord()

    strategy = FedAvg(
        train_metrics_aggr_fn=spy,
        evaluate_metrics_aggr_fn=spy,
        min_available_nodes=nodes,
        loop=LoopOptions(clients=None if nodes == 4 else 4),
    )
    app = message_app([as_mod(FedAvgClient)])
    run_strategy(strategy, app, nodes=nodes, num_rounds=1)
    assert len(seen) == 8
    assert {len(names) for names, _ in seen} == {1}
    assert {frozenset(metrics) for _, metrics in seen} == {
        frozenset({"loss", "num-examples"}),
        frozenset({"accuracy", "num-examples"}),
    }


class OpenUDP(UDP):
    metrics_phases = frozenset({"train"})


def test_a_metrics_function_does_not_see_the_mark_of_a_seed() -> None:
    seen: list[set[str]] = []

    def spy(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
        seen.extend(set(content["metrics"]) for content in contents)
        return MetricRecord()

    strategy = OpenUDP(privacy=UserLevel(), train_metrics_aggr_fn=spy, loop=LoopOptions(seed=1))
    app = message_app([as_mod(UDPClient)])
    assert run_strategy(strategy, app, num_rounds=1, insecure_seed=3).guarantee.void
    assert seen == [{"num-examples", "sigma"}] * 4


@pytest.mark.parametrize("phase", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (UDP, {}),
        (CentralDP, {}),
        (MSP, {}),
        (MSPDQ, {}),
        (ACFL, {"learning_rate": 0.1}),
        (FedAvg, {"secure_sum": SecureSum()}),
    ],
)
def test_a_function_for_metrics_that_nobody_sends_is_refused(
    kind: Any, options: dict[str, Any], phase: str
) -> None:
    own = {f"{phase}_metrics_aggr_fn": lambda contents, key: MetricRecord()}
    with pytest.raises(InvalidParameterError, match=rf"{phase}_metrics_aggr_fn = (.|\n)*None: "):
        make(kind, **options, **own)
