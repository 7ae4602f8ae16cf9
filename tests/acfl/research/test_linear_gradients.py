"""Moments from gradients, from noised gradients and from sums, against the moments themselves."""

import math
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.acfl.linear_gradients import (
    estimate_moments,
    recover_from_sums,
    recover_moments,
)

Matrix = NDArray[np.float64]


def relative(found: Matrix, truth: Matrix) -> float:
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def device(m: int, d: int, o: int, seed: int = 0) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    draws = np.random.default_rng(seed)
    X, Y = draws.uniform(-1, 1, (m, d)), draws.uniform(-1, 1, (m, o))
    return X, Y, X.T @ X, X.T @ Y


def gradients(X: Matrix, Y: Matrix, models: Matrix) -> Matrix:
    return np.array([X.T @ (X @ W - Y) for W in models])  # as a device computes them, not by A, B


def models_of(rounds: int, d: int, o: int, seed: int = 1) -> Matrix:
    return np.random.default_rng(seed).normal(size=(rounds, d, o))


def paper_training(rounds: int) -> tuple[Matrix, Matrix, Matrix, Matrix, NDArray[np.bool_]]:
    """Train as the paper does: N = 100, m = 100, d = o = 10, p = 0.2, sigma^2 for epsilon 1."""
    draws = np.random.default_rng(0)
    N, m, d, o, p, s = 100, 100, 10, 10, 0.2, 14.005747
    X = draws.uniform(-1, 1, (N, m, d))
    Y = X @ draws.uniform(0, 1 / 30, (d, o))
    A, B = X.transpose(0, 2, 1) @ X, X.transpose(0, 2, 1) @ Y
    coded = [part.sum(0) + math.sqrt(N * s) * draws.normal(size=(d, o)) for part in (A, B)]
    W = draws.uniform(0, 1 / 30, (d, o))
    models, answered = [], draws.random((rounds, N)) >= p
    for t in range(1, rounds + 1):
        models.append(W)
        received = gradients_of_all(X[answered[t - 1]], Y[answered[t - 1]], W)
        energy = d * s * (W**2).sum() + o * d * s
        beta2 = (received**2).sum() / len(received)
        a = p * beta2 / (p * beta2 + (1 - p) * energy)
        step = a * (coded[0] @ W - coded[1]) + (1 - a) / (1 - p) * received.sum(0)
        W = W - 1e-4 / t * step
    return X, Y, A, np.array(models), answered


def gradients_of_all(X: Matrix, Y: Matrix, W: Matrix) -> Matrix:
    return X.transpose(0, 2, 1) @ (X @ W - Y)


def test_F17_two_answers_give_the_moments_of_the_papers_devices_away() -> None:
    X, Y, A, models, answered = paper_training(11)
    both = np.flatnonzero(answered[:2].all(axis=0))
    assert 45 <= len(both) <= 82  # 64 expected, 4 standard deviations
    for rounds in (2, 11):
        for i in np.flatnonzero(answered[:rounds].sum(axis=0) >= 2):
            sent = models[:rounds][answered[:rounds, i]]
            found = recover_moments(sent, gradients(X[i], Y[i], sent))
            assert found.determined
            assert relative(found.features, A[i]) < 1e-12
            assert relative(found.labels, X[i].T @ Y[i]) < 1e-12
            assert found.residual < 1e-11
    assert (answered.sum(axis=0) >= 2).all()


