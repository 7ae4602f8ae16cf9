"""Calibrates the noise: every device, or every record, gets the same budget.

Not in "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation".
Nothing leaves a trusted zone in a local step. The boundary node's average is released, once a round
or more often, and it is about all local steps since the last release. So each class of devices,
those whose boundary nodes are at the same tier, is calibrated by itself.

``device``
    Neighbours differ in all data of one device. A release about k of tau local steps gets the share
    k / tau of the budget, in Gaussian DP, where shares add up (`multiplier`).
``record``
    Neighbours differ in one record, which one of them does not have; every local step draws its
    batch with Poisson sampling at rate q, which nobody sees. A release about k steps has the record
    with probability ``1 - (1 - q)^k`` (`record_multiplier`).
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from flwr_privacy.accounting import ADD_REMOVE, Charge, new_accountant, noise_multiplier, spent
from flwr_privacy.accounting.gaussian import check_delta, mu_of
from flwr_privacy.accounting.roots import root
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number

from .terms import any_batch

__all__ = ["multiplier", "record_multiplier"]

_SMALLEST = math.ulp(0.0)
_MARGIN = 1 + 1e-9  # for the rounding of whoever adds the releases up one by one
_PRECISION = 1e-7  # relative, of a noise multiplier that is searched for
_STEEPEST = 3.0  # the searched function is cut off there: it may be infinite
_BRACKET = 1.001  # about which it is searched: more than an accountant is off by


def multiplier(
    *, epsilon: float, delta: float, steps: int, total_steps: int, share: float = 1.0
) -> float:
    """Return the noise over the sensitivity of a release, for a budget of all data of a device.

    ``sqrt(total_steps / (share steps)) / mu`` (not in the paper).

    Parameters
    ----------
    epsilon, delta : float
        The budget of the whole training: epsilon above 0, delta strictly between 0 and 1.
    steps : int
        Local steps that the release is about, from 1 to `total_steps`.
    total_steps : int
        Local steps of the whole training, tau.
    share : float, default 1.0
        Share of the budget (of mu squared) that all these releases have, above 0 and at most 1.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Notes
    -----
    Guarantee: (epsilon, delta)-DP for all data of a device replaced, if the noise is Gaussian and
    every sensitivity is that of `Drift` or larger. Such a release is mu_r-GDP with ``mu_r^2 = mu^2
    share steps / total_steps``, and the squares of all releases of a device add up to at most
    share mu^2, however rounds and periods divide the steps: the total is the budget less a relative
    1e-9.
    Without amplification by sampling. Where the schedule is chosen on the way, it must be so from
    what is public; the cap then holds too (see `flwr_privacy.accounting.accountants`).

    Examples
    --------
    200 rounds of 20 local steps, with one release a round or with four:

    >>> for steps in (20, 5):
    ...     print(round(multiplier(epsilon=1, delta=1e-5, steps=steps, total_steps=4000), 2))
    52.76
    105.52
    """
    check_integer("total_steps", total_steps, minimum=1)
    check_integer("steps", steps, minimum=1, maximum=total_steps)
    check_number("share", share, minimum=_SMALLEST, maximum=1)
    return math.sqrt(total_steps / (share * steps)) / mu_of(epsilon, delta) * _MARGIN


def record_multiplier(
    *,
    epsilon: float,
    delta: float,
    rate: float,
    periods: Sequence[int],
    rounds: int,
    accountant: str | None = None,
    beside: tuple[Charge, ...] = (),
) -> float:
    """Return the noise over the sensitivity of all releases of a class, for a budget of a record.

    Parameters
    ----------
    epsilon, delta : float
        The budget of the whole training: epsilon above 0, delta strictly between 0 and 1.
    rate : float
        Rate q at which a local step samples a record, above 0 and at most 1.
    periods : sequence of int
        For each noised release of a round, the local steps that it is about, at least 1.
    rounds : int
        Rounds, at least 1.
    accountant : {"gdp", "rdp", "pld"}, optional
        Who adds up. Default: the tightest whose cap is proven, ``rdp``, or ``gdp`` where every
        record is in every release.
    beside : tuple of Charge, default ()
        Other releases of the same budget, whose noise is known.

    Returns
    -------
    float
        Never too small; too large by a relative 1e-6, and where the periods differ by what the
        accountant's cap loses on unequal releases (far below 1 % of epsilon).

    Raises
    ------
    InvalidParameterError
        If a value is out of range, or no noise multiplier up to 1e9 is enough.

    Notes
    -----
    Guarantee: (epsilon, delta)-DP for one record that is there or not, if batches are Poisson
    samples that nobody sees, and every sensitivity is that of `Drift` or larger: with the record
    outside all batches of a period, nothing differs; otherwise as much may as if all data of the
    device did. (The gradient of a *batch* is clipped, so one record can move a step by 2 G.)

    Examples
    --------
    >>> round(record_multiplier(epsilon=8, delta=1e-3, rate=0.1, periods=[5, 5], rounds=10), 2)
    1.18
    """
    check_number("epsilon", epsilon, minimum=_SMALLEST)
    check_delta(delta)
    check_number("rate", rate, minimum=_SMALLEST, maximum=1)
    check_integer("rounds", rounds, minimum=1)
    if not periods:
        raise InvalidParameterError("periods", list(periods), "the steps of at least one release")
    counts: dict[float, int] = {}  # releases by the probability that they have the record
    for steps in periods:
        sampling = any_batch(rate, check_integer("periods", steps, minimum=1))
        counts[sampling] = counts.get(sampling, 0) + rounds
    if accountant is None:
        accountant = "gdp" if min(counts) == 1 else "rdp"
    return _least(epsilon, delta, tuple(counts.items()), accountant, beside)


@lru_cache(maxsize=2**10)
def _least(
    epsilon: float,
    delta: float,
    counts: tuple[tuple[float, int], ...],
    accountant: str,
    beside: tuple[Charge, ...],
) -> float:
    """Return the least noise multiplier for releases by sampling rate."""
    releases = sum(count for _, count in counts)

    def equal(sampling: float) -> float:
        return noise_multiplier(
            epsilon=epsilon,
            delta=delta,
            releases=releases,
            neighbours=ADD_REMOVE,
            sampling=sampling,
            accountant=accountant,
            beside=beside,
        )

    if len(counts) == 1:
        return equal(counts[0][0])

    def charges(z: float) -> list[Charge]:
        return [
            Charge(noise_multiplier=z, neighbours=ADD_REMOVE, sampling=q, count=count)
            for q, count in counts
        ]

    def fits(z: float) -> bool:
        *before, last = *charges(z), *beside
        if new_accountant(accountant, before).would_exceed(last, epsilon=epsilon, delta=delta):
            return False
        return spent([*charges(z), *beside], delta=delta, accountant=accountant) <= epsilon

    def excess(log_z: float) -> float:
        found = [*charges(math.exp(log_z)), *beside]
        ratio = spent(found, delta=delta, accountant=accountant) / epsilon
        return min(_STEEPEST, math.log(max(ratio, math.exp(-_STEEPEST))))

    # As if all had the record as often as the release that has it least often, and most often.
    rates = [sampling for sampling, _ in counts]
    low, high = equal(min(rates)) / _BRACKET, equal(max(rates)) * _BRACKET
    z = math.exp(root(excess, math.log(low), math.log(high), absolute=_PRECISION))
    step = _PRECISION
    while not fits(z):  # rounding, and what the cap loses
        z *= 1 + step
        step *= 2
    return z * _MARGIN
