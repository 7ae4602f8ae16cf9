"""Lagrange codes: thresholds, shares, answers that decode, and who learns nothing."""

import math
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_privacy.coding.field import MERSENNE_31, PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode, lagrange_basis
from flwr_privacy.coding.thresholds import max_partitions, max_stragglers, recovery_threshold
from flwr_privacy.errors import InvalidParameterError, NotEnoughSharesError, ProtocolError
from flwr_privacy.privacy.randomness import SecureRandom
from tests.shared.ranks import rank_mod_p

LARGE, NARROW = PrimeField(MERSENNE_31), PrimeField(4194301)


def code(N: int, K: int, T: int, p: int = MERSENNE_31, **others: Any) -> LagrangeCode:
    return LagrangeCode(N=N, K=K, T=T, field=PrimeField(p), **others)


def column(*values: int) -> np.ndarray:
    return np.array(values)


def answered(answers: np.ndarray, holders: Iterable[int]) -> dict[int, np.ndarray]:
    return {holder: answers[holder] for holder in holders}


def products(
    chosen: LagrangeCode, seed: int, *, rows: int = 3, width: int = 4, columns: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """Return every holder's product of two shares, with all that hides it, and the truth."""
    field, random = chosen.field, SecureRandom.insecure(seed, chosen.N, chosen.K, chosen.T)
    X = field.uniform((chosen.K, rows, width), random)
    W = field.uniform((width, columns), random)
    x = chosen.encode(X, field.uniform((chosen.T, rows, width), random))
    w = chosen.encode_constant(W, field.uniform((chosen.T, width, columns), random))
    zeros = field.uniform((chosen.vanishing_terms, rows, columns), random)
    answers = np.stack([field.matmul(x[n], w[n]) for n in range(chosen.N)])
    answers = field.reduce(answers + chosen.vanishing(zeros))
    return answers, (X.astype(object) @ W.astype(object) % field.p).astype(np.int64)


# Small numbers worked by hand


def test_F1_three_holders_and_one_segment():
    small = code(3, 1, 1, 97)
    assert small.matrix.tolist() == [[96, 2], [95, 3], [94, 4]]
    X = [small.encode(column(x), column(z)) for x, z in ((5, 10), (7, 20), (11, 30))]
    assert [share.tolist() for share in X] == [[15, 20, 25], [33, 46, 59], [49, 68, 87]]
    W = [small.encode(column(w), column(v)) for w, v in ((3, 40), (95, 50), (4, 60))]
    assert [share.tolist() for share in W] == [[77, 17, 54], [5, 57, 12], [19, 75, 34]]
    H = sum(x * w for x, w in zip(X, W, strict=True)) % 97
    assert H.tolist() == [20, 11, 69]
    assert lagrange_basis(small.points, small.nodes[:1], 97).tolist() == [[6, 89, 3]]
    assert small.decode(dict(enumerate(H))).tolist() == [15 - 14 + 44]


def test_F2_a_polynomial_that_vanishes_changes_answers_and_not_the_result():
    small = code(3, 1, 1, 97)
    zeros = small.vanishing(column(5, 7))
    assert zeros.tolist() == [52, 2, 63]
    answers = (column(20, 11, 69) + zeros) % 97
    assert answers.tolist() == [72, 13, 35]
    assert small.decode(dict(enumerate(answers))).tolist() == [45]


def test_F3_five_holders_and_two_segments():
    small = code(5, 2, 1, 101)
    field = small.field
    assert small.threshold == 5
    expected = [[1, 98, 3], [3, 93, 6], [6, 86, 10], [10, 77, 15], [15, 66, 21]]
    assert small.matrix.tolist() == expected
    X = [
        small.encode(field.reduce(column(*x)), column(z)) for x, z in (((3, -4), 50), ((10, 2), 60))
    ]
    assert [share.tolist() for share in X] == [[64, 38, 73, 68, 23], [83, 71, 24, 43, 27]]
    W = [small.encode(field.reduce(column(w, w)), column(v)) for w, v in ((7, 70), (-5, 80))]
    assert [share.tolist() for share in W] == [[95, 82, 31, 43, 17], [48, 0, 37, 58, 63]]
    H = (X[0] * W[0] + X[1] * W[1]) % 101
    assert H.tolist() == [65, 86, 20, 65, 72]
    basis = lagrange_basis(small.points, small.nodes[:2], 101)
    assert basis.tolist() == [[35, 97, 25, 31, 15], [15, 61, 45, 77, 5]]
    decoded = small.decode(dict(enumerate(H)))
    assert decoded.tolist() == [72, 63]
    assert field.signed(decoded).tolist() == [3 * 7 - 10 * 5, -4 * 7 - 2 * 5]
    wrong = lagrange_basis(small.points[:4], small.nodes[:2], 101)  # one answer too few
    assert field.matmul(wrong, H[:4, None])[:, 0].tolist() == [25, 81]


@pytest.mark.parametrize(
    ("N", "K", "T", "R", "S"),
    [
        (28, 6, 1, 13, 15),
        (28, 13, 1, 27, 1),
        (28, 1, 1, 3, 25),
        (10, 2, 1, 5, 5),
        (11, 2, 1, 5, 6),
        (6, 1, 1, 3, 3),
        (6, 2, 1, 5, 1),
        (16, 4, 1, 9, 7),
        (16, 4, 3, 13, 3),
    ],
)
def test_F4_thresholds_of_products(N, K, T, R, S):
    assert recovery_threshold(K, T) == R
    assert max_stragglers(N, K, T) == S
    assert code(N, K, T).threshold == R


def test_F4_a_threshold_of_degree_three():
    assert recovery_threshold(2, 1, degree=3) == 7
    assert max_stragglers(9, 2, 1, degree=3) == 2


@pytest.mark.parametrize(
    ("N", "S", "T", "K"),
    [
        (28, 14, 1, 6),
        (28, 0, 1, 13),
        (10, 5, 1, 2),
        (10, 0, 1, 4),
        (11, 5, 1, 2),
        (11, 0, 1, 5),
        (6, 3, 1, 1),
        (6, 0, 1, 2),
        (28, 14, 2, 5),
        (28, 14, 6, 1),
    ],
)
def test_F5_the_largest_number_of_segments(N, S, T, K):
    assert max_partitions(N, S, T) == K
    assert recovery_threshold(K, T) <= N - S < recovery_threshold(K + 1, T)


def test_F5_not_one_segment_is_refused():
    with pytest.raises(ValueError, match="N = 28") as error:
        max_partitions(28, 14, 7)
    text = "N = 28: expected at least S + 2 T + 1 = 29 for S = 14 stragglers and T = 7"
    assert str(error.value) == text
    assert max_partitions(29, 14, 7) == 1
    with pytest.raises(InvalidParameterError, match="S = 28: expected an integer from 0 to 27"):
        max_partitions(28, 28, 1)


# Answers


def test_F6_one_answer_too_few_is_refused_and_nothing_is_interpolated():
    chosen = code(7, 2, 1)
    answers, _ = products(chosen, 0)
    with pytest.raises(NotEnoughSharesError) as error:
        chosen.decode(answered(answers, [6, 1, 4, 2]))
    assert (error.value.needed, error.value.got) == (5, 4)
    assert error.value.missing == ("0", "3", "5")
    assert str(error.value) == "4 of at least 5 answers are there; missing: 0, 3, 5"


def test_F6_a_holder_that_answers_twice_counts_once():
    chosen = code(6, 2, 1)
    answers, truth = products(chosen, 0)
    collected: dict[int, np.ndarray] = {}
    for holder in (3, 3, 0, 1, 5):
        collected[holder] = answers[holder]
    with pytest.raises(NotEnoughSharesError, match=r"^4 of at least 5 answers"):
        chosen.decode(collected)
    collected[2] = answers[2]
    assert np.array_equal(chosen.decode(collected), truth)


def test_F6_too_few_holders_are_refused_before_anything_is_shared():
    text = "N = 12: expected at least R = 2 (K + T - 1) + 1 = 13 for K = 6, T = 1"
    for refused in (lambda: code(12, 6, 1), lambda: max_stragglers(12, 6, 1)):
        with pytest.raises(InvalidParameterError) as error:
            refused()
        assert str(error.value) == text
    assert code(13, 6, 1).threshold == 13


@pytest.mark.parametrize("p", [MERSENNE_31, 4194301])
def test_F7_any_answers_decode_to_the_same(p):
    chosen = code(16, 4, 1, p)
    answers, truth = products(chosen, 1)
    rng = np.random.default_rng(0)
    for _ in range(25):
        some = rng.permutation(16)[: int(rng.integers(9, 17))].tolist()
        assert np.array_equal(chosen.decode(answered(answers, some)), truth)


def test_F7_the_first_answers_count():
    chosen = code(6, 1, 1)
    answers, truth = products(chosen, 2)
    order = [4, 0, 5, 2]
    spoilt = answers.copy()
    spoilt[2] += 1
    assert np.array_equal(chosen.decode(answered(spoilt, order)), truth)
    spoilt[5] += 1
    assert not np.array_equal(chosen.decode(answered(spoilt, order)), truth)


def test_F7_one_more_answer_shows_where_one_of_them_is_wrong():
    chosen = code(8, 3, 1)
    answers, _ = products(chosen, 3, rows=5, columns=6)
    order = [7, 0, 3, 4, 1, 6, 2, 5]
    assert not chosen.inconsistent(answered(answers, order)).any()
    for wrong in order:
        changed = answers.copy()
        changed[wrong, 2, 5] = (changed[wrong, 2, 5] + 1) % MERSENNE_31
        changed[wrong, 4, 0] = (changed[wrong, 4, 0] + 12345) % MERSENNE_31
        expected = np.zeros((3, 5, 6), bool)
        expected[:, 2, 5] = expected[:, 4, 0] = True
        assert np.array_equal(chosen.inconsistent(answered(changed, order)), expected)


def test_a_check_needs_one_more_answer_than_a_result():
    chosen = code(5, 2, 1)
    answers, truth = products(chosen, 0)
    assert np.array_equal(chosen.decode(dict(enumerate(answers))), truth)
    with pytest.raises(NotEnoughSharesError, match=r"^5 of at least 6 answers are there$"):
        chosen.inconsistent(dict(enumerate(answers)))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 3), st.data())
