"""The noise term of Theorem 1 as a function of how many devices take part.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
Theorem 1, term (b), which is a cost and no bound: see `bounds`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .bounds import abc_terms

__all__ = ["GapCoefficients"]


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
        fanouts, p, p_min, alpha, dedup, active_tiers
            As in `stationarity_gap`; at least one fan-out.

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
