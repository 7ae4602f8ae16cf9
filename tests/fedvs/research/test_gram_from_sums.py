"""What sums over rounds say of the similarity of rows, against trainings and least squares."""

import numpy as np
import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.fedvs.gram_from_sums import (
    gram_correlation,
    neighbours_found,
    recover_gram,
)

Matrix = np.ndarray


def training(
    m: int, e: int, h: int, rounds: int, *, rate: float, noise: float = 0.0
) -> tuple[Matrix, Matrix, Matrix]:
    """Return the Gram matrix of some rows, and embeddings and gradients of a training on them."""
    draws = np.random.default_rng(m + e)
    X, W = draws.uniform(0, 1, (m, e)), draws.normal(size=(e, h))
    embeddings, gradients = [], draws.normal(size=(rounds, m, h)) / m
    for gradient in gradients:
        embeddings.append(X @ W + noise * draws.normal(size=(m, h)))
        W = W - rate * X.T @ gradient
    return X @ X.T, np.array(embeddings), gradients


@pytest.mark.parametrize("e", [3, 8, 40])
def test_without_noise_the_matrix_is_exact(e: int) -> None:
    gram, embeddings, gradients = training(10, e, 4, 8, rate=0.1)
    found = recover_gram(embeddings, gradients, rate=0.1)
    np.testing.assert_allclose(found, gram, atol=1e-8)
    np.testing.assert_array_equal(found, found.T)
    assert gram_correlation(found, gram) == pytest.approx(1)
    assert neighbours_found(found, gram) == 1


def test_who_knows_the_other_features_has_the_matrix_of_the_rest() -> None:
    draws = np.random.default_rng(5)
    own, others = draws.uniform(0, 1, (2, 9, 3))
    X, W, embeddings = np.concatenate([own, others], axis=1), draws.normal(size=(6, 4)), []
    gradients = draws.normal(size=(8, 9, 4))
    for gradient in gradients:
        embeddings.append(X @ W)
        W = W - 0.1 * X.T @ gradient
    found = recover_gram(embeddings, gradients, rate=0.1) - others @ others.T
    np.testing.assert_allclose(found, own @ own.T, atol=1e-8)


def test_the_last_gradient_is_not_used() -> None:
    _, embeddings, gradients = training(6, 4, 3, 5, rate=0.1)
    both = [recover_gram(embeddings, own, rate=0.1) for own in (gradients, gradients[:-1])]
    np.testing.assert_array_equal(*both)


def test_with_noise_it_is_the_best_symmetric_fit() -> None:
    """Against least squares over the entries of a symmetric matrix, one equation each."""
    m, rate = 5, 0.3
    _, embeddings, gradients = training(m, 7, 3, 6, rate=rate, noise=0.05)
    moves = np.zeros_like(embeddings)
    moves[1:] = -rate * np.cumsum(gradients[:-1], axis=0)
    moves, heard = moves - moves.mean(axis=0), embeddings - embeddings.mean(axis=0)
    places = [(i, j) for i in range(m) for j in range(i, m)]
    columns = []
    for i, j in places:
        unit = np.zeros((m, m))
        unit[i, j] = unit[j, i] = 1
        columns.append((unit @ moves).reshape(-1))
    entries = np.linalg.lstsq(np.array(columns).T, heard.reshape(-1), rcond=None)[0]
    expected = np.zeros((m, m))
    for (i, j), entry in zip(places, entries, strict=True):
        expected[i, j] = expected[j, i] = entry
    np.testing.assert_allclose(recover_gram(embeddings, gradients, rate=rate), expected, atol=1e-9)


def test_more_rounds_say_more_and_a_known_noise_helps() -> None:
    gram, embeddings, gradients = training(12, 6, 4, 200, rate=0.1, noise=0.02)
    plain, known = (
        [
            float(
                np.linalg.norm(
                    recover_gram(embeddings[:n], gradients[:n], rate=0.1, noise=s) - gram
                )
            )
            for n in (5, 30, 200)
        ]
        for s in (0.0, 0.02)
    )
    assert plain == sorted(plain, reverse=True)
    assert known == sorted(known, reverse=True)
    assert known[0] < plain[0]
    assert known[-1] < 0.1 * np.linalg.norm(gram)


def test_where_nothing_moves_nothing_is_known() -> None:
    _, embeddings, gradients = training(5, 4, 3, 4, rate=0.1)
    assert not recover_gram(embeddings, np.zeros_like(gradients), rate=0.1).any()


def test_neighbours_are_by_distance() -> None:
    X = np.array([[0.0, 0.0], [1.0, 0.0], [5.0, 0.0], [5.0, 0.5]])
    other = X[[0, 2, 1, 3]]  # of 0, 1 and 3 the nearest is another one then
    assert neighbours_found(X @ X.T, X @ X.T) == 1
    assert neighbours_found(other @ other.T, X @ X.T) == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"embeddings": np.zeros((1, 3, 2))}, "embeddings = "),
        ({"gradients": np.zeros((4, 3, 3))}, "gradients = "),
        ({"gradients": np.zeros((1, 3, 2))}, "gradients = 1"),
        ({"rate": 0.0}, "rate = 0.0"),
        ({"noise": -1.0}, "noise = -1.0"),
        ({"embeddings": np.full((4, 3, 2), np.nan)}, "embeddings = "),
    ],
)
def test_what_is_not_allowed_is_named(change: dict[str, object], text: str) -> None:
    given = {"embeddings": np.zeros((4, 3, 2)), "gradients": np.zeros((4, 3, 2)), "rate": 1.0}
    given |= change
    with pytest.raises(InvalidParameterError, match=text):
        recover_gram(**given)  # type: ignore[arg-type]


def test_matrices_that_cannot_be_compared_are_named() -> None:
    with pytest.raises(InvalidParameterError, match="found = 'a constant'"):
        gram_correlation(np.eye(3), np.eye(3))
    with pytest.raises(InvalidParameterError, match="true = "):
        neighbours_found(np.eye(3), np.eye(4))
