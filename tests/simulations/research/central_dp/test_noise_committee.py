"""A committee's noise in shares: what the server sees, counted exactly, and what it costs."""

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

import numpy as np
import pytest

from flwr_privacy.central_dp.correlated.options import BandedMF
from flwr_privacy.central_dp.correlated.sensitivity import joint_sensitivities
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.distributed_noise import log_ratio_bound
from flwr_privacy.simulations.research.central_dp.noise_committee import (
    Committee,
    Opened,
    View,
    committee_cost,
    hockey_stick,
    independent_cost,
    restarted_multiplier,
    rounds_until_lost,
    shifted_sum_distance,
    tables,
    view_law,
)
from tests.shared.imports import ROOT

MODULUS = 7
LAW = {-1: 1, 0: 2, 1: 1}
FACTOR = (1, 1)  # C has ones on and below its diagonal, and its inverse is of integers
OTHERS, CLIENT = (2, 3, 1), (1, 0, 1)  # rounds in which the client whose data change takes part
FACTORS = (1, 2, 4)  # exp(epsilon)

Sums = Sequence[Opened]


def law_of(sums: Sums, members: int, known: Collection[int] = ()) -> dict[View, Fraction]:
    return view_law(
        sums, coefficients=FACTOR, modulus=MODULUS, law=LAW, members=members, known=known
    )


def opened(data: Sequence[int], present: Sequence[Collection[int]]) -> list[Opened]:
    return [Opened(t, x, who) for t, (x, who) in enumerate(zip(data, present, strict=True))]


def losses(
    present: Sequence[Collection[int]], members: int, known: Collection[int] = ()
) -> list[Fraction]:
    """Return the least delta of each epsilon, between the client's data and none."""
    neighbour = [x + u for x, u in zip(OTHERS, CLIENT, strict=True)]
    one, other = (law_of(opened(data, present), members, known) for data in (OTHERS, neighbour))
    return [hockey_stick(one, other, factor) for factor in FACTORS]


def most_views(
    *,
    coefficients: Sequence[int] = FACTOR,
    denominator: int = 1,
    modulus: int = MODULUS,
    members: int,
    law: Mapping[int, int],
) -> int:
    """Return how many openings there are at most for one value of C x + sum z, over two data."""
    found: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    lattice = modulus * denominator
    for data in ((2, 3, 1), (3, 3, 2)):
        views = view_law(
            opened(data, [range(members)] * 3),
            coefficients=coefficients,
            denominator=denominator,
            modulus=modulus,
            law=law,
            members=members,
            known=range(members),
        )
        for values, *noise in views:
            key = tuple(
                (
                    sum(c * data[t - i] for i, c in enumerate(coefficients) if i <= t)
                    + sum(z[t] for z in noise)
                )
                % lattice
                for t in range(3)
            )
            found.setdefault(key, set()).add(values)
    return max(map(len, found.values()))


# What the sums are a function of


def test_view_is_a_function_of_c_x_plus_all_z() -> None:
    assert most_views(members=3, law={0: 1, 1: 2}) == 1
    assert most_views(members=2, law=LAW) == 1


def test_streams_that_are_rounded_one_by_one_are_not() -> None:
    """Why members need another sampler: the proof of `stream` is for one stream only."""
    most = [
        most_views(coefficients=(2, 1), denominator=2, modulus=1001, members=n, law=LAW)
        for n in (1, 2)
    ]
    assert most[0] == 1 < most[1]


@pytest.mark.parametrize("shifts", [(0.25, 0.5), (0.5, 0.5), (0.1, 0.35, 0.4)])
def test_shifted_shares_add_up_to_a_discrete_gaussian(shifts: tuple[float, ...]) -> None:
    """What the other sampler draws: the bound for shares around 0 holds for any centres."""
    for sigma in (0.9, 1.0, 1.2):
        assert shifted_sum_distance(sigma, shifts) <= log_ratio_bound(sigma, len(shifts))
    assert shifted_sum_distance(0.6, shifts) > 1e-3


# Members that are lost, collude, or are asked twice


