"""Replies that do not fit the protocol: one of them never harms the others."""

import math
from typing import Any

import numpy as np
import pytest
from apps import message_app, record, run_strategy, same
from flwr.app import Array, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hostile_nodes import Change, entries, tampered

from flwr_privacy.clients import FedAvgClient, as_mod
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.strategies import FedAvg, LoopOptions
from flwr_privacy.wire.message import COHORT, RECORD


def weights(values: Any) -> Change:
    def change(content: RecordDict) -> None:
        content["arrays"] = record({**dict.fromkeys(content["arrays"], values)})

    return change


def metric(**metrics: Any) -> Change:
    def change(content: RecordDict) -> None:
        content["metrics"] = MetricRecord({"num-examples": 1, **_dashed(metrics)})

    return change


def _dashed(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "-"): value for key, value in metrics.items()}


def npy(header: str) -> Change:
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()

    def change(content: RecordDict) -> None:
        content["arrays"]["0"] = Array("float32", (5,), "numpy.ndarray", data)

    return change


def remove(name: str) -> Change:
    def change(content: RecordDict) -> None:
        del content[name]

    return change


SINGLE = {
    "no record": (remove(RECORD), "malformed"),
    "no arrays": (remove("arrays"), "malformed"),
    "no metrics": (remove("metrics"), "malformed"),
    "record of another kind": (
        lambda content: content.update({RECORD: MetricRecord({"round": 1})}),
        "malformed",
    ),
    "round as text": (entries(RECORD, round="1"), "malformed"),
    "a huge scheme": (entries(RECORD, scheme="x" * 5_000_000), "malformed"),
    "terminal codes": (entries(RECORD, scheme="\x1b[2J\r"), "malformed"),
    "another experiment": (entries(RECORD, experiment_id="f"), "another round"),
    "another request": (entries(RECORD, request=7), "another round"),
    "another client": (entries(RECORD, client_id="3"), "unknown client"),
    "no client": (entries(RECORD, client_id=None), "unknown client"),
    "a cohort's answer": (
        lambda content: content.update({COHORT: ConfigRecord({"bytes-up": 0, "late": ["1"]})}),
        None,
    ),
    "a field named clients": (entries(RECORD, clients=["1", "2"]), None),
    "weight nan": (metric(num_examples=math.nan), "weight"),
    "weight infinite": (metric(num_examples=math.inf), "weight"),
    "weight negative": (metric(num_examples=-1), "weight"),
    "weight huge": (metric(num_examples=1e308), "weight"),
    "weight tiny": (metric(num_examples=5e-324), "weight"),
    "weight a list": (metric(num_examples=[1, 2]), "weight"),
    "weight beyond 64 bits": (metric(num_examples=2**70), "malformed"),
    "metric of another length": (metric(loss=[1.0, 2.0]), None),
    "metric not finite": (metric(loss=math.nan), None),
    "arrays of another shape": (weights(np.full(5, 1e300)), "shape"),
    "header with other entries": (npy("{1: 2, 'a': 3}"), "malformed"),
    "header that is no literal": (npy("(((("), "malformed"),
    "header with a giant shape": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (10**30,)}"),
        "malformed",
    ),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_bad_reply_is_refused_and_the_others_are_averaged(name: str) -> None:
    change, reason = SINGLE[name]
    result = run_strategy(FedAvg(fraction_evaluate=0), tampered(change))
    for line in result.history[1:]:
        assert line["refused"] == ({} if reason is None else {reason: 1})
        assert line["accumulated"] == (4 if reason is None else 3)
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())


COHORTS = {
    "no account of the clients": remove(COHORT),
    "no bytes": entries(COHORT, bytes_up=None),
    "negative bytes": entries(COHORT, bytes_up=-1),
    "somebody else's clients": entries(COHORT, answered=["0", "1"]),
    "clients late who sit elsewhere": entries(COHORT, late=["1", "3"]),
    "a client twice": entries(COHORT, answered=["0", "0", "2"]),
    "no clients": lambda content: (
        entries(COHORT, answered=None)(content),
        entries(RECORD, clients=None, weight=1e9)(content),
    ),
    "a sum over other clients": entries(RECORD, clients=["0", "1"]),
    "weight as text": entries(RECORD, weight="x"),
    "weight negative": entries(RECORD, weight=-10.0),
    "weight beyond all bounds": entries(RECORD, weight=1e300),
    "weight of nothing": entries(RECORD, weight=0.0),
    "values beyond the model's": lambda content: content.update(
        {"arrays": record({n: np.full(a.shape, 1e200) for n, a in content["arrays"].items()})}
    ),
    "no metric weights": entries(RECORD, metric_weights=None),
    "metric sums cut": entries(RECORD, metric_sums=None),
    "lengths that do not fit": entries(RECORD, metric_lengths=[10**9]),
    "not finite": lambda content: content.update(
        {"arrays": record({n: a.numpy() * np.nan for n, a in content["arrays"].items()})}
    ),
}


