"""A training whose rounds have three sums, over the talk of server and clients."""

import logging
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from apps import make, message_app, record, run_strategy, same
from flwr.app import ConfigRecord, Message, RecordDict
from grid_tap import without_a_deal

from flwr_privacy.clients import SecureSumClient, as_mod
from flwr_privacy.clients.node.secure_sum import step_of
from flwr_privacy.errors import ProtocolError
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.grid import CodeGrid, GridMean
from flwr_privacy.secure_sum import Bounds, NotOpenedError, SecureSum
from flwr_privacy.secure_sum.messages import OPEN
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import FedAvg, LoopOptions
from flwr_privacy.strategies.transport.summed import opened_mean
from flwr_privacy.wire.message import TRAIN, Header

logger = logging.getLogger("flwr.privacy")

MIX = "mix"
LAST = 2  # step


class MixingClient(SecureSumClient):
    """Sends its update again at every later step."""

    phases: ClassVar[frozenset[str]] = frozenset({TRAIN, MIX})

    def handle(self, phase: str, *rest: Any) -> Any:
        return super().handle(TRAIN, *rest)

    def accumulator(self, phase: str, *rest: Any) -> WeightedMean:
        return super().accumulator(TRAIN if phase == MIX else phase, *rest)


class Mixing(FedAvg):
    """Takes the model from the last of three sums."""

    sum_phases: ClassVar[frozenset[str]] = frozenset({TRAIN, MIX})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.opened: list[tuple[int, int, tuple[str, ...]]] = []
        self.sums: list[dict[str, np.ndarray]] = []
        self.told: list[dict[str, float]] = []

    def train_round(self, grid: Any, server_round: int, arrays: Any, config: Any) -> Any:
        if not self.prepared(grid, server_round):
            return None, None
        self._template = {name: array.numpy() for name, array in arrays.items()}
        config = ConfigRecord({"server-round": server_round})
        content = RecordDict({"arrays": arrays, "config": config})
        told = self.instruct(server_round)
        for step in range(LAST + 1):
            phase = MIX if step else TRAIN
            if step:
                try:
                    self.transport.go_on()
                except NotOpenedError as error:
                    logger.warning("%s", error)
                    return None, None
            assigned = self.transport.clients(grid, server_round)
            quorum = self.transport.quorum(self.quorum)
            instruction = replace(told, again=step < LAST)
            mean, metrics = self.ask(
                grid, server_round, phase, content, assigned, instruction, quorum=quorum
            )
            if mean is None or metrics is None:
                return None, None
            self.sums.append(mean.sums)
            self.opened.append((server_round, step, tuple(sorted(mean.clients))))
            self.told.append({**self.transport.metrics(), "quorum": self.transport.quorum(3) or 0})
        return record(mean.finish()), metrics


def mixed(secure_sum: SecureSum | None = None, **options: Any) -> tuple[Mixing, Any]:
    names = ("faults", "nodes", "before", "num_rounds")
    start = {name: options.pop(name) for name in names if name in options}
    strategy = make(
        Mixing, seed=3, secure_sum=secure_sum or SecureSum(value_range=100.0), **options
    )
    app = message_app([as_mod(MixingClient)])
    options = {"arrays": record(), "nodes": 5, "num_rounds": 2, **start}
    return strategy, run_strategy(strategy, app, **options)


ALL = ("0", "1", "2", "3", "4")


def plainly(**options: Any) -> Any:
    strategy = make(FedAvg, seed=3, secure_sum=SecureSum(value_range=100.0), **options)
    app = message_app([as_mod(SecureSumClient)])
    return run_strategy(strategy, app, arrays=record(), nodes=5, num_rounds=2)


def test_three_sums_a_round_are_over_the_same_clients_and_take_two_exchanges_each() -> None:
    strategy, result = mixed()
    assert strategy.opened == [(r, step, ALL) for r in (1, 2) for step in range(3)]
    for step in (1, 2, 4, 5):
        for name, total in strategy.sums[step].items():
            np.testing.assert_array_equal(total, strategy.sums[step - 1][name])
    assert same(result.arrays, plainly().arrays)
    assert [line["exchanges"] for line in result.history] == [1, 2 + 3 * 2, 3 * 2]
    assert "at least 3 of 5 clients" in result.guarantee.secure_sum


def test_nodes_that_play_several_clients_take_part_in_later_steps() -> None:
    strategy, result = mixed(clients=5, nodes=2)
    assert [opened[2] for opened in strategy.opened] == [ALL] * 6
    assert same(result.arrays, plainly().arrays)


@pytest.mark.parametrize("quorum", [None, 3])
def test_who_drops_out_of_the_first_sum_is_in_no_later_one(quorum: int | None) -> None:
    faults = [Fault(kind="drop", client="1", server_round=1)]
    secure_sum = SecureSum(threshold=3, value_range=100.0)
    strategy, result = mixed(secure_sum, faults=faults, deadline=0.5, quorum=quorum, num_rounds=1)
    left = strategy.opened[0][2]
    assert "1" not in left
    assert len(left) == (quorum or 4)
    assert strategy.opened == [(1, step, left) for step in range(3)]
    assert [told["sum_opened"] for told in strategy.told] == [len(left)] * 3
    assert [told["sum_cohort"] for told in strategy.told] == [5, len(left), len(left)]
    assert [told["quorum"] for told in strategy.told] == [3, len(left), len(left)]
    assert {told["sum_threshold"] for told in strategy.told} == {3}
    assert "at least 3 of 5 clients" in result.guarantee.secure_sum


