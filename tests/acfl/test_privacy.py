"""The facts of ACFL's specification on privacy, against the mutual information of real uploads."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.integrate import quad

from flwr_privacy.accounting.gaussian import delta_of
from flwr_privacy.acfl.encoding import moments, upper
from flwr_privacy.acfl.privacy import (
    eps_feature,
    eps_feature_tight,
    eps_label,
    eps_label_tight,
    mi_epsilon,
    noise_split,
    sigma2_for_eps,
)
from flwr_privacy.acfl.weights import coded_energy
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.acfl.theory import record_epsilon, record_mu

Array = NDArray[np.float64]

VARIANCES = st.floats(1e-6, 1e6)
SIZES = st.integers(1, 200)
BOUNDS = st.floats(0.05, 20)


def close(value: float, expected: float, rel: float = 1e-6) -> bool:
    return value == pytest.approx(expected, rel=rel, abs=5e-7)


# The paper's bound


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((10, 10, 1, 1), 10.050634),
        ((100, 10, 1, 1), 72.433880),
        ((10, 10, 0.01, 0.01), 66.919247),
        ((10, 10, 100, 100), 0.144280),
        ((5, 3, 2, 0.5), 3.472511),
        ((2, 1, 0.5, 0.2), 2.543798),
    ],
)
def test_F1_the_papers_level(values: tuple[Any, ...], expected: float) -> None:
    assert close(eps_feature(*values), expected)
    d, o, s1, s2 = values
    printed = (d - 1 / 2) * math.log((1 + s1) / s1) + o / 2 * math.log((1 + s2) / s2)
    assert close(eps_feature(*values), printed, rel=1e-12)


def test_F1_bits() -> None:
    assert close(eps_feature(10, 10, 1, 1), 14.5 * math.log(2), rel=1e-14)


def test_F1_the_level_falls_as_the_noise_grows() -> None:
    scales = 10.0 ** np.arange(-6, 10)
    for levels in (
        [eps_feature(10, 10, s, 1) for s in scales],
        [eps_feature(10, 10, 1, s) for s in scales],
        [eps_feature(10, 10, s, s) for s in scales],
    ):
        assert all(higher > lower for higher, lower in itertools.pairwise(levels))
    assert eps_feature(10, 10, 1e12, 1e12) < 1e-10
    assert eps_feature(10, 10, 0, 1) == eps_feature(10, 10, 1, 0) == math.inf


@pytest.mark.parametrize(
    ("d", "eps", "expected"),
    [
        (10, 0.1, 144.500575),
        (10, 1, 14.005747),
        (10, 5, 2.428679),
        (10, 10, 1.007021),
        (10, 50, 0.032845),
        (100, 1, 104.000797),
        (100, 10, 9.957973),
        (100, 100, 0.623554),
    ],
)
def test_F2_the_variance_of_a_level(d: int, eps: float, expected: float) -> None:
    s = sigma2_for_eps(eps, d, 10)
    assert close(s, expected, rel=1e-6)
    assert close(s, 1 / math.expm1(eps / (d - 1 / 2 + 10 / 2)), rel=1e-12)


@given(
    st.floats(1e-3, 30),
    st.integers(1, 50),
    st.integers(1, 20),
    st.sampled_from(["paper", "tight"]),
    st.booleans(),
    BOUNDS,
    BOUNDS,
)
def test_F2_the_level_of_the_variance_of_a_level(
    eps: float,
    d: int,
    o: int,
    bound: str,
    symmetric: bool,
    B_X: float,
    B_Y: float,
) -> None:
    options: dict[str, Any] = {"bound": bound, "symmetric": symmetric}
    for labels in (B_X, B_Y):
        s = sigma2_for_eps(eps, d, o, B_X=B_X, B_Y=labels, **options)
        found = mi_epsilon(d, o, s, s, B_X=B_X, B_Y=labels, **options)
        assert found == pytest.approx(eps, rel=1e-10)


def test_F2_the_variance_covers_labels_of_another_size() -> None:
    s = sigma2_for_eps(1.0, 10, 1, B_X=1, B_Y=50)
    assert eps_label(10, 1, s, s, B_Y=50) == pytest.approx(1.0)
    assert eps_feature(10, 1, s, s, B_Y=50) < 0.5


def test_bounds_other_than_one_scale_the_variances() -> None:
    functions: list[Callable[..., float]] = [
        eps_feature,
        eps_label,
        eps_feature_tight,
        eps_label_tight,
        partial(eps_feature, symmetric=True),
    ]
    for function in functions:
        expected = function(5, 3, 0.7, 0.3)
        assert close(function(5, 3, 0.7 * 2**4, 0.3 * 6**2, B_X=2, B_Y=3), expected, rel=1e-13)


# Labels, the tighter bounds, symmetric noise


def test_F3_labels() -> None:
    assert close(eps_label(10, 10, 1, 1), 3.465736)
    assert close(eps_label(2, 1, 1, 1), 0.693147)
    assert close(eps_feature(2, 1, 4, 1), 0.681289)
    assert close(eps_label(2, 1, 4, 1), 0.693147)
    assert mi_epsilon(2, 1, 4, 1) == eps_label(2, 1, 4, 1)


def test_F3_tight_levels() -> None:
    assert close(eps_feature_tight(10, 10, 1, 1), 1.795220)
    assert close(eps_label_tight(10, 10, 1, 1), 1.198948)
    assert close(eps_feature_tight(100, 10, 1, 1), 2.782739)
    assert close(eps_feature_tight(2, 1, 0.5, 0.2), 1.354024)
    assert close(sigma2_for_eps(1, 10, 10, bound="tight"), 4.656893)
    assert close(sigma2_for_eps(0.1, 10, 10, bound="tight"), 127.842828)


@given(SIZES, SIZES, VARIANCES, VARIANCES, BOUNDS, BOUNDS)
def test_F3_tight_is_never_above_the_papers(
    d: int, o: int, s1: float, s2: float, B_X: float, B_Y: float
) -> None:
    values, bounds = (d, o, s1, s2), {"B_X": B_X, "B_Y": B_Y}
    slack = 1 + 1e-12
    assert eps_feature_tight(*values, **bounds) <= eps_feature(*values, **bounds) * slack
    assert eps_label_tight(*values, **bounds) <= eps_label(*values, **bounds) * slack
    symmetric = eps_feature_tight(*values, **bounds, symmetric=True)
    assert symmetric <= eps_feature_tight(*values, **bounds) * slack
    assert symmetric <= eps_feature(*values, **bounds, symmetric=True) * slack
    assert eps_feature(*values, **bounds, symmetric=True) <= eps_feature(*values, **bounds) * slack


@given(SIZES, SIZES, VARIANCES, BOUNDS)
def test_with_equal_noise_and_bounds_a_feature_tells_the_most(
    d: int, o: int, s: float, bound: float
) -> None:
    for kind in ("paper", "tight"):
        feature = (eps_feature if kind == "paper" else eps_feature_tight)(
            d, o, s, s, B_X=bound, B_Y=bound
        )
        assert mi_epsilon(d, o, s, s, bound=kind, B_X=bound, B_Y=bound) == feature


def test_symmetric_noise_shows_an_entry_less_often() -> None:
    assert close(eps_feature(10, 10, 1, 1, symmetric=True), 10 * math.log(2))
    s = sigma2_for_eps(1, 10, 10, symmetric=True)
    assert close(s, 1 / math.expm1(1 / 10), rel=1e-12)
    assert mi_epsilon(10, 10, s, s, symmetric=True) == pytest.approx(1.0)
    assert eps_feature_tight(1, 1, 2, 3) == eps_feature_tight(1, 1, 2, 3, symmetric=True)


@pytest.mark.parametrize("d", [1, 3])
def test_without_noise_every_level_is_infinite(d: int) -> None:
    for s1, s2 in ((0, 1), (1, 0), (0, 0)):
        for function in (eps_feature, eps_feature_tight, partial(eps_feature, symmetric=True)):
            assert function(d, 1, s1, s2) == math.inf
    for function in (eps_label, eps_label_tight):
        assert function(d, 1, 1, 0) == math.inf
        assert function(d, 1, 0, 1) < math.inf  # the other noise does not matter


# The mutual information itself, by integration


def two_point_information(distance: float, share: float) -> float:
    """Of a two-point input, told by a Gaussian channel of unit noise with means so far apart."""

    def density(y: float) -> float:
        means = ((1 - share), y), (share, y - distance)
        return sum(q * math.exp(-z * z / 2) for q, z in means) / math.sqrt(2 * math.pi)

    def term(y: float) -> float:
        value = density(y)
        return -value * math.log(value) if value > 0 else 0.0

    entropy, _ = quad(term, -12, distance + 12, limit=400, points=[0, distance])
    return float(entropy) - math.log(2 * math.pi * math.e) / 2


def upload(X: Array, Y: Array, s1: float, s2: float, *, symmetric: bool) -> Array:
    """The means of what is sent, each in units of its noise."""
    exact = moments(X, Y)
    features = upper(exact.features) if symmetric else exact.features.ravel()
    return np.concatenate([features / math.sqrt(s1), exact.labels.ravel() / math.sqrt(s2)])


PAIRS = [(-1.0, 1.0), (0.0, 1.0), (-1.0, 0.5), (0.25, 0.75)]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("s", [0.05, 1.0, 14.0, 200.0])
@pytest.mark.parametrize(("d", "o"), [(1, 1), (2, 1), (3, 5), (10, 10)])
def test_two_points_tell_less_than_the_tight_bound(
    d: int, o: int, s: float, symmetric: bool
) -> None:
    rng = np.random.default_rng(d * 100 + o)
    for extreme in (True, False):
        X, Y = rng.uniform(-1, 1, (3, d)), rng.uniform(-1, 1, (3, o))
        if extreme:  # what lets an entry show most
            X, Y = np.sign(X), np.sign(Y)
        for low, high in PAIRS:
            for share in (0.5, 0.2):
                for table, bound in (
                    (X, eps_feature_tight(d, o, s, s / 2, symmetric=symmetric)),
                    (Y, eps_label_tight(d, o, s, s / 2)),
                ):
                    seen = []
                    for value in (low, high):
                        table[0, 0] = value
                        seen.append(upload(X, Y, s, s / 2, symmetric=symmetric))
                    distance = float(np.linalg.norm(seen[1] - seen[0]))
                    assert two_point_information(distance, share) <= bound


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_tight_bounds_are_nearly_reached(symmetric: bool) -> None:
    d, o, s = 10, 10, 2000.0
    X, Y = np.ones((1, d)), np.ones((1, o))
    for table, bound in (
        (X, eps_feature_tight(d, o, s, s, symmetric=symmetric)),
        (Y, eps_label_tight(d, o, s, s)),
    ):
        seen = []
        for value in (-1.0, 1.0):
            table[0, 0] = value
            seen.append(upload(X, Y, s, s, symmetric=symmetric))
        found = two_point_information(float(np.linalg.norm(seen[1] - seen[0])), 0.5)
        assert 0.97 * bound < found <= bound


@pytest.mark.parametrize("s", [(0.1, 0.1), (1.0, 0.5), (10.0, 30.0)])
@pytest.mark.parametrize(
    "points",
    [[-1.0, 1.0], [0.0, 1.0], [-1.0, 0.0, 1.0], list(np.linspace(-1, 1, 101))],
    ids=["two", "half", "three", "many"],
)
def test_more_points_tell_less_than_the_tight_bound(
    points: list[float], s: tuple[float, float]
) -> None:
    # d = o = 1 and one record: the upload is (x^2, x), integrated over the plane.
    x = np.array(points)
    spread = [math.sqrt(variance) for variance in s]
    sides = [
        np.linspace(low - 8 * scale, 1 + 8 * scale, 801)
        for low, scale in zip((0.0, -1.0), spread, strict=True)
    ]
    steps = [side[1] - side[0] for side in sides]
    factors = [
        np.exp(-((side[:, None] - mean) ** 2) / (2 * scale**2)) / (scale * math.sqrt(2 * math.pi))
        for side, mean, scale in zip(sides, (x**2, x), spread, strict=True)
    ]
    density = factors[0] @ factors[1].T / len(x)
    assert density.sum() * steps[0] * steps[1] == pytest.approx(1, abs=1e-9)
    entropy = -np.sum(density * np.log(np.maximum(density, 1e-300))) * steps[0] * steps[1]
    found = float(entropy) - sum(math.log(2 * math.pi * math.e * v) / 2 for v in s)
    assert 0 < found <= eps_feature_tight(1, 1, *s) <= eps_feature(1, 1, *s)


# The split


@pytest.mark.parametrize(
    ("C2", "split", "energy", "equal"),
    [(0.04, (117.820, 4.9518), 542.31, 1406.18), (1.0, (30.7805, 6.6927), 977.08, 1540.63)],
)
def test_F20_the_split_of_the_noise(
    C2: float, split: tuple[float, float], energy: float, equal: float
) -> None:
    s1, s2 = noise_split(1, 10, 10, C2)
    assert (s1, s2) == pytest.approx(split, rel=1e-5)
    assert coded_energy(C2, s1, s2, 10, 10) == pytest.approx(energy, rel=1e-5)
    s = sigma2_for_eps(1, 10, 10)
    assert coded_energy(C2, s, s, 10, 10) == pytest.approx(equal, rel=1e-5)
    assert eps_feature(10, 10, s1, s2) == pytest.approx(1, rel=1e-12)
    if C2 == 0.04:
        assert close(eps_label(10, 10, s1, s2), 0.9197, rel=1e-4)
        assert close(eps_label(10, 10, s, s), 0.3448, rel=2e-4)


@pytest.mark.parametrize(("B_X", "B_Y"), [(1.0, 1.0), (0.5, 2.0), (3.0, 0.1)])
@pytest.mark.parametrize("eps", [0.1, 2.0, 30.0])
def test_F20_no_other_split_of_the_level_disturbs_less(eps: float, B_X: float, B_Y: float) -> None:
    d, o, C2 = 4, 3, 0.7
    least = coded_energy(C2, *noise_split(eps, d, o, C2, B_X=B_X, B_Y=B_Y), d, o)
    for share in np.linspace(0.001, 0.999, 999):  # of the level, to the features' moments
        s1 = B_X**4 / math.expm1(share * eps / (d - 0.5))
        s2 = (B_X * B_Y) ** 2 / math.expm1((1 - share) * eps / (o / 2))
        assert eps_feature(d, o, s1, s2, B_X=B_X, B_Y=B_Y) == pytest.approx(eps)
        assert coded_energy(C2, s1, s2, d, o) >= least * (1 - 1e-9)


# One record, in the usual currency


def test_a_level_of_one_is_a_weak_guarantee_for_a_record() -> None:
    norm = math.sqrt(10)
    found = []
    for bound in ("paper", "tight"):
        s = sigma2_for_eps(1, 10, 10, bound=bound)
        found.append(
            record_epsilon(s, s, feature_norm=norm, label_norm=norm, delta=1e-5),
        )
    assert found == pytest.approx([22.59, 48.65], abs=0.005)


@given(st.integers(1, 6), st.integers(1, 4), st.booleans(), st.integers(0, 2**32 - 1))
def test_no_record_moves_the_upload_by_more_than_mu(
    d: int, o: int, symmetric: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    s1, s2, R_x, R_y = 0.3, 0.7, 1.5, 0.8
    X, Y = rng.normal(size=(3, d)), rng.normal(size=(3, o))
    X *= R_x / np.linalg.norm(X, axis=1, keepdims=True)
    Y *= R_y / np.linalg.norm(Y, axis=1, keepdims=True)
    mu = record_mu(s1, s2, feature_norm=R_x, label_norm=R_y)

    def moved() -> float:
        whole = upload(X, Y, s1, s2, symmetric=symmetric)
        return float(np.linalg.norm(whole - upload(X[1:], Y[1:], s1, s2, symmetric=symmetric)))

    assert moved() <= mu * (1 + 1e-12)
    if not symmetric:
        assert moved() == pytest.approx(mu)
    X[0] = [R_x] + [0.0] * (d - 1)
    assert moved() == pytest.approx(mu)  # the worst case of symmetric noise too


def test_the_epsilon_of_a_record_is_that_of_gaussian_dp() -> None:
    values: dict[str, float] = {"s1": 50.0, "s2": 20.0, "feature_norm": 2.0, "label_norm": 1.0}
    mu = math.sqrt(2**4 / 50 + 2**2 / 20)
    assert record_mu(**values) == pytest.approx(mu)
    assert delta_of(mu, record_epsilon(**values, delta=1e-6)) == pytest.approx(1e-6)
    assert record_epsilon(0.0, 1.0, feature_norm=1, label_norm=1, delta=1e-5) == math.inf


# What is refused


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: eps_feature(0, 1, 1, 1), "d"),
        (lambda: eps_feature(1, 0, 1, 1), "o"),
        (lambda: eps_feature(1, 1, -1, 1), "s1"),
        (lambda: eps_label(1, 1, 1, math.inf), "s2"),
        (lambda: eps_feature_tight(1, 1, 1, 1, B_X=0), "B_X"),
        (lambda: eps_label_tight(1, 1, 1, 1, B_Y=1e300), "B_Y"),
        (lambda: mi_epsilon(1, 1, 1, 1, bound="loose"), "bound"),
        (lambda: sigma2_for_eps(0, 1, 1), "eps"),
        (lambda: sigma2_for_eps(1e6, 1, 1), "eps"),
        (lambda: sigma2_for_eps(1e6, 1, 1, bound="tight"), "eps"),
        (lambda: sigma2_for_eps(1, 0, 1), "d"),
        (lambda: sigma2_for_eps(1, 0, 1, bound="tight"), "d"),
        (lambda: noise_split(1e6, 1, 1, 1), "eps"),
        (lambda: noise_split(1, 1, 1, 0), "C2"),
        (lambda: record_mu(1, 1, feature_norm=0, label_norm=1), "feature_norm"),
        (lambda: record_mu(1, 1, feature_norm=1, label_norm=-1), "label_norm"),
        (lambda: record_mu(-1, 1, feature_norm=1, label_norm=1), "s1"),
    ],
)
def test_what_is_out_of_range_is_refused(call: Callable[[], float], name: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{name} = "):
        call()
