"""The paper's bound as printed, its parts, and why it is no bound."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp.control.gap import abc_terms
from flwr_privacy.simulations.research.m2fdp.theory import (
    corollary_gap,
    stationarity_gap,
    step_size,
    theorem1_bound,
)

DEFAULT: dict[str, Any] = {"M": 7840, "K": 20, "q": 0.05, "eps": 1.0, "delta": 1e-5}
TINY: dict[str, Any] = {"M": 10, "K": 2, "q": 0.1, "eps": 1.0, "delta": 1e-5}

CONFIGS = {"D1": (0.5, 0, 0), "D2": (0.5, 0, 1), "D3": (0.5, 1, 1), "D4": (1, 1, 1)}


def weighted(fanouts: Sequence[int], p: Sequence[float], dedup: bool = False) -> list[float]:
    """Return what every tier adds to nu, without the factor in front."""
    above = (0.0, *p)
    terms = abc_terms(fanouts, p, dedup=dedup)
    return [(1 - low) ** 2 * sum(term) for low, term in zip(above, terms, strict=True)]


def test_A14_terms_of_a_small_tree() -> None:
    assert abc_terms([2], [0.5]) == ((0.125, 0.125, 0.25), (1.0, 0.0, 1.0))
    assert sum(weighted([2], [0.5])) == pytest.approx(1.0)
    assert sum(weighted([2], [0.5], dedup=True)) == pytest.approx(0.625)


def test_A14_gap_of_a_small_tree() -> None:
    assert stationarity_gap([2], [0.5], **TINY) == pytest.approx(294.7309, rel=1e-6)
    assert stationarity_gap([2], [0.5], **TINY, dedup=True) == pytest.approx(184.2068, rel=1e-6)


def test_A14_terms_of_three_tiers() -> None:
    found = weighted([2, 3], [0.5, 0.5])
    assert found == pytest.approx([0.0833333, 0.0694444, 0.5], rel=1e-6)
    assert sum(found) == pytest.approx(0.6527778, rel=1e-6)
    assert sum(weighted([2, 3], [0.5, 0.5], dedup=True)) == pytest.approx(0.375)


@pytest.mark.parametrize("dedup", [False, True], ids=["printed", "dedup"])
def test_A14_terms_are_the_printed_sums(dedup: bool) -> None:
    """Against the formulas written out with indices, for random trees of four tiers."""
    generator = np.random.default_rng(14)
    for _ in range(20):
        L = 4
        s = dict(enumerate(map(int, generator.integers(1, 6, L - 1)), start=1))
        low = dict(enumerate(generator.uniform(0, 1, L - 1), start=1))
        high = {tier: low[tier] + generator.uniform(0, 1 - low[tier]) for tier in low} | {L: 1.0}
        a = dict(enumerate(generator.uniform(0.1, 3, L), start=1))
        found = abc_terms(
            list(s.values()),
            [high[tier] for tier in s],
            p_min=list(low.values()),
            alpha=list(a.values()),
            dedup=dedup,
        )
        for tier in range(1, L + 1):
            rest = math.prod(s[i] for i in range(tier, L))
            A = high[tier] * a[tier] ** 2 / rest**2
            B = 0.0
            for m in range(tier + 1 if dedup else tier, L):
                distrust = math.prod(1 - low[i] for i in range(tier, m))
                nodes = math.prod(s[i] for i in range(tier, m))
                devices = math.prod(s[i] for i in range(m, L))
                B += distrust * high[m] * a[m] ** 2 / (nodes * devices**2)
            C = math.prod(1 - low[i] for i in range(tier, L)) * a[L] ** 2 / rest
            if dedup and tier == L:
                C = 0.0
            assert found[tier - 1] == pytest.approx((A, B, C))


@pytest.mark.parametrize(
    ("p", "printed", "dedup"), [(0.0, 2.2, 1.2), (0.5, 0.64, 0.37), (1.0, 0.08, 0.04)]
)
def test_A15_sums_of_the_default_tree(p: float, printed: float, dedup: float) -> None:
    """Section 8.8."""
    assert sum(weighted([5], [p])) == pytest.approx(printed)
    assert sum(weighted([5], [p], dedup=True)) == pytest.approx(dedup)


@pytest.mark.parametrize(
    ("p", "expected"), [(0.0, 1.2708796e9), (0.5, 3.6971043e8), (1.0, 4.6213804e7)]
)
def test_A15_gap_of_the_default_tree(p: float, expected: float) -> None:
    assert stationarity_gap([5], [p], **DEFAULT) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("config", "expected"),
    [("D1", 2.6268869e9), ("D2", 1.5146980e8), ("D3", 3.1027334e6), ("D4", 5.6413335e5)],
)
def test_A15_gap_of_four_tiers(config: str, expected: float) -> None:
    found = stationarity_gap([4, 4, 4], CONFIGS[config], **DEFAULT)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "factor"),
    [({"K": 40}, 16), ({"q": 0.1}, 4), ({"eps": 0.5}, 4), ({"M": 15680}, 2), ({"delta": 1e-10}, 2)],
    ids=["K", "q", "eps", "M", "delta"],
)
def test_A15_how_the_gap_scales(change: dict[str, Any], factor: float) -> None:
    usual = stationarity_gap([5], [0.5], **DEFAULT)
    found = stationarity_gap([5], [0.5], **{**DEFAULT, **change})
    assert found == pytest.approx(factor * usual)


def test_the_gap_with_and_without_G() -> None:
    usual = stationarity_gap([5], [0.5], **DEFAULT)
    assert stationarity_gap([5], [0.5], **DEFAULT, G=3.0) == pytest.approx(9 * usual)
    assert stationarity_gap([5], [0.5], **DEFAULT, G=3.0, with_G2=False) == usual


def test_the_gap_of_some_tiers() -> None:
    tree: Any = ([4, 4, 4], CONFIGS["D1"])
    parts = [stationarity_gap(*tree, **DEFAULT, active_tiers={tier}) for tier in (1, 2, 3, 4)]
    assert sum(parts) == pytest.approx(stationarity_gap(*tree, **DEFAULT))
    two = stationarity_gap(*tree, **DEFAULT, active_tiers=(1, 2))
    assert two == pytest.approx(parts[0] + parts[1])
    # Section 8.9: the last tier dominates, a constant without any fan-out in it.
    assert parts[3] / sum(parts) == pytest.approx(2 / 2.27, abs=0.005)


def test_the_gap_with_other_fanouts_below_secure_nodes() -> None:
    """What enters at tier 1 belongs to secure subtrees, and everything else to the others."""
    p = [0.5, 0.5]
    same = abc_terms([2, 3], p, secure_fanouts=[2, 3])
    assert same == abc_terms([2, 3], p)
    fewer = abc_terms([2, 3], p, secure_fanouts=[2, 1])
    assert tuple(fewer[0]) == pytest.approx((same[0].A * 9, same[0].B + same[0].A * 8, same[0].C))
    assert fewer[1:] == same[1:]


@pytest.mark.parametrize(
    ("K", "T", "left", "right"),
    [(1, 100, 0.8047, 0.0497), (1, 1000, 0.9240, 0.0056), (20, 1000, 0.2469, 0.0688)],
)
def test_A16_theorem_1_is_not_a_bound(K: int, T: int, left: float, right: float) -> None:
    """One device, the loss ``w^2 / 2``, no noise, gradients of at most 1, and gamma = 1/T."""
    w, squares = 1.0, []
    for t in range(1, T + 1):
        squares.append(w**2)
        eta = min(1 / K, 1 / T) / math.sqrt(t + 1)
        w *= (1 - eta) ** K
    decrease = (1 - w**2) / 2
    bound = theorem1_bound(beta=1, T=T, K=K, G=1, decrease=decrease)
    assert float(np.mean(squares)) == pytest.approx(left, abs=5e-5)
    assert bound == pytest.approx(right, abs=5e-5)
    assert float(np.mean(squares)) > bound


def test_A16_the_printed_value() -> None:
    found = theorem1_bound(beta=1, T=100, K=1, G=1, decrease=0.1491337)
    assert found == pytest.approx(0.0496787, rel=1e-6)
    in_the_corollary = theorem1_bound(beta=1, T=100, K=1, G=1, decrease=0.5)  # F(w^1)
    assert in_the_corollary == pytest.approx(0.1195, abs=5e-5)


def test_A16_other_terms_of_theorem_1() -> None:
    usual = theorem1_bound(beta=2, T=10, K=5, G=3, decrease=0.0)
    assert usual == pytest.approx(5 * 9 * 1.5 / 10)
    more = theorem1_bound(beta=2, T=10, K=5, G=3, decrease=0.0, sigma_sgd=2.0, gap=7.0)
    assert more == pytest.approx(usual + 5 * 4 / 10 + 7)


def test_A17_step_rule() -> None:
    eta = step_size(beta=2.0, previous_steps=5, total_steps=1000, t=3)
    assert eta == pytest.approx(2.5e-4)
    assert eta * math.sqrt(3 + 1) == pytest.approx(5e-4)  # gamma
    assert step_size(beta=2.0, previous_steps=50, total_steps=10, t=3) == pytest.approx(1 / 200)


def test_A17_the_step_rule_cannot_train() -> None:
    """Section 8.1: all steps together, with K = 20, T = 200, times the largest gradient's slope."""
    steps = [step_size(beta=1.0, previous_steps=20, total_steps=4000, t=t) for t in range(1, 201)]
    assert 20 * sum(steps) == pytest.approx(0.1296, abs=5e-5)