def test_products_of_shares_decode_to_products(K, T, spare, data):
    p = data.draw(st.sampled_from([97, 4194301, MERSENNE_31]))
    chosen = code(recovery_threshold(K, T) + spare, K, T, p)
    answers, truth = products(chosen, data.draw(st.integers(0, 2**32)))
    order = data.draw(st.permutations(range(chosen.N)))
    assert np.array_equal(chosen.decode(answered(answers, order)), truth)


@pytest.mark.parametrize("degree", [1, 3, 4])
def test_answers_of_another_degree_decode_at_its_threshold(degree):
    chosen = code(3 * degree + 2, 3, 1, degree=degree)
    field, random = chosen.field, SecureRandom.insecure(degree)
    X = field.uniform((3, 20), random)
    shares = chosen.encode(X, field.uniform((1, 20), random))
    powers = [[pow(int(x), degree, field.p) for x in row] for row in X]
    answers = np.array([[pow(int(x), degree, field.p) for x in row] for row in shares])
    zeros = chosen.vanishing(field.uniform((chosen.vanishing_terms, 20), random))
    answers = field.reduce(answers + zeros)
    assert chosen.threshold == 3 * degree + 1
    assert chosen.decode(dict(enumerate(answers))).tolist() == powers


# Privacy


def test_F12_two_of_three_shares_are_each_pair_once_for_every_secret():
    small = code(3, 1, 2, 7, degree=1)
    first, second = (part.reshape(-1) for part in np.indices((7, 7)))
    for secret in range(7):
        for deal in (
            small.encode(np.full((1, 49), secret), np.stack([first, second])),
            small.encode_constant(np.full(49, secret), np.stack([first, second])),
        ):
            for one, other in combinations(range(3), 2):
                cells = deal[one] * 7 + deal[other]
                assert sorted(cells.tolist()) == list(range(49))


