"""States what an epsilon means for an attacker: how well two neighbouring data sets are told apart.

An attacker sees all that the adversary of the guarantee sees, knows everything but which of two
neighbouring data sets was used, and says of one of them that it was it. For neighbours with one
element more or less that is to infer membership.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr_privacy.accounting import ACCOUNTANTS, Accountant, Charge, new_accountant
from flwr_privacy.errors import check_choice, check_number

__all__ = ["DELTAS", "FALSE_POSITIVES", "AttackerBound", "attacker_of"]

FALSE_POSITIVES = (0.01, 0.001)
"""Rates of false positives at which true positives are stated."""

DELTAS = (1e-5, 1e-6, 1e-8)
"""At which epsilon is stated besides, so that guarantees with other deltas can be compared."""

_STEPS = 24  # of a search; every point on the way is a bound
_BEYOND = 1 + 1e-12  # whatever the order in which gaps are added up
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, kw_only=True)
class AttackerBound:
    """Upper bounds of what an attacker attains against one client.

    Parameters
    ----------
    accountant : {"gdp", "rdp", "pld"}
        Whose curve of epsilon and delta they are read from.
    advantage : float
        Rate of true positives minus rate of false positives, at the worst of all rates.
    true_positives : tuple of float
        Rate of true positives at each of `FALSE_POSITIVES`.
    epsilons : tuple of float
        Epsilon at each of `DELTAS`; may be infinite.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    accountant: str
    advantage: float
    true_positives: tuple[float, ...]
    epsilons: tuple[float, ...]

    def __post_init__(self) -> None:
        check_choice("accountant", self.accountant, ACCOUNTANTS)
        for rate in (self.advantage, *self.true_positives):
            check_number("rate", rate, minimum=0, maximum=1)
        for epsilon in self.epsilons:
            if epsilon != math.inf:
                check_number("epsilon", epsilon, minimum=0)

    def to_dict(self) -> dict[str, Any]:
        """Return the bounds as plain values, those of a rate or a delta under its number."""
        return {
            "accountant": self.accountant,
            "advantage": self.advantage,
            "true_positives": dict(
                zip(map(str, FALSE_POSITIVES), self.true_positives, strict=True)
            ),
            "epsilon": dict(zip(map(str, DELTAS), self.epsilons, strict=True)),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AttackerBound":
        """Read the result of `to_dict`.

        Raises
        ------
        KeyError
            If a value is missing.
        InvalidParameterError
            If a value is not allowed.
        """
        rates, epsilons = values["true_positives"], values["epsilon"]
        return cls(
            accountant=values["accountant"],
            advantage=values["advantage"],
            true_positives=tuple(rates[str(rate)] for rate in FALSE_POSITIVES),
            epsilons=tuple(epsilons[str(delta)] for delta in DELTAS),
        )

    def lines(self) -> list[tuple[str, str]]:
        """Return the bounds as pairs of a name and a text, for a page."""
        rates = zip(FALSE_POSITIVES, self.true_positives, strict=True)
        own = [f"{rate:.4g} at {false:g} false positives" for false, rate in rates]
        pairs = zip(DELTAS, self.epsilons, strict=True)
        others = [f"{epsilon:.6g} at delta {delta:g}" for delta, epsilon in pairs]
        return [
            ("Attacker's advantage", f"at most {self.advantage:.4g} ({self.accountant})"),
            ("Attacker's true positives", f"at most {'; '.join(own)}"),
            ("Other deltas", f"epsilon {'; '.join(others)}"),
        ]


def attacker_of(charges: Iterable[Charge], accountant: str) -> AttackerBound:
    """Return what the charges of one client allow an attacker, by the curve of an accountant.

    Parameters
    ----------
    charges : iterable of Charge
        What the client was charged.
    accountant : {"gdp", "rdp", "pld"}
        Whose curve: one that knows the charges.

    Notes
    -----
    Releases that are (epsilon, delta)-DP have, at a rate x of false positives, at most
    ``exp(epsilon) x + delta`` true positives, and at most ``1 - exp(-epsilon) (1 - delta - x)``;
    both together bound the advantage by ``(exp(epsilon) - 1 + 2 delta) / (exp(epsilon) + 1)``
    (Kairouz, Oh, Viswanath, *The composition theorem for differential privacy*, ICML 2015). The
    least of these over the whole curve is what is attained (Dong, Roth, Su, *Gaussian differential
    privacy*, proposition 2.12). Below the gap of the charges the curve says nothing.

    Examples
    --------
    >>> bound = attacker_of([Charge(noise_multiplier=1.0, neighbours="add_remove")], "gdp")
    >>> round(bound.advantage, 4), [round(rate, 4) for rate in bound.true_positives]
    (0.3829, [0.0924, 0.0183])
    """
    curve = new_accountant(accountant, charges)

    def advantage(epsilon: float) -> float:
        half = math.tanh(epsilon / 2)
        return min(1.0, half + curve.delta(epsilon) * (1 - half))

    return AttackerBound(
        accountant=accountant,
        advantage=_least(advantage, curve, math.log(2)),
        true_positives=tuple(_true_positives(curve, rate) for rate in FALSE_POSITIVES),
        epsilons=tuple(curve.epsilon(delta) for delta in DELTAS),
    )


def _true_positives(curve: Accountant, false: float) -> float:
    """Return the least bound of true positives at a rate of false positives."""

    def bound(epsilon: float) -> float:
        delta = curve.delta(epsilon)
        one, other = math.exp(epsilon) * false + delta, (1 - delta - false) * math.exp(-epsilon)
        return min(1.0, one, 1 - max(0.0, other))

    return _least(bound, curve, -math.log(false))  # beyond it the first is above 1


def _least(bound: Callable[[float], float], curve: Accountant, high: float) -> float:
    """Return about the least value of a bound that falls and then grows with epsilon."""
    low = _BEYOND * sum(charge.gap * charge.count for charge in curve.charges)
    high = max(low, high)
    least = min(bound(low), bound(high))
    for _ in range(_STEPS):
        length = _GOLDEN * (high - low)
        left, right = bound(high - length), bound(low + length)
        least = min(least, left, right)
        low, high = (low, low + length) if left <= right else (high - length, high)
    return least