def test_the_corollary_by_its_sums() -> None:
    s, p, a = [2, 3, 4], [0.5, 0.25, 1.0], [1.0, 2.0, 3.0, 4.0]
    factor = 8 * 4 * 10 * 2**4 * 0.1**2 * math.log(1e5)
    trusted, distrusted = corollary_gap(s, p, **TINY, alpha=a)
    first = 0.5 * 1 / (2 * 3 * 4) ** 2 + 0.5**2 * 0.25 * 4 / (3 * 4) ** 2
    second = 0.5 * 16 / (2 * 3 * 4**2) + 0.5**2 * 0.75 * 16 / (3 * 4**2)
    assert trusted == pytest.approx(factor * first)
    assert distrusted == pytest.approx(factor * second)
    assert corollary_gap(s, p, **TINY, alpha=a, m=2) == (trusted, distrusted)


def test_the_corollary_grows_with_the_lowest_insecure_tier() -> None:
    """Every term of (c) that is there before is s_m times as large after m became m."""
    s, p = [2, 3, 4], [0.5, 0.0, 0.0]
    found = [corollary_gap(s, p, **TINY, m=m)[1] for m in (1, 2, 3)]
    for m, (before, after) in enumerate(itertools.pairwise(found), start=2):
        added = corollary_gap_term(s, p, m)
        assert after - added == pytest.approx(s[m - 1] * before)