@pytest.mark.parametrize("secrets", [(0, 0), (96, 13)])
def test_F12_two_shares_of_two_segments_are_jointly_uniform(secrets):
    draws, cells = 400_000, 97 * 97
    small = code(6, 2, 2, 97, degree=1)
    random = SecureRandom.insecure(0, "joint", *secrets)
    segments = np.repeat(np.array(secrets)[:, None], draws, axis=1)
    shares = small.encode(segments, small.field.uniform((2, draws), random))
    for one, other in combinations(range(6), 2):
        counts = np.bincount(shares[one] * 97 + shares[other], minlength=cells)
        statistic = float(((counts - draws / cells) ** 2).sum() / (draws / cells))
        # Chi-square of 9408 degrees of freedom: five standard deviations around its mean.
        assert abs(statistic - (cells - 1)) < 5 * math.sqrt(2 * (cells - 1))
    # Three shares are not: a combination without masks is the same in every draw.
    free = np.cross(small.matrix[:3, 2], small.matrix[:3, 3])
    assert set((free @ shares[:3] % 97).tolist()) == {free @ small.matrix[:3, :2] @ secrets % 97}


@pytest.mark.parametrize(("N", "K", "T", "p"), [(6, 2, 2, 97), (7, 1, 3, 11), (9, 2, 3, 97)])
def test_F13_any_T_rows_of_the_masks_columns_are_invertible(N, K, T, p):
    import galois

    chosen, element = code(N, K, T, p, degree=1), galois.GF(p)
    for coalition in combinations(range(N), T):
        square = element(chosen.matrix[list(coalition), K:])
        assert np.linalg.det(square) != 0