def test_a_drop_out_at_a_later_step_ends_the_round_and_not_the_training(caplog: Any) -> None:
    faults = [Fault(kind="drop", client="1", phase=MIX, server_round=1)]
    strategy, result = mixed(faults=faults, deadline=0.5)
    assert [text for text in caplog.messages if "not opened" in text] == [
        "the sum of step 1 of round 1 is not opened: 4 of at least 5 clients sent a vector that "
        "can be used, 1 are missing"
    ]
    assert [line.get("skipped") for line in result.history] == [None, True, False]
    assert result.history[1]["scheme"]["sum_opened"] == 5
    assert strategy.opened[0] == (1, 0, ALL)
    assert [(r, step) for r, step, _ in strategy.opened[1:]] == [(2, 0), (2, 1), (2, 2)]


def test_who_does_not_deal_for_a_later_step_ends_the_round_and_not_the_training(
    caplog: Any,
) -> None:
    _, result = mixed(before=without_a_deal(step=1))
    assert [text for text in caplog.messages if "not opened" in text] == [
        "the sum of step 1 of round 1 is not opened: 4 of at least 5 clients dealt their secrets, "
        "1 are missing"
    ]
    assert [line.get("skipped") for line in result.history] == [None, True, False]


def test_a_server_that_leaves_somebody_out_of_a_later_sum_is_refused(caplog: Any) -> None:
    """It does not tell the others that one client sent its vector, and would open the rest."""

    def change(grid: Any) -> None:
        push = grid.push_messages
        sums = []

        def push_messages(messages: list[Message]) -> Any:
            opening = [m for m in messages if OPEN in m.content]
            sums.extend(opening[:1])
            if len(sums) == 2:  # of step 1
                for message in opening:
                    record = message.content[OPEN]
                    told = [c for c in record["survivors"] if c != "1"]
                    message.content[OPEN] = ConfigRecord({**record, "survivors": told})
            return push(messages)

        grid.push_messages = push_messages

    with caplog.at_level("WARNING", "flwr.privacy"):
        strategy, _ = mixed(before=change)
    assert strategy.opened[0] == (1, 0, ALL)
    assert strategy.opened[1][0] == 2
    text = "1 of 5 clients are missing in step 1 of round 1: a sum over fewer clients than the step"
    assert caplog.text.count(text) == 4


def test_parameters_that_do_not_fit_those_left_open_nothing(caplog: Any) -> None:
    class Narrow(Mixing):
        def bounds_of(self, clients: list[str], server_round: int) -> Any:
            asked.append((server_round, clients))
            bits = SecureSum(value_range=100.0, modulus_bits=2 if len(clients) == 4 else None)
            return bits.bounds(len(clients))

    asked: list[Any] = []
    faults = [Fault(kind="drop", client="1", server_round=1)]
    strategy = Narrow(
        secure_sum=SecureSum(value_range=100.0), loop=LoopOptions(seed=3, deadline=0.5)
    )
    app = message_app([as_mod(MixingClient)])
    run_strategy(strategy, app, arrays=record(), nodes=5, num_rounds=2, faults=faults)
    assert asked[:2] == [(1, list(ALL)), (1, ["0", "2", "3", "4"])]
    text = "there is no sum of step 1 of round 1: secure_sum.modul"
    assert any(message.startswith(text) for message in caplog.messages)
    assert strategy.opened[0][0] == 2


@pytest.mark.parametrize(("survivors", "heaviest"), [(2, 6), (4, 8)])
def test_a_sum_of_more_weight_than_there_can_be_is_of_wrong_vectors(
    survivors: int, heaviest: int
) -> None:
    mean = GridMean({"w": np.zeros(1, np.float32)}, CodeGrid(-2), ["w"])
    bounds = Bounds(cohort=5, code_limit=10, largest_weight=3, total_weight=8, modulus_bits=9)
    clients = list(ALL[:survivors])
    opened = opened_mean(mean, np.array([-10 * heaviest, heaviest]), clients, bounds)
    assert opened.finish()["w"] == -2.5
    for values in ([0, heaviest + 1], [10 * heaviest + 1, heaviest], [0, -1]):
        with pytest.raises(NotOpenedError, match="somebody sent a wrong one"):
            opened_mean(mean, np.array(values), clients, bounds)


@pytest.mark.parametrize(
    ("phase", "number", "step"), [(TRAIN, 0, 0), (TRAIN, 3, 0), (MIX, 0, 1), (MIX, 4, 5)]
)
def test_the_step_of_a_question_is_its_number_after_the_training(
    phase: str, number: int, step: int
) -> None:
    header = Header(scheme="s", experiment_id="e", phase=phase, server_round=1, request=number)
    assert step_of(header) == step


def test_no_later_question_passes_for_the_training() -> None:
    header = Header(scheme="s", experiment_id="e", phase=MIX, server_round=1, request=-1)
    with pytest.raises(ProtocolError, match="request -1 of phase 'mix': expected 0 or more"):
        step_of(header)
