"""The parameters of a secure sum, and the modulus they require."""

import math
from dataclasses import dataclass

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.privacy.grid import CODE_LIMIT, MOST_WEIGHT, CodeGrid

__all__ = ["COMPLETE_UP_TO", "LARGEST_COHORT", "Bounds", "SecureSum"]

COMPLETE_UP_TO = 100
"""Clients of a cohort up to which everybody shares masks with everybody."""

LARGEST_COHORT = 2**20
"""Most clients of a cohort; a node refuses to hear of more."""

_MOST_BITS = 64


@dataclass(frozen=True, kw_only=True)
class SecureSum:
    """Parameters of a secure sum; give it to a strategy as ``secure_sum``.

    Parameters
    ----------
    threshold : int, optional
        Least number of clients in a sum that is opened. A round in which fewer are left is refused,
        and more than half of its cohort is needed in any case, which is the default.
    colluders : int, optional
        Number of clients whose secrets the server may know, below `threshold`; by default a fifth
        of the cohort.
    value_range : float, default 4.0
        Bound of every entry of an update, for schemes that have no grid of their own. A client
        refuses to send an update that is beyond it.
    bits : int, default 20
        Bits of an entry of an update, from 2 to 31, for such schemes: the grid has ``2**bits``
        steps from one end of the range to the other, or up to half as many if the range is no power
        of two.
    largest_weight : int, default 65536
        Bound of a client's weight (its number of examples); every factor of 2 costs a bit per
        value. With 1 all clients weigh the same.
    modulus_bits : int, optional
        Sums are modulo ``2**modulus_bits``, from 2 to 64; by default as few as the cohort needs.
    neighbours : int, optional
        Number of clients with which each one shares masks, even; by default all others in a cohort
        of up to 100 clients and as many as `flwr_privacy.secure_sum.graph.degree` says beyond.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> secure_sum = SecureSum(threshold=3)
    >>> secure_sum.threshold_of(5), secure_sum.colluders_of(5)
    (3, 1)
    """

    threshold: int | None = None
    colluders: int | None = None
    value_range: float = 4.0
    bits: int = 20
    largest_weight: int = 2**16
    modulus_bits: int | None = None
    neighbours: int | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None:
            check_integer("secure_sum.threshold", self.threshold, minimum=2)
        if self.colluders is not None:
            check_integer("secure_sum.colluders", self.colluders, minimum=0)
        check_number("secure_sum.value_range", self.value_range, minimum=1e-100, maximum=1e100)
        check_integer("secure_sum.bits", self.bits, minimum=2, maximum=31)
        check_integer("secure_sum.largest_weight", self.largest_weight, minimum=1, maximum=2**31)
        if self.modulus_bits is not None:
            check_integer(
                "secure_sum.modulus_bits", self.modulus_bits, minimum=2, maximum=_MOST_BITS
            )
        if self.neighbours is not None:
            check_integer("secure_sum.neighbours", self.neighbours, minimum=2, maximum=254)
            if self.neighbours % 2:
                raise InvalidParameterError("secure_sum.neighbours", self.neighbours, "even")
        if self.threshold is not None:
            self._check_colluders(self.threshold, self.colluders or 0)

    @property
    def code_limit(self) -> int:
        """Largest code of an update of a scheme that has no grid of its own."""
        return math.ceil(self.value_range / self.grid.step)

    @property
    def grid(self) -> CodeGrid:
        """The finest grid with at most ``2**bits`` steps over the range."""
        mantissa, exponent = math.frexp(self.value_range)
        return CodeGrid(exponent - (mantissa == 0.5) - (self.bits - 1))

    def threshold_of(self, cohort: int) -> int:
        """Return the least number of clients in a sum over a cohort.

        Raises
        ------
        InvalidParameterError
            If the threshold that was given is more than the cohort has.
        """
        if cohort < 2:
            raise InvalidParameterError(
                "cohort", cohort, "at least 2 clients: the sum over one client is its vector"
            )
        threshold = max(self.threshold or 0, cohort // 2 + 1)
        if threshold > cohort:
            raise InvalidParameterError(
                "secure_sum.threshold", threshold, f"at most the {cohort} clients of a cohort"
            )
        return threshold

    def colluders_of(self, cohort: int) -> int:
        """Return the number of colluding clients that a cohort withstands.

        Raises
        ------
        InvalidParameterError
            If it is not below the threshold.
        """
        colluders = cohort // 5 if self.colluders is None else self.colluders
        self._check_colluders(self.threshold_of(cohort), colluders)
        return colluders

    def liars_of(self, cohort: int) -> int:
        """Return the number of clients of a cohort that may lie together about dealt shares.

        These are the colluders, or as many as may be missing in a sum, at least one.
        """
        return max(1, self.colluders_of(cohort), cohort - self.threshold_of(cohort))

    def quorum_of(self, cohort: int) -> tuple[int, int, int]:
        """Return a cohort, the least number of clients in a sum over it, and its colluders."""
        return cohort, self.threshold_of(cohort), self.colluders_of(cohort)

    def honest_in_sums(self, cohort: int, *, lying: bool = False) -> int:
        """Return the least number of honest clients in any sum that the server can open.

        Parameters
        ----------
        cohort : int
            Number n of clients, in a complete graph.
        lying : bool, default False
            Whether the server departs from the protocol and tells every client another story of who
            dealt and who survived. 1 then means that nothing is guaranteed.

        Notes
        -----
        Let T be the threshold and t the colluders. In an honest run a sum has T clients, T - t of
        them honest.

        A server that lies opens the sum over a group of g honest clients if it has all their seeds
        and, for each of them, the masks with all honest dealers outside of it that it was told of:
        at least T - t - g. Such a mask needs the key of that dealer, because both secrets of
        a member of it cannot be opened while t < 2 T - n. A key takes T - t honest clients who were
        told that its owner is missing. Each of the n - t honest clients believes at most n - T
        others to be missing, and says so once a round. So (T - t - g)(T - t) is at most
        (n - t)(n - T).

        Examples
        --------
        >>> majority, two_thirds = SecureSum(colluders=0), SecureSum(threshold=14, colluders=0)
        >>> majority.honest_in_sums(20), majority.honest_in_sums(20, lying=True)
        (11, 1)
        >>> two_thirds.honest_in_sums(20), two_thirds.honest_in_sums(20, lying=True)
        (14, 6)
        """
        threshold, colluders = self.threshold_of(cohort), self.colluders_of(cohort)
        honest = threshold - colluders
        if not lying:
            return honest
        if colluders >= 2 * threshold - cohort:
            return 1
        return max(1, honest - (cohort - colluders) * (cohort - threshold) // honest)

    def parties_of(self, cohort: int) -> int:
        """Return the number of honest clients that the noise of a sum may be split over.

        Raises
        ------
        InvalidParameterError
            If `colluders` is less than a fifth of the cohort: clients would refuse.

        Examples
        --------
        >>> SecureSum().parties_of(20)
        7
        """
        fifth = cohort // 5
        if self.colluders_of(cohort) < fifth:
            raise InvalidParameterError(
                "secure_sum.colluders",
                self.colluders,
                f"at least {fifth} with noise in shares: whatever a server says, a client reckons "
                f"that a fifth of the {cohort} clients of a cohort collude with it, and refuses a "
                "smaller share",
            )
        return self.honest_in_sums(cohort)

    def bounds(
        self,
        cohort: int,
        *,
        code_limit: int | None = None,
        largest_weight: int | None = None,
        total_weight: int = 0,
    ) -> "Bounds":
        """Return bounds of a cohort's vectors, with a modulus that is large enough for their sum.

        Parameters
        ----------
        cohort : int
            Number of clients.
        code_limit, largest_weight : int, optional
            Those of a scheme that has its own.
        total_weight : int, default 0
            That of a scheme that knows the sum of the weights; see `Bounds`.

        Raises
        ------
        InvalidParameterError
            If threshold or colluders do not fit the cohort, or the modulus is too small.
        """
        self.colluders_of(cohort)
        limit = self.code_limit if code_limit is None else code_limit
        weight = self.largest_weight if largest_weight is None else largest_weight
        needed = Bounds.bits_needed(
            cohort, code_limit=limit, largest_weight=weight, total_weight=total_weight
        )
        return Bounds(
            cohort=cohort,
            code_limit=limit,
            largest_weight=weight,
            total_weight=total_weight,
            modulus_bits=needed if self.modulus_bits is None else self.modulus_bits,
        )

    def _check_colluders(self, threshold: int, colluders: int) -> None:
        if colluders >= threshold:
            raise InvalidParameterError(
                "secure_sum.threshold",
                threshold,
                f"more than colluders = {colluders}: they could open every vector by themselves",
            )


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of a cohort's vectors that keep their sum from wrapping.

    Parameters
    ----------
    cohort : int
        Number of clients, from 2 to 2^20.
    code_limit : int
        Codes lie between minus this and this.
    largest_weight : int
        Weights lie between 0 and this.
    modulus_bits : int
        Sums are modulo ``2**modulus_bits``.
    total_weight : int, default 0
        Largest sum of the weights, at least `largest_weight`; 0 where nothing better than
        ``cohort * largest_weight`` is known.

    Raises
    ------
    InvalidParameterError
        If the modulus is too small for the sum of all vectors, weighted: proven here for every
        sum that can be opened, ``2**modulus_bits > 2 * weight_limit * code_limit``.

    Examples
    --------
    >>> Bounds(cohort=100, code_limit=2**15 - 1, largest_weight=1, modulus_bits=22)
    Traceback (most recent call last):
    ...
    flwr_privacy.errors.InvalidParameterError: secure_sum.modulus_bits = 22: \
expected at least 23 for 100 clients with codes up to 32767 and weights up to 1
    """

    cohort: int
    code_limit: int
    largest_weight: int
    modulus_bits: int
    total_weight: int = 0

    def __post_init__(self) -> None:
        check_integer("cohort", self.cohort, minimum=2, maximum=LARGEST_COHORT)
        check_integer("code_limit", self.code_limit, minimum=1, maximum=CODE_LIMIT)
        check_integer("largest_weight", self.largest_weight, minimum=1, maximum=2**31)
        check_integer(
            "total_weight",
            self.total_weight,
            minimum=self.largest_weight if self.total_weight else 0,
            maximum=MOST_WEIGHT,
        )
        if self.weight_limit > MOST_WEIGHT:
            raise InvalidParameterError(
                "secure_sum.largest_weight",
                self.largest_weight,
                f"at most {MOST_WEIGHT // self.cohort} for {self.cohort} clients",
            )
        check_integer("modulus_bits", self.modulus_bits, minimum=2, maximum=_MOST_BITS)
        needed = self.bits_needed(
            self.cohort,
            code_limit=self.code_limit,
            largest_weight=self.largest_weight,
            total_weight=self.total_weight,
        )
        if self.modulus_bits < needed:
            raise InvalidParameterError(
                "secure_sum.modulus_bits",
                self.modulus_bits,
                f"at least {needed} for {self.cohort} clients with codes up to {self.code_limit} "
                f"and weights up to {self.largest_weight}"
                + (f", {self.total_weight} in all" if self.total_weight else ""),
            )

    @property
    def weight_limit(self) -> int:
        """Largest sum of the weights of all clients."""
        return _weight_limit(self.cohort, self.largest_weight, self.total_weight)

    @staticmethod
    def bits_needed(
        cohort: int, *, code_limit: int, largest_weight: int, total_weight: int = 0
    ) -> int:
        """Return the bits of the smallest modulus for which no sum over a cohort wraps.

        A sum lies between -B and B with B = `weight_limit` * code_limit; it can be told modulo M if
        M is at least 2 B + 1. The sum of the weights is no larger than B.
        """
        most = _weight_limit(cohort, largest_weight, total_weight)
        return max(2, (2 * most * code_limit).bit_length())


def _weight_limit(cohort: int, largest_weight: int, total_weight: int) -> int:
    all_largest = cohort * largest_weight
    return min(total_weight, all_largest) if total_weight else all_largest