@pytest.mark.parametrize(("N", "K", "T"), [(28, 6, 1), (28, 13, 1), (16, 4, 3), (28, 3, 4)])
def test_F13_rows_sum_to_one_and_the_polynomial_passes_through_the_segments(N, K, T):
    chosen = code(N, K, T)
    p, random = MERSENNE_31, SecureRandom.insecure(N, K, T)
    assert (chosen.matrix.sum(axis=1) % p == 1).all()
    segments, masks = LARGE.uniform((K, 30), random), LARGE.uniform((T, 30), random)
    shares = chosen.encode(segments, masks)
    holders = np.random.default_rng(N).permutation(N)[: K + T]
    back = lagrange_basis([chosen.points[n] for n in holders], chosen.nodes, p)
    assert np.array_equal(LARGE.matmul(back, shares[holders]), np.concatenate([segments, masks]))


@pytest.mark.parametrize(("K", "least"), [(1, 84), (3, 80)])
def test_one_holder_more_than_T_opens_a_constant_but_for_few_coalitions(K, least):
    import galois

    chosen, element = code(9, K, 2, 97), galois.GF(97)
    random = SecureRandom.insecure(K)
    W = chosen.field.uniform(50, random)
    shares = chosen.encode_constant(W, chosen.field.uniform((2, 50), random))
    opened = 0
    for some in combinations(range(9), 3):
        # Unknown: the constant and two masks, however many segments there are.
        system = np.concatenate([np.ones((3, 1), int), chosen.matrix[list(some), K:]], axis=1)
        if rank_mod_p(system, 97) == 3:
            opened += 1
            solution = np.linalg.inv(element(system)) @ element(shares[list(some)])
            assert np.array_equal(solution[0], W)
    assert opened >= least


# Codes


