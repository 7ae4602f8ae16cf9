"""Views of FedVS in tiny fields, counted: which of them depend on the secrets."""

import math
from itertools import combinations, product

import numpy as np
import pytest

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.fedvs.share_enumeration import (
    enumerate_views,
    rounds_distance,
    total_variation,
)

TINY = LagrangeCode(N=3, K=1, T=1, field=PrimeField(5))
FIRST = ([[1], [2], [3]], [1, 1, 1])
SECOND = ([[1], [1], [0]], [1, 0, 2])  # with the same sum over the clients 1 and 2


def test_F15_the_server_with_a_client_learns_more_than_the_sum_without_a_zero_mask() -> None:
    views = [enumerate_views(TINY, *one, coalition=[0]) for one in (FIRST, SECOND)]
    assert total_variation(*views) == pytest.approx(0.8, abs=1e-12)


@pytest.mark.parametrize("dealers", [(1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_F15_with_an_honest_zero_mask_they_learn_nothing_more(dealers: tuple[int, ...]) -> None:
    """With T + 1 = 2 dealers one of them at least is honest."""
    views = [enumerate_views(TINY, *one, coalition=[0], dealers=dealers) for one in (FIRST, SECOND)]
    assert total_variation(*views) == 0


def test_F15_the_zero_mask_of_a_colluder_does_not_help() -> None:
    views = [enumerate_views(TINY, *one, coalition=[0], dealers=[0]) for one in (FIRST, SECOND)]
    assert total_variation(*views) == pytest.approx(0.8, abs=1e-12)


def test_F15_the_zero_mask_does_not_change_what_is_decoded() -> None:
    for dealers in ((), (1,), (1, 2)):
        views = enumerate_views(TINY, *FIRST, coalition=[0], dealers=dealers)
        sums = TINY.decode(dict(enumerate(views[:, :3].T)))
        assert (sums == 2 * 1 + 3 * 1 - 5).all()  # 5 is 0


def test_other_sums_are_told_apart_with_certainty() -> None:
    views = [
        enumerate_views(TINY, data, [1, 1, 1], coalition=[0], dealers=[1])
        for data in ([[1], [2], [3]], [[1], [2], [4]])
    ]
    assert total_variation(*views) == 1


@pytest.mark.parametrize("holder", [0, 1, 2])
def test_a_single_answer_says_nothing_at_all(holder: int) -> None:
    """FedVS, theorem 5.3: whatever the secrets are, also with other sums."""
    views = [
        enumerate_views(TINY, data, weights, answers=[holder])
        for data, weights in (
            FIRST,
            SECOND,
            ([[0], [0], [0]], [0, 0, 0]),
            ([[4], [1], [0]], [3] * 3),
        )
    ]
    assert all(total_variation(views[0], other) == 0 for other in views[1:])


def test_all_answers_of_a_round_say_the_sum_and_no_more_if_rows_are_independent() -> None:
    secrets = [FIRST, ([[1], [0], [0]], [1, 0, 0]), ([[1], [4], [2]], [2, 1, 0])]
    assert [int(np.ravel(x) @ np.array(w)) % 5 for x, w in secrets] == [1, 1, 1]
    views = [enumerate_views(TINY, *one) for one in secrets]
    assert all(total_variation(views[0], other) == 0 for other in views[1:])


@pytest.mark.parametrize("pair", list(combinations(range(5), 2)))
def test_F12_shares_of_T_clients_are_a_bijection_of_the_masks(pair: tuple[int, int]) -> None:
    code = LagrangeCode(N=5, K=1, T=2, field=PrimeField(11))
    masks = np.array(list(product(range(11), repeat=2))).T
    for secret in range(11):
        shares = code.encode(np.full((1, 121), secret), masks)
        assert len(np.unique(shares[list(pair)], axis=1).T) == 121
    views = [
        code.encode_constant(np.full(121, weight), masks)[list(pair)].T for weight in (3, 0, 10)
    ]
    assert all(total_variation(views[0], other) == 0 for other in views[1:])


def test_F14_shares_of_T_clients_say_nothing_and_of_T_plus_1_all() -> None:
    alone = [enumerate_views(TINY, *one, coalition=[0], answers=[]) for one in (FIRST, SECOND)]
    assert total_variation(*alone) == 0
    both = [enumerate_views(TINY, *one, coalition=[0, 1], answers=[]) for one in (FIRST, SECOND)]
    assert total_variation(*both) == 1


def independent_pair(p: int, width: int, seed: int) -> tuple[tuple, tuple]:
    """Return two secrets of two independent rows, with weights of 8 rounds and equal sums."""
    draws = np.random.default_rng(seed)
    rows = np.eye(2, width, dtype=np.int64)
    others = rows.copy()
    others[:, 2:] = draws.integers(1, p, (2, width - 2))
    models, other_models = draws.integers(0, p, (2, 8, width))
    other_models[:, :2] = (models[:, :2] - other_models[:, 2:] @ others[:, 2:].T) % p
    assert not ((rows @ models.T - others @ other_models.T) % p).any()
    return (rows, models), (others, other_models)


@pytest.mark.parametrize(
    ("p", "width", "fourth", "eighth"), [(5, 3, 0.04, 0.75), (3, 4, 0.03, 0.22)]
)
def test_F15_over_rounds_the_server_learns_more_if_a_batch_is_too_large(
    p: int, width: int, fourth: float, eighth: float
) -> None:
    """(K + T) b = 4: more than E = 3, or as many as E = 4, where masks fail by chance."""
    samples = 400
    after = rounds_distance(p, *independent_pair(p, width, seed=0), samples=samples, seed=1)
    if width == 3:
        assert after[0] == 0  # a single round says nothing, as the masks of the data help
    assert (np.diff(after) >= -4 / math.sqrt(8 * samples)).all()
    # Between pairs of secrets the fourth differs by its own size; of the last, 5 standard errors.
    assert after[3] < 3 * fourth
    assert abs(after[7] - eighth) < 5 / math.sqrt(8 * samples)


@pytest.mark.parametrize(("p", "width"), [(5, 3), (3, 4)])
def test_a_zero_mask_stops_that(p: int, width: int) -> None:
    pair = independent_pair(p, width, seed=0)
    assert (rounds_distance(p, *pair, samples=20, zero_mask=True) == 0).all()


def test_rounds_are_counted_as_views_are() -> None:
    """One round of one row, against an enumeration that knows nothing of subspaces."""
    first = ([[1], [2], [3]], [1, 1, 1])
    second = ([[0], [0], [0]], [1, 0, 0])
    third = ([[0], [0], [0]], [0, 0, 0])
    samples = 2000
    for one, other in ((second, third), (first, ([[1], [1], [0]], [1, 0, 2]))):
        exact = total_variation(enumerate_views(TINY, *one), enumerate_views(TINY, *other))
        found = rounds_distance(
            5,
            ([np.ravel(one[0])], [one[1]]),
            ([np.ravel(other[0])], [other[1]]),
            samples=samples,
        )
        assert abs(found[0] - exact) < 5 / math.sqrt(8 * samples)


def test_pads_of_zeros_give_weights_away() -> None:
    pads = [[0, 0, 0]]
    after = rounds_distance(5, (pads, [[0, 0, 0]]), (pads, [[1, 0, 0]]), samples=2000)
    assert abs(after[0] - 0.8) < 5 / math.sqrt(8 * 2000)


def test_total_variation_of_lists_of_other_lengths() -> None:
    assert total_variation([[0], [1]], [[0], [0], [1], [1]]) == 0
    assert total_variation([[0, 1]], [[1, 0]]) == 1
    assert total_variation([[0], [1]], [[0]]) == 0.5


def test_what_is_not_allowed_is_named() -> None:
    with pytest.raises(InvalidParameterError, match="data = "):
        enumerate_views(TINY, [[1]], [1, 1, 1])
    with pytest.raises(InvalidParameterError, match="weights = "):
        enumerate_views(TINY, FIRST[0], [1])
    with pytest.raises(InvalidParameterError, match="dealers = 3"):
        enumerate_views(TINY, *FIRST, dealers=[3])
    with pytest.raises(InvalidParameterError, match="choices of masks"):
        enumerate_views(TINY, *FIRST, dealers=[0, 1, 2])
    with pytest.raises(InvalidParameterError, match="the products of the first"):
        rounds_distance(5, ([[1]], [[1]]), ([[1]], [[2]]))
    with pytest.raises(InvalidParameterError, match="second = "):
        rounds_distance(5, ([[1]], [[1]]), ([[1, 1]], [[1, 0]]))
    with pytest.raises(InvalidParameterError, match="fewer rows or columns"):
        rounds_distance(97, ([[1] * 4], [[0] * 4]), ([[1] * 4], [[0] * 4]))
    with pytest.raises(InvalidParameterError, match="rows of 1 parts"):
        total_variation([[1]], [[1, 2]])
