"""Membership inference against brute force, and its claims over many drawn runs."""

import math
from dataclasses import astuple

import numpy as np
import pytest
from scipy.stats import binom, norm

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.attacks.membership import (
    evaluate,
    likelihood_ratio,
    logit_confidence,
    loss_threshold,
    roc,
)


def drawn(size: int, gap: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of which those of the members are larger by a gap in the mean, with ties."""
    draws = np.random.default_rng(seed)
    members = draws.random(size) < 0.5
    return (draws.normal(size=size) + gap * members).round(1), members


def test_auc_roc_and_rates_are_those_of_counting() -> None:
    scores, members = drawn(150, 1.0, 0)
    found = evaluate(scores, members, delta=0.0, limits=(0.0, 0.05, 1.0))
    inside, outside = scores[members], scores[~members]
    above = (inside[:, None] > outside).mean() + (inside[:, None] == outside).mean() / 2
    assert found.auc == pytest.approx(above)
    alarms, hits = roc(scores, members)
    expected = [(0.0, 0.0)] + [
        ((outside >= t).mean(), (inside >= t).mean()) for t in np.unique(scores)[::-1]
    ]
    np.testing.assert_allclose(np.stack([alarms, hits], axis=1), expected)
    for rate in found.rates:
        allowed = [point for point in expected if point[0] <= rate.limit]
        assert (rate.fpr, rate.tpr) == pytest.approx(max(allowed))
        assert rate.low < rate.tpr <= rate.high or rate.tpr == 0


def test_the_interval_of_a_rate_holds_as_often_as_it_says() -> None:
    """The true rate of the threshold that was drawn; 95 %, within 3 standard errors below."""
    kept, runs = 0, 200
    for seed in range(runs):
        draws = np.random.default_rng(seed)
        members = np.arange(400) % 4 < 2
        scores = draws.normal(size=400) + members
        (rate,) = evaluate(scores, members, delta=0.0, limits=(0.1,)).rates
        barrier = np.sort(scores[~members])[-21]  # 20 of 200 are above
        kept += rate.low <= norm.sf(barrier - 1) <= rate.high
    assert kept / runs > 0.95 - 3 * math.sqrt(0.95 * 0.05 / runs)


def test_scores_of_chance_show_nothing() -> None:
    """The advantage has no bias, and the bound is wrong no more often than it says."""
    found = [evaluate(*drawn(400, 0.0, seed), delta=1e-5) for seed in range(200)]
    advantages = np.array([one.advantage for one in found])
    assert abs(advantages.mean()) < 4 * advantages.std() / math.sqrt(len(found))
    wrong = sum(one.epsilon > 0 for one in found)
    assert wrong <= binom.ppf(0.9999, len(found), 0.05)


def test_the_bound_of_randomised_response_comes_near_its_epsilon_and_hardly_above() -> None:
    epsilon, bounds = 2.0, []
    for seed in range(60):
        draws = np.random.default_rng(seed)
        members = draws.random(4000) < 0.5
        answers = members ^ (draws.random(4000) > 1 / (1 + math.exp(-epsilon)))
        bounds.append(evaluate(answers, members, delta=0.0).epsilon)
    assert sum(bound > epsilon for bound in bounds) <= binom.ppf(0.9999, 60, 0.05)
    assert np.mean(bounds) > 1.6
    assert evaluate(answers, members, delta=0.05).epsilon < bounds[-1]


def test_both_kinds_of_error_count_in_the_bound() -> None:
    """Members that are never missed prove as much as non-members that are never named."""
    draws = np.random.default_rng(0)
    members = draws.random(2000) < 0.5
    some = draws.random(2000) < 0.3
    few_named = evaluate(members & some, members, delta=0.0).epsilon
    few_missed = evaluate(members | some, members, delta=0.0).epsilon
    assert min(few_named, few_missed) > 3


def test_the_logit_of_the_confidence_is_exact_also_at_its_ends() -> None:
    logits = np.random.default_rng(0).normal(size=(50, 4))
    labels = np.arange(50) % 4
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    own = shares[np.arange(50), labels]
    np.testing.assert_allclose(logit_confidence(logits, labels), np.log(own / (1 - own)))
    np.testing.assert_array_equal(
        logit_confidence([[1000.0, 0.0], [1000.0, 0.0]], [0, 1]), [1000.0, -1000.0]
    )


def shadows(count: int, records: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidences of shadow models, who is in them, and how hard each record is."""
    draws = np.random.default_rng(seed)
    hardness = 3 * draws.normal(size=records)
    inside = draws.permuted(np.tile(np.arange(count)[:, None] % 2 == 0, records), axis=0)
    spread = 0.5 + draws.random(records)
    return hardness + inside + spread * draws.normal(size=(count, records)), inside, hardness


def test_the_ratio_is_that_of_two_fitted_normal_laws() -> None:
    known, inside, _ = shadows(80, 12, 0)
    seen = np.linspace(-2, 2, 12)
    expected, apart = [], []
    for j in range(12):
        one, other = known[inside[:, j], j], known[~inside[:, j], j]
        laws = [norm(part.mean(), part.std(ddof=1)) for part in (one, other)]
        expected.append(laws[0].logpdf(seen[j]) - laws[1].logpdf(seen[j]))
        apart.append((seen[j] - other.mean()) / other.std(ddof=1))
    np.testing.assert_allclose(likelihood_ratio(seen, known, inside), expected)
    np.testing.assert_allclose(likelihood_ratio(seen, known, inside, online=False), apart)


def test_with_few_shadow_models_the_records_share_a_variance() -> None:
    known, inside, _ = shadows(8, 20, 0)
    seen = known.mean(axis=0)
    without = [known[~inside[:, j], j] for j in range(20)]
    shared = math.sqrt(np.mean([part.var(ddof=1) for part in without]))
    expected = [(s - part.mean()) / shared for s, part in zip(seen, without, strict=True)]
    np.testing.assert_allclose(likelihood_ratio(seen, known, inside, online=False), expected)


def test_the_ratio_finds_members_among_records_of_which_some_are_hard() -> None:
    known, inside, hardness = shadows(32, 2000, 1)
    draws = np.random.default_rng(2)
    members = draws.random(2000) < 0.5
    seen = hardness + members + draws.normal(size=2000)
    plain = evaluate(loss_threshold(np.logaddexp(0, -seen)), members, delta=0.0)
    for online in (True, False):
        ratio = evaluate(likelihood_ratio(seen, known, inside, online=online), members, delta=0.0)
        assert ratio.auc > plain.auc + 0.08  # standard errors of about 0.012
        assert ratio.rates[1].low > plain.rates[1].high
    assert plain.rates[1].tpr < 0.2


KNOWN, INSIDE, _ = shadows(4, 3, 0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: loss_threshold([1.0, math.inf]), "losses"),
        (lambda: logit_confidence([[1.0], [2.0]], [0, 0]), "logits"),
        (lambda: logit_confidence([[1.0, 2.0]], [0, 1]), "labels"),
        (lambda: likelihood_ratio(np.zeros(2), KNOWN, INSIDE), "shadows"),
        (lambda: likelihood_ratio(np.zeros(3), KNOWN, INSIDE.T), "inside"),
        (lambda: likelihood_ratio(np.zeros(3), KNOWN, INSIDE[:1] | INSIDE), "two shadow models"),
        (
            lambda: evaluate([1.0, 2.0, 3.0, 4.0], [True, False, True, False], delta=0),
            "both halves",
        ),
        (lambda: evaluate([1.0, 2.0], [True], delta=0), "members"),
        (lambda: evaluate(*drawn(20, 1.0, 0), delta=1), "delta = 1"),
        (lambda: evaluate(*drawn(20, 1.0, 0), delta=0, limits=(2,)), "limits = 2"),
        (lambda: evaluate(*drawn(20, 1.0, 0), delta=0, confidence=2), "confidence"),
    ],
)
def test_what_is_not_allowed_is_named(call, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        call()


def test_the_order_of_equal_scores_says_nothing() -> None:
    members = np.arange(40) < 20
    found = evaluate(np.zeros(40), members, delta=0.0)
    assert found.auc == 0.5
    assert found.advantage == 0
    assert all(astuple(rate)[1:3] == (0, 0) for rate in found.rates)
