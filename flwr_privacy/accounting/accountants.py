"""Accountants: compute the total cost of charges, and whether one more exceeds a cap.

`Accountant.epsilon` says what releases cost whose noise was planned in advance. Where the noise of
a release may depend on earlier releases, a total is no statement; what is proven then is the cap
that `Accountant.would_exceed` keeps, and not for every accountant:

=======  ===================================  ================================  ===============
name     charges                              total                             cap, noise
                                                                                chosen late
=======  ===================================  ================================  ===============
``gdp``  Gaussian, not sampled                exact                             proven
``rdp``  Gaussian; Laplace if not sampled     upper bound, often 10 to 20 %     proven
                                              too large
``pld``  all but sampled Laplace noise where  upper bound, nearly exact         not proven: for
         an element is replaced                                                 plans that are
                                                                                fixed in advance
=======  ===================================  ================================  ===============

A node caps with ``gdp`` and ``rdp`` only. All charges of an accountant are for the same neighbours
(`flwr_privacy.accounting.neighbours`); others are refused, and nothing is converted in silence.

A total gap g makes (epsilon, delta) into (epsilon + g, exp(g) delta). The other term of
`flwr_privacy.privacy.noise.discretisation_gap` is left out: 1e-30 exp(epsilon) per release, added
to delta, is nothing until epsilon is about 30.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_choice, check_number

from .charges import GAUSSIAN, REPLACE_ONE, Charge, check_alike
from .curves import MOST_PARTS, ORDERS, composed_pld, gaussian_mu, rdp_curve
from .gaussian import check_delta, delta_of, epsilon_of

__all__ = ["ACCOUNTANTS", "Accountant", "fitting", "new_accountant", "spent", "supports"]

Releases = tuple[tuple[Charge, int], ...]
"""Charges with a count of 1, oldest first, each with the number of times it was made."""

_LARGEST_GAP = 100.0  # beyond it nothing is guaranteed
_ROUNDING = 1e-15  # of delta, per composition in a PLD: what Fourier transforms may lose


class Accountant(ABC):
    """The charges so far and their total cost: base of the accountants.

    Parameters
    ----------
    charges : iterable of Charge, default ()
        Charges to begin with, oldest first.

    Raises
    ------
    InvalidParameterError
        If the accountant does not know the cost of a charge, or charges are for different
        neighbours.
    """

    name: ClassVar[str]
    known: ClassVar[str]

    def __init__(self, charges: Iterable[Charge] = ()) -> None:
        self._counts: dict[Charge, int] = {}
        for charge in charges:
            self.compose(charge)

    @property
    def charges(self) -> tuple[Charge, ...]:
        """The charges so far, oldest first; equal charges are merged into the oldest."""
        return tuple(replace(charge, count=count) for charge, count in self._counts.items())

    def compose(self, charge: Charge) -> None:
        """Add a charge.

        Raises
        ------
        InvalidParameterError
            If the accountant does not know its cost, or it is for other neighbours than the
            charges before it; nothing is added then.
        """
        single = self._single(charge)
        self._counts[single] = self._counts.get(single, 0) + charge.count

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of the charges so far: 0 without charges, infinite without a bound.

        Parameters
        ----------
        delta : float
            Strictly between 0 and 1.

        Raises
        ------
        InvalidParameterError
            If `delta` is out of range.
        """
        check_delta(delta)
        releases = tuple(self._counts.items())
        if not releases:
            return 0.0
        gap = _gap(releases)
        if gap > _LARGEST_GAP:
            return math.inf
        return self._epsilon(releases, delta * math.exp(-gap)) + gap

    def delta(self, epsilon: float) -> float:
        """Return the delta of the charges so far: 0 without charges.

        Parameters
        ----------
        epsilon : float
            At least 0.

        Raises
        ------
        InvalidParameterError
            If `epsilon` is out of range.
        """
        check_number("epsilon", epsilon, minimum=0)
        releases = tuple(self._counts.items())
        return self._delta_beyond_gap(releases, epsilon) if releases else 0.0

    def would_exceed(self, charge: Charge, *, epsilon: float, delta: float) -> bool:
        """Return whether one more charge would exceed a cap; nothing is added.

        Parameters
        ----------
        charge : Charge
            The next release.
        epsilon, delta : float
            The cap, the same for all releases: epsilon above 0, delta strictly between 0 and 1.

        Raises
        ------
        InvalidParameterError
            If the accountant does not know the cost of the charge, it is for other neighbours than
            the charges before it, or the cap is out of range.
        """
        check_number("epsilon", epsilon, minimum=math.ulp(0.0))
        check_delta(delta)
        return self._exceeds(tuple(self._with(charge).items()), epsilon, delta)

    def _with(self, charge: Charge) -> dict[Charge, int]:
        single = self._single(charge)
        return {**self._counts, single: self._counts.get(single, 0) + charge.count}

    def _single(self, charge: Charge) -> Charge:
        if not self._knows(charge):
            raise InvalidParameterError("charge", charge, f"for '{self.name}' {self.known}")
        if self._counts:
            check_alike(next(iter(self._counts)), charge)
        # A ledger is added up for every check: a copy, which is validated, only where one is due.
        return charge if charge.count == 1 else replace(charge, count=1)

    def _exceeds(self, releases: Releases, epsilon: float, delta: float) -> bool:
        return self._delta_beyond_gap(releases, epsilon) > delta

    def _delta_beyond_gap(self, releases: Releases, epsilon: float) -> float:
        gap = _gap(releases)
        if gap > min(epsilon, _LARGEST_GAP):
            return 1.0
        return min(1.0, math.exp(gap) * self._delta(releases, epsilon - gap))

    @staticmethod
    @abstractmethod
    def _knows(charge: Charge) -> bool: ...

    @abstractmethod
    def _epsilon(self, releases: Releases, delta: float) -> float: ...

    @abstractmethod
    def _delta(self, releases: Releases, epsilon: float) -> float: ...