def corollary_gap_term(s: Sequence[int], p: Sequence[float], m: int) -> float:
    """Return the last term of the sum (c), l = m."""
    factor = 8 * 4 * 10 * 2**4 * 0.1**2 * math.log(1e5)
    return factor * (1 - p[m - 2]) ** 2 * (1 - p[m - 1]) / (s[m - 1] * math.prod(s[m:]) ** 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: abc_terms([5], [0.5, 0.5]), "p = [0.5, 0.5]: expected a share for each of the 1"),
        (lambda: abc_terms([5], [1.5]), "p = 1.5: expected a finite number from 0 to 1"),
        (lambda: abc_terms([0], [0.5]), "fanouts = 0: expected an integer of at least 1"),
        (lambda: abc_terms([5], [0.5], p_min=[0.6]), "p_min = [0.6]: expected shares of at most p"),
        (
            lambda: abc_terms([5], [0.5], alpha=[1.0]),
            "alpha = [1.0]: expected one number, or 2 of them",
        ),
        (
            lambda: abc_terms([5], [0.5], secure_fanouts=[5, 5]),
            "fanouts = [5, 5]: expected 1 numbers",
        ),
        (
            lambda: stationarity_gap([5], [0.5], **DEFAULT, active_tiers="some"),
            "active_tiers = 'some': expected one of 'all'",
        ),
        (
            lambda: stationarity_gap([5], [0.5], **{**DEFAULT, "q": 2.0}),
            "q = 2.0: expected a finite number from",
        ),
        (
            lambda: stationarity_gap([5], [0.5], **{**DEFAULT, "K": 0}),
            "K = 0: expected an integer of at least 1",
        ),
        (
            lambda: corollary_gap([5], [1.0], **DEFAULT),
            "p = [1.0]: expected a share below 1: an insecure aggregator",
        ),
        (
            lambda: corollary_gap([5], [0.5], **DEFAULT, m=2),
            "m = 2: expected an integer from 1 to 1",
        ),
        (
            lambda: theorem1_bound(beta=0.0, T=1, K=1, G=1, decrease=1),
            "beta = 0.0: expected a finite number",
        ),
        (
            lambda: step_size(beta=1.0, previous_steps=0, total_steps=1, t=1),
            "previous_steps = 0: expected an integer of at least 1",
        ),
        (
            lambda: step_size(beta=1.0, previous_steps=1, total_steps=1, t=0),
            "t = 0: expected an integer of at least 1",
        ),
    ],
)
def test_errors_name_the_parameter(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        call()
    assert message in str(caught.value)
