"""Clients that are drawn with replacement, by shares, whoever is there."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from apps import make, message_app, record, run_strategy
from flwr.serverapp.strategy import Strategy

from flwr_privacy.clients import MSPClient, as_mod
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.strategies import MSP, LoopOptions
from flwr_privacy.strategies.requests.federation import Federation
from flwr_privacy.strategies.requests.sampling import Sampler

NAMES = [f"c{i:02}" for i in range(100)]
SHARES = {name: 1 + i / 10 for i, name in enumerate(NAMES)}
VALUES = {name: (i / 10 - 4) ** 2 for i, name in enumerate(NAMES)}
"""What each client has, to be averaged."""


def sampler(names: list[str] = NAMES) -> Sampler:
    federation = Federation()
    federation.met = True
    federation.nodes = {name: 1000 + NAMES.index(name) for name in names}
    return Sampler(federation)


def draw(
    size: int,
    *,
    seed: int = 1,
    purpose: tuple[str | int, ...] = ("train", 1),
    names: list[str] = NAMES,
    **options: Any,
) -> dict[str, int]:
    _, draws = sampler(names).draw(seed, purpose, fraction=0.0, minimum=size, **options)
    return draws


@pytest.mark.parametrize("shares", [None, SHARES])
def test_F25_the_mean_over_the_draws_is_unbiased(shares: Mapping[str, float] | None) -> None:
    """Lemma 1, over 100000 draws in 20 rounds."""
    even, uneven = np.full(100, 0.01), np.array(list(SHARES.values())) / sum(SHARES.values())
    chances, others = (even, uneven) if shares is None else (uneven, even)
    values = np.array([VALUES[name] for name in NAMES])
    expected = float(chances @ values)
    variance = float(chances @ values**2) - expected**2
    counts: Counter[str] = Counter()
    for server_round in range(20):
        counts.update(draw(5000, purpose=("train", server_round), shares=shares))
    assert sum(counts.values()) == 100_000
    mean = sum(n * VALUES[name] for name, n in counts.items()) / 100_000
    assert abs(mean - expected) < 3 * (variance / 100_000) ** 0.5
    # The other law is far away, so the bound tells them apart.
    assert abs(mean - float(others @ values)) > 10 * (variance / 100_000) ** 0.5
    # Chi-square with 99 degrees of freedom: mean 99, standard deviation 14.1.
    seen = np.array([counts[name] for name in NAMES])
    statistic = float((((seen - 100_000 * chances) ** 2) / (100_000 * chances)).sum())
    assert 99 - 4 * 14.1 < statistic < 99 + 4 * 14.1


def test_F25_of_20_draws_from_100_clients_18_are_distinct() -> None:
    """100 (1 - 0.99^20) is 18.21; the standard deviation of the number is 1.18."""
    numbers = []
    for server_round in range(300):
        draws = draw(20, purpose=("train", server_round))
        assert sum(draws.values()) == 20
        assert min(draws.values()) >= 1
        numbers.append(len(draws))
    assert abs(np.mean(numbers) - 18.209) < 3 * 1.18 / 300**0.5
    assert min(numbers) < 18
    assert max(numbers) == 20


def test_draws_of_one_round_are_independent_of_those_of_another() -> None:
    """The correlation of 200 pairs has a standard error of 0.07."""
    drawing, values = sampler(), []
    for server_round in (1, 2):
        times: list[float] = []
        for part in range(200):
            _, draws = drawing.draw(3, ("train", server_round, part), fraction=0.0, minimum=1)
            (name,) = draws
            times.append(VALUES[name])
        values.append(times)
    assert abs(np.corrcoef(values)[0, 1]) < 3 / 200**0.5
    assert values[0] != values[1]


def test_who_is_absent_changes_its_own_draws_only() -> None:
    everybody = draw(40, shares=SHARES)
    assert max(everybody.values()) > 1
    for absent in NAMES:
        left = [name for name in NAMES if name != absent]
        without = draw(40, names=left, shares=SHARES)
        assert sum(without.values()) == 40
        came_in = {name: n - everybody.get(name, 0) for name, n in without.items()}
        assert min(came_in.values()) >= 0
        assert sum(came_in.values()) == everybody.get(absent, 0)


def test_a_node_that_owes_an_answer_is_as_good_as_absent() -> None:
    everybody = draw(10)
    busy = next(iter(everybody))
    assigned, draws = sampler().draw(
        1, ("train", 1), fraction=0.0, minimum=10, busy={1000 + NAMES.index(busy)}
    )
    assert draws == draw(10, names=[name for name in NAMES if name != busy])
    assert {client for clients in assigned.values() for client in clients} == set(draws)


def test_the_seed_and_the_purpose_decide() -> None:
    one = draw(20, seed=1, shares=SHARES)
    assert one == draw(20, seed=1, shares={name: 2 * s for name, s in SHARES.items()})
    assert one == draw(20, seed=1, shares=SHARES, names=NAMES[::-1])
    assert one != draw(20, seed=2, shares=SHARES)
    assert one != draw(20, seed=1, shares=SHARES, purpose=("train", 2))
    assert one != draw(20, seed=1)


def test_more_draws_go_on_from_fewer() -> None:
    few, many = draw(10), draw(30)
    assert all(many[name] >= n for name, n in few.items())


def test_fraction_and_least_number_are_of_the_draws() -> None:
    for fraction, minimum, size in ((0.25, 2, 25), (0.25, 40, 40), (1.0, 300, 300), (0.0, 0, 0)):
        _, draws = sampler().draw(1, ("train", 1), fraction=fraction, minimum=minimum)
        assert sum(draws.values()) == size


def test_nobody_there_nobody_drawn() -> None:
    assert sampler([]).draw(1, ("train", 1), fraction=0.5, minimum=2) == ({}, {})
    busy = {1000 + i for i in range(100)}
    assert sampler().draw(1, ("train", 1), fraction=0.5, minimum=2, busy=busy) == ({}, {})


def test_who_has_no_share_is_not_drawn_and_before_the_first_round_it_is_an_error() -> None:
    shares = {name: 1.0 for name in NAMES if name not in ("c07", "c31")}
    drawn = draw(500, shares=shares)
    assert sum(drawn.values()) == 500
    assert not {"c07", "c31"} & set(drawn)
    with pytest.raises(InvalidParameterError, match=r"shares = \['3'\]: expected a share for each"):
        run(Kept(replacement=True, shares=dict.fromkeys("012", 1.0)))


def test_simulated_clients_are_drawn_like_others_and_keep_their_nodes() -> None:
    federation_ = Federation(virtual_clients=30)
    federation_.met = federation_.cohorts = True
    federation_.nodes = {"w1": 1, "w2": 2}
    federation_.introductions = {"w1": {"plays": "any"}, "w2": {"plays": "any"}}
    places: dict[str, int] = {}
    drawing = Sampler(federation_)
    for server_round in range(5):
        assigned, draws = drawing.draw(1, ("train", server_round), fraction=0.0, minimum=20)
        assert sum(draws.values()) == 20
        asked = [client for clients in assigned.values() for client in clients]
        assert sorted(asked) == sorted(draws)  # each once, however often it was drawn
        for node, clients in assigned.items():
            for client in clients:
                assert places.setdefault(client, node) == node
    assert set(places.values()) == {1, 2}


# -- The strategy --------------------------------------------------------------------------------


def run(strategy: MSP, **options: Any) -> Any:
    app = message_app([as_mod(MSPClient)])
    model = {"w": np.arange(1, 7, dtype=np.float64)}
    return run_strategy(strategy, app, arrays=record(model), **{"num_rounds": 1, **options})


class Kept(MSP):
    """Keeps the draws of all rounds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(mixing_rounds=1, gamma=0.5, **options)
        self.all: list[dict[str, int]] = []

    def instruct(self, server_round: int) -> Any:
        self.all.append(self.draws(server_round))
        return super().instruct(server_round)


