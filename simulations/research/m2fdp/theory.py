"""Computes the paper's convergence bound, its noise term, and its step size, as printed.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
Theorem 1, Corollary 1, and the first part of the control algorithm. Theorem 1 is false as stated
(`theorem1_bound` has a counter-example), and its step size is too small to train with. The terms of
the noise by tier are in `flwr_privacy.m2fdp.control.gap`.
"""

import math
from collections.abc import Collection, Sequence

from flwr_privacy.accounting.gaussian import check_delta
from flwr_privacy.errors import (
    InvalidParameterError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from flwr_privacy.m2fdp.control.gap import abc_terms, check_alphas, check_shares

__all__ = [
    "corollary_gap",
    "stationarity_gap",
    "step_size",
    "theorem1_bound",
]

_SMALLEST = math.ulp(0.0)


def stationarity_gap(
    fanouts: Sequence[int],
    p: Sequence[float],
    *,
    M: int,
    K: int,
    q: float,
    eps: float,
    delta: float,
    G: float = 1.0,
    p_min: Sequence[float] | None = None,
    alpha: float | Sequence[float] = 1.0,
    dedup: bool = False,
    with_G2: bool = True,
    active_tiers: str | Collection[int] = "all",
    secure_fanouts: Sequence[int] | None = None,
) -> float:
    """Return nu, what the noise adds to the bound, M2FDP, Theorem 1, term (b).

    ``8 L M K^4 q^2 G^2 ln(1/delta) / eps^2`` times the sum over l of
    ``(1 - p_{l-1}^min)^2 (A_l + B_l + C_l)``. The number of subtrees below the cloud is not in it.

    Parameters
    ----------
    fanouts, p, p_min, alpha, dedup, secure_fanouts
        As in `abc_terms`.
    M : int
        Number of the model's weights, at least 1.
    K : int
        Local steps of a round (the most there are), at least 1.
    q : float
        Rate at which a local step samples a record, above 0 and at most 1.
    eps, delta : float
        The budget: eps above 0, delta strictly between 0 and 1.
    G : float, default 1.0
        Bound of the gradients' norms, at least 0.
    with_G2 : bool, default True
        Whether G is in it; the paper loses it between two lines.
    active_tiers : "all" or collection of int, default "all"
        Tiers l to add up. With local events at tier 1 alone only tiers 1 and 2 describe events that
        happen.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(stationarity_gap([2], [0.5], M=10, K=2, q=0.1, eps=1, delta=1e-5), 4)
    294.7309
    """
    terms = abc_terms(
        fanouts, p, p_min=p_min, alpha=alpha, dedup=dedup, secure_fanouts=secure_fanouts
    )
    depth = len(terms)
    _, _, smallest = check_shares(fanouts, p, p_min)
    above = (0.0, *smallest)  # p_{l-1}^min of tier l
    active = _active(active_tiers, depth)
    total = math.fsum((1 - above[tier - 1]) ** 2 * sum(terms[tier - 1]) for tier in active)
    check_flag("with_G2", with_G2)
    return _scale(depth, M, K, q, eps, delta) * (_squared(G) if with_G2 else 1.0) * total


def corollary_gap(
    fanouts: Sequence[int],
    p: Sequence[float],
    *,
    M: int,
    K: int,
    q: float,
    eps: float,
    delta: float,
    m: int | None = None,
    alpha: float | Sequence[float] = 1.0,
) -> tuple[float, float]:
    """Return what the noise adds by Corollary 1: for secure subtrees, and term (c) for the others.

    With the same factor in front as nu (without G, as printed) they are the sums over l up to m of
    ``(1 - p_{l-1})^2 p_l alpha_l^2 / (s_l ... s_{L-1})^2`` and of ``(1 - p_{l-1})^2 (1 - p_l)
    alpha'^2 / (s_l ... s_m (s_{m+1} ... s_{L-1})^2)``. The paper has it that (c) grows by s_m with
    m; so does every term of its sum, which also gains one.

    Parameters
    ----------
    fanouts, p, M, K, q, eps, delta
        As in `stationarity_gap`; largest and smallest shares are the same.
    m : int, optional
        Lowest tier (farthest from the cloud) with an insecure aggregator, from 1 to L - 1.
        Default: the last one whose share is below 1.
    alpha : float or sequence of float, default 1.0
        As in `abc_terms`. The paper does not define alpha': the largest of them is taken.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, or no aggregator is insecure.
    """
    s, largest, _ = check_shares(fanouts, p, None)
    depth = len(s) + 1
    alphas = check_alphas(alpha, depth)
    if m is None:
        m = max((tier for tier, share in enumerate(p, start=1) if share < 1), default=None)
        if m is None:
            raise InvalidParameterError("p", list(p), "a share below 1: an insecure aggregator")
    check_integer("m", m, minimum=1, maximum=depth - 1)
    above = (0.0, *largest)
    trusted = distrusted = 0.0
    for tier in range(1, m + 1):
        factor = (1 - above[tier - 1]) ** 2
        share, noise = largest[tier - 1], alphas[tier - 1]
        trusted += factor * share * noise**2 / math.prod(s[tier - 1 :]) ** 2
        below = math.prod(s[tier - 1 : m]) * math.prod(s[m:]) ** 2
        distrusted += factor * (1 - share) * max(alphas) ** 2 / below
    scale = _scale(depth, M, K, q, eps, delta)
    return scale * trusted, scale * distrusted


def theorem1_bound(
    *,
    beta: float,
    T: int,
    K: int,
    G: float,
    decrease: float,
    sigma_sgd: float = 0.0,
    gap: float = 0.0,
) -> float:
    """Return the right side of Theorem 1 as printed. It is not a valid bound.

    ``2 beta decrease / sqrt(T + 1) + K (G^2 (1 + 1/beta) + sigma_sgd^2) / T + gap``, claimed for
    the mean over T rounds of the squared norm of the gradient with ``eta^t = gamma / sqrt(t + 1)``
    and ``gamma <= min(1/K, 1/T) / beta``. With such a gamma the first term grows like ``sqrt(T)``.

    Parameters
    ----------
    beta : float
        Smoothness of the losses, above 0.
    T : int
        Rounds, at least 1.
    K : int
        Local steps of a round (the most there are), at least 1.
    G : float
        Bound of the gradients' norms, at least 0.
    decrease : float
        ``F(w^1) - F(w^{T+1})``; Corollary 1 has ``F(w^1)``.
    sigma_sgd : float, default 0.0
        Bound of the standard deviation of a batch's gradient, at least 0.
    gap : float, default 0.0
        nu, of `stationarity_gap` or `corollary_gap`.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    One device with the loss ``w^2 / 2``, one step a round without noise, from ``w = 1``: the mean
    is 0.8047.

    >>> round(theorem1_bound(beta=1, T=100, K=1, G=1, decrease=0.1491337), 7)
    0.0496787
    """
    check_number("beta", beta, minimum=_SMALLEST)
    check_integer("T", T, minimum=1)
    check_integer("K", K, minimum=1)
    check_number("decrease", decrease)
    check_number("gap", gap, minimum=0)
    noise = _squared(G) * (1 + 1 / beta) + check_number("sigma_sgd", sigma_sgd, minimum=0) ** 2
    return 2 * beta * decrease / math.sqrt(T + 1) + K * noise / T + gap


def step_size(*, beta: float, previous_steps: int, total_steps: int, t: int) -> float:
    """Return the step size of a round by the paper's rule: too small to train with.

    ``gamma / sqrt(t + 1)`` with ``gamma = min(1 / K^{t-1}, 1 / tau) / beta``. Over a whole training
    the steps come to about 0.13 / beta where K = 20 and T = 200.

    Parameters
    ----------
    beta : float
        Smoothness of the losses, above 0.
    previous_steps : int
        Local steps of the round before, at least 1 (for the first round its own).
    total_steps : int
        Local steps of the whole training, tau, at least 1; it stands for the number of rounds.
    t : int
        Number of the round, from 1.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(step_size(beta=2, previous_steps=5, total_steps=1000, t=3), 9)
    0.00025
    """
    check_number("beta", beta, minimum=_SMALLEST)
    check_integer("previous_steps", previous_steps, minimum=1)
    check_integer("total_steps", total_steps, minimum=1)
    check_integer("t", t, minimum=1)
    return min(1 / previous_steps, 1 / total_steps) / beta / math.sqrt(t + 1)


def _active(active_tiers: str | Collection[int], depth: int) -> list[int]:
    if isinstance(active_tiers, str):
        check_choice("active_tiers", active_tiers, ("all",))
        return list(range(1, depth + 1))
    for tier in active_tiers:
        check_integer("active_tiers", tier, minimum=1)
    return [tier for tier in range(1, depth + 1) if tier in active_tiers]


def _scale(depth: int, M: int, K: int, q: float, eps: float, delta: float) -> float:
    """Return ``8 L M K^4 q^2 ln(1/delta) / eps^2``."""
    check_integer("M", M, minimum=1)
    check_integer("K", K, minimum=1)
    check_number("q", q, minimum=_SMALLEST, maximum=1)
    check_number("eps", eps, minimum=_SMALLEST)
    return 8 * depth * M * K**4 * q**2 * -math.log(check_delta(delta)) / eps**2


def _squared(G: float) -> float:
    return check_number("G", G, minimum=0) ** 2
