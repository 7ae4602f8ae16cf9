"""The facts of ACFL's specification on the scheme that it is compared with."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
from scipy.integrate import quad
from scipy.stats import chi

from flwr_privacy.acfl.encoding import gradient
from flwr_privacy.acfl.scfl import (
    eps_projected,
    features_epsilon,
    projected_gradient,
    sigma2_for_eps_projected,
)
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.acfl.scfl import encode_projected, projected_mse

DEVICES, RECORDS, FEATURES, LABELS, C, S = 3, 6, 3, 2, 3, 0.8


def test_F16_the_gradient_of_projected_data() -> None:
    rng = np.random.default_rng(16)
    W = rng.normal(size=(FEATURES, LABELS))
    X = rng.uniform(-1, 1, (DEVICES, RECORDS, FEATURES))
    Y = rng.uniform(-1, 1, (DEVICES, RECORDS, LABELS))
    full = sum(gradient(*data, W) for data in zip(X, Y, strict=True))
    errors = []
    for _ in range(20000):
        parts = [encode_projected(x, y, C, S, rng) for x, y in zip(X, Y, strict=True)]
        Xt, Yt = sum(part.features for part in parts), sum(part.labels for part in parts)
        errors.append(projected_gradient(Xt, Yt, W, devices=DEVICES, s=S) - full)
    spread = np.std(errors, axis=0) / math.sqrt(len(errors))
    assert (np.abs(np.mean(errors, axis=0)) < 4 * spread).all()
    # The test would see the bias that the server subtracts.
    assert np.abs(DEVICES * S * W).max() > 10 * spread.max()
    squares = np.sum(np.array(errors) ** 2, axis=(1, 2))
    expected = projected_mse(list(zip(X, Y, strict=True)), W, c=C, s=S)
    assert abs(squares.mean() - expected) < 4 * squares.std() / math.sqrt(len(squares))


def test_an_upload_has_the_stated_size() -> None:
    rng = np.random.default_rng(0)
    coded = encode_projected(np.ones((7, 4)), np.ones((7, 2)), 5, 1.0, rng)
    assert (coded.features.shape, coded.labels.shape) == ((5, 4), (5, 2))


@pytest.mark.parametrize(
    ("eps", "expected"),
    [(0.01, 495.0), (0.1, 45.17), (1, 1.565), (5, 4.54e-4), (10, 2.06e-8)],
)
def test_the_noise_of_a_level(eps: float, expected: float) -> None:
    s = sigma2_for_eps_projected(eps, 10)
    assert s == pytest.approx(expected, rel=1e-3)
    assert s == pytest.approx(10 / math.expm1(2 * eps))
    assert eps_projected(10, s) == pytest.approx(eps)
    assert eps_projected(10, 0) == math.inf
    assert sigma2_for_eps_projected(eps, 10, B_X=0.1) == pytest.approx(s / 100)
    assert eps_projected(10, s / 100, B_X=0.1) == pytest.approx(eps)


@pytest.mark.parametrize("bound", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("s", [0.1, 1.0, 20.0])
def test_two_points_tell_less_than_the_level(s: float, bound: float) -> None:
    # Who knows the projection sees a channel whose means are 2 bound |column| / sqrt(s) apart.
    def information(distance: float) -> float:
        def term(y: float) -> float:
            value = (math.exp(-(y**2) / 2) + math.exp(-((y - distance) ** 2) / 2)) / 2
            value /= math.sqrt(2 * math.pi)
            return -value * math.log(value) if value > 0 else 0.0

        entropy, _ = quad(term, -12, distance + 12, points=[0, distance], limit=400)
        return float(entropy) - math.log(2 * math.pi * math.e) / 2

    rng = np.random.default_rng(0)
    columns = np.linalg.norm(rng.standard_normal((200, C)), axis=1)
    mean = np.mean([information(2 * bound * column / math.sqrt(s)) for column in columns])
    assert 0 < mean <= eps_projected(C, s, B_X=bound)


@pytest.mark.parametrize("delta", [1e-5, 0.01])
@pytest.mark.parametrize(("c", "s", "distance"), [(1, 1.0, 1.0), (10, 1.565, 2.0), (200, 5.0, 0.5)])
def test_the_epsilon_of_features_is_that_of_the_chi_squared_mixture(
    c: int, s: float, distance: float, delta: float
) -> None:
    epsilon = features_epsilon(c, s, distance=distance, delta=delta)

    def term(length: float) -> float:
        loss = GaussianPrivacyLoss(math.sqrt(s) / (length * distance))
        return float(chi.pdf(length, c)) * loss.get_delta_for_epsilon(epsilon)

    end = float(chi.isf(1e-12, c))
    exact, _ = quad(term, 1e-6, end, limit=400, points=[math.sqrt(c)])
    assert 0.9 * delta < exact <= delta


def test_a_label_that_one_client_alone_has_is_told_with_certainty() -> None:
    rng = np.random.default_rng(3)
    X, Y = rng.normal(size=(6, 4)), np.zeros((6, 2))
    Y[:, 0] = 1
    for _ in range(20):  # the same noise, and one record with the other label
        other = Y.copy()
        other[2] = [0, 1]
        assert not encode_projected(X, Y, 4, 100.0, rng).labels[:, 1].any()
        assert encode_projected(X, other, 4, 100.0, rng).labels[:, 1].all()


def test_features_without_noise_have_no_epsilon() -> None:
    assert features_epsilon(3, 0.0, distance=1.0, delta=1e-5) == math.inf
    assert features_epsilon(3, 0.0, distance=0.0, delta=1e-5) == 0
    assert features_epsilon(3, 1e9, distance=1e-3, delta=1e-5) == 0


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: features_epsilon(0, 1.0, distance=1.0, delta=0.1), "c"),
        (lambda: features_epsilon(1, -1.0, distance=1.0, delta=0.1), "s"),
        (lambda: features_epsilon(1, 1.0, distance=-1.0, delta=0.1), "distance"),
        (lambda: features_epsilon(1, 1.0, distance=1.0, delta=0.0), "delta"),
        (lambda: eps_projected(0, 1.0), "c"),
        (lambda: eps_projected(1, -1.0), "s"),
        (lambda: sigma2_for_eps_projected(0, 1), "eps"),
        (lambda: sigma2_for_eps_projected(1e4, 1), "eps"),
        (lambda: sigma2_for_eps_projected(1, 0), "c"),
        (lambda: sigma2_for_eps_projected(1, 1, B_X=0), "B_X"),
        (lambda: eps_projected(1, 1.0, B_X=-1), "B_X"),
    ],
)
def test_what_is_out_of_range_is_refused(call: Callable[[], float], name: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{name} = "):
        call()
