"""Clipped updates under central differential privacy: one, their sum, and the mean made of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.pipeline.mechanism import Answer, Facts, Mechanism, ReleasePlan
from flwr_privacy.privacy.adaptive_clipping import (
    COUNT_GRID,
    COUNT_NAME,
    count_code,
    fraction_below,
)
from flwr_privacy.privacy.failures import FAILED_NAME
from flwr_privacy.privacy.grid import CodeGrid, EvenMean
from flwr_privacy.privacy.noise import discrete_gaussian
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import Update, check_start
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import METRICS

from .sensitivity import DISTRIBUTED, SERVER
from .terms import CentralDPTerms

__all__ = ["AddNoise", "CentralMean", "ClippedUpdate", "add_noise"]

_BLOCK = 1 << 22  # samples at a time: their sampler has them drawn by several threads

AddNoise = Callable[[dict[str, NDArray[np.int64]], CentralDPTerms, SecureRandom], None]
"""Adds the noise of a round to sums of codes."""


class _Measured(NamedTuple):
    """An update (its values may be gone), its codes, and whether the training failed."""

    update: Update
    codes: NDArray[Any]
    failed: bool = False


@dataclass(frozen=True)
class ClippedUpdate(Mechanism):
    """A client's update, clipped to an L2 norm, with a share of the noise or without any.

    A share alone hides nothing: with the same share in two sums, or in none, the one or the
    difference of the two would have hardly any noise. So there is one attempt, in a secure sum.
    Where a trusted server adds the noise, the release has none; the server accounts for it, and
    the client's ledger does not. With a committee it has none either: the members, without whom the
    sum is not opened, add it, and the client's ledger is charged for its next participation.

    Parameters
    ----------
    terms : CentralDPTerms
        What was asked.
    """

    terms: CentralDPTerms

    def plan(self, start: Arrays, facts: Facts) -> ReleasePlan:
        """Decide or refuse everything about the release; see `Mechanism.plan`."""
        terms, alone = self.terms, self.terms.noise == DISTRIBUTED
        names = terms.names(start)
        check_start(start, names)
        terms.check_grid(sum(np.size(start[name]) for name in names))
        charge = terms.charge() if alone else None
        return ReleasePlan(
            unit="user",
            charge=charge,
            epsilon=terms.epsilon,
            delta=terms.delta,
            noise_multiplier=terms.least_multiplier() if alone else 0.0,
            sigma=terms.sigma() if alone else 0.0,
            parties=terms.parties if alone else 0,
            largest_code=terms.code_limit(),
            limit=terms.limit(),
            members=tuple(terms.members),
            charges=terms.charge if terms.members else None,
        )

    def measure(self, start: Arrays, outcome: Any) -> _Measured:
        """Return the clipped update as codes."""
        terms = self.terms
        names, norm = terms.names(start), terms.clipping_norm
        update = Update.between(start, outcome, names, clipping_norm=norm)
        # A share of noise may leave 32 bits on the way; such codes take the vector's place.
        alone = terms.noise == DISTRIBUTED
        out: Any = update.vector.view(np.int64) if alone else np.empty(update.vector.size, np.int32)
        return _Measured(update, CodeGrid(terms.grid).encode(update.vector, out))

    def failed(self, start: Arrays) -> _Measured:
        """Return the zero update, marked as that of a failed training."""
        return self.measure(start, start)._replace(failed=True)

    def noise(self, measured: _Measured, plan: ReleasePlan, random: SecureRandom) -> Answer:
        """Return the codes with a share of the noise, or without noise."""
        update, vector, failed = measured
        codes: dict[str, NDArray[Any]] = update.arrays(vector)
        if self.terms.count_share:
            count = count_code(within=update.factor == 1)
            codes[COUNT_NAME] = np.array([count], vector.dtype)
        if code := self.terms.failed_code:
            codes[FAILED_NAME] = np.array([code if failed else 0], vector.dtype)
        if plan.charge is not None and not plan.members:
            add_noise(codes, self.terms, random)
        # Everybody weighs the same: the number of records is a secret.
        return codes, {METRICS: {"num-examples": 1}}

    def accumulator(self, start: Arrays) -> "CentralMean":
        """Return an empty sum of codes."""
        return CentralMean(start, self.terms)


def add_noise(
    codes: dict[str, NDArray[np.int64]], terms: CentralDPTerms, random: SecureRandom
) -> None:
    """Add one party's noise in place: a client's share, or the trusted server's whole noise.

    Parameters
    ----------
    codes : dict of str to int64 array
        Codes or sums of them, by name, the count among them if there is one.
    terms : CentralDPTerms
        Say how much.
    random : SecureRandom
        Where it comes from: the arrays take theirs in the order of their names, the count of
        trainings that failed last.
    """
    update, count = terms.share_sigmas()
    for name in sorted(codes, key=lambda name: (name == FAILED_NAME, name)):
        sigma = update / CodeGrid(terms.grid).step
        if name == COUNT_NAME and count is not None:
            sigma = count / COUNT_GRID.step
        flat = codes[name].view()
        flat.shape = flat.size  # never a copy, as `reshape` may make one: its noise would be lost
        for start in range(0, flat.size, _BLOCK):  # no second vector for all of it
            part = flat[start : start + _BLOCK]
            part += discrete_gaussian(part.size, sigma, random)


class CentralMean(EvenMean):
    """The mean of clipped updates as codes, with the count of updates within the norm, if any.

    Parameters
    ----------
    start : Mapping of str to ndarray
        The model that the updates start from.
    terms : CentralDPTerms
        What was asked.

    Notes
    -----
    **Guarantee.** The sum is private once it has its noise: in shares, inside the codes, or by
    `add_noise`; what `settle` and `finish` make of it then costs nothing. See
    `flwr_privacy.central_dp.plan.CentralDPNoisePlan`.

    Examples
    --------
    >>> terms = CentralDPTerms(
    ...     noise="server", sampling="fixed", neighbours="replace_one", noise_multiplier=8.0,
    ...     count_share=0.5, epsilon=8.0, delta=1e-5, gap=1e-3, clipping_norm=1.0, grid=-10,
    ... )
    >>> mean = CentralMean({"w": np.zeros(2)}, terms)
    >>> codes = {"w": np.array([600, 0]), COUNT_NAME: np.array([2**16])}
    >>> mean.accumulate("a", codes, weight=1)
    >>> mean.accumulate("b", codes, weight=1)
    >>> mean.add_noise(SecureRandom.insecure(0))
    >>> round(mean.settle(2), 1), mean.finish()["w"].round(1)
    (-5.4, array([ 2.9, -3.4]))
    """

    def __init__(self, start: Arrays, terms: CentralDPTerms) -> None:
        names, code = terms.names(start), terms.failed_code
        super().__init__(start, CodeGrid(terms.grid), names, failed_code=code)
        self._terms = terms
        if terms.count_share:
            self.template[COUNT_NAME] = ((1,), np.dtype(np.int32))

    def add_noise(self, random: SecureRandom, noise: AddNoise | None = None) -> None:
        """Add the trusted server's noise to the sums, once, however few replies are in them.

        Parameters
        ----------
        random : SecureRandom
            Where it comes from.
        noise : callable, optional
            Adds it to sums by name, in place, for some terms; by default `add_noise`, independently
            of other rounds.

        Raises
        ------
        InvalidParameterError
            If the clients add the noise.
        """
        if self._terms.noise != SERVER:
            raise InvalidParameterError("noise", self._terms.noise, SERVER)
        for name, (shape, _) in self.template.items():
            self._sums.setdefault(name, np.zeros(shape, self.sum_dtype))
        (noise or add_noise)(self._sums, self._terms, random)

    def settle(self, number: float) -> float | None:
        """Divide the sums by a number of contributions; remove and return the count.

        Parameters
        ----------
        number : float
            What sums are divided by: the number of contributions, or the expected one where the
            actual one is secret. It becomes the `weight`.

        Returns
        -------
        float or None
            The noised fraction of updates within the norm; None where it was not counted.

        Raises
        ------
        InvalidParameterError
            If `number` is not above 0.
        """
        self.weight = number
        if COUNT_NAME not in self.template:
            return None
        halves = COUNT_GRID.step * float(self._sums.pop(COUNT_NAME)[0])
        return fraction_below(halves, number)