class GdpAccountant(Accountant):
    """Gaussian differential privacy: exact for Gaussian noise without sampling.

    Its cap holds even if the noise of each release is chosen after all earlier ones were seen
    (Koskela, Tobaben, Honkela, *Individual privacy accounting with Gaussian differential privacy*,
    ICLR 2023; Smith & Thakurta, *Fully adaptive composition for Gaussian differential privacy*,
    2022).

    Examples
    --------
    >>> another = Charge(noise_multiplier=10.0, neighbours="replace_one")
    >>> accountant = GdpAccountant([another] * 99)
    >>> accountant.would_exceed(another, epsilon=4.4, delta=1e-5)
    False
    >>> accountant.compose(another)
    >>> round(accountant.epsilon(1e-5), 6)
    4.377178
    """

    name = "gdp"
    known = "Gaussian noise without sampling"

    @staticmethod
    def _knows(charge: Charge) -> bool:
        return charge.mechanism == GAUSSIAN and charge.sampling == 1

    def _epsilon(self, releases: Releases, delta: float) -> float:
        return epsilon_of(gaussian_mu(releases), delta)

    def _delta(self, releases: Releases, epsilon: float) -> float:
        return delta_of(gaussian_mu(releases), epsilon)


class RdpAccountant(Accountant):
    """Rényi differential privacy, with the curves of dp-accounting.

    A total takes the best of all orders. A cap takes one order, that under which most repeats of
    the oldest charge fit. It is thus fixed before anything is released, and then the cap holds even
    if the noise of each release is chosen after all earlier ones were seen (Feldman & Zrnic,
    *Individual privacy accounting via a Rényi filter*, NeurIPS 2021, section 3); with the best
    order of each moment that is not proven. While all charges are equal the two agree.

    From divergence to epsilon: Canonne, Kamath, Steinke, *The discrete Gaussian for differential
    privacy*, NeurIPS 2020, proposition 12.
    """

    name = "rdp"
    known = "Gaussian noise, or Laplace noise without sampling"

    @staticmethod
    def _knows(charge: Charge) -> bool:
        return charge.mechanism == GAUSSIAN or charge.sampling == 1

    def _epsilon(self, releases: Releases, delta: float) -> float:
        return max(0.0, float(np.min(_divergence(releases) + _conversion(delta))))

    def _delta(self, releases: Releases, epsilon: float) -> float:
        exponents = _divergence(releases) - epsilon + np.log1p(-1 / ORDERS)
        return math.exp(min(0.0, float(np.min((ORDERS - 1) * exponents - np.log(ORDERS)))))

    def _exceeds(self, releases: Releases, epsilon: float, delta: float) -> bool:
        budget = epsilon - _conversion(delta)
        # What gaps do to epsilon and delta, by order, as if each were a divergence.
        share = ORDERS / (ORDERS - 1)
        oldest = releases[0][0]
        order = np.argmax(budget / (_curve(oldest) + oldest.gap * share))
        cost = _divergence(releases)[order] + _gap(releases) * share[order]
        return not cost <= budget[order]


