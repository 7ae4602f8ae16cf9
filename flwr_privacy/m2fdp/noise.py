"""Computes the noise of the paper's rule, and its variance in the global model.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
equation (2) and Proposition 1. The rule is not sound (it charges every local step as a release at
rate q, and its constant alpha only "exists"): `flwr_privacy.m2fdp.privacy` has the sound ones, and
what this one costs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from flwr_privacy.accounting.gaussian import check_delta
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.m2fdp.tree.tree import TierTree

from .schedule import EventSchedule

__all__ = ["noise_multiplier", "one_shot_sigma", "sigma", "tree_noise_var", "variance_by_tier"]

_SMALLEST = math.ulp(0.0)


def noise_multiplier(
    *, q: float, n_comp: int, eps: float, delta: float, alpha: float = 1.0
) -> float:
    """Return the paper's noise over the sensitivity, M2FDP, Proposition 1.

    ``alpha q sqrt(n_comp ln(1/delta)) / eps``. Claimed for ``eps < c_1 q n_comp`` with some c_1.

    Parameters
    ----------
    q : float
        Rate at which a local step samples a record, above 0 and at most 1.
    n_comp : int
        Compositions, at least 1: the largest number of local steps of a round times the rounds.
    eps, delta : float
        The budget of the whole training: eps above 0, delta strictly between 0 and 1.
    alpha : float, default 1.0
        The constant of the rule, above 0; the paper does not give it.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(noise_multiplier(q=0.05, n_comp=4000, eps=1, delta=1e-5), 6)
    10.72983
    """
    check_number("q", q, minimum=_SMALLEST, maximum=1)
    check_integer("n_comp", n_comp, minimum=1)
    check_number("eps", eps, minimum=_SMALLEST)
    check_delta(delta)
    check_number("alpha", alpha, minimum=_SMALLEST)
    return alpha * q * math.sqrt(n_comp * -math.log(delta)) / eps


def sigma(
    Delta: float, *, q: float, n_comp: int, eps: float, delta: float, alpha: float = 1.0
) -> float:
    """Return the paper's standard deviation of the noise on an entry, M2FDP, Proposition 1.

    Parameters
    ----------
    Delta : float
        L2 sensitivity (`flwr_privacy.m2fdp.sensitivity.sensitivity`), at least 0.
    q, n_comp, eps, delta, alpha
        As in `noise_multiplier`.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(sigma(0.4, q=0.05, n_comp=4000, eps=1, delta=1e-5), 6)
    4.291932
    """
    check_number("Delta", Delta, minimum=0)
    return Delta * noise_multiplier(q=q, n_comp=n_comp, eps=eps, delta=delta, alpha=alpha)


def one_shot_sigma(Delta: float, *, eps: float, delta: float) -> float:
    """Return the classical noise for one release, M2FDP, (2): ``sqrt(2 ln(1.25/delta)) Delta/eps``.

    Parameters
    ----------
    Delta : float
        L2 sensitivity, at least 0.
    eps : float
        Above 0 and at most 1; the formula is proven below 1 only.
    delta : float
        Strictly between 0 and 1.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(one_shot_sigma(0.4, eps=1, delta=1e-5), 6)
    1.937922
    """
    check_number("Delta", Delta, minimum=0)
    check_number("eps", eps, minimum=_SMALLEST, maximum=1)
    return math.sqrt(2 * math.log(1.25 / check_delta(delta))) * Delta / eps


def tree_noise_var(
    nodes: Iterable[tuple[int, float, float]], n_events: Mapping[int, int] | None = None
) -> float:
    """Return the variance of the noise that one round leaves in an entry of the global model.

    Exact (not in the paper) up to what noise does to later gradients of the round: the sum of
    ``W^2 sigma^2 (1 + sum over l < b of |K_l|)`` over the nodes that add noise.

    Parameters
    ----------
    nodes : iterable of (int, float, float)
        For every node that adds noise: its tier b, its weight W in the global model, and the
        standard deviation of its noise.
    n_events : Mapping of int to int, optional
        Local events of a round by tier, ``|K_l|``. Default: none.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(tree_noise_var([(1, 0.1, 0.2)] * 5 + [(2, 0.02, 1.0)] * 25, {1: 3}), 6)
    0.042
    """
    events = dict(n_events or {})
    for tier, count in events.items():
        check_integer("n_events", tier, minimum=1)
        check_integer("n_events", count, minimum=0)
    variance = 0.0
    for tier, weight, noise in nodes:
        check_integer("tier", tier, minimum=1)
        check_number("weight", weight, minimum=0, maximum=1)
        check_number("sigma", noise, minimum=0)
        releases = 1 + sum(count for at, count in events.items() if at < tier)
        variance += (weight * noise) ** 2 * releases
    return variance


def variance_by_tier(
    tree: TierTree, sigmas: Mapping[int, float | Sequence[float]], schedule: EventSchedule
) -> dict[int, float]:
    """Return the variance of `tree_noise_var` by the tier at which the noise was added.

    Noise of a local event stays: it is handed to all devices below the event's top node, so it has
    the same weight in the global model as that of the last event.

    Parameters
    ----------
    tree : TierTree
        The tree; everybody takes part.
    sigmas : Mapping of int to float or sequence of float
        By tier, the standard deviation of the noise that a node adds: one number, or one for each
        of its releases in the round. Needed for the tiers of ``tree.injectors()``.
    schedule : EventSchedule
        The events of the round.

    Returns
    -------
    dict of int to float
        Variance of an entry by tier; only the tiers that add noise. Their sum is the whole.

    Raises
    ------
    InvalidParameterError
        If a tier has no standard deviation, or as many as it has no releases.

    Examples
    --------
    >>> tree = TierTree.of_fanouts((10, 5), p=0.5)
    >>> found = variance_by_tier(tree, {1: 0.2, 2: 1.0}, EventSchedule(steps=20, events={1: 5}))
    >>> {tier: round(variance, 6) for tier, variance in found.items()}
    {1: 0.002, 2: 0.04}
    """
    weights: dict[int, float] = {}  # sums of squares
    for node in tree.injectors():
        tier = tree.tier(node)
        weights[tier] = weights.get(tier, 0.0) + tree.weight(node) ** 2
    variances = {}
    for tier, weight in sorted(weights.items()):
        releases = schedule.releases(tier, tree.depth)
        variances[tier] = weight * sum(s**2 for s in _sigmas(sigmas, tier, releases))
    return variances


def _sigmas(
    sigmas: Mapping[int, float | Sequence[float]], tier: int, releases: int
) -> Sequence[float]:
    """Return the standard deviations of the noise of a node's releases in a round."""
    if tier not in sigmas:
        raise InvalidParameterError("sigmas", dict(sigmas), f"a standard deviation for tier {tier}")
    found = sigmas[tier]
    listed = [found] * releases if isinstance(found, int | float) else list(found)
    if len(listed) != releases:
        allowed = f"one for each of the {releases} releases of a round at tier {tier}"
        raise InvalidParameterError("sigmas", listed, allowed)
    for value in listed:
        check_number("sigmas", value, minimum=0)
    return listed
