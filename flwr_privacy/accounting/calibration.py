"""Finds the least noise that keeps a number of equal releases within a budget."""

import math
from dataclasses import replace
from functools import lru_cache

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number

from .accountants import ACCOUNTANTS, new_accountant, spent
from .charges import Charge
from .gaussian import check_delta, mu_of
from .roots import root

__all__ = ["noise_multiplier"]

_MARGIN = 1 + 1e-9  # for the rounding of whoever adds the releases up one by one
_PRECISION = 2e-7  # relative, of a noise multiplier that is searched for
_MOST = 1e9
_STEEPEST = 3.0  # the searched function is cut off there: it may be infinite


def noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    releases: int,
    neighbours: str,
    sampling: float = 1.0,
    accountant: str = "gdp",
    beside: tuple[Charge, ...] = (),
) -> float:
    """Return the least noise multiplier that keeps equal Gaussian releases within a budget.

    The releases fit under the cap of that accountant (`Accountant.would_exceed`) one by one and
    together. The result is never too small, and too large by a relative 1e-6 at most (1e-9 for
    ``gdp``).

    Parameters
    ----------
    epsilon, delta : float
        The budget: epsilon above 0, delta strictly between 0 and 1.
    releases : int
        Number of releases, at least 1.
    neighbours : {"add_remove", "replace_one", "zero_out"}
        Over whose distance the noise multiplier is; without a sample it is the same for all.
    sampling : float, default 1.0
        Rate of the Poisson sample, above 0 and at most 1.
    accountant : {"gdp", "rdp", "pld"}, default "gdp"
        Who adds up. ``gdp`` is a closed form and takes no sample. The others search, which takes
        seconds where there is a sample; an answer is kept for the next time in the same process.
    beside : tuple of Charge, default ()
        Other releases of the same budget, for the same neighbours, whose noise is known.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, the accountant does not know such releases, or no noise
        multiplier up to 1e9 is enough.

    Examples
    --------
    >>> z = noise_multiplier(epsilon=8, delta=1e-3, releases=200, neighbours="replace_one")
    >>> round(z, 4)
    6.7884
    """
    check_number("epsilon", epsilon, minimum=math.ulp(0.0))
    check_delta(delta)
    check_integer("releases", releases, minimum=1)
    check_choice("accountant", accountant, ACCOUNTANTS)
    release = Charge(noise_multiplier=1.0, neighbours=neighbours, sampling=sampling, count=releases)
    return _least(release, float(epsilon), float(delta), accountant, beside)


@lru_cache(maxsize=2**10)
def _least(
    release: Charge, epsilon: float, delta: float, accountant: str, beside: tuple[Charge, ...]
) -> float:
    """Return the least noise multiplier; that of `release` stands for any."""

    def charge(z: float) -> Charge:
        return replace(release, noise_multiplier=z)

    def fits(z: float) -> bool:
        # Accountants may go by the oldest charge: the other releases come later.
        *before, last = charge(z), *beside
        if new_accountant(accountant, before).would_exceed(last, epsilon=epsilon, delta=delta):
            return False
        return spent([*beside, charge(z)], delta=delta, accountant=accountant) <= epsilon

    def excess(log_z: float) -> float:
        charges = [*beside, charge(math.exp(log_z))]
        ratio = spent(charges, delta=delta, accountant=accountant) / epsilon
        return min(_STEEPEST, math.log(max(ratio, math.exp(-_STEEPEST))))

    enough = math.sqrt(release.count) / mu_of(epsilon, delta) * _MARGIN  # without a sample
    while not fits(enough):
        enough *= _MARGIN if accountant == "gdp" and not beside else 1.5
        if enough > _MOST:
            allowed = f"a budget that '{accountant}' can keep with {release.count} releases"
            raise InvalidParameterError("(epsilon, delta)", (epsilon, delta), allowed)
    if accountant == "gdp" and not beside:
        return enough
    too_little = enough / 2
    while fits(too_little):
        enough, too_little = too_little, too_little / 2
    z = math.exp(root(excess, math.log(too_little), math.log(enough), absolute=_PRECISION))
    step = _PRECISION
    while not fits(z):
        z *= 1 + step
        step *= 2 if beside else 1  # the cap of several kinds of releases may be a little tighter
    return z * _MARGIN