def test_two_answers_by_the_printed_formula() -> None:
    X, Y, A, B = device(30, 4, 6)
    models = models_of(2, 4, 6)
    heard = gradients(X, Y, models)
    printed = (heard[1] - heard[0]) @ np.linalg.pinv(models[1] - models[0])
    found = recover_moments(models, heard)
    np.testing.assert_allclose(found.features, printed, rtol=1e-10)
    np.testing.assert_allclose(found.labels, printed @ models[0] - heard[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.features, A, rtol=1e-10)
    np.testing.assert_allclose(found.labels, B, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("d", "o"), [(1, 1), (5, 1), (7, 2), (9, 3), (6, 10)])
def test_so_many_answers_as_the_directions_need_and_no_fewer(d: int, o: int) -> None:
    needed = math.ceil(d / o) + 1
    X, Y, A, B = device(3 * d, d, o)
    models = models_of(needed, d, o)
    found = recover_moments(models, gradients(X, Y, models))
    assert found.rank == found.seen == d
    assert relative(found.features, A) < 1e-10
    assert relative(found.labels, B) < 1e-10
    few = recover_moments(models[:-1], gradients(X, Y, models[:-1]))
    assert few.rank == (needed - 2) * o < d
    assert not few.determined
    assert not few.saturated
    assert relative(few.features, A) > 1e-3
    assert few.residual < 1e-12  # they explain what was seen, and are others


def test_what_explains_too_few_answers_has_no_negative_eigenvalue_and_is_least() -> None:
    X, Y, A, _ = device(40, 8, 2)
    models = models_of(3, 8, 2)
    found = recover_moments(models, gradients(X, Y, models))
    assert found.rank == 4
    assert np.linalg.eigvalsh(found.features).min() > -1e-9
    assert np.linalg.eigvalsh(A - found.features).min() > -1e-9
    assert np.linalg.matrix_rank(found.features, tol=1e-9) == 4
    differences = (models[1:] - models[0]).transpose(1, 0, 2).reshape(8, 4)
    np.testing.assert_allclose(found.features @ differences, A @ differences, atol=1e-10)


@pytest.mark.parametrize("m", [1, 4, 10, 25])
def test_few_records_need_fewer_answers_than_features_do(m: int) -> None:
    d, o = 50, 5
    X, Y, A, B = device(m, d, o)
    rounds = math.ceil((m + 1) / o) + 1
    assert rounds < math.ceil(d / o) + 1
    models = models_of(rounds, d, o)
    found = recover_moments(models, gradients(X, Y, models))
    assert found.seen == m < found.rank < d
    assert found.saturated
    assert not found.determined
    assert relative(found.features, A) < 1e-9
    assert relative(found.labels, B) < 1e-9


def test_models_that_have_nearly_converged_still_do() -> None:
    X, Y, A, B = device(60, 12, 3)
    goal = np.linalg.lstsq(X, Y, rcond=None)[0]
    for size, bound in ((1e-2, 1e-12), (1e-4, 1e-10), (1e-6, 1e-8)):
        models = goal + size * models_of(9, 12, 3)
        found = recover_moments(models, gradients(X, Y, models))
        assert found.determined
        assert relative(found.features, A) < bound
        assert relative(found.labels, B) < bound
    same = np.repeat(goal[None], 9, axis=0)
    assert recover_moments(same, gradients(X, Y, same)).rank == 0


def test_directions_in_which_only_rounding_moves_do_not_count() -> None:
    X, Y, *_ = device(30, 6, 2)
    models = models_of(8, 6, 2)
    models[:, 4:] = 1 + 1e-14 * models[:, 4:]
    found = recover_moments(models, gradients(X, Y, models))
    assert found.rank == 4
    assert np.abs(found.features).max() < 100  # and are not divided by
    wide = recover_moments(models.astype(np.float32), gradients(X, Y, models), tolerance=1e-4)
    assert wide.rank == 4


def test_noise_on_gradients_is_averaged_and_borrowing_by_symmetry_helps() -> None:
    d, o, rounds, sigma = 6, 4, 400, 0.1
    X, Y, A, _ = device(40, d, o)
    models = models_of(rounds, d, o)
    models[:, 0] *= 0.05  # a direction that is seen badly
    draws = np.random.default_rng(5)
    found, plain = [], []
    for _ in range(100):
        heard = gradients(X, Y, models) + sigma * draws.normal(size=models.shape)
        found.append(recover_moments(models, heard).features - A)
        moved = (models - models.mean(0)).transpose(1, 0, 2).reshape(d, -1)
        turned = (heard - heard.mean(0)).transpose(1, 0, 2).reshape(d, -1)
        plain.append(turned @ np.linalg.pinv(moved) - A)
    errors, unaided = np.std(found, axis=0), np.std(plain, axis=0)
    # Away from the diagonal the precisions of both sides add up, 1 and 1 or 1 and 400: the
    # standard deviation of a half, or of the better one. 5 standard errors of 100 draws: 36 %.
    best = sigma / math.sqrt(rounds * o)
    off = ~np.eye(d, dtype=bool)
    off[0] = off[:, 0] = False
    np.testing.assert_allclose(errors[off], best / math.sqrt(2), rtol=0.4)
    np.testing.assert_allclose(errors[0, 1:], best, rtol=0.4)
    np.testing.assert_allclose(unaided[1:, 0], 20 * best, rtol=0.4)
    np.testing.assert_allclose(errors[0, 0], 20 * best, rtol=0.4)


def test_the_best_estimate_is_that_of_the_stacked_equations() -> None:
    d, o, rounds, noise, s1, s2 = 4, 2, 5, 0.3, 0.5, 0.2
    X, Y, A, B = device(20, d, o)
    draws = np.random.default_rng(6)
    models = models_of(rounds, d, o)
    heard = gradients(X, Y, models) + math.sqrt(noise) * draws.normal(size=models.shape)
    upload = (
        A + math.sqrt(s1) * draws.normal(size=(d, d)),
        B + math.sqrt(s2) * draws.normal(size=(d, o)),
    )
    found = estimate_moments(
        models, heard, gradient_variance=noise, upload=upload, upload_variances=(s1, s2)
    )
    rows = []
    for r in range(d):
        equations, values = [], []
        for W, G in zip(models, heard, strict=True):
            for c in range(o):
                unit = np.eye(o)[c]
                equations.append(np.concatenate([W[:, c], -unit]) / math.sqrt(noise))
                values.append(G[r, c] / math.sqrt(noise))
        for k in range(d + o):
            sigma = math.sqrt(s1 if k < d else s2)
            equations.append(np.eye(d + o)[k] / sigma)
            values.append((upload[0][r, k] if k < d else upload[1][r, k - d]) / sigma)
        rows.append(np.linalg.lstsq(np.array(equations), np.array(values), rcond=None)[0])
    stacked = np.array(rows)
    np.testing.assert_allclose(found.labels, stacked[:, d:], rtol=1e-9)
    square = stacked[:, :d]
    np.testing.assert_allclose(found.features, (square + square.T) / 2, rtol=1e-9)
    assert found.rank == found.seen == d


def test_gradients_and_upload_together_beat_either() -> None:
    d, o, rounds, variance = 8, 4, 12, 48.0  # as much in 12 rounds as in the upload
    X, Y, A, _ = device(60, d, o)
    models = models_of(rounds, d, o)
    draws = np.random.default_rng(7)
    errors = []
    for _ in range(200):
        heard = gradients(X, Y, models) + math.sqrt(variance) * draws.normal(size=models.shape)
        coded = A + draws.normal(size=(d, d))
        other = X.T @ Y + draws.normal(size=(d, o))
        both = estimate_moments(
            models,
            heard,
            gradient_variance=variance,
            upload=(coded, other),
            upload_variances=(1.0, 1.0),
        ).features
        alone = recover_moments(models, heard).features
        errors.append([((x - A) ** 2).sum() for x in (both, alone, (coded + coded.T) / 2)])
    both, alone, upload = np.mean(errors, axis=0)
    assert both < 0.7 * min(alone, upload)


def test_hardly_any_noise_on_gradients_leaves_nothing_to_the_upload() -> None:
    X, Y, A, B = device(20, 5, 5)
    models = models_of(3, 5, 5)
    wrong = (np.zeros((5, 5)), np.zeros((5, 5)))
    found = estimate_moments(
        models,
        gradients(X, Y, models),
        gradient_variance=1e-12,
        upload=wrong,
        upload_variances=(1.0, 1.0),
    )
    assert relative(found.features, A) < 1e-9
    assert relative(found.labels, B) < 1e-9


def federation(
    N: int, d: int, o: int, rounds: int, seed: int = 0
) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    draws = np.random.default_rng(seed)
    X, Y = draws.uniform(-1, 1, (N, 3 * d, d)), draws.uniform(-1, 1, (N, 3 * d, o))
    models = draws.normal(size=(rounds, d, o))
    each = np.array([[x.T @ (x @ W - y) for x, y in zip(X, Y, strict=True)] for W in models])
    return X.transpose(0, 2, 1) @ X, X.transpose(0, 2, 1) @ Y, models, each


def opened(each: Matrix, answered: NDArray[np.bool_]) -> Matrix:
    return np.array(
        [rows[present].sum(axis=0) for rows, present in zip(each, answered, strict=True)]
    )


def test_sums_over_changing_devices_give_every_device_away() -> None:
    A, B, models, each = federation(5, 3, 3, 16)
    answered = np.random.default_rng(1).random((16, 5)) < 0.6
    found = recover_from_sums(models, opened(each, answered), answered)
    assert found.rank == found.unknowns == 5 * (3 + 3)
    assert found.determined.all()
    assert relative(found.features, A) < 1e-10
    assert relative(found.labels, B) < 1e-10
    assert found.residual < 1e-12


def test_ten_rounds_are_what_the_count_says_and_nine_are_too_few() -> None:
    # N (d + o) / o = 10. Masks of which all subsets that matter are independent.
    A, _, models, each = federation(5, 3, 3, 10, seed=3)
    answered = np.array(
        [[i != t % 5 and i != (t + 1 + t // 5) % 5 for i in range(5)] for t in range(10)]
    )
    found = recover_from_sums(models, opened(each, answered), answered)
    assert found.determined.all()
    assert relative(found.features, A) < 1e-8
    few = recover_from_sums(models[:9], opened(each[:9], answered[:9]), answered[:9])
    assert few.rank == 27
    assert not few.determined.any()
    assert relative(few.features, A) > 1e-3


def test_where_nobody_ever_straggles_only_the_total_is_determined() -> None:
    A, B, models, each = federation(5, 3, 3, 40)
    answered = np.ones((40, 5), bool)
    found = recover_from_sums(models, opened(each, answered), answered)
    assert found.rank == 3 + 3
    assert not found.determined.any()
    assert relative(found.features.sum(axis=0), A.sum(axis=0)) < 1e-10
    assert relative(found.labels.sum(axis=0), B.sum(axis=0)) < 1e-10
    np.testing.assert_allclose(found.features, np.repeat(found.features[:1], 5, axis=0))
    assert relative(found.features, A) > 0.1


def test_who_always_answers_together_is_hidden_in_the_pair_and_the_others_are_not() -> None:
    A, _, models, each = federation(5, 3, 3, 40)
    answered = np.random.default_rng(2).random((40, 5)) < 0.6
    answered[:, 4] = answered[:, 3]
    found = recover_from_sums(models, opened(each, answered), answered)
    np.testing.assert_array_equal(found.determined, [True, True, True, False, False])
    assert relative(found.features[:3], A[:3]) < 1e-10
    assert relative(found.features[3:].sum(axis=0), A[3:].sum(axis=0)) < 1e-10
    assert relative(found.features[3], A[3]) > 0.1


def test_one_who_never_straggles_is_told_from_others_who_do() -> None:
    A, _, models, each = federation(4, 2, 2, 30)
    answered = np.random.default_rng(2).random((30, 4)) < 0.5
    answered[:, 0] = True
    found = recover_from_sums(models, opened(each, answered), answered)
    assert found.determined.all()
    assert relative(found.features, A) < 1e-10


def test_the_error_that_rounding_leaves_is_the_one_that_is_told() -> None:
    N, d, o, rounds, step = 4, 3, 2, 60, 2.0**-10
    A, _, models, each = federation(N, d, o, rounds)
    models *= 0.1
    each = np.array([A @ W for W in models])
    answered = np.random.default_rng(4).random((rounds, N)) < 0.6
    draws, missed = np.random.default_rng(8), []
    for _ in range(300):
        noise = draws.uniform(-step / 2, step / 2, (rounds, d, o))
        found = recover_from_sums(models, opened(each, answered) + noise, answered)
        missed.append(found.features - A)
    diagonal = np.array(missed)[:, :, range(d), range(d)]  # these are not averaged
    seen = np.sqrt((diagonal**2).mean(axis=(0, 2)))
    told = found.error * step / math.sqrt(12)
    # 900 correlated values of each device: 5 standard errors of at least 300.
    np.testing.assert_allclose(seen, told, rtol=5 / math.sqrt(2 * 300))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"models": np.zeros((3, 2))}, "models"),
        ({"models": np.full((3, 2, 2), np.nan)}, "models"),
        ({"gradients": np.zeros((2, 2, 2))}, "gradients"),
        ({"gradients": np.full((3, 2, 2), np.inf)}, "gradients"),
        ({"tolerance": -1.0}, "tolerance"),
    ],
    ids=["axes", "nan", "shape", "infinite", "tolerance"],
)
def test_what_does_not_fit_is_named(change: dict[str, object], name: str) -> None:
    given = {"models": np.zeros((3, 2, 2)), "gradients": np.zeros((3, 2, 2)), **change}
    with pytest.raises(InvalidParameterError) as error:
        recover_moments(**given)  # type: ignore[arg-type]
    assert error.value.parameter == name


def test_no_variance_of_zero_and_no_masks_of_numbers() -> None:
    rounds = np.zeros((3, 2, 2))
    with pytest.raises(InvalidParameterError, match="gradient_variance = 0"):
        estimate_moments(
            rounds,
            rounds,
            gradient_variance=0,
            upload=(np.eye(2), np.eye(2)),
            upload_variances=(1.0, 1.0),
        )
    for answered in (np.ones((3, 4)), np.ones((2, 4), bool), np.ones(3, bool)):
        with pytest.raises(InvalidParameterError, match="answered"):
            recover_from_sums(rounds, rounds, answered)


def test_more_rounds_of_sums_leave_a_smaller_error() -> None:
    _, _, models, each = federation(5, 3, 3, 80)
    answered = np.random.default_rng(1).random((80, 5)) < 0.6
    errors = [
        recover_from_sums(models[:n], opened(each[:n], answered[:n]), answered[:n]).error.max()
        for n in (14, 20, 40, 80)
    ]
    assert all(later < earlier for earlier, later in pairwise(errors))