def test_the_same_seed_draws_the_same_also_in_cohorts() -> None:
    options = {"replacement": True, "min_train_nodes": 8, "seed": 5}
    one, other, cohort = (
        make(Kept, **options),
        make(Kept, **options),
        make(Kept, clients=5, **options),
    )
    run(one, nodes=5, num_rounds=3)
    run(other, nodes=5, num_rounds=3)
    run(cohort, nodes=2, num_rounds=3)
    assert one.all == other.all == cohort.all
    assert len({tuple(sorted(draws.items())) for draws in one.all}) == 3
    another = make(Kept, **{**options, "seed": 6})
    run(another, nodes=5, num_rounds=3)
    assert another.all != one.all


def test_shares_decide_who_is_drawn_and_so_who_weighs() -> None:
    shares = {"0": 1e-9, "1": 3.0, "2": 1e-9, "3": 1.0}
    strategy = Kept(replacement=True, shares=shares, min_train_nodes=200, loop=LoopOptions(seed=1))
    result = run(strategy)
    (draws,) = strategy.all
    assert set(draws) == {"1", "3"}
    assert abs(draws["1"] - 150) < 3 * (200 * 0.75 * 0.25) ** 0.5
    assert result.history[1]["scheme"]["draws"] == 200
    assert result.history[1]["scheme"]["distinct"] == 2
    model = np.arange(1, 7)
    trained = {"1": model * 1.1 + 1 / 3, "3": model * 1.3 + 1}
    mean = sum(draws[client] * trained[client] for client in trained) / 200
    np.testing.assert_allclose(result.arrays["w"].numpy(), mean, rtol=1e-12)


def test_without_replacement_everybody_is_drawn_once() -> None:
    strategy = Kept(fraction_train=0.5, loop=LoopOptions(seed=5))
    result = run(strategy, nodes=6, num_rounds=2)
    assert all(len(draws) == 3 and set(draws.values()) == {1} for draws in strategy.all)
    assert [line["scheme"]["draws"] for line in result.history[1:]] == [3, 3]
    assert "draws" not in result.history[0]["scheme"]


def test_with_replacement_the_clients_must_have_met() -> None:
    class Own(MSP):
        start = Strategy.start

    text = "replacement: works only where this strategy's own start runs the rounds"
    with pytest.raises(ProtocolError, match=text):
        run(Own(replacement=True))
