"""Random Fourier features, and classification by a linear model."""

import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from flwr_privacy.acfl import features
from flwr_privacy.acfl.features import FourierFeatures, accuracy, predict
from flwr_privacy.errors import InvalidParameterError

GOLDEN = [-0.5201406110907455, 0.3361506369436048, 0.5567908336066415, -0.04748191251398638]


def test_inner_products_are_near_the_gaussian_kernel() -> None:
    rng = np.random.default_rng(0)
    raw, D, width = rng.normal(size=(30, 4)), 40000, 1.5
    phi = FourierFeatures(raw=4, features=D, width=width, seed=1)(raw)
    distances = np.sum((raw[:, None] - raw[None]) ** 2, axis=2)
    kernel = np.exp(-distances / (2 * width**2))
    # A product of two features is in [-2, 2] / D: standard error below 2 / sqrt(D), of 465 pairs.
    assert np.abs(phi @ phi.T - kernel).max() < 4.5 * 2 / math.sqrt(D)
    assert kernel[~np.eye(30, dtype=bool)].max() > 0.3  # so the bound above says something


def test_features_are_bounded() -> None:
    embed = FourierFeatures(raw=8, features=50, width=0.3, seed=2)
    phi = embed(np.random.default_rng(3).normal(0, 100, (500, 8)))
    assert embed.bound == math.sqrt(2 / 50)
    assert np.abs(phi).max() <= embed.bound
    assert np.linalg.norm(phi, axis=1).max() <= embed.norm == math.sqrt(2)


def test_maps_with_one_identity_are_equal_and_others_differ() -> None:
    usual: dict[str, Any] = {"raw": 4, "features": 6, "width": 2, "seed": 0}
    raw = np.random.default_rng(4).normal(size=(5, 4))
    embed = FourierFeatures(**usual)
    assert embed.identity == "fourier raw=4 features=6 width=2 seed=0"
    assert FourierFeatures(**{**usual, "width": 2.0}).identity == embed.identity
    features._projection.cache_clear()
    np.testing.assert_array_equal(FourierFeatures(**usual)(raw), embed(raw))
    identities = {embed.identity}
    for change in ({"width": 2.5}, {"width": 2 + 2**-51}, {"seed": 1}, {"seed": -1}):
        other = FourierFeatures(**{**usual, **change})
        identities.add(other.identity)
        assert not np.array_equal(other(raw), embed(raw))
    assert len(identities) == 5
    with pytest.raises(FrozenInstanceError):
        embed.seed = 3  # type: ignore[misc]


def test_the_map_of_an_identity_never_changes() -> None:
    embed = FourierFeatures(raw=3, features=4, width=2, seed=0)
    np.testing.assert_allclose(embed(np.array([[0.1, -0.2, 0.3]]))[0], GOLDEN, atol=1e-12)


@pytest.mark.parametrize("block", [1, 50, 2**20])
def test_blocks_of_records_make_no_difference(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.random.default_rng(5).normal(size=(23, 4))
    embed = FourierFeatures(raw=4, features=6, width=2, seed=0)
    directions, offsets = features._projection(4, 6, 2, 0)
    monkeypatch.setattr(features, "_BLOCK", block)
    expected = math.sqrt(2 / 6) * np.cos(raw @ directions + offsets)
    np.testing.assert_allclose(embed(raw), expected, rtol=0, atol=1e-14)


def test_images_are_flattened() -> None:
    images = np.random.default_rng(6).integers(0, 255, (3, 2, 4), dtype=np.uint8)
    embed = FourierFeatures(raw=8, features=6, width=100, seed=0)
    np.testing.assert_array_equal(embed(images), embed(images.reshape(3, 8).astype(float)))
    assert embed(images[:0]).shape == (0, 6)
    assert embed(images).dtype == np.float64


@pytest.mark.parametrize("shape", [(3, 7), (3,), (3, 9), (3, 2, 2)])
def test_records_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidParameterError, match="records of 8 values"):
        FourierFeatures(raw=8, features=6, width=2, seed=0)(np.zeros(shape))


@pytest.mark.parametrize(
    ("name", "value"),
    [("raw", 0), ("features", 0), ("width", 0.0), ("width", math.inf), ("seed", 0.5)],
)
def test_what_is_no_map_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{name} = "):
        FourierFeatures(**{"raw": 8, "features": 6, "width": 2, "seed": 0, name: value})


def test_a_ridge_regression_on_the_features_learns_what_is_not_linear() -> None:
    rng = np.random.default_rng(7)
    raw = rng.uniform(-1, 1, (600, 2))
    labels = (raw[:, 0] * raw[:, 1] > 0).astype(int)  # the four quadrants
    X = FourierFeatures(raw=2, features=100, width=0.7, seed=0)(raw)
    Y = np.eye(2)[labels]
    train, test = slice(0, 400), slice(400, 600)
    W = np.linalg.solve(X[train].T @ X[train] + 1e-2 * np.eye(100), X[train].T @ Y[train])
    assert accuracy(W, X[test], labels[test]) > 0.9
    linear = np.linalg.lstsq(raw[train], Y[train], rcond=None)[0]
    assert accuracy(linear, raw[test], labels[test]) < 0.7


def test_predictions_and_their_accuracy() -> None:
    W = np.array([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]])
    X = np.array([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    assert predict(W, X).tolist() == [0, 1, 0]  # of equals the first
    assert predict(W, X).dtype == np.int64
    assert accuracy(W, X, [0, 1, 2]) == pytest.approx(2 / 3)
    for labels in ([0, 1], [[0], [1], [2]], []):
        with pytest.raises(InvalidParameterError, match="labels = "):
            accuracy(W, X, labels)
