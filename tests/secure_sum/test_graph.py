import itertools
import math

import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.secure_sum.graph import (
    LARGEST_INSECURITY,
    degree,
    insecurity,
    is_safe,
    local_threshold,
    rosters,
)


def clients(count: int) -> list[str]:
    return [f"c{i:04}" for i in range(count)]


@pytest.mark.parametrize("size", [2, 3, 5, 99, 100])
def test_everybody_shares_masks_with_everybody_in_small_cohorts(size):
    cohort = clients(size)
    result = rosters(cohort[::-1], SecureSum(), seed=1, server_round=1)
    assert result == dict.fromkeys(cohort, cohort)
    assert result == rosters(cohort, SecureSum(neighbours=254), seed=1, server_round=1)


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (400, SecureSum(colluders=4, threshold=320)),
        (501, SecureSum(colluders=10)),
        (600, SecureSum(colluders=20, neighbours=120)),
    ],
)
def test_rosters_of_a_sparse_graph_are_regular_and_symmetric_and_of_one_piece(size, settings):
    cohort = clients(size)
    result = rosters(cohort, settings, seed=7, server_round=3)
    neighbours = settings.neighbours or degree(size, settings)
    assert neighbours < size - 1
    assert sorted(result) == cohort
    for client, roster in result.items():
        assert client in roster
        assert roster == sorted(set(roster))
        assert len(roster) == neighbours + 1
        assert all(client in result[peer] for peer in roster)
    reached, edge = set(), {cohort[0]}
    while edge:
        reached |= edge
        edge = {peer for client in edge for peer in result[client]} - reached
    assert reached == set(cohort)


def test_every_round_and_experiment_has_a_graph_of_its_own_that_all_can_draw_again():
    cohort, settings = clients(300), SecureSum(colluders=5, neighbours=120)
    draws = {
        (seed, server_round): rosters(cohort, settings, seed=seed, server_round=server_round)
        for seed in (1, "1", 2)
        for server_round in (1, 2)
    }
    assert draws[1, 1] == rosters(cohort[::-1], settings, seed=1, server_round=1)
    for one, other in itertools.combinations(draws.values(), 2):
        same = [len(set(one[client]) & set(other[client])) for client in cohort]
        # 121 of 300 each, so 49 in common; a mean of 70 over 300 clients is no chance.
        assert sum(same) / len(same) < 70


def test_who_is_near_on_the_circle_has_nothing_to_do_with_names():
    cohort, settings = clients(300), SecureSum(colluders=5, neighbours=120)
    pairs = 0
    for server_round in range(20):
        result = rosters(cohort, settings, seed=0, server_round=server_round)
        pairs += sum(cohort[i + 1] in result[cohort[i]] for i in range(299))
    # 120 of 299: 2400 of 5980 expected, standard error about 38.
    assert abs(pairs - 2400) < 6 * 38


