"""UDP: noise on the client, from a budget over the whole training.

Wei, Li, Ding, Ma, Su, Zhang, Poor, "User-Level Privacy-Preserving Federated Learning: Analysis and
Performance Optimization". A client trains, adds Gaussian noise and uploads; the noise is the same
in every round, from a budget (epsilon, delta) over T of them. The paper's formula (10) is
`sigma_paper`; it is not sufficient (`epsilon_of_paper` has what it gives). The default is Gaussian
differential privacy, whose composition is exact.

Symbols: q is the fraction of the clients that is asked in a round, T the number of rounds, Dl the
L2 sensitivity of one release, a the sum of the squares of Dl / sigma.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import bdtr

from .accounting import Charge, noise_multiplier, spent
from .accounting.gaussian import mu_of
from .errors import (
    InvalidParameterError,
    ProtocolError,
    check_choice,
    check_integer,
    check_number,
)
from .updates import SMALLEST_NORM

__all__ = [
    "NOISES",
    "RECORD_UNIT",
    "USER_UNIT",
    "Schedule",
    "Terms",
    "eps_paper",
    "eps_zcdp",
    "participations",
    "rounds_paper",
    "sensitivity",
    "sigma_gdp",
    "sigma_paper",
    "sigma_zcdp",
]

RECORD_UNIT, USER_UNIT = "record", "user"
"""What is protected: one record of a client's data, or all of its data."""

NOISES = ("gdp_fixed", "paper")
"""How the noise follows from the budget; see `Schedule`."""

GRID_SHARE, _LARGEST_GAP = 1e-3, 0.1
"""Share of epsilon, and at most how much of it, that is set aside for the grid; see `Charge`."""

_SMALLEST = math.ulp(0.0)


def sensitivity(
    unit: str,
    *,
    clipping_norm: float,
    learning_rate: float = 1.0,
    records: int = 1,
    sampling_rate: float = 1.0,
) -> float:
    """Return the L2 sensitivity of one release.

    Parameters
    ----------
    unit : {"record", "user"}
        At record level one full-batch step with gradients clipped per record, where neighbouring
        data differ in one record: ``2 * learning_rate * clipping_norm / records`` (section III.A
        of the paper). At user level an update clipped as a whole, where neighbouring data differ in
        everything: ``2 * clipping_norm``.
    clipping_norm : float
        Bound of a record's gradient, or of the update.
    learning_rate, records : float, int
        Step size and number of records; at record level only.
    sampling_rate : float, default 1.0
        Rate at which records are drawn; the sum is then divided by ``sampling_rate * records``.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> sensitivity("record", clipping_norm=1.0, learning_rate=1.0, records=800)
    0.0025
    """
    check_number("clipping_norm", clipping_norm, minimum=SMALLEST_NORM)
    _check_sampling(check_choice("unit", unit, (RECORD_UNIT, USER_UNIT)), sampling_rate)
    if unit == USER_UNIT:
        return 2 * clipping_norm
    check_number("learning_rate", learning_rate, minimum=_SMALLEST)
    check_integer("records", records, minimum=1)
    return 2 * learning_rate * clipping_norm / (sampling_rate * records)


def sigma_paper(*, rounds: int, q: float, epsilon: float, delta: float, Dl: float = 1.0) -> float:
    """Return the paper's noise, equation (10): ``Dl * sqrt(2 q T ln(1/delta)) / epsilon``.

    It claims (epsilon, delta) for the whole training and does not give it: the proof uses an
    inequality backwards, and counts the expected number of participations, which the server sees.

    Examples
    --------
    >>> round(sigma_paper(rounds=200, q=1.0, epsilon=8.0, delta=1e-3), 6)
    6.570652
    """
    _check(rounds=rounds, q=q, epsilon=epsilon, delta=delta)
    return Dl * math.sqrt(2 * q * rounds * math.log(1 / delta)) / epsilon


def eps_paper(*, sigma: float, rounds: int, q: float, delta: float, Dl: float = 1.0) -> float:
    """Return the epsilon that equation (10) claims for a given noise."""
    check_number("sigma", sigma, minimum=_SMALLEST)
    _check(rounds=rounds, q=q, delta=delta)
    return Dl * math.sqrt(2 * q * rounds * math.log(1 / delta)) / sigma