def test_a_constant_has_the_shares_of_copies_with_other_masks():
    chosen, random = code(9, 3, 2), SecureRandom.insecure(4)
    W = LARGE.uniform((4, 2), random)
    masks = LARGE.uniform((2, 4, 2), random)
    copies = chosen.encode(np.stack([W] * 3), LARGE.reduce(masks + W))
    assert np.array_equal(chosen.encode_constant(W, masks), copies)


@pytest.mark.parametrize("T", [1, 2, 4])
def test_one_segment_at_zero_is_shamirs_sharing(T):
    p, N = MERSENNE_31, 2 * T + 3
    shamir = code(N, 1, T, degree=1, nodes=(0, *range(90, 90 + T)), points=range(1, N + 1))
    coefficients = LARGE.uniform((T + 1, 8), SecureRandom.insecure(T, "shamir")).astype(object)

    def values(x: int) -> np.ndarray:
        return (sum(row * x**e for e, row in enumerate(coefficients)) % p).astype(np.int64)

    masks = np.stack([values(node) for node in shamir.nodes[1:]])
    shares = shamir.encode(values(0)[None], masks)
    assert np.array_equal(shares, [values(x) for x in range(1, N + 1)])
    assert shamir.threshold == T + 1
    for some in combinations(range(N), T + 1):
        assert np.array_equal(shamir.decode(answered(shares, some))[0], values(0))


def test_the_basis_is_that_of_galois_and_one_at_its_node():
    import galois

    p = 2**13 - 1
    element = galois.GF(p)
    nodes, points = [3, 10, 8190, 77, 0], [3, 5, 1234]
    basis = lagrange_basis(nodes, points, p)
    for k in range(5):
        unit = element([int(k == i) for i in range(5)])
        polynomial = galois.lagrange_poly(element(nodes), unit)
        assert basis[:, k].tolist() == [int(polynomial(x)) for x in points]
    assert basis[0].tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("p", [97, 4194301, MERSENNE_31])
def test_vanishing_values_are_those_of_the_polynomial(p):
    chosen = code(9, 3, 1, p)
    assert chosen.vanishing_terms == 4
    q = chosen.field.uniform((4, 5), SecureRandom.insecure(p))
    values = chosen.vanishing(q)
    for n, x in enumerate(chosen.points):
        zero = math.prod(x - node for node in chosen.nodes[:3])
        expected = [zero * sum(int(c) * x**e for e, c in enumerate(row)) % p for row in q.T]
        assert values[n].tolist() == expected
    # The zeros are at the nodes, where answers are decoded.
    assert not chosen.decode(dict(enumerate(values))).any()


def test_places_are_those_of_the_paper_unless_given():
    assert code(5, 2, 1).nodes == (1, 2, 3)
    assert code(5, 2, 1).points == (4, 5, 6, 7, 8)
    smallest = code(3, 1, 1, 5)  # as many elements as places
    assert smallest.points == (3, 4, 0)
    answers, truth = products(smallest, 0)
    assert np.array_equal(smallest.decode(dict(enumerate(answers))), truth)
    moved = code(5, 2, 1, nodes=(9, 100, 7), points=(0, 1, 2, 3, 2**31 - 2))
    answers, truth = products(moved, 0)
    assert np.array_equal(moved.decode(dict(enumerate(answers))), truth)


def test_equal_codes_are_equal_and_do_not_show_what_they_keep():
    one, other = code(5, 2, 1), code(5, 2, 1)
    answers, _ = products(one, 0)
    one.decode(dict(enumerate(answers)))
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)
    assert one != code(6, 2, 1)
    with pytest.raises(ValueError, match="read-only"):
        one.matrix[0, 0] = 0


