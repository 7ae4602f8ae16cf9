"""What coalitions open of coded shares, against dealing, exhaustion and an independent field."""

from itertools import combinations, product

import galois
import numpy as np
import pytest

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.fedvs.sharing import data_shares, weight_shares
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.fedvs.coalition import (
    OpenedShares,
    data_coefficients,
    open_shares,
    small_secrets,
    weight_coefficients,
)

LARGE = PrimeField()


def random(purpose: str) -> SecureRandom:
    return SecureRandom.insecure(0, "test coalition", purpose)


def code(N: int, K: int, T: int, field: PrimeField = LARGE) -> LagrangeCode:
    return LagrangeCode(N=N, K=K, T=T, field=field)


@pytest.mark.parametrize(("N", "K", "T"), [(9, 3, 2), (13, 6, 1), (5, 1, 2), (9, 2, 3)])
def test_F14_what_so_many_holders_open(N: int, K: int, T: int) -> None:
    lagrange, draws = code(N, K, T), np.random.default_rng(1)
    X = LARGE.uniform((K * 2, 3), random("data"))
    W = LARGE.uniform((3, 4), random("weights"))
    X_shares = data_shares(lagrange, X, random("data masks"))
    W_shares = weight_shares(lagrange, W, random("weight masks"))
    for count in range(1, K + T + 1):
        holders = [int(n) for n in draws.permutation(N)[:count]]
        data = open_shares(
            X_shares[holders], data_coefficients(lagrange, holders), secrets=K, field=LARGE
        )
        weights = open_shares(
            W_shares[holders], weight_coefficients(lagrange, holders), secrets=1, field=LARGE
        )
        assert len(data.relations) == max(0, count - T)
        assert len(weights.relations) == min(1, max(0, count - T))
        if count <= T:
            assert data.secrets == weights.secrets == {}
        else:
            np.testing.assert_array_equal(weights.secrets[0], W)
        if count < K + T:
            assert data.secrets == {}  # relations alone, none of a single segment
        else:
            opened = np.stack([data.secrets[k] for k in range(K)])
            np.testing.assert_array_equal(opened, X.reshape(K, 2, 3))
        # What is said of the secrets is true of them.
        for row, value in zip(data.relations, data.values, strict=True):
            true = sum(int(c) * X.reshape(K, 2, 3)[k].astype(object) for k, c in enumerate(row))
            np.testing.assert_array_equal(value, true % LARGE.p)


@pytest.mark.parametrize(("count", "possible"), [(1, 49), (2, 49), (3, 7), (4, 1)])
def test_F14_no_more_is_known_than_the_relations(count: int, possible: int) -> None:
    """In a field of 11 with K = T = 2, but a secret from 7 values each, all are gone through."""
    field = PrimeField(11)
    lagrange = code(7, 2, 2, field)
    for holders in list(combinations(range(7), count))[:5]:
        matrix = data_coefficients(lagrange, holders)
        secret, mask = np.array([3, 5]), np.array([9, 4])
        shares = matrix @ np.concatenate([secret, mask]) % 11
        opened = open_shares(shares, matrix, secrets=2, field=field)
        fitting, explained = set(), set()
        for x in product(range(11), repeat=2):
            if not ((opened.relations @ x - opened.values) % 11).any():
                fitting.add(x)
            for z in product(range(11), repeat=2):
                if not ((matrix @ np.array([*x, *z]) - shares) % 11).any():
                    explained.add(x)
        assert fitting == explained
        assert len(fitting) == 11 ** (2 - len(opened.relations))
        assert possible == (49 if len(fitting) == 121 else 7 if len(fitting) == 11 else 1)


def test_elimination_agrees_with_an_independent_field() -> None:
    GF, draws = galois.GF(97), np.random.default_rng(2)
    field = PrimeField(97)
    for shape in [(3, 5), (5, 5), (6, 4), (4, 7)]:
        made = draws.integers(0, 97, shape)
        made[-1] = (made[0] + 2 * made[1]) % 97  # dependent
        unknowns = draws.integers(0, 97, (shape[1], 2))
        opened = open_shares(made @ unknowns % 97, made, secrets=2, field=field)
        masks = GF(made[:, 2:])
        left = masks.left_null_space() @ GF(made[:, :2])
        expected = left.row_reduce()
        rank = int(np.linalg.matrix_rank(left))
        np.testing.assert_array_equal(opened.relations, np.asarray(expected)[:rank])