def rounds_paper(*, sigma: float, q: float, epsilon: float, delta: float, Dl: float = 1.0) -> float:
    """Return the number of rounds for which equation (10) has a given noise."""
    check_number("sigma", sigma, minimum=_SMALLEST)
    _check(q=q, epsilon=epsilon, delta=delta)
    return (sigma * epsilon / Dl) ** 2 / (2 * q * math.log(1 / delta))


def eps_zcdp(*, a: float, delta: float) -> float:
    """Return ``a/2 + sqrt(2 a ln(1/delta))``: what Theorem 1's own moments give.

    Parameters
    ----------
    a : float
        Sum of ``(Dl / sigma)**2`` over the releases, at least 0.
    delta : float
        Between 0 and 1.
    """
    check_number("a", a, minimum=0)
    _check(delta=delta)
    return a / 2 + math.sqrt(2 * a * math.log(1 / delta))


def sigma_zcdp(*, rounds: int, q: float, epsilon: float, delta: float, Dl: float = 1.0) -> float:
    """Return the noise at which `eps_zcdp` over the expected participations is `epsilon`."""
    _check(rounds=rounds, q=q, epsilon=epsilon, delta=delta)
    log = math.log(1 / delta)
    return Dl * math.sqrt(q * rounds / 2) / (math.sqrt(log + epsilon) - math.sqrt(log))


def sigma_gdp(*, releases: int, epsilon: float, delta: float, Dl: float = 1.0) -> float:
    """Return the noise at which so many releases together are exactly (epsilon, delta).

    Gaussian differential privacy (Dong, Roth, Su 2022): ``Dl * sqrt(releases) / mu``, with mu of
    `flwr_privacy.accounting.gaussian.mu_of`.

    Examples
    --------
    >>> round(sigma_gdp(releases=200, epsilon=8.0, delta=1e-3), 3)
    6.788
    """
    check_integer("releases", releases, minimum=1)
    _check(epsilon=epsilon, delta=delta)
    return Dl * math.sqrt(releases) / mu_of(epsilon, delta)