@pytest.mark.parametrize("name", COHORTS)
def test_a_bad_sum_is_refused_and_the_other_nodes_count(name: str) -> None:
    strategy = FedAvg(loop=LoopOptions(clients=4, seed=1), fraction_evaluate=0)
    result = run_strategy(strategy, tampered(COHORTS[name]), nodes=2)
    honest = run_strategy(
        FedAvg(loop=LoopOptions(clients=4, seed=1), fraction_evaluate=0),
        faulty_clients({0, 2}),
        nodes=2,
    )
    assert same(result.arrays, honest.arrays)
    for line in result.history[1:]:
        assert sum(line["refused"].values()) == 2  # the clients of the node
        assert line["accumulated"] == 2


def faulty_clients(faulty: set[int]) -> ClientApp:
    def mod(message: Message, context: Context, call_next: Any) -> Message:
        if int(context.node_config["partition-id"]) in faulty:
            raise RuntimeError("absent")
        return call_next(message, context)

    return message_app([as_mod(FedAvgClient), mod])


def test_a_node_that_sends_garbage_is_named_and_asked_nothing_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = FedAvg(loop=LoopOptions(seed=1), fraction_evaluate=0, min_available_nodes=4)
    result = run_strategy(strategy, tampered(remove("arrays")), nodes=4, num_rounds=5)
    rounds = result.history[1:]
    assert [line["refused"] for line in rounds] == [{"malformed": 1}] * 3 + [{}] * 2
    assert [line["asked"] for line in rounds] == [4, 4, 4, 3, 3]
    (said,) = [r.getMessage() for r in caplog.records if "left out of this run" in r.getMessage()]
    assert said.startswith("client 0 (node ")
    assert said.endswith("is left out of this run: 3 replies were not in the form of this scheme")


def test_values_that_may_come_of_training_leave_nobody_out() -> None:
    strategy = FedAvg(loop=LoopOptions(seed=1), fraction_evaluate=0, min_available_nodes=4)
    result = run_strategy(strategy, tampered(COHORTS["not finite"]), nodes=4, num_rounds=5)
    assert result.history[1]["refused"] == {"not finite": 1}
    assert [line["asked"] for line in result.history[1:]] == [4] * 5


def test_who_runs_simulated_clients_is_never_left_out() -> None:
    strategy = FedAvg(loop=LoopOptions(clients=4, seed=1), fraction_evaluate=0)
    result = run_strategy(strategy, tampered(remove(COHORT)), nodes=2, num_rounds=5)
    assert [line["asked"] for line in result.history[1:]] == [4] * 5


def test_a_reply_is_no_larger_than_its_request_allows() -> None:
    def grow(content: RecordDict) -> None:
        content["note"] = ConfigRecord({"text": b"x" * (2**26 + 10**6)})

    strategy = FedAvg(loop=LoopOptions(seed=1), fraction_evaluate=0)
    result = run_strategy(strategy, tampered(grow), nodes=4, num_rounds=1)
    line = result.history[1]
    assert (line["refused"], line["accumulated"]) == ({"malformed": 1}, 3)


def test_who_answers_first_decides_about_nobody_else() -> None:
    """Metrics in the form that most replies have reach the user's function; all arrays count."""
    seen: list[list[set[str]]] = []

    def spy(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
        seen.append([set(content["metrics"]) for content in contents])
        return MetricRecord()

    change = metric(num_examples=1, strange=1.0)  # of client 0, the first
    strategy = FedAvg(
        loop=LoopOptions(seed=1),
        fraction_evaluate=0,
        min_available_nodes=4,
        train_metrics_aggr_fn=spy,
    )
    result = run_strategy(strategy, tampered(change), nodes=4, num_rounds=2)
    assert [line["accumulated"] for line in result.history[1:]] == [4, 4]
    assert [line["refused"] for line in result.history[1:]] == [{}, {}]
    assert [len(contents) for contents in seen] == [3, 3]
    assert all("strange" not in names for contents in seen for names in contents)


def test_a_list_of_another_length_decides_about_no_mean_but_by_its_weight() -> None:
    told: list[Any] = [[7.0, 7.0, 7.0], 1.0, 3.0]
    for order in ((0, 1, 2), (1, 0, 2), (1, 2, 0)):
        mean, merged = WeightedMean({}), WeightedMean({})
        for client in order:
            alone = WeightedMean({})
            for each in (mean, alone):
                each.accumulate(f"c{client}", {}, weight=1, metrics={"loss": told[client]})
            merged.merge(merged.from_state(*alone.state()))
        assert mean.metrics() == merged.metrics() == {"loss": 2.0}