def test_a_share_that_does_not_fit_leaves_what_the_first_ones_say() -> None:
    shares, made = [[13], [17], [22]], [[1, 2], [1, 3], [1, 4]]  # 5 + 2 * 4, 5 + 3 * 4, no 21
    opened = open_shares(shares, made, secrets=1, field=PrimeField(97))
    assert opened.secrets == {0: 5}


def small(lagrange: LagrangeCode, X: np.ndarray, holders: list[int]) -> OpenedShares:
    shares = data_shares(lagrange, lagrange.field.reduce(X), random("small"))
    return open_shares(
        shares[holders],
        data_coefficients(lagrange, holders),
        secrets=lagrange.K,
        field=lagrange.field,
    )


def test_small_data_are_opened_by_fewer_than_all_relations() -> None:
    """Three segments of bytes and a sign are 27 bits; a relation has 31."""
    points = tuple(int(n) for n in LARGE.uniform(12, random("points")))
    lagrange = LagrangeCode(N=8, K=3, T=1, field=LARGE, nodes=points[:4], points=points[4:12])
    X = np.random.default_rng(3).integers(-255, 256, (3 * 50, 4))
    found, fits, certain = small_secrets(small(lagrange, X, [5, 2]), lowest=-255, highest=255)
    assert not certain
    right = (found == X.reshape(found.shape)).all(axis=0)
    assert right.mean() > 0.5  # by T + 1 holders
    assert right[fits].mean() > right.mean()
    found, fits, certain = small_secrets(small(lagrange, X, [5, 2, 0]), lowest=-255, highest=255)
    assert certain
    assert fits.all()
    np.testing.assert_array_equal(found.reshape(X.shape), X)


def test_with_small_points_it_takes_some_more_holders_and_still_fewer_than_all() -> None:
    lagrange = code(16, 6, 1)
    X = 16 * np.random.default_rng(4).integers(0, 17, (6 * 20, 4))
    near = small_secrets(small(lagrange, X, [0, 1]), lowest=0, highest=256, step=16)
    assert (near[0].reshape(X.shape) == X).mean() < 0.5
    far = small_secrets(small(lagrange, X, [13, 14, 15]), lowest=0, highest=256, step=16)
    np.testing.assert_array_equal(far[0].reshape(X.shape), X)
    five = small_secrets(small(lagrange, X, [0, 1, 2, 3, 4]), lowest=0, highest=256, step=16)
    assert five[2]
    np.testing.assert_array_equal(five[0].reshape(X.shape), X)


def test_without_a_relation_nothing_is_found_but_the_middle() -> None:
    lagrange = code(16, 6, 1)
    X = np.random.default_rng(5).integers(0, 17, (6, 3))
    found, fits, certain = small_secrets(small(lagrange, X, [3]), lowest=0, highest=16)
    assert not certain
    assert fits.all()
    np.testing.assert_array_equal(found, 8)


def test_what_is_not_allowed_is_named() -> None:
    lagrange = code(5, 1, 1)
    with pytest.raises(InvalidParameterError, match="coalition = 5"):
        data_coefficients(lagrange, [0, 5])
    with pytest.raises(InvalidParameterError, match="each holder once"):
        weight_coefficients(lagrange, [1, 1])
    with pytest.raises(InvalidParameterError, match="shares of 2 holders"):
        open_shares([[1]], [[1, 2], [1, 3]], secrets=1, field=LARGE)
    with pytest.raises(InvalidParameterError, match="3 columns or more"):
        open_shares([[1], [2]], [[1, 2], [1, 3]], secrets=3, field=LARGE)
    opened = open_shares([[1], [2]], [[1, 2], [1, 3]], secrets=1, field=LARGE)
    with pytest.raises(InvalidParameterError, match="step = 3: expected a divisor of 0 and 16"):
        small_secrets(opened, lowest=0, highest=16, step=3)
    with pytest.raises(InvalidParameterError, match="highest = -1"):
        small_secrets(opened, lowest=0, highest=-1)


def test_secrets_are_not_printed() -> None:
    opened = open_shares([[13], [17]], [[1, 2], [1, 3]], secrets=1, field=PrimeField(97))
    assert "array" not in repr(opened)
