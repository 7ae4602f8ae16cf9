"""The way of the answers: whom a secure sum asks, when it draws them, and what it refuses."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from apps import message_app, record, run_strategy, same
from flwr.app import ConfigRecord, RecordDict

from flwr_privacy.clients import SecureSumClient, as_mod
from flwr_privacy.errors import ProtocolError
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.secure_sum import SecureSum, Session
from flwr_privacy.strategies import FedAvg, LoopOptions
from flwr_privacy.strategies.transport.sum_guarantee import SumGuarantee
from flwr_privacy.strategies.transport.summed import Summed
from flwr_privacy.strategies.transport.transport import Plain, Transport

APP = message_app([as_mod(SecureSumClient)])
SUM = SecureSum(value_range=100.0)


class Watched(FedAvg):
    """Notes when it draws the clients of a round."""

    def __init__(self, **options: Any) -> None:
        self.events: list[str] = []
        seen = LoopOptions(seed=3, on_round=lambda line: self.events.append(f"end {line['round']}"))
        super().__init__(loop=seen, fraction_evaluate=0.0, **options)

    def drawn(self, grid: Any, server_round: int) -> Any:
        self.events.append(f"draw {server_round}")
        return super().drawn(grid, server_round)


def test_the_clients_of_a_sum_are_drawn_one_round_ahead_and_none_after_the_last() -> None:
    strategy = Watched(secure_sum=SUM)
    run_strategy(strategy, APP, arrays=record())
    rounds = ["draw 1", "draw 2", "end 1", "draw 3", "end 2", "end 3"]
    assert strategy.events == ["end 0", *rounds]


def test_without_a_sum_they_are_drawn_in_their_round() -> None:
    strategy = Watched()
    run_strategy(strategy, arrays=record(), num_rounds=2)
    assert strategy.events == ["end 0", "draw 1", "end 1", "draw 2", "end 2"]


def test_a_second_training_has_a_transport_of_its_own() -> None:
    strategy = FedAvg(secure_sum=SUM, loop=LoopOptions(seed=3))
    before: Transport = strategy.transport
    one = run_strategy(strategy, APP, arrays=record(), num_rounds=2)
    assert isinstance(strategy.transport, Summed)
    assert strategy.transport is before
    other = run_strategy(strategy, APP, arrays=record(), num_rounds=2)
    assert isinstance(strategy.transport, Summed)
    assert strategy.transport is not before
    assert same(one.arrays, other.arrays)
    assert isinstance(FedAvg().transport, Plain)


USES: list[Callable[[Transport], Any]] = [
    lambda transport: transport.cohort,
    lambda transport: transport.quorum(3),
    lambda transport: transport.clients(None, 1),  # type: ignore[arg-type]
    lambda transport: transport.question("train", RecordDict({"config": ConfigRecord()}), {}),
    lambda transport: transport.accumulator("train", WeightedMean({"w": np.zeros(2)})),
]


@pytest.mark.parametrize("use", USES)
def test_nothing_is_asked_of_a_sum_that_was_not_prepared(use: Callable[[Transport], Any]) -> None:
    with pytest.raises(ProtocolError, match="works only where this strategy's own start"):
        use(FedAvg(secure_sum=SUM).transport)


def test_a_step_that_was_not_dealt_for_is_not_the_next_one() -> None:
    with pytest.raises(ProtocolError, match="was not opened with again=True"):
        FedAvg(secure_sum=SUM).transport.go_on()


def test_other_phases_go_in_the_open() -> None:
    transport, content = FedAvg(secure_sum=SUM).transport, RecordDict({"config": ConfigRecord()})
    empty = WeightedMean({"w": np.zeros(2)})
    assert transport.question("another", content, {}) == (content, {})
    assert transport.accumulator("another", empty) is empty


def sum_of(settings: SecureSum, cohort: int, roster: int | None = None) -> Session:
    clients = [f"c{i:02}" for i in range(cohort)]
    return Session(
        name="a",
        experiment_id="e",
        server_round=1,
        rosters=dict.fromkeys(clients, clients[: roster or cohort]),
        keys={},
        threshold=settings.threshold_of(cohort),
        bounds=settings.bounds(cohort),
    )


def test_the_promise_is_that_of_the_weakest_sum() -> None:
    """Cohorts shrink and grow; a promise that a sum has broken does not come back."""
    settings, promised = SecureSum(threshold=14, colluders=0), SumGuarantee()
    assert promised.text() == "nothing was summed yet"
    promised.note(settings, sum_of(settings, 20))
    weakest = {"threshold": 14, "cohort": 20, "colluders": 0, "lying": 6, "needed": 0}
    assert promised.least == weakest
    promised.note(settings, sum_of(settings, 30))
    assert promised.least == {**weakest, "lying": 1}
    assert "a server that lies about who takes part is not covered" in promised.text()
    promised.note(settings, sum_of(settings, 16))
    assert promised.least == {**weakest, "cohort": 16, "lying": 1}
    assert "at least 14 of 16 clients" in promised.text()


def test_in_a_sparse_graph_a_lying_server_is_not_covered() -> None:
    settings, promised = SecureSum(threshold=14, colluders=0), SumGuarantee()
    promised.note(settings, sum_of(settings, 20, roster=15))
    assert promised.least["lying"] == 1


def test_the_card_of_a_training_whose_cohorts_shrink_has_the_smaller_one() -> None:
    strategy = Watched(secure_sum=SUM)

    def leaving(grid: Any) -> None:
        nodes = list(grid.get_node_ids())
        grid.get_node_ids = lambda: nodes[: 4 if "end 1" in strategy.events else 6]

    result = run_strategy(strategy, APP, nodes=6, arrays=record(), before=leaving)
    assert [line["asked"] for line in result.history[1:]] == [6, 6, 4]
    assert "sums over at least 3 of 4 clients" in result.guarantee.secure_sum