def test_a_local_threshold_is_more_than_half_and_no_smaller_share_than_that_of_the_cohort():
    for cohort in (2, 3, 10, 101, 1000):
        for threshold in {cohort // 2 + 1, (3 * cohort + 3) // 4, cohort}:
            for roster in range(1, min(cohort, 255) + 1):
                local = local_threshold(roster, threshold, cohort)
                assert roster < 2 * local <= 2 * roster
                assert local * cohort >= roster * threshold
                smaller = local - 1
                assert 2 * smaller <= roster or smaller * cohort < roster * threshold
    assert local_threshold(7, 5, 7) == 5
    assert local_threshold(10, 51, 100) == 6
    assert local_threshold(10, 70, 100) == 7
    assert local_threshold(10, 71, 100) == 8


def exact_insecurity(cohort: int, neighbours: int, settings: SecureSum) -> float:
    """Return how many placements on the circle fail somebody, of all of them.

    Of the `cohort` places some are colluders and some are of clients that drop out. A placement
    fails if an honest client has a local threshold of colluders among its neighbours, or if those
    who are neither are not in one piece.
    """
    threshold, colluders = settings.threshold_of(cohort), settings.colluders_of(cohort)
    enough = local_threshold(neighbours + 1, threshold, cohort)
    reach = neighbours // 2
    around = [
        {(place + step) % cohort for step in range(-reach, reach + 1) if step}
        for place in range(cohort)
    ]
    failed = total = 0
    for bad in itertools.combinations(range(cohort), colluders):
        honest = set(range(cohort)).difference(bad)
        surrounded = any(len(around[place].intersection(bad)) >= enough for place in honest)
        for lost in itertools.combinations(sorted(honest), min(len(honest), cohort - threshold)):
            total += 1
            left = honest.difference(lost)
            reached: set[int] = set()
            edge = set(sorted(left)[:1])
            while edge:
                reached |= edge
                edge = {peer for place in edge for peer in around[place]} & left - reached
            failed += surrounded or reached != left
    return failed / total


# Cohort, neighbours, threshold, colluders; how much larger than the truth the bound may be.
CASES = [
    (8, 4, 6, 0, 1),  # nobody is in danger: the truth is 0
    (8, 4, 6, 1, 1),
    (8, 4, 5, 3, 15),
    (9, 4, 7, 2, 15),
    (9, 2, 8, 1, 15),
    (10, 4, 8, 3, 15),
    (10, 4, 8, 4, 15),
    (10, 6, 8, 4, 30),
    (10, 6, 7, 5, 15),
]


@pytest.mark.parametrize(("cohort", "neighbours", "threshold", "colluders", "factor"), CASES)
def test_the_bound_of_insecurity_holds_by_enumeration(
    cohort, neighbours, threshold, colluders, factor
):
    settings = SecureSum(threshold=threshold, colluders=colluders)
    exact = exact_insecurity(cohort, neighbours, settings)
    bound = insecurity(cohort, neighbours, settings)
    assert exact <= bound
    if exact:
        assert bound <= factor * exact


@pytest.mark.parametrize(("neighbours", "colluders"), [(200, 400), (250, 350), (254, 400)])
def test_colluders_around_a_client_follow_the_hypergeometric_law(neighbours, colluders):
    # So many that somebody surrounded is the larger danger by far. In integers, exactly.
    cohort, threshold = 1000, 501
    enough = neighbours // 2 + 1
    assert local_threshold(neighbours + 1, threshold, cohort) == enough
    ways = sum(
        math.comb(colluders, k) * math.comb(cohort - 1 - colluders, neighbours - k)
        for k in range(enough, neighbours + 1)
    )
    surrounded = cohort * ways / math.comb(cohort - 1, neighbours)
    bound = insecurity(cohort, neighbours, SecureSum(colluders=colluders))
    assert surrounded <= bound <= 1.1 * surrounded


def test_more_colluders_are_worse_and_higher_thresholds_and_more_neighbours_better():
    by_colluders = [insecurity(500, 100, SecureSum(colluders=c)) for c in range(0, 251, 10)]
    assert by_colluders == sorted(by_colluders)
    assert len(set(by_colluders)) > 20
    by_threshold = [
        insecurity(500, 100, SecureSum(threshold=t, colluders=100)) for t in range(251, 501, 10)
    ]
    assert by_threshold == sorted(by_threshold, reverse=True)
    assert len(set(by_threshold)) > 20
    by_neighbours = [insecurity(500, n, SecureSum(colluders=100)) for n in range(2, 255, 2)]
    assert by_neighbours == sorted(by_neighbours, reverse=True)
    assert len(set(by_neighbours)) > 100


@pytest.mark.parametrize(
    ("cohort", "settings"),
    [
        (101, SecureSum(colluders=0)),
        (150, SecureSum()),
        (300, SecureSum(colluders=10)),
        (1000, SecureSum(colluders=100)),
        (1000, SecureSum()),
        (2000, SecureSum(colluders=100, threshold=1500)),
    ],
)
def test_the_degree_is_the_least_that_is_safe(cohort, settings):
    assert LARGEST_INSECURITY == 2**-40
    least = degree(cohort, settings)
    assert least % 2 == 0
    assert insecurity(cohort, least, settings) <= 2**-40
    assert all(insecurity(cohort, k, settings) > 2**-40 for k in range(2, least, 2))
    for neighbours in (least - 2, least):
        asked = SecureSum(
            threshold=settings.threshold, colluders=settings.colluders, neighbours=neighbours
        )
        if neighbours == least:
            roster = rosters(clients(cohort), asked, seed=0, server_round=1)["c0000"]
            assert len(roster) == least + 1
            continue
        text = (
            rf"secure_sum\.neighbours = {neighbours}: expected at least {least} in a cohort of "
            f"{cohort}, or fewer colluders"
        )
        with pytest.raises(InvalidParameterError, match=text):
            rosters(clients(cohort), asked, seed=0, server_round=1)


def test_two_neighbours_are_enough_where_nobody_colludes_or_drops_out():
    assert degree(150, SecureSum(threshold=150, colluders=0)) == 2


def test_where_no_sparse_graph_is_safe_all_are_neighbours_or_the_cohort_is_refused():
    for cohort in (101, 150, 255):
        settings = SecureSum(colluders=cohort // 2)
        assert degree(cohort, settings) == cohort - 1
        members = clients(cohort)
        result = rosters(members, settings, seed=0, server_round=1)
        assert result == dict.fromkeys(members, members)
    settings = SecureSum(colluders=128)
    text = (
        "secure_sum.colluders = 128: expected fewer, or a higher threshold: in a cohort of 256 no "
        "graph with up to 254 neighbours is safe with a probability of 1 - 2\\*\\*-40"
    )
    with pytest.raises(InvalidParameterError, match=text):
        rosters(clients(256), settings, seed=0, server_round=1)


def test_a_client_believes_in_a_large_cohort_only_around_a_large_roster():
    assert is_safe(10, 10, 6)
    assert is_safe(1000, degree(1000, SecureSum()) + 1, 501)
    assert not is_safe(1000, 5, 501)
    assert not is_safe(60_000, 5, 30_001)
