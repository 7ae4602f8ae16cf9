"""MSP and MSPDQ on real messages: what travels, how often, and that both ends have the same."""

import math
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
from apps import make
from mixing_training import MODEL, SIZE, Wire, run

from flwr_privacy.clients import MSPDQClient
from flwr_privacy.strategies import MSP, MSPDQ, FedAvg

# -- F11: both ends have the same values ---------------------------------------------------------


class Watched(MSPDQClient):
    """Notes what it keeps as heard after every message."""

    heard: ClassVar[dict[tuple[str, int], np.ndarray]] = {}

    def handle(self, *question: Any) -> Any:
        reply = super().handle(*question)
        state = self.context.state
        if "heard" in state.get("flwr-privacy.sub-states", {}):
            kept = state["flwr-privacy.sub-states"]["heard"].numpy()
            self._note(int(state["flwr-privacy.mixing"]["sent"]), kept)
        return reply

    def _said(self, round_: Any, member: Any, *rest: Any) -> Any:
        reply = super()._said(round_, member, *rest)
        self._note(member.sent, member.heard)
        return reply

    def _note(self, k: int, heard: np.ndarray) -> None:
        self.heard[str(self.context.node_config["partition-id"]), k] = np.array(heard)


class Recording(MSPDQ):
    """Notes what it has of every client after every message."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.decoded: dict[tuple[str, int], np.ndarray] = {}

    def _average(self, mean: Any) -> Any:
        average = super()._average(mean)
        k = self._messages - 1 + self._sent()
        for client in self._members:
            self.decoded[client, k] = np.array(self._hub._value(client))
        return average


def modes() -> list[tuple[str, str]]:
    starts, rules = ("independent", "reference", "global"), ("self", "linf", "paper", "bound")
    return [(s, r) for s in starts for r in rules if r != "bound" or s == "global"]


@pytest.mark.parametrize(("start", "interval"), modes())
@pytest.mark.parametrize("bits", [1, 4, 8, 16])
def test_F11_the_server_has_what_the_client_keeps_bit_for_bit(
    bits: int, start: str, interval: str
) -> None:
    Watched.heard.clear()
    strategy = Recording(
        bits=bits, mixing_start=start, interval=interval, mixing_rounds=3, min_available_nodes=3
    )
    run(strategy, arrays=MODEL, client=Watched, nodes=3)
    leaps = start != "independent" and interval in ("self", "bound")
    expected = {(str(c), k) for c in range(3) for k in range(int(leaps), 4)}
    assert set(strategy.decoded) == set(Watched.heard) == expected
    for place, value in strategy.decoded.items():
        np.testing.assert_array_equal(value, Watched.heard[place])
    last = [strategy.decoded[str(c), 3] for c in range(3)]
    assert any((value != last[0]).any() for value in last[1:])


# -- What travels --------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 17))
def test_F11_a_message_has_no_more_bytes_than_its_codes(bits: int) -> None:
    wire = Wire()
    run(MSPDQ(bits=bits, mixing_rounds=1), nodes=2, before=wire)
    assert len(wire.said) == 4
    for _, arrays in wire.said:
        assert set(arrays) == {"codes"}
        assert arrays["codes"].dtype == np.uint8
        assert arrays["codes"].shape == (math.ceil(bits * SIZE / 8),)


@pytest.mark.parametrize(
    ("strategy", "most", "least"),
    [
        (lambda: FedAvg(), 32, 32),
        (lambda: MSP(mixing_rounds=4), 160, 160),
        (lambda: MSPDQ(mixing_rounds=10, bits=8), 88, 88),
        (lambda: MSPDQ(mixing_rounds=20, bits=6), 126, 126),
        (lambda: MSPDQ(mixing_rounds=30, bits=8), 248, 248),
        (lambda: MSPDQ(mixing_rounds=10, bits=8, mixing_start="global"), 80, 80),
        (lambda: MSPDQ(mixing_rounds=10, bits=8, mixing_start="global", interval="linf"), 80, 80),
        (lambda: MSPDQ(mixing_rounds=10, bits=8, mixing_start="reference"), 88, 80),
        (lambda: MSPDQ(mixing_rounds=10, bits=8, paper=True, replacement=False), 88, 80),
    ],
)
def test_F19_bits_of_a_coordinate_in_a_learning_round(strategy: Any, most: int, least: int) -> None:
    """From a common start only the client that gives it uploads a first message."""
    wire = Wire()
    model = {"w": np.linspace(0.1, 1, 16, dtype=np.float32)}
    run(strategy(), arrays=model, nodes=2, before=wire)
    bits: Counter[str] = Counter()
    for head, arrays in wire.said:
        bits[head["client-id"]] += sum(8 * array.nbytes for array in arrays.values())
    assert sorted(bits.values()) == [16 * least, 16 * most]


FUSED = [(s, r) for s in ("reference", "global") for r in ("self", "fixed")]
FUSED.append(("global", "bound"))
ASKED = [(s, r) for s in ("reference", "global") for r in ("paper", "linf")]


@pytest.mark.parametrize(
    ("strategy", "phases"),
    [
        (MSP(mixing_rounds=0), ["train"]),
        (MSP(mixing_rounds=3), ["train", "mix", "mix", "mix"]),
        *(
            (MSPDQ(mixing_rounds=3, interval=rule), ["train", "mix", "mix", "mix"])
            for rule in ("self", "linf", "paper", "fixed")
        ),
        *(
            (
                MSPDQ(mixing_rounds=3, mixing_start=start, interval=rule),
                ["train", *["sync"] * (start == "reference"), "mix", "mix"],
            )
            for start, rule in FUSED
        ),
        *(
            (
                MSPDQ(mixing_rounds=3, mixing_start=start, interval=rule),
                ["train", *["sync"] * (start == "reference"), "mix", "mix", "mix"],
            )
            for start, rule in ASKED
        ),
        (MSPDQ(mixing_rounds=1, mixing_start="global"), ["train"]),
    ],
)
def test_the_exchanges_of_a_learning_round_are_with_the_same_clients(
    strategy: Any, phases: list[str]
) -> None:
    wire = Wire()
    strategy.fraction_train = 0.5
    result = run(strategy, nodes=5, before=wire, num_rounds=2)
    for server_round in (1, 2):
        exchanges = wire.exchanges(server_round)
        assert [phase for phase, _ in exchanges] == phases
        assert len({nodes for _, nodes in exchanges}) == 1
        assert len(exchanges[0][1]) == 2
    assert [line["exchanges"] for line in result.history] == [1, len(phases), len(phases)]


@pytest.mark.parametrize("strategy", [MSP, MSPDQ])
def test_a_client_that_is_drawn_twice_is_asked_once(strategy: Any) -> None:
    wire = Wire()
    drawn = make(strategy, replacement=True, min_train_nodes=9, mixing_rounds=2, seed=1)
    line = run(drawn, nodes=4, before=wire).history[1]  # `exchanges` fails on a second question
    assert [len(nodes) for _, nodes in wire.exchanges(1)] == [len(drawn.draws(1))] * 3
    assert sum(drawn.draws(1).values()) == line["scheme"]["draws"] == 9
    assert line["scheme"]["distinct"] == len(drawn.draws(1)) <= 4


def test_nothing_is_asked_of_the_clients_beyond_the_mixing() -> None:
    wire = Wire()
    result = run(MSPDQ(mixing_rounds=1, fraction_evaluate=1.0), before=wire)
    assert {head["phase"] for head, _ in wire.asked} == {"hello", "train", "mix"}
    assert result.history[1]["train"] == result.history[1]["evaluate"] == {}
