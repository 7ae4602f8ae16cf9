import copy
import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
from apps import MODEL, make, message_app, model_of, record, run_strategy, same, step
from conformance import WrapsConformance
from flwr.app import Array, Message
from flwr.serverapp.strategy import FedAdam

from flwr_privacy.clients import FedAvgClient, SecureSumClient, as_mod, numpy_client_app
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.secure_sum import SecureSum, masked
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import FedAvg, LoopOptions


class TestConformance(WrapsConformance):
    strategy = FedAvg
    client = SecureSumClient
    options: ClassVar[dict[str, Any]] = {"secure_sum": SecureSum()}
    exact_cohorts = True
    codes = True
    registered = False  # the app runs it as --set secure_sum=true: see test_app
    own_start = "secure_sum: works only where this strategy's own"


def secured(secure_sum: SecureSum | None = None, client: type = SecureSumClient, **options: Any):
    """Run a training under a secure sum; five clients by default."""
    start = {
        key: options.pop(key)
        for key in ("faults", "nodes", "num_rounds", "before")
        if key in options
    }
    strategy = make(FedAvg, seed=3, secure_sum=secure_sum or SecureSum(), **options)
    return run_strategy(
        strategy, message_app([as_mod(client)]), arrays=record(), **{"nodes": 5, **start}
    )


def plain(survivors: list[int], secure_sum: SecureSum, start: dict[str, Any] = MODEL):
    """Aggregate in the clear what the survivors' vectors say, on the same grid."""
    size = secure_sum.grid.step
    weights = [i + 1 if secure_sum.largest_weight > 1 else 1 for i in survivors]
    model = {}
    for name, array in start.items():
        if not np.issubdtype(array.dtype, np.floating):
            model[name] = array
            continue
        old = array.astype(np.float64)
        codes = [np.rint((step(array, i).astype(np.float64) - old) / size) for i in survivors]
        total = sum(w * c.astype(np.int64) for w, c in zip(weights, codes, strict=True))
        model[name] = (old + total / sum(weights) * size).astype(array.dtype)
    return model


@pytest.mark.parametrize("lost", [*itertools.combinations(range(5), 1), (0, 1), (3, 4)])
@pytest.mark.parametrize("phase", ["keys", "train"])
def test_the_sum_is_that_of_the_survivors_bit_for_bit(phase: str, lost: tuple[int, ...]) -> None:
    secure_sum = SecureSum(bits=16, value_range=8.0, threshold=3)
    faults = [Fault(kind="drop", client=str(i), phase=phase) for i in lost]
    result = secured(secure_sum, faults=faults, num_rounds=1, deadline=0.3)
    survivors = [i for i in range(5) if i not in lost]
    assert same(result.arrays, record(plain(survivors, secure_sum)))
    assert result.history[1]["scheme"]["sum_opened"] == len(survivors)


@pytest.mark.parametrize("kind", ["drop", "crash"])
def test_a_client_that_is_lost_while_it_reveals_is_in_the_sum(kind: str) -> None:
    secure_sum = SecureSum(threshold=3)
    faults = [
        Fault(kind=kind, client=str(i), phase="shares", server_round=2, seconds=0) for i in (0, 4)
    ]
    result = secured(secure_sum, faults=faults, num_rounds=3, deadline=0.3)
    assert [line["scheme"]["sum_opened"] for line in result.history[1:]] == [5, 5, 3]
    second = secured(secure_sum, num_rounds=2)
    assert result.history[3]["scheme"]["sum_dealers"] == 3
    after_two = model_of(second.arrays)
    assert same(result.arrays, record(plain([1, 2, 3], secure_sum, after_two)))


def test_too_few_survivors_skip_the_round_and_the_training_goes_on(caplog) -> None:
    faults = [Fault(kind="drop", client=str(i), server_round=2) for i in (0, 1, 2)]
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = secured(faults=faults, num_rounds=3, deadline=0.3)
    assert [line.get("skipped") for line in result.history] == [None, False, True, False]
    assert (
        "the sum of round 2 is not opened: 2 of at least 3 clients sent a vector that can be used, "
        "1 are missing" in caplog.text
    )


