"""Shares of data and weights, masks that vanish, answers, and what is decoded from them."""

from collections import Counter
from itertools import combinations, product
from typing import Any

import galois
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import InvalidParameterError, NotEnoughSharesError
from flwr_privacy.fedvs.network import expand, gradient_of, initial_weights, project
from flwr_privacy.fedvs.quantisation import (
    Scales,
    check_partial_sum,
    dequantise,
    quantise,
    quantise_stochastic,
)
from flwr_privacy.fedvs.rows import Segments, batch_of
from flwr_privacy.fedvs.sharing import data_shares, decode_rows, evaluate, weight_shares, zero_masks
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.fedvs.paper.sharing import (
    pad_rows,
    pad_rows_paper,
    weight_shares_paper,
)
from flwr_privacy.simulations.research.fedvs.paper.theory import (
    embedding_error_bound,
    embedding_error_rms,
)
from tests.shared.ranks import rank_mod_p

Elements = NDArray[np.int64]

LARGE = PrimeField()
SETTINGS = [  # N, K, T
    (3, 1, 1),
    (6, 1, 1),
    (10, 2, 1),
    (11, 2, 1),
    (28, 6, 1),
    (28, 13, 1),
    (16, 4, 3),
    (9, 2, 3),
    (28, 3, 4),
]


def stream(*purpose: str | int) -> SecureRandom:
    return SecureRandom.insecure(0, "sharing tests", *purpose)


def exact(
    rows: list[Elements], weights: list[Elements], p: int
) -> NDArray[Any]:  # in Python's integers
    total: NDArray[Any] = np.zeros((len(rows[0]), weights[0].shape[1]), object)
    for X, W in zip(rows, weights, strict=True):
        total = total + X.astype(object) @ W.astype(object)
    return total % p