def test_arrays_of_any_shape_are_shared_element_by_element():
    chosen, random = code(5, 2, 1), SecureRandom.insecure(0)
    assert chosen.encode(np.zeros((2, 0, 3), int), np.zeros((1, 0, 3), int)).shape == (5, 0, 3)
    X, Z = LARGE.uniform((2, 3, 4, 2), random), LARGE.uniform((1, 3, 4, 2), random)
    shares = chosen.encode(X, Z)
    assert shares.shape == (5, 3, 4, 2)
    assert np.array_equal(shares[:, 1, 2], chosen.encode(X[:, 1, 2], Z[:, 1, 2]))
    scalar = chosen.encode_constant(np.array(7), np.array([3]))
    assert chosen.decode(dict(enumerate(scalar))).tolist() == [7, 7]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"N": 2}, "N = 2: expected at least R = 2 (K + T - 1) + 1 = 3 for K = 1, T = 1"),
        ({"degree": 3}, "N = 3: expected at least R = 3 (K + T - 1) + 1 = 4 for K = 1, T = 1"),
        ({"K": 0}, "K = 0: expected an integer of at least 1"),
        ({"T": 0}, "T = 0: expected an integer of at least 1"),
        ({"T": 1.0}, "T = 1.0: expected an integer of at least 1"),
        ({"degree": 0}, "degree = 0: expected an integer of at least 1"),
        ({"field": PrimeField(3)}, "p = 3: expected at least N + K + T = 5"),
        ({"nodes": (1,)}, "nodes = (1,): expected 2 of them"),
        ({"nodes": (4, 4)}, "nodes = (4, 4): expected no two the same modulo p = 97"),
        ({"points": (3, 4)}, "points = (3, 4): expected 3 of them"),
        ({"points": (3, 4, 3)}, "points = (3, 4, 3): expected no two the same modulo p = 97"),
        ({"points": (3, 97, 4)}, "points = 97: expected an integer from 0 to 96"),
        ({"points": (3, -1, 4)}, "points = -1: expected an integer from 0 to 96"),
        ({"points": (2, 3, 1)}, "points = (2, 3, 1): expected no node: 1, 2"),
    ],
)
def test_a_code_that_cannot_be_is_refused(changes, text):
    parameters: dict[str, Any] = {"N": 3, "K": 1, "T": 1, "field": PrimeField(97)}
    with pytest.raises(InvalidParameterError) as error:
        LagrangeCode(**{**parameters, **changes})
    assert str(error.value) == text


def test_nodes_that_repeat_modulo_the_prime_are_refused():
    with pytest.raises(InvalidParameterError) as error:
        lagrange_basis([1, 98], [2], 97)
    assert str(error.value) == "nodes = (1, 98): expected no two the same modulo p = 97"


def test_arrays_that_do_not_fit_are_refused():
    chosen, good = code(5, 2, 1), np.zeros((2, 4), int)
    with pytest.raises(InvalidParameterError) as error:
        chosen.encode(np.zeros((3, 4), int), good[:1])
    assert str(error.value) == "segments = 'an array of shape (3, 4)': expected shape (2, 4)"
    with pytest.raises(InvalidParameterError) as error:
        chosen.encode(good, good)
    assert str(error.value) == "masks = 'an array of shape (2, 4)': expected shape (1, 4)"
    with pytest.raises(InvalidParameterError, match=r"^masks = .* expected shape \(1, 4\)$"):
        chosen.encode_constant(good[0], good)
    with pytest.raises(InvalidParameterError, match=r"^coefficients = .* expected shape \(3, 4\)$"):
        chosen.vanishing(good)
    with pytest.raises(InvalidParameterError, match=r"^elements = 'a value outside'"):
        chosen.encode(good - 1, good[:1])
    with pytest.raises(InvalidParameterError, match=r"^elements = 'a value outside'"):
        chosen.encode_constant(good[0] + MERSENNE_31, good[:1])


def test_answers_that_do_not_fit_are_refused():
    chosen = code(5, 2, 1)
    answers: dict[int, np.ndarray] = {n: np.zeros((2, 2), int) for n in range(5)}
    with pytest.raises(ProtocolError) as error:
        chosen.decode(answers | {3: np.zeros((2, 3), int)})
    assert str(error.value) == "answers of shapes (2, 2) and (2, 3): expected one"
    with pytest.raises(InvalidParameterError, match="holder = 5: expected an integer from 0 to 4"):
        chosen.decode(answers | {5: np.zeros((2, 2), int)})
