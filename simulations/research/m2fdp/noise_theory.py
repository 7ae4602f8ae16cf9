"""Computes the paper's sensitivities, and the variance of the noise in the global model.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
equation (2) and Lemma 1, as printed. The lemma does not hold after an average without noise:
`flwr_privacy.m2fdp.sensitivity` has what a training uses.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from flwr_privacy.accounting.gaussian import check_delta
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.m2fdp.schedule import EventSchedule
from flwr_privacy.m2fdp.tree.tree import TierTree

__all__ = [
    "one_shot_sigma",
    "sensitivity",
    "sensitivity_node",
    "sensitivity_smooth",
    "smooth_factor",
    "tree_noise_var",
    "variance_by_tier",
]

_SMALLEST = math.ulp(0.0)
_LARGEST_EXPONENT = 700.0  # of e, in a float


def sensitivity(tier: int, *, eta: float, K: int, G: float, fanouts: Sequence[int]) -> float:
    """Return the paper's L2 sensitivity of a node's upload after a round, M2FDP, Lemma 1.

    ``2 eta K G / (s_tier * ... * s_{L-1})``, and ``2 eta K G`` for a device (tier L).

    Parameters
    ----------
    tier : int
        From 1 to L, where L is one more than the number of fan-outs.
    eta : float
        Step size, at least 0.
    K : int
        Local steps of the round, at least 1.
    G : float
        Bound of the gradients' L2 norms, at least 0.
    fanouts : sequence of int
        The smallest fan-outs ``s_1, ..., s_{L-1}``, at least 1; none for a star.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> [sensitivity(tier, eta=0.01, K=20, G=1.0, fanouts=(5,)) for tier in (1, 2)]
    [0.08, 0.4]
    """
    check_integer("tier", tier, minimum=1, maximum=len(fanouts) + 1)
    for fanout in fanouts:
        check_integer("fanouts", fanout, minimum=1)
    return _moved(eta, K, G) / math.prod(fanouts[tier - 1 :])


def sensitivity_node(path_weights: Iterable[float], *, eta: float, K: int, G: float) -> float:
    """Return Lemma 1 for one node of any tree: ``2 eta K G`` times the largest weight.

    Parameters
    ----------
    path_weights : iterable of float
        For every device below the node that took part: its weight in the node's average (the
        product of the weights along the path), above 0 and at most 1.
    eta, K, G
        As in `sensitivity`.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, or there is no weight.
    """
    weights = [check_number("path_weights", weight, maximum=1) for weight in path_weights]
    if not weights or min(weights) <= 0:
        raise InvalidParameterError("path_weights", weights, "at least one, all of them above 0")
    return _moved(eta, K, G) * max(weights)


def sensitivity_smooth(
    tier: int, *, eta: float, K: int, G: float, fanouts: Sequence[int], beta: float
) -> float:
    """Return Lemma 1 times `smooth_factor`: enough for beta-smooth losses, whatever the events.

    Parameters
    ----------
    tier, eta, K, G, fanouts
        As in `sensitivity`.
    beta : float
        Smoothness of the losses, at least 0.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.
    """
    check_number("beta", beta, minimum=0)
    lemma = sensitivity(tier, eta=eta, K=K, G=G, fanouts=fanouts)
    return lemma * smooth_factor(K, eta * beta)


def smooth_factor(K: int, eta_beta: float) -> float:
    """Return ``((1 + eta beta)^K - 1) / (eta beta K)``: how much smooth losses can add to Lemma 1.

    It is for a clean event after every step, which is worst; infinite if no float holds it.

    Parameters
    ----------
    K : int
        Local steps since the last noised release, at least 1.
    eta_beta : float
        Step size times smoothness, at least 0; 0 gives 1.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(smooth_factor(20, 1 / 20), 4)
    1.6533
    """
    check_integer("K", K, minimum=1)
    check_number("eta_beta", eta_beta, minimum=0)
    exponent = K * math.log1p(eta_beta)
    if exponent >= _LARGEST_EXPONENT:
        return math.inf
    return math.expm1(exponent) / (eta_beta * K) if eta_beta * K > 0 else 1.0


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


def _moved(eta: float, K: int, G: float) -> float:
    check_number("eta", eta, minimum=0)
    check_integer("K", K, minimum=1)
    check_number("G", G, minimum=0)
    return 2 * eta * K * G