@pytest.mark.parametrize("there", [(0, 2), (1,), (2,), (0, 1)])
def test_a_lost_member_costs_no_more_than_if_it_had_never_been_there(
    there: tuple[int, ...],
) -> None:
    present = [(0, 1, 2) if t in there else (0, 1) for t in range(3)]
    always = losses([(0, 1)] * 3, members=2)
    assert all(a <= b for a, b in zip(losses(present, members=3), always, strict=True))
    everybody = losses([(0, 1, 2)] * 3, members=3)
    assert all(a < b for a, b in zip(everybody, always, strict=True))


def test_a_colluder_counts_as_lost() -> None:
    assert losses([(0, 1, 2)] * 3, members=3, known=[2]) == losses([(0, 1)] * 3, members=2)


def test_fewer_than_planned_cost_more() -> None:
    planned = losses([(0, 1)] * 3, members=2)
    alone = losses([(0,)] * 3, members=1)
    assert all(a > b for a, b in zip(alone, planned, strict=True))
    # One missing once, in a round of the client, is enough.
    once = losses([(0,), (0, 1), (0, 1)], members=2)
    assert all(a > b for a, b in zip(once, planned, strict=True))


def test_two_sums_with_the_same_noise_give_everything_away() -> None:
    sums = [[Opened(0, 2 + u, (0, 1)), Opened(0, 2, (0, 1))] for u in (0, 1)]
    assert hockey_stick(law_of(sums[0], 2), law_of(sums[1], 2), 4) == 1


def test_a_training_that_splits_in_two_costs_no_more_than_two_trainings() -> None:
    """Both members in round 0, then a round of each alone: all of round 0 counts for the first."""
    deltas = []
    for first, rest in (((0, 1), ()), ((0,), (Opened(0, 0, (1,)),))):
        one, other = (
            law_of([Opened(0, 2 + u, first), *rest, Opened(1, 3, (0,)), Opened(1, 1 + u, (1,))], 2)
            for u in (0, 1)
        )
        deltas.append([hockey_stick(one, other, factor) for factor in FACTORS])
    assert all(split <= two for split, two in zip(*deltas, strict=True))


@pytest.mark.parametrize("cut", [10, 40, 70])
def test_new_streams_cost_no_privacy(cut: int) -> None:
    setting = {"separation": 10, "participations": 10}
    factor = BandedMF().factor(rounds=100, **setting)
    whole = joint_sensitivities(factor, rounds=100, **setting) ** 2
    before = joint_sensitivities(factor, rounds=cut, **setting) ** 2
    after = joint_sensitivities(factor, rounds=100 - cut, **setting) ** 2
    for first in range(1, cut // 10 + 1):
        for second in range(1, 10 - cut // 10 + 1):
            assert before[first - 1] + after[second - 1] <= whole[first + second - 1] + 1e-9
    assert restarted_multiplier(100) < restarted_multiplier(cut) < 1.9


# What it costs, and what is printed


def test_committees() -> None:
    assert [(c.colluders, c.honest) for c in map(Committee, (5, 10, 20))] == [
        (1, 4),
        (2, 8),
        (4, 16),
    ]
    assert rounds_until_lost(10) == pytest.approx(10)


def test_cost_is_that_by_hand() -> None:
    # 51,002 values of 28 bits, and 156 bytes for each of 19 or 24 others.
    values, model = 178_507, 204_000
    now = independent_cost(20)
    assert now[:3] == (28, values + 2_964, model + 2_964)
    assert now.server == 20 * (values + model + 2 * 2_964)
    # 2 * 25 * 12 * 1.2033 * 2 * 2.9619 / sqrt(4) * 2^18 = 5.61e8 < 2^30.
    cost, values = committee_cost(20, Committee(5)), 191_258
    assert cost[:5] == (30, values + 3_744, model + 3_744, values + 3_744, model + 3_744)
    assert cost.server == 25 * (values + model + 2 * 3_744)


def test_the_page_has_what_is_printed() -> None:
    lines: list[str] = []
    tables(lines.append)
    page = (ROOT / "docs" / "noise-in-shares.md").read_text()
    assert "| 20 | committee, M = 5 | 30 | 195 | 208 | 195 | 208 | 10,069 | 1.07, 1.30 |" in lines
    printed = [line for line in "\n".join(lines).splitlines() if line.startswith("|")]
    assert not [line for line in printed if line not in page.splitlines()]


def test_too_much_noise_to_go_through() -> None:
    with pytest.raises(InvalidParameterError, match="members"):
        law_of([Opened(9, 0, np.arange(3).tolist())], members=3)