class PldAccountant(Accountant):
    """Privacy loss distributions of dp-accounting: nearly exact, for final figures.

    Losses lie on a grid (of 1e-4, coarser where there would be too many points), and are moved
    onto it such that delta does not fall ("connect the dots", Doroshenko et al., PoPETs 2022);
    tails that are cut off count as an infinite loss. Of delta, 3e-13 and another 1e-15 per release
    with a sample or Laplace noise are set aside for the rounding of the Fourier transforms.

    A check takes milliseconds to seconds. Total and cap are for plans that were fixed in advance,
    noise and number of releases: no filter is proven for privacy loss distributions.
    """

    name = "pld"
    known = "Gaussian noise, or Laplace noise, without sampling where an element is replaced"

    @staticmethod
    def _knows(charge: Charge) -> bool:
        is_proven = charge.sampling == 1 or charge.neighbours != REPLACE_ONE
        return charge.mechanism == GAUSSIAN or is_proven

    def _epsilon(self, releases: Releases, delta: float) -> float:
        return _pld_epsilon(releases, delta)

    def _delta(self, releases: Releases, epsilon: float) -> float:
        distribution = composed_pld(releases)
        if distribution is None:
            return 1.0
        return float(distribution.get_delta_for_epsilon(epsilon)) + _rounding(releases)


@lru_cache(maxsize=64)  # a card's total is stated, shown and verified
def _pld_epsilon(releases: Releases, delta: float) -> float:
    distribution, rest = composed_pld(releases), delta - _rounding(releases)
    if distribution is None or rest <= 0:
        return math.inf
    return float(distribution.get_epsilon_for_delta(rest))


ACCOUNTANTS: dict[str, type[Accountant]] = {
    kind.name: kind for kind in (GdpAccountant, RdpAccountant, PldAccountant)
}
"""The accountants by name."""


def new_accountant(name: str, charges: Iterable[Charge] = ()) -> Accountant:
    """Make an accountant by name.

    Parameters
    ----------
    name : {"gdp", "rdp", "pld"}
        Which one.
    charges : iterable of Charge, default ()
        Charges to begin with, oldest first.

    Raises
    ------
    InvalidParameterError
        If there is no such accountant, or it does not know the cost of a charge.
    """
    return ACCOUNTANTS[check_choice("accountant", name, ACCOUNTANTS)](charges)


def supports(charge: Charge, accountant: str) -> bool:
    """Return whether an accountant can bound the cost of a charge.

    Examples
    --------
    >>> supports(Charge(noise_multiplier=1.0, neighbours="add_remove", sampling=0.1), "gdp")
    False
    """
    return ACCOUNTANTS[check_choice("accountant", accountant, ACCOUNTANTS)]._knows(charge)


def spent(charges: Iterable[Charge], *, delta: float, accountant: str = "gdp") -> float:
    """Return the total epsilon of some charges.

    Parameters
    ----------
    charges : iterable of Charge
        The charges; none cost 0.
    delta : float
        Strictly between 0 and 1.
    accountant : {"gdp", "rdp", "pld"}, default "gdp"
        How to compute it.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, the accountant does not know the cost of a charge, or charges
        are for different neighbours.

    Examples
    --------
    >>> charge = Charge(noise_multiplier=1.0, neighbours="replace_one", count=80)
    >>> round(spent([charge], delta=1e-5), 1)
    77.3
    """
    return new_accountant(accountant, charges).epsilon(delta)


def fitting(charges: Iterable[Charge]) -> str:
    """Return the name of the tightest accountant that bounds all of the charges.

    Choose once, with every kind of charge that may come: a cap that changes its accountant on the
    way is not proven.

    Raises
    ------
    InvalidParameterError
        If there is none: for a charge with sampling and Laplace noise.

    Examples
    --------
    >>> charge = Charge(noise_multiplier=1.0, neighbours="add_remove")
    >>> fitting([charge]), fitting([charge, replace(charge, sampling=0.5)])
    ('gdp', 'rdp')
    """
    kinds = list(charges)
    unknown = next((charge for charge in kinds if not RdpAccountant._knows(charge)), None)
    if unknown is not None:
        raise InvalidParameterError("charge", unknown, RdpAccountant.known)
    return "gdp" if all(GdpAccountant._knows(charge) for charge in kinds) else "rdp"


def _gap(releases: Releases) -> float:
    return sum(charge.gap * count for charge, count in releases)


def _rounding(releases: Releases) -> float:
    others = sum(count for charge, count in releases if not GdpAccountant._knows(charge))
    return _ROUNDING * (MOST_PARTS + others)


def _curve(charge: Charge) -> NDArray[np.float64]:
    return rdp_curve(charge.mechanism, charge.noise_multiplier, charge.sampling, charge.neighbours)


def _divergence(releases: Releases) -> NDArray[np.float64]:
    total = np.zeros(ORDERS.shape)
    for charge, count in releases:
        total += count * _curve(charge)
    return total


def _conversion(delta: float) -> NDArray[np.float64]:
    """Return epsilon minus the Rényi divergence, by order."""
    converted: NDArray[np.float64] = np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1)
    return converted