class Owners:
    """All owners of one code, their padded data and everyone's shares."""

    def __init__(self, N: int, K: int, T: int, *, b: int = 3, h: int = 2, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.random = stream("owners", N, K, T, seed)
        self.code = LagrangeCode(N=N, K=K, T=T, field=LARGE)
        self.b, self.h = b, h
        widths = rng.integers(1, 6, N)
        self.rows = [rng.integers(0, LARGE.p, (K * b, e)) for e in widths]
        self.weights = [rng.integers(0, LARGE.p, (e, h)) for e in widths]
        self.data = np.concatenate(
            [data_shares(self.code, X, self.random) for X in self.rows], axis=2
        )
        self.coded = np.concatenate(
            [weight_shares(self.code, W, self.random) for W in self.weights], axis=1
        )

    def answers(self, masks: int = 0) -> dict[int, Elements]:
        dealt = [zero_masks(self.code, self.b, self.h, self.random) for _ in range(masks)]
        return {
            n: evaluate(LARGE, self.data[n], self.coded[n], [mask[n] for mask in dealt])
            for n in range(self.code.N)
        }

    def chosen(self, answers: dict[int, Elements], seed: int) -> dict[int, Elements]:
        order = np.random.default_rng(seed).permutation(self.code.N)
        return {int(n): answers[int(n)] for n in order[: self.code.threshold]}


# Decoding


@pytest.mark.parametrize(("N", "K", "T"), SETTINGS)
def test_any_holders_that_suffice_give_the_exact_sum(N: int, K: int, T: int) -> None:
    owners = Owners(N, K, T)
    answers = owners.answers()
    truth = exact(owners.rows, owners.weights, LARGE.p)
    for seed in range(3):
        decoded = decode_rows(owners.code, owners.chosen(answers, seed))
        np.testing.assert_array_equal(decoded, truth)


@pytest.mark.parametrize(("N", "K", "T"), SETTINGS)
def test_F15_zero_masks_leave_what_is_decoded_bit_for_bit(N: int, K: int, T: int) -> None:
    owners = Owners(N, K, T)
    bare, masked = owners.answers(), owners.answers(masks=T + 1)
    truth = exact(owners.rows, owners.weights, LARGE.p)
    for seed in range(3):
        decoded = decode_rows(owners.code, owners.chosen(masked, seed))
        np.testing.assert_array_equal(decoded, truth)
    changed = [(bare[n] != masked[n]).all() for n in range(N)]
    assert all(changed)


def test_one_answer_too_few_gives_an_error_and_no_sum() -> None:
    owners = Owners(10, 2, 1)
    answers = owners.chosen(owners.answers(), 0)
    answers.pop(next(iter(answers)))
    with pytest.raises(NotEnoughSharesError, match="4 of at least 5"):
        decode_rows(owners.code, answers)


def test_the_shares_of_chunks_are_those_of_the_rows_they_decode_to() -> None:
    code, random = LagrangeCode(N=7, K=3, T=1, field=LARGE), stream("chunks")
    segments = Segments(rows=20, K=3)  # one pad
    rows = np.random.default_rng(0).integers(0, LARGE.p, (20, 4))
    padded = pad_rows(rows, segments, LARGE, random)
    chunks = [np.arange(0, 3), np.arange(3, 7)]
    shares = np.concatenate(
        [data_shares(code, padded[segments.real_rows(chunk)], random) for chunk in chunks], axis=1
    )
    identity = weight_shares(code, np.eye(4, dtype=np.int64), random)
    coded = np.array([6, 2, 3])
    answers = {n: evaluate(LARGE, shares[n][coded], identity[n]) for n in range(7)}
    np.testing.assert_array_equal(decode_rows(code, answers), padded[segments.real_rows(coded)])


def test_both_ways_of_sharing_weights_share_the_same_at_all_nodes() -> None:
    code, random = LagrangeCode(N=9, K=3, T=2, field=LARGE), stream("both ways")
    weights = np.random.default_rng(0).integers(0, LARGE.p, (4, 2))
    one = np.ones((3, 1), np.int64)
    for deal in (weight_shares, weight_shares_paper):
        shares = deal(code, weights, random)
        assert shares.shape == (9, 4, 2)
        ones = data_shares(code, one, random)
        answers = {n: LARGE.reduce(ones[n][0, 0] * shares[n]) for n in range(9)}
        decoded = code.decode(answers)
        assert all((block == weights).all() for block in decoded)


# Pads


def test_pads_are_random_elements_and_in_the_paper_zeros() -> None:
    segments = Segments(rows=400, K=3)
    rows = np.arange(800).reshape(400, 2)
    padded = pad_rows(rows, segments, LARGE, stream("pads"))
    assert padded.shape == (402, 2)
    np.testing.assert_array_equal(padded[:400], rows)
    assert (padded[400:] > 10**6).all()  # all four below it: a chance of 2**-44
    assert pad_rows_paper(rows, segments)[400:].tolist() == [[0, 0], [0, 0]]
    with pytest.raises(InvalidParameterError, match="elements"):
        pad_rows(rows[:-1], segments, LARGE, stream("pads"))


def test_pads_decode_to_noise_and_leave_the_other_rows_alone() -> None:
    owners = {"uniform": pad_rows, "zeros": None}
    code, segments = LagrangeCode(N=5, K=2, T=1, field=LARGE), Segments(rows=5, K=2)
    rows = np.random.default_rng(0).integers(0, LARGE.p, (5, 3))
    weights = np.random.default_rng(1).integers(1, LARGE.p, (3, 2))
    random = stream("noise")
    for name in owners:
        if name == "uniform":
            padded = pad_rows(rows, segments, LARGE, random)
        else:
            padded = pad_rows_paper(rows, segments)
        shares = data_shares(code, padded, random)
        coded = weight_shares(code, weights, random)
        decoded = decode_rows(code, {n: evaluate(LARGE, shares[n], coded[n]) for n in range(5)})
        counted = segments.counted(np.arange(3))
        truth = exact([rows], [weights], LARGE.p)
        np.testing.assert_array_equal(decoded[counted], truth)
        assert bool((decoded[~counted] == 0).all()) is (name == "zeros")


# Accuracy


def test_F11_the_error_of_a_secure_forward_step_is_within_its_bound() -> None:
    N, K, e, h, count = 10, 2, 40, 64, 80
    rng, random = np.random.default_rng(3), stream("error")
    code = LagrangeCode(N=N, K=K, T=1, field=LARGE)
    X = [expand(rng.uniform(-1, 1, (K * count, e // 2)), 2) for _ in range(N)]
    W = [rng.uniform(-1, 1, (e, h)) for _ in range(N)]
    shares = np.concatenate([data_shares(code, quantise(x, 8, LARGE), random) for x in X], axis=2)
    coded = np.concatenate(
        [weight_shares(code, quantise_stochastic(w, 8, LARGE, random), random) for w in W], axis=1
    )
    answers = {n: evaluate(LARGE, shares[n], coded[n]) for n in (7, 1, 9, 4, 2)}
    H = dequantise(decode_rows(code, answers), scale_bits=16, field=LARGE, divisor=N)
    error = H - sum(x @ w for x, w in zip(X, W, strict=True)) / N
    assert error.size == 10_240
    sizes = {"data_bits": 8, "weight_bits": 8, "divisor": N}
    bound = embedding_error_bound(N * e, x_max=1, w_max=1, **sizes)
    x_square = (1 / 3 + 1 / 5) / 2  # mean of the second and the fourth moment
    rms = embedding_error_rms(N * e, x_square=x_square, w_square=1 / 3, **sizes)
    assert bound == pytest.approx(0.235, abs=5e-4)
    assert rms == pytest.approx(0.0021, abs=5e-5)
    assert np.abs(error).max() <= bound
    assert np.sqrt((error**2).mean()) == pytest.approx(rms, rel=0.3)


# Losslessness


@pytest.mark.parametrize(("N", "K", "T"), [(6, 1, 1), (10, 2, 1), (9, 2, 2)])
def test_F17_training_on_shares_is_training_on_integers_whoever_straggles(
    N: int, K: int, T: int
) -> None:
    rows, h, steps, scales = 23, 3, 6, Scales()
    segments = Segments(rows=rows, K=K)
    code = LagrangeCode(N=N, K=K, T=T, field=LARGE)
    rng = np.random.default_rng(N)
    expanded = [expand(rng.uniform(-1, 1, (rows, 1 + n % 3)), 2) for n in range(N)]
    labels = rng.normal(size=(rows, h))

    def train(stragglers_seed: int | None) -> tuple[list[Elements], list[NDArray[np.float64]]]:
        """Train on shares with random stragglers, or, without a seed, on the integers."""
        masks = stream("masks", stragglers_seed or 0)
        weights = [
            initial_weights(x.shape[1], h, stream("initial", n)) for n, x in enumerate(expanded)
        ]
        elements = [quantise(x, scales.data_bits, LARGE) for x in expanded]
        rounded = [dequantise(x, scale_bits=scales.data_bits, field=LARGE) for x in elements]
        padded = [pad_rows(x, segments, LARGE, stream("pads", n)) for n, x in enumerate(elements)]
        shares = np.concatenate([data_shares(code, x, masks) for x in padded], axis=2)
        sums = []
        for step in range(1, steps + 1):
            coded = batch_of(segments.length, 4, 0, step)
            places, counted = segments.real_rows(coded), segments.counted(coded)
            owned = [
                quantise_stochastic(w, scales.weight_bits, LARGE, stream("rounding", n, step))
                for n, w in enumerate(weights)
            ]
            for x, w in zip(elements, owned, strict=True):
                check_partial_sum(
                    LARGE.signed(x[places[counted]]),
                    LARGE.signed(w),
                    scales.owners_share(x.shape[1]),
                )
            if stragglers_seed is None:
                total = exact([x[places] for x in padded], owned, LARGE.p).astype(np.int64)
            else:
                dealt = np.concatenate([weight_shares(code, w, masks) for w in owned], axis=1)
                zeros = [zero_masks(code, len(coded), h, masks) for _ in range(T + 1)]
                arrived = np.random.default_rng([stragglers_seed, step]).permutation(N)
                total = decode_rows(
                    code,
                    {
                        int(n): evaluate(LARGE, shares[n][coded], dealt[n], [z[n] for z in zeros])
                        for n in arrived[: code.threshold]
                    },
                )
            sums.append(total)
            H = dequantise(total, scale_bits=scales.total_bits, field=LARGE, divisor=N)
            gradient = H[counted] - labels[places[counted]]
            for n, w in enumerate(weights):
                batch = rounded[n][places[counted]]
                moved = w - 0.5 * gradient_of(batch, gradient, N)
                weights[n] = project(moved, scales.w_max)
        return sums, weights

    reference, trained = train(None)
    for seed in (1, 2, 3):
        sums, weights = train(seed)
        for one, other in zip(sums, reference, strict=True):
            np.testing.assert_array_equal(one, other)
        for mine, theirs in zip(weights, trained, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(reference[0], reference[1])


# Thresholds of privacy


def opening(code: LagrangeCode, places: list[int]) -> NDArray[Any]:
    """Return what links T + 1 holders' shares of weights to the weights and the T masks."""
    return np.concatenate([np.ones((code.T + 1, 1), int), code.matrix[places, code.K :]], axis=1)


def test_F14_T_plus_one_holders_open_all_weights() -> None:
    code = LagrangeCode(N=9, K=3, T=2, field=PrimeField(65521))
    weights = np.random.default_rng(0).integers(0, 65521, (4, 3))
    shares = weight_shares(code, weights, stream("open weights"))
    GF = galois.GF(65521)
    for coalition in combinations(range(9), 3):
        places = list(coalition)
        right = GF(shares[places].reshape(3, -1))
        opened = np.linalg.solve(GF(opening(code, places)), right)
        np.testing.assert_array_equal(np.asarray(opened)[0].reshape(4, 3), weights)


def test_F14_in_small_fields_a_few_coalitions_of_T_plus_one_do_not_open_them() -> None:
    code = LagrangeCode(N=9, K=3, T=2, field=PrimeField(97))
    ranks = [rank_mod_p(opening(code, list(c)), 97) for c in combinations(range(9), 3)]
    assert Counter(ranks) == {3: 83, 2: 1}


def test_F14_K_plus_T_holders_open_all_data() -> None:
    N, K, T = 9, 3, 2
    code = LagrangeCode(N=N, K=K, T=T, field=PrimeField(97))
    rows = np.random.default_rng(0).integers(0, 97, (K * 2, 3))
    shares = data_shares(code, rows, stream("open data"))
    GF = galois.GF(97)
    for coalition in [(0, 1, 2, 3, 4), (8, 2, 5, 0, 7)]:
        places = list(coalition)
        right = GF(shares[places].reshape(K + T, -1))
        opened = np.linalg.solve(GF(code.matrix[places]), right)
        np.testing.assert_array_equal(np.asarray(opened)[:K].reshape(K * 2, 3), rows)


@pytest.mark.parametrize(("K", "T"), [(1, 1), (2, 1), (1, 2)])
def test_F14_T_holders_shares_have_one_distribution_for_all_secrets(K: int, T: int) -> None:
    """Over all masks; for one holder more the distribution does depend on the secret."""
    p = 11
    N = 2 * (K + T - 1) + 1
    code = LagrangeCode(N=N, K=K, T=T, field=PrimeField(p))
    secrets = [np.zeros(K, int), np.arange(3, 3 + K), np.full(K, p - 1)]

    def views(secret: NDArray[Any], coalition: tuple[int, ...]) -> Counter[tuple[int, ...]]:
        masks = np.array(list(product(range(p), repeat=T))).T
        segments = np.repeat(secret[:, None], masks.shape[1], axis=1)
        shares = code.encode(segments, masks)[list(coalition)]
        return Counter(tuple(column) for column in shares.T.tolist())

    for coalition in combinations(range(N), T):
        first, *others = (views(secret, coalition) for secret in secrets)
        assert set(first.values()) == {1}
        assert len(first) == p**T
        assert all(other == first for other in others)
    for coalition in combinations(range(N), T + 1):
        units = [views(secret, coalition) for secret in np.eye(K, dtype=int)]
        assert any(view != views(secrets[0], coalition) for view in units)


def test_F14_dealt_shares_are_uniform_for_two_different_secrets() -> None:
    p, draws = 11, 20_000
    code = LagrangeCode(N=5, K=2, T=1, field=PrimeField(p))
    quantile = chi2.ppf(1 - 1e-6, p - 1)
    joint = []
    for k, secret in enumerate([(0, 0), (3, 4)]):
        rows = np.repeat(secret, draws)[:, None]
        shares = data_shares(code, rows, stream("uniform", k))[:, :, 0]
        weights = weight_shares(code, np.full((draws, 1), secret[0]), stream("weights", k))[:, :, 0]
        for holder in range(5):
            for seen in (shares[holder], weights[holder]):
                counts = np.bincount(seen, minlength=p)
                assert ((counts - draws / p) ** 2 / (draws / p)).sum() < quantile
        joint.append(np.bincount(shares[0] * p + shares[1], minlength=p * p))
    # Two holders, one more than T: each secret leaves them p of the p^2 pairs, others.
    assert (joint[0] > 0).sum() == (joint[1] > 0).sum() == p
    assert ((joint[0] > 0) != (joint[1] > 0)).any()


def test_shares_of_the_same_data_differ_every_time() -> None:
    code, rows = LagrangeCode(N=3, K=1, T=1, field=LARGE), np.zeros((4, 3), np.int64)
    first, second = (data_shares(code, rows, SecureRandom()) for _ in range(2))
    assert (first != second).all()
    first, second = (weight_shares(code, rows, SecureRandom()) for _ in range(2))
    assert (first != second).all()
    first, second = (zero_masks(code, 4, 3, SecureRandom()) for _ in range(2))
    assert (first != second).all()


def test_a_masks_shares_are_zero_at_the_nodes_and_uniform_elsewhere() -> None:
    p, draws = 5, 20_000
    code = LagrangeCode(N=3, K=1, T=1, field=PrimeField(p))
    shares = zero_masks(code, draws, 1, stream("vanishing"))
    assert not decode_rows(code, dict(enumerate(shares))).any()
    # K + 2T - 1 = 2 coefficients: any two holders' shares are uniform pairs.
    for one, other in combinations(range(3), 2):
        counts = np.bincount((shares[one] * p + shares[other]).reshape(-1), minlength=p * p)
        expected = draws / p**2
        assert ((counts - expected) ** 2 / expected).sum() < chi2.ppf(1 - 1e-6, p**2 - 1)


# Shapes


def test_shapes_that_do_not_fit_are_refused() -> None:
    code, random = LagrangeCode(N=5, K=2, T=1, field=LARGE), stream("shapes")
    with pytest.raises(InvalidParameterError, match="multiple of K = 2"):
        data_shares(code, np.zeros((3, 2), np.int64), random)
    with pytest.raises(InvalidParameterError, match="matrix of integers"):
        data_shares(code, np.zeros((4, 2)), random)
    with pytest.raises(InvalidParameterError, match="matrix of integers"):
        weight_shares(code, np.zeros(4, np.int64), random)
    with pytest.raises(InvalidParameterError, match="coded_weights"):
        evaluate(LARGE, np.zeros((2, 3), np.int64), np.zeros((4, 2), np.int64))
    with pytest.raises(InvalidParameterError, match="masks"):
        evaluate(
            LARGE,
            np.zeros((2, 3), np.int64),
            np.zeros((3, 2), np.int64),
            [np.zeros((2, 1), np.int64)],
        )


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.int32])
def test_elements_may_have_any_integer_type(dtype: type) -> None:
    field = PrimeField(65521)
    rows = np.arange(6).reshape(2, 3).astype(dtype)
    weights = np.arange(3)[:, None].astype(dtype)
    mask = np.full((2, 1), 65520).astype(dtype)
    assert evaluate(field, rows, weights, [mask, mask]).tolist() == [[3], [12]]
