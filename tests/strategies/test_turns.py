"""Balanced cohorts: clients take turns, so that nobody is asked more often than planned."""

import math
from collections import Counter

import pytest

from flwr_privacy.privacy.cohorts import BALANCED, planned_participations, rest
from flwr_privacy.strategies.turns import Turns
from flwr_privacy.wire.documents import dumps, loads


def first(turns: Turns, names: list[str], asked: int) -> list[str]:
    return sorted(names, key=lambda name: turns.last.get(name, (0, 0)))[:asked]


@pytest.mark.parametrize("clients", [5, 20, 25, 40])
@pytest.mark.parametrize("asked", [1, 3, 5])
@pytest.mark.parametrize("rounds", [1, 7, 40])
def test_taking_turns_asks_nobody_more_often_than_balanced_says(
    clients: int, asked: int, rounds: int
) -> None:
    turns, counts, shortest = Turns(), Counter[str](), math.inf
    names = [f"client-{number}" for number in range(clients)]
    for server_round in range(1, rounds + 1):
        chosen = first(turns, names, asked)
        for name in chosen:
            last, _ = turns.last.get(name, (-math.inf, 0))
            shortest = min(shortest, server_round - last)
            counts[name] += 1
        turns.take(server_round, chosen)
    q = asked / clients
    assert max(counts.values()) == planned_participations(BALANCED, rounds=rounds, q=q)
    assert shortest >= rest(q)


def test_a_draw_that_is_made_again_is_the_same() -> None:
    turns, names = Turns(), list("abcde")
    for server_round in (1, 2, 3):
        turns.take(server_round, first(turns, names, 2))
    drawn = [first(turns, names, 2)]
    turns.take(4, drawn[0])
    turns.take(5, first(turns, names, 2))
    resumed = Turns()
    resumed.load(loads(dumps(turns.state())))
    for again in (turns, resumed):
        again.back_to(4)
        assert first(again, names, 2) == drawn[0]


def test_who_was_absent_or_is_new_comes_first() -> None:
    turns = Turns()
    turns.take(1, ["a", "b"])
    turns.take(2, ["a", "b"])  # c was not there
    assert first(turns, list("abcd"), 2) == ["c", "d"]
    assert turns.resting(3, 2) == {"a", "b"}
    assert turns.resting(4, 2) == set()