def participations(rounds: int, q: float, *, quantile: float = 0.99) -> int:
    """Return how often a client takes part at most, in all but ``1 - quantile`` of the cases.

    Examples
    --------
    >>> participations(200, 1.0), participations(200, 0.6)
    (200, 136)
    """
    _check(rounds=rounds, q=q)
    shares = bdtr(np.arange(rounds + 1), rounds, q)  # of the clients, by number of participations
    return max(1, int(np.searchsorted(shares, quantile)))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The noise of a training, from its budget.

    Parameters
    ----------
    noise : {"gdp_fixed", "paper"}
        ``gdp_fixed``: the least noise such that a client may take part as often as 99 % of the
        clients do at most; who is drawn more often declines. ``paper``: equation (10).
    epsilon, delta : float
        Budget of a client over the whole training; for ``paper`` what the formula claims.
    rounds : int
        Rounds planned, T.
    q : float
        Fraction of the clients that is asked in a round.
    sampling_rate : float, default 1.0
        Rate of the Poisson sample of a client's records in a round; 1: all records.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> schedule = Schedule(noise="paper", epsilon=8.0, delta=1e-3, rounds=200, q=1.0)
    >>> round(schedule.noise_multiplier, 6), round(schedule.cap, 2)
    (6.570652, 8.37)
    """

    noise: str
    epsilon: float
    delta: float
    rounds: int
    q: float
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        check_choice("noise", self.noise, NOISES)
        _check(rounds=self.rounds, q=self.q, epsilon=self.epsilon, delta=self.delta)
        check_number("sampling_rate", self.sampling_rate, minimum=_SMALLEST, maximum=1)
        if self.noise == "paper" and self.sampling_rate != 1:
            raise InvalidParameterError(
                "sampling_rate", self.sampling_rate, "1: the paper's formula knows full batches"
            )

    @property
    def releases(self) -> int:
        """Number of releases for which the budget of a client is meant."""
        return self.rounds if self.noise == "paper" else participations(self.rounds, self.q)

    @cached_property
    def noise_multiplier(self) -> float:
        """Noise over the sensitivity, in every round."""
        if self.noise == "paper":
            return sigma_paper(rounds=self.rounds, q=self.q, epsilon=self.epsilon, delta=self.delta)
        return noise_multiplier(
            epsilon=self.epsilon - self._set_aside,
            delta=self.delta * math.exp(-self._set_aside),
            releases=self.releases,
            sampling=self.sampling_rate,
            accountant="gdp" if self.sampling_rate == 1 else "rdp",
        )

    @property
    def gap(self) -> float:
        """Epsilon set aside per release for the grid."""
        return self._set_aside / self.releases

    @property
    def cap(self) -> float:
        """Epsilon that no client exceeds: for ``paper`` what a client in every round spends."""
        if self.noise != "paper":
            return self.epsilon
        charge = Charge(noise_multiplier=self.noise_multiplier, gap=self.gap, count=self.releases)
        return spent([charge], delta=self.delta)

    @property
    def _set_aside(self) -> float:
        return min(GRID_SHARE * self.epsilon, _LARGEST_GAP)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the server asks of a client in a round; the fields of UDP on the wire.

    Parameters
    ----------
    unit : {"record", "user"}
        What is protected.
    noise_multiplier : float
        Standard deviation of the noise over the sensitivity.
    epsilon, delta : float
        Budget of a client in this experiment; it declines what would exceed it.
    gap : float
        Epsilon set aside per release for the grid.
    clipping_norm : float
        Bound of a record's gradient, or of the update.
    learning_rate : float
        Step size; at record level only.
    sampling_rate : float
        Rate of the Poisson sample of the records; at record level only.
    grid : int
        Exponent of the grid's step.
    keep_back : tuple of str
        Arrays of which nothing is released, beyond those that a client keeps back anyway.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    unit: str
    noise_multiplier: float
    epsilon: float
    delta: float
    gap: float
    clipping_norm: float
    learning_rate: float = 1.0
    sampling_rate: float = 1.0
    grid: int
    keep_back: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, (RECORD_UNIT, USER_UNIT))
        check_number("noise_multiplier", self.noise_multiplier, minimum=_SMALLEST)
        _check(epsilon=self.epsilon, delta=self.delta)
        check_number("gap", self.gap, minimum=0)
        check_number("clipping_norm", self.clipping_norm, minimum=SMALLEST_NORM)
        check_number("learning_rate", self.learning_rate, minimum=_SMALLEST)
        _check_sampling(self.unit, self.sampling_rate)
        if self.unit == USER_UNIT and self.learning_rate != 1:
            raise InvalidParameterError(
                "learning_rate", self.learning_rate, "1 at user level: the user's training has it"
            )

    def charge(self) -> Charge:
        """Return what one release costs."""
        return Charge(
            noise_multiplier=self.noise_multiplier, sampling=self.sampling_rate, gap=self.gap
        )

    def write(self) -> dict[str, Any]:
        """Return the fields of a message."""
        return {
            "unit": self.unit,
            "noise-multiplier": self.noise_multiplier,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "gap": self.gap,
            "clipping-norm": self.clipping_norm,
            "learning-rate": self.learning_rate,
            "sampling-rate": self.sampling_rate,
            "grid": self.grid,
            "keep-back": list(self.keep_back),
        }

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "Terms":
        """Read the fields of a message.

        Raises
        ------
        ProtocolError
            If a field is missing.
        InvalidParameterError
            If a value is not allowed.
        """
        names = [name for name in cls.__dataclass_fields__ if name != "keep_back"]
        keys = {name: name.replace("_", "-") for name in names}
        if missing := sorted(key for key in keys.values() if key not in fields):
            raise ProtocolError(f"the question of UDP has no {missing}")
        keep_back = fields.get("keep-back", [])
        if not isinstance(keep_back, list) or not all(isinstance(n, str) for n in keep_back):
            raise ProtocolError("the entry 'keep-back' is no list of names")
        return cls(**{n: fields[k] for n, k in keys.items()}, keep_back=tuple(keep_back))


def _check_sampling(unit: str, sampling_rate: float) -> None:
    check_number("sampling_rate", sampling_rate, minimum=_SMALLEST, maximum=1)
    if unit == USER_UNIT and sampling_rate != 1:
        raise InvalidParameterError(
            "sampling_rate", sampling_rate, "1 at user level: records are not sampled"
        )


def _check(
    *,
    rounds: int | None = None,
    q: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
) -> None:
    if rounds is not None:
        check_integer("rounds", rounds, minimum=1)
    if q is not None and not 0 < check_number("q", q) <= 1:
        raise InvalidParameterError("q", q, "a number above 0 and of at most 1")
    if epsilon is not None and not check_number("epsilon", epsilon) > 0:
        raise InvalidParameterError("epsilon", epsilon, "a number above 0")
    if delta is not None and not 0 < check_number("delta", delta) < 1:
        raise InvalidParameterError("delta", delta, "a number between 0 and 1, neither of them")