def test_too_few_who_reveal_open_nothing(caplog) -> None:
    faults = [Fault(kind="drop", client=str(i), phase="shares", server_round=1) for i in (0, 1, 2)]

    def run(num_rounds: int):
        return secured(faults=faults, num_rounds=num_rounds, deadline=0.3)

    with caplog.at_level("WARNING", "flwr.privacy"):
        result = run(1)
    assert result.history[1]["skipped"]
    assert same(result.arrays, record())
    assert "asked" not in result.history[1]  # for a vector
    assert "2 of at least 3 clients dealt their secrets, 1 are missing" in caplog.text


def test_cohorts_stragglers_and_samples_keep_to_the_grid() -> None:
    secure_sum = SecureSum(threshold=5, value_range=1e4)
    model = StragglerModel(slow_fraction=0.15)
    options = {"clients": 12, "fraction_train": 0.75, "deadline": 4.0, "stragglers": model}
    one = secured(secure_sum, nodes=1, min_available_nodes=1, **options)
    three = secured(secure_sum, nodes=3, **options)
    assert same(one.arrays, three.arrays)
    opened = [line["scheme"]["sum_opened"] for line in one.history[1:]]
    assert opened == [line["scheme"]["sum_opened"] for line in three.history[1:]]
    assert 5 <= min(opened) < 9
    assert not any(line["skipped"] for line in one.history[1:])


