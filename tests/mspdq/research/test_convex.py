"""F23: the ordering of the schemes on a strongly convex problem with unlike clients."""

from collections.abc import Callable
from functools import cache

import numpy as np
from mixing_rounds import learning_round, terms_of
from scipy.optimize import minimize

from flwr_privacy.mspdq import Mixing, UniformSplit
from flwr_privacy.privacy.randomness import SecureRandom

CLIENTS, SAMPLES, CLASSES, FEATURES = 20, 60, 5, 21
LOCAL_STEPS, ROUNDS, PENALTY = 5, 60, 0.02

Average = Callable[[np.ndarray, np.ndarray, SecureRandom, SecureRandom], np.ndarray]


@cache
def data() -> tuple[np.ndarray, np.ndarray]:
    """Return features and one-hot labels; every client has two of the five classes."""
    draws = np.random.default_rng(3)
    centres = draws.normal(size=(CLASSES, FEATURES - 1))
    labels = np.stack(
        [draws.choice(draws.choice(CLASSES, 2, replace=False), SAMPLES) for _ in range(CLIENTS)]
    )
    features = centres[labels] + draws.normal(size=(CLIENTS, SAMPLES, FEATURES - 1))
    ones = np.ones((CLIENTS, SAMPLES, 1))
    return np.concatenate([features, ones], axis=2), np.eye(CLASSES)[labels]


def losses_and_gradients(models: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each client's penalized cross entropy, and its gradient."""
    features, labels = data()
    scores = features @ models.reshape(CLIENTS, FEATURES, CLASSES)
    scores -= scores.max(axis=-1, keepdims=True)
    shares = np.exp(scores)
    totals = shares.sum(axis=-1, keepdims=True)
    losses = (np.log(totals[..., 0]) - (labels * scores).sum(axis=-1)).mean(axis=1)
    slopes = features.transpose(0, 2, 1) @ (shares / totals - labels) / SAMPLES
    penalty = PENALTY / 2 * (models**2).sum(axis=1)
    return losses + penalty, slopes.reshape(CLIENTS, -1) + PENALTY * models


@cache
def optimum() -> np.ndarray:
    def everybody(model: np.ndarray) -> tuple[float, np.ndarray]:
        losses, gradients = losses_and_gradients(np.tile(model, (CLIENTS, 1)))
        return losses.mean(), gradients.mean(axis=0)

    size = FEATURES * CLASSES
    options = {"maxiter": 2000, "ftol": 1e-15, "gtol": 1e-9}
    return minimize(everybody, np.zeros(size), jac=True, method="L-BFGS-B", options=options).x


def distance(average: Average) -> float:
    """Train, and return how far the end is from the optimum, relative to its norm."""
    model = np.zeros(FEATURES * CLASSES)
    # All runs have the same splits, so what differs is the rounding.
    splits, random = (SecureRandom.insecure(23, purpose) for purpose in ("splits", "rounding"))
    for t in range(1, ROUNDS + 1):
        models = np.tile(model, (CLIENTS, 1))
        for _ in range(LOCAL_STEPS):
            models -= 4 / (20 + t) * losses_and_gradients(models)[1]
        model = average(model, models, splits, random)
    return float(np.linalg.norm(model - optimum()) / np.linalg.norm(optimum()))


def fedavg() -> float:
    return distance(lambda _before, models, *_: models.mean(axis=0))


@cache
def msp(coupling: str, gamma: float, rounds: int, eps_s: float = 0.3) -> float:
    mixing, split = Mixing(coupling=coupling, gamma=gamma, rounds=rounds), UniformSplit(eps_s=eps_s)

    def average(
        _: np.ndarray, models: np.ndarray, splits: SecureRandom, random: SecureRandom
    ) -> np.ndarray:
        visible = np.stack([split.visible(model, splits) for model in models])
        seen = learning_round(terms_of(mixing), models, random, visible=visible)
        return seen.averages[-1]

    return distance(average)


@cache
def mspdq(start: str, bits: int) -> float:
    mixing = Mixing(coupling="harmonic", gamma=0.3, rounds=10)
    terms = terms_of(mixing, levels=2**bits, start=start, interval="linf")

    def average(
        before: np.ndarray, models: np.ndarray, splits: SecureRandom, random: SecureRandom
    ) -> np.ndarray:
        visible = np.stack([UniformSplit().visible(model, splits) for model in models])
        seen = learning_round(terms, models, random, visible=visible, start=before)
        return seen.averages[-1]

    return distance(average)


def test_F23_the_faster_the_mixing_the_nearer_to_fedavg():
    reference = fedavg()
    assert abs(msp("const", 0.3, 10) - reference) < 0.01 * reference
    ordered = [
        reference * 1.01,
        msp("const", 0.3, 4),
        msp("const", 0.1, 10),
        msp("const", 0.1, 4),
        msp("harmonic", 0.1, 4),
    ]
    assert ordered == sorted(ordered)


def test_F23_quantization_costs_little_and_the_start_much():
    unquantized = msp("harmonic", 0.3, 10)
    for bits in (6, 8):
        assert abs(mspdq("independent", bits) - unquantized) < 0.1 * unquantized
    assert mspdq("global", 8) < mspdq("independent", 8) < mspdq("reference", 8)


def test_F23_a_narrower_split_disturbs_less():
    distances = [msp("const", 0.1, 4, eps_s) for eps_s in (0.9, 0.7, 0.3, 0.0)]
    assert distances == sorted(distances)
