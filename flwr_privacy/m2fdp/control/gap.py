"""The noise term of Theorem 1, as printed, and how it depends on how many devices take part.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
Theorem 1, term (b). The theorem is false as stated
(`flwr_privacy.simulations.research.m2fdp.theory.theorem1_bound` has a counter-example). What is
left is nu, the part that the noise adds, as a heuristic cost for the controller. By tier l it has
three terms (s_l: smallest fan-out of tier l, p_l: share of secure children at tier l below insecure
parents, ``p_0 = 0``, ``p_L = 1``)::

    A_l = p_l^max alpha_l^2 / (s_l ... s_{L-1})^2                  noise that enters at tier l
    B_l = sum over m from l to L-1 of (1 - p_l^min) ... (1 - p_{m-1}^min) p_m^max alpha_m^2
              / (s_l ... s_{m-1} (s_m ... s_{L-1})^2)              ... at a tier m from l on
    C_l = (1 - p_l^min) ... (1 - p_{L-1}^min) alpha_L^2 / (s_l ... s_{L-1})    ... at the devices

B_l repeats A_l with m = l, and at the devices' tier A_L and C_L are one and the same.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flwr_privacy.errors import InvalidParameterError, check_flag, check_integer, check_number

__all__ = ["BoundTerms", "GapCoefficients", "abc_terms", "check_alphas", "check_shares"]


class BoundTerms(NamedTuple):
    """The noise terms of Theorem 1 at one tier."""

    A: float
    B: float
    C: float


def abc_terms(
    fanouts: Sequence[int],
    p: Sequence[float],
    *,
    p_min: Sequence[float] | None = None,
    alpha: float | Sequence[float] = 1.0,
    dedup: bool = False,
    secure_fanouts: Sequence[int] | None = None,
) -> tuple[BoundTerms, ...]:
    """Return the terms A_l, B_l, C_l for the tiers l from 1 to L.

    Parameters
    ----------
    fanouts : sequence of int
        Smallest fan-outs ``s_1, ..., s_{L-1}``, at least 1; none for a star.
    p : sequence of float
        ``p_1^max, ..., p_{L-1}^max``, from 0 to 1 (`TierTree.ratios`).
    p_min : sequence of float, optional
        ``p_1^min, ..., p_{L-1}^min``. Default: `p`.
    alpha : float or sequence of float, default 1.0
        Constants of the noise rule: one for all tiers, or ``alpha_1, ..., alpha_L``; at least 0.
    dedup : bool, default False
        Whether to count what is printed twice only once: B_l then starts at ``m = l + 1``, and C_L
        is 0.
    secure_fanouts : sequence of int, optional
        Other fan-outs for noise that enters at tier 1, where the controller asks fewer devices
        below secure nodes of tier 1 than below the others. Default: `fanouts`.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, or the lengths differ.

    Examples
    --------
    >>> [tuple(terms) for terms in abc_terms([2], [0.5])]
    [(0.125, 0.125, 0.25), (1.0, 0.0, 1.0)]
    """
    check_flag("dedup", dedup)
    depth = len(fanouts) + 1
    insecure, largest, smallest = check_shares(fanouts, p, p_min)
    secure = insecure if secure_fanouts is None else _fanouts(secure_fanouts, depth)
    squares = [a**2 for a in check_alphas(alpha, depth)]

    def entered(first: int, at: int) -> float:
        """Return the term of noise that enters at tier `at`, with averages up to tier `first`."""
        s = secure if at == 1 else insecure
        devices, nodes = math.prod(s[at - 1 :]), math.prod(s[first - 1 : at - 1])
        distrusted = math.prod(1 - low for low in smallest[first - 1 : at - 1])
        return distrusted * largest[at - 1] * squares[at - 1] / (nodes * devices**2)

    terms = []
    for tier in range(1, depth + 1):
        inner = range(tier + 1 if dedup else tier, depth)
        A = entered(tier, tier)
        B = math.fsum(entered(tier, at) for at in inner)
        C = 0.0 if dedup and tier == depth else entered(tier, depth)
        terms.append(BoundTerms(A, B, C))
    return tuple(terms)


@dataclass(frozen=True, kw_only=True)
class GapCoefficients:
    """The sum over the tiers in nu, for any number of devices under the lowest aggregators.

    Write the lowest fan-out s_{L-1} as s_sec where noise enters at tier 1, which is a secure
    subtree as a whole, and as s_ins where it enters further down. Then

        sum over l of (1 - p_{l-1})^2 (A_l + B_l + C_l)
            = secure / s_sec^2 + averaged / s_ins^2 + devices / s_ins + constant

    for a term has the lowest fan-out squared where its noise enters at an aggregator, once where it
    enters at the devices, and not at all at the devices' own tier.

    Parameters
    ----------
    secure, averaged, devices, constant : float
        The factors, at least 0.

    Examples
    --------
    >>> GapCoefficients.of([2, 3], [0.5, 0.5], dedup=True)
    GapCoefficients(secure=0.125, averaged=0.25, devices=0.25, constant=0.25)
    """

    secure: float
    averaged: float
    devices: float
    constant: float

    @classmethod
    def of(
        cls,
        fanouts: Sequence[int],
        p: Sequence[float],
        *,
        p_min: Sequence[float] | None = None,
        alpha: float | Sequence[float] = 1.0,
        dedup: bool = False,
        active_tiers: str | Collection[int] = "all",
    ) -> "GapCoefficients":
        """Return the factors for a tree; the last of its fan-outs has no influence.

        Parameters
        ----------
        fanouts, p, p_min, alpha, dedup
            As in `abc_terms`; at least one fan-out.
        active_tiers : "all" or collection of int, default "all"
            Tiers l to add up. With local events at tier 1 alone only tiers 1 and 2 describe events
            that happen.

        Raises
        ------
        InvalidParameterError
            If a value is out of range, or the lengths differ.
        """
        terms = abc_terms((*fanouts[:-1], 1), p, p_min=p_min, alpha=alpha, dedup=dedup)
        above = (0.0, *(p if p_min is None else p_min))  # p_{l-1}^min of tier l
        secure = averaged = devices = constant = 0.0
        for tier, (A, B, C) in enumerate(terms, start=1):
            if not isinstance(active_tiers, str) and tier not in active_tiers:
                continue
            weight = (1 - above[tier - 1]) ** 2
            if tier == len(terms):
                constant += weight * (A + B + C)
                continue
            if tier == 1:  # A_1 is printed twice: B_1 begins with it
                repeated = 0.0 if dedup else A
                secure, averaged = A + repeated, max(0.0, B - repeated)
            else:
                averaged += weight * (A + B)
            devices += weight * C
        return cls(secure=secure, averaged=averaged, devices=devices, constant=constant)

    def total(self, secure: Any, insecure: Any) -> Any:
        """Return the sum for s_sec and s_ins, numbers or arrays of floats."""
        below_insecure = self.averaged / insecure**2 + self.devices / insecure
        return self.secure / secure**2 + below_insecure + self.constant


def check_shares(
    fanouts: Sequence[int], p: Sequence[float], p_min: Sequence[float] | None
) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    """Return the fan-outs and the largest and smallest shares, where the devices' are 1."""
    depth = len(fanouts) + 1
    s = _fanouts(fanouts, depth)
    both = []
    for name, shares in (("p", p), ("p_min", p if p_min is None else p_min)):
        if len(shares) != depth - 1:
            allowed = f"a share for each of the {depth - 1} tiers of aggregators"
            raise InvalidParameterError(name, list(shares), allowed)
        both.append([check_number(name, share, minimum=0, maximum=1) for share in shares])
    largest, smallest = both
    if any(low > high for low, high in zip(smallest, largest, strict=True)):
        raise InvalidParameterError("p_min", smallest, f"shares of at most p = {largest}")
    return s, (*largest, 1.0), (*smallest, 1.0)


def check_alphas(alpha: float | Sequence[float], depth: int) -> tuple[float, ...]:
    """Return the constants of the noise rule by tier, `depth` of them, checked."""
    alphas = (alpha,) * depth if isinstance(alpha, int | float) else tuple(alpha)
    if len(alphas) != depth:
        raise InvalidParameterError("alpha", alpha, f"one number, or {depth} of them")
    return tuple(check_number("alpha", a, minimum=0) for a in alphas)


def _fanouts(fanouts: Sequence[int], depth: int) -> tuple[int, ...]:
    found = tuple(check_integer("fanouts", fanout, minimum=1) for fanout in fanouts)
    if len(found) != depth - 1:
        raise InvalidParameterError("fanouts", list(fanouts), f"{depth - 1} numbers")
    return found