@pytest.mark.parametrize("neighbours", [None, 8])
def test_cohorts_open_the_sums_of_one_node_per_client_when_clients_drop_out(
    neighbours: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flwr_privacy.secure_sum.graph.LARGEST_INSECURITY", 1e9)
    secure_sum = SecureSum(value_range=1e4, neighbours=neighbours)
    slow = {"deadline": 4.0, "stragglers": StragglerModel(slow_fraction=0.15)}
    single = secured(secure_sum, nodes=12, **slow)
    cohorts = secured(secure_sum, nodes=2, clients=12, **slow)
    for one, other in zip(single.history[1:], cohorts.history[1:], strict=True):
        assert (other["skipped"], other["scheme"]) == (one["skipped"], one["scheme"])
    # The masks of those who dropped out were taken off.
    assert any(line["late"] and not line["skipped"] for line in cohorts.history[1:])
    assert same(single.arrays, cohorts.arrays)


def test_a_sparse_graph_gives_the_same_sum(monkeypatch) -> None:
    monkeypatch.setattr("flwr_privacy.secure_sum.graph.LARGEST_INSECURITY", 1e9)
    options = {"clients": 30, "nodes": 2, "num_rounds": 2}
    sparse = secured(SecureSum(neighbours=8, value_range=1e4), **options)
    complete = secured(SecureSum(value_range=1e4), **options)
    assert same(sparse.arrays, complete.arrays)
    assert [line["scheme"]["sum_opened"] for line in sparse.history[1:]] == [30, 30]
    assert sparse.history[2]["bytes_up"] < 0.6 * complete.history[2]["bytes_up"]


def test_a_threshold_fits_the_clients_that_are_drawn_not_those_that_are_left(caplog) -> None:
    faults = [Fault(kind="drop", client=str(i), phase="keys") for i in (0, 1)]
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = secured(SecureSum(threshold=4), faults=faults, deadline=0.3, num_rounds=5)
    assert [line["skipped"] for line in result.history[1:]] == [True] * 5
    text = "3 of at least 4 clients have a key and do not contradict each other, 1 are missing"
    assert text in caplog.text
    assert result.guarantee.secure_sum == "nothing was summed yet"


def test_two_exchanges_a_round_after_the_first() -> None:
    assert [line["exchanges"] for line in secured().history] == [1, 4, 2, 2]


def test_a_second_and_other_vector_of_a_client_is_refused_unread() -> None:
    def answer_twice(grid: Any) -> None:
        pull = grid.pull_messages

        def pull_messages(message_ids: Any) -> list[Message]:
            replies = list(pull(message_ids))
            others = []
            for reply in replies:
                if reply.has_error() or masked.MASKED not in reply.content.get("arrays", {}):
                    continue
                other = copy.deepcopy(reply)
                vector = np.array(other.content["arrays"][masked.MASKED].numpy())
                other.content["arrays"][masked.MASKED] = Array(vector ^ 1)
                others.append(other)
            return [*replies, *others]

        grid.pull_messages = pull_messages

    result = secured(before=answer_twice, num_rounds=2)
    assert [line["refused"] for line in result.history[1:]] == [{"duplicate": 5}] * 2
    assert same(result.arrays, secured(num_rounds=2).arrays)


def test_nothing_of_a_client_is_sent_but_its_vector() -> None:
    result = secured()
    assert all(line["train"] == {} and line["evaluate"] == {} for line in result.history[1:])
    assert "batches" in result.guarantee.not_protected[-1]
    assert "at least 3 of 5 clients" in result.guarantee.secure_sum


def test_equal_weights_take_fewer_bits() -> None:
    alike = SecureSum(largest_weight=1, threshold=3)
    result = secured(alike, num_rounds=1)
    assert same(result.arrays, record(plain([0, 1, 2, 3, 4], alike)))
    weighted = secured(num_rounds=1)
    bits = [r.history[1]["scheme"]["sum_modulus_bits"] for r in (result, weighted)]
    assert bits == [20 + 3, 20 + 3 + 16]


@pytest.mark.parametrize(
    ("secure_sum", "told"),
    [
        (SecureSum(value_range=0.5), "the update is beyond value_range = 0.5"),
        (SecureSum(largest_weight=2), "a whole number from 0 to largest_weight = 2"),
    ],
)
def test_a_client_refuses_what_does_not_fit(secure_sum: SecureSum, told: str, caplog) -> None:
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = secured(secure_sum, num_rounds=1)
    assert result.history[1]["skipped"]
    assert told in caplog.text
    lines = [entry.getMessage() for entry in caplog.records]
    refusals = [line for line in lines if "refused" in line]
    for line in lines:  # what the nodes log for themselves of their values
        if "the update has values up to " in line:
            assert not any(line.rpartition(" ")[2] in refusal for refusal in refusals)
    assert len(refusals) >= 3
    assert not any("values up to" in refusal for refusal in refusals)


@pytest.mark.parametrize(
    ("secure_sum", "told"),
    [
        (SecureSum(threshold=6), "secure_sum.threshold = 6: expected at most the 5 clients"),
        (SecureSum(colluders=3), "expected more than colluders = 3"),
        (SecureSum(modulus_bits=30), "secure_sum.modulus_bits = 30: expected at least 39"),
    ],
)
def test_parameters_that_do_not_fit_the_cohort_end_the_run(
    secure_sum: SecureSum, told: str
) -> None:
    with pytest.raises(InvalidParameterError, match=told):
        secured(secure_sum)


def test_what_cannot_be_combined_is_refused_at_once() -> None:
    with pytest.raises(InvalidParameterError, match="train_metrics_aggr_fn"):
        FedAvg(secure_sum=SecureSum(), train_metrics_aggr_fn=lambda *_: None)
    with pytest.raises(InvalidParameterError, match="secure_sum = True"):
        FedAvg(secure_sum=True)


def test_the_halves_of_other_schemes_say_that_they_do_not_fit(caplog) -> None:
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = secured(client=FedAvgClient, num_rounds=1)
        assert result.history[1]["skipped"]
        assert "phase 'keys' is not known" in caplog.text
        strategy = FedAvg(loop=LoopOptions(seed=3))
        app = message_app([as_mod(SecureSumClient)])
        result = run_strategy(strategy, app, arrays=record(), num_rounds=1)
    assert result.history[1]["refused"] == {"declined": 4}
    assert "SecureSumClient answers only within a secure sum" in caplog.text


def test_an_inner_strategy_gets_the_aggregate() -> None:
    inner = {"eta": 0.1, "eta_l": 0.1}
    summed = secured(SecureSum(value_range=100.0, bits=31), inner=FedAdam(**inner))
    clear = run_strategy(
        FedAvg(loop=LoopOptions(seed=3), inner=FedAdam(**inner)),
        message_app([as_mod(FedAvgClient)]),
        arrays=record({name: a for name, a in MODEL.items() if name != "batches"}),
        nodes=5,
    )
    for name, array in clear.arrays.items():
        np.testing.assert_allclose(summed.arrays[name].numpy(), array.numpy(), rtol=1e-5)


@pytest.mark.parametrize("bad", [{"weight": -100}, {"codes": 2**19}])
def test_a_wrong_vector_spoils_its_round_and_no_other(
    bad: dict[str, int], monkeypatch, caplog
) -> None:
    """Nobody sees whose it is; the sum says that somebody sent one."""
    honest = masked.residues

    def residues(arrays: Any, weight: int, bounds: Any) -> Any:
        vector = honest(arrays, weight, bounds)
        if weight == 3 and len(spoilt) == 0:
            spoilt.append(weight)
            vector[-1] += np.uint64(bad.get("weight", 0) % 2**64)
            vector[0] += np.uint64(bad.get("codes", 0) * 50)
            vector &= np.uint64(2**bounds.modulus_bits - 1)
        return vector

    spoilt: list[int] = []
    monkeypatch.setattr("flwr_privacy.clients.node.secure_sum.residues", residues)
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = secured(SecureSum(value_range=100.0))
    assert [line.get("skipped") for line in result.history] == [None, True, False, False]
    assert "somebody sent a wrong one" in caplog.text


def test_the_guarantee_is_that_of_the_smallest_cohort() -> None:
    model = StragglerModel()
    options = {"clients": 9, "stragglers": model, "nodes": 1, "min_available_nodes": 1}

    class Growing(FedAvg):
        def drawn(self, grid: Any, server_round: int) -> Any:
            self.min_train_nodes = 3 if server_round < 3 else 9
            self.fraction_train = 1e-9
            return super().drawn(grid, server_round)

    strategy = make(
        Growing,
        seed=3,
        secure_sum=SecureSum(value_range=100.0),
        quorum=2,
        **{key: value for key, value in options.items() if key != "nodes"},
    )
    app = message_app([as_mod(SecureSumClient)])
    result = run_strategy(strategy, app, arrays=record(), nodes=1)
    sizes = [line["scheme"]["sum_cohort"] for line in result.history[1:]]
    assert sizes == [3, 3, 9]
    assert result.history[3]["scheme"]["sum_opened"] == 5  # the quorum of 2 was raised
    assert "at least 2 of 3 clients" in result.guarantee.secure_sum
    assert "no more than 0 clients collude" in result.guarantee.secure_sum


def test_what_building_a_client_says_of_the_data_stays_on_the_node(caplog) -> None:
    def client_fn(context: Any) -> SecureSumClient:
        raise ValueError("patient J. Smith")

    strategy = FedAvg(secure_sum=SecureSum())
    with caplog.at_level("WARNING", "flwr.privacy"), pytest.raises(ProtocolError) as error:
        run_strategy(strategy, numpy_client_app(client_fn), arrays=record())
    assert "Smith" not in str(error.value)
    told = [entry.getMessage() for entry in caplog.records if "refused" in entry.getMessage()]
    assert len(told) == 4
    assert all("the client could not be built" in text for text in told)
    assert not any("Smith" in text for text in told)


def test_a_graph_that_is_unsafe_for_those_who_are_left_skips_the_round(monkeypatch, caplog) -> None:
    def insecurity(cohort: int, neighbours: int, settings: SecureSum) -> float:
        return 0.0 if cohort == 12 else 1.0

    monkeypatch.setattr("flwr_privacy.secure_sum.graph.insecurity", insecurity)
    faults = [Fault(kind="drop", client="0", phase="keys")]
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = secured(SecureSum(neighbours=8), nodes=12, faults=faults, deadline=1.0)
    assert [line["skipped"] for line in result.history[1:]] == [True] * 3
    assert "there is no sum of round 1: secure_sum.neighbours = 8: expected at least" in caplog.text
