"""Central differential privacy of whole clients, for federated averaging (DP-FedAvg).

In a round each client of a cohort sends its update, clipped to an L2 norm C and truncated to the
grid; the sum gets Gaussian noise. With adaptive clipping the number of updates that were not
clipped is summed and noised too, and C follows a quantile of the norms.

Sources: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language
Models", ICLR 2018 (clients weigh the same here); Andrew, Thakkar, McMahan, Ramaswamy,
"Differentially Private Learning with Adaptive Clipping", NeurIPS 2021; for noise in shares
`flwr_privacy.distributed_noise`.

Symbols: C is the clipping norm, N the number of clients, q the fraction of them asked in a round, z
a noise multiplier (standard deviation over L2 sensitivity), n the number of contributions to a sum.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .accounting import Charge, noise_multiplier
from .accounting.gaussian import check_delta
from .distributed_noise import MOST_PARTIES, share_sigma, summed_gap
from .errors import (
    InvalidParameterError,
    ProtocolError,
    check_choice,
    check_integer,
    check_number,
)
from .grid import Grid
from .udp import GRID_SHARE, participations
from .updates import SMALLEST_NORM

__all__ = [
    "COUNT_GRID",
    "DISTRIBUTED",
    "FIXED",
    "POISSON",
    "SERVER",
    "Schedule",
    "Terms",
    "count_code",
    "fraction_below",
    "next_clipping_norm",
    "sensitivity",
    "split",
]

DISTRIBUTED, SERVER = "distributed", "server"
"""Who adds the noise: each client a share of it, or a trusted server."""

FIXED, POISSON = "fixed", "poisson"
"""How a cohort is drawn: a fixed number of clients, or each client by itself with probability q."""

LARGEST_NORM = 1e100

COUNT_GRID = Grid(-16)
"""Grid of the count of updates within the norm, in half units; see `count_code`."""

_LARGEST_GAP = 0.1  # of epsilon, set aside for the grid in the whole training
_LARGEST_SHARE = 0.99
_SMALLEST = math.ulp(0.0)


def sensitivity(clipping_norm: float, *, sampling: str, noise: str) -> float:
    """Return the L2 sensitivity of a sum of updates within a clipping norm.

    Parameters
    ----------
    clipping_norm : float
        Bound C of an update; truncation to the grid keeps to it. With 1, the result is the
        sensitivity of the count in half units (`count_code`).
    sampling : {"fixed", "poisson"}
        How a cohort is drawn.
    noise : {"distributed", "server"}
        Who adds the noise.

    Returns
    -------
    float
        C for secret Poisson samples (``poisson`` with ``server``), where neighbours have one client
        more or less; otherwise 2C, as one client's data are replaced by any other.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> sensitivity(0.5, sampling="fixed", noise="distributed")
    1.0
    >>> sensitivity(0.5, sampling="poisson", noise="server")
    0.5
    """
    check_number("clipping_norm", clipping_norm, minimum=SMALLEST_NORM, maximum=LARGEST_NORM)
    return clipping_norm if _amplified(noise, sampling) else 2 * clipping_norm


def split(noise_multiplier: float, count_share: float) -> tuple[float, float | None]:
    """Return the noise multipliers of the update and of the count, from that of both together.

    Parameters
    ----------
    noise_multiplier : float
        Noise multiplier z of the two as one release.
    count_share : float
        Share of ``1 / z**2`` that goes to the count, from 0 to 0.99; with 0 there is no count.

    Returns
    -------
    update, count : float, float or None
        z_u and z_c.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Notes
    -----
    Divide the update by z_u times its sensitivity, and the count by z_c times its own. Then both
    have noise of standard deviation 1, so together they are one vector with one Gaussian noise; and
    one client moves the vector by at most sqrt(1/z_u^2 + 1/z_c^2) in L2. So the pair is one
    Gaussian mechanism of noise multiplier z, exactly, with

        1/z^2 = 1/z_u^2 + 1/z_c^2,   z_u = z / sqrt(1 - share),   z_c = z / sqrt(share),

    also after a Poisson sample, as both are of the same sample. Andrew et al. (theorem 1) have
    the same with z_c twice their sigma_b, which is in whole units. Nothing smaller holds: an update
    may turn round while the count falls.

    Examples
    --------
    >>> update, count = split(1.0, 0.01)
    >>> round(update, 4), round(count, 4)
    (1.005, 10.0)
    """
    check_number("noise_multiplier", noise_multiplier, minimum=_SMALLEST)
    check_number("count_share", count_share, minimum=0, maximum=_LARGEST_SHARE)
    if count_share == 0:
        return noise_multiplier, None
    return noise_multiplier / math.sqrt(1 - count_share), noise_multiplier / math.sqrt(count_share)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The noise of a training, from its budget.

    Parameters
    ----------
    noise : {"distributed", "server"}
        Who adds the noise.
    sampling : {"fixed", "poisson"}
        How a cohort is drawn.
    epsilon, delta : float
        Budget of a client over the whole training.
    rounds : int
        Rounds planned.
    q : float
        Fraction of the clients that is asked in a round; for ``poisson`` the probability of each.
    count_share : float, default 0.0
        Share of a round's budget that goes to the count of updates within the norm, where clipping
        is adaptive: see `split`. With 0 clipping is fixed. The standard error that noise adds to
        the fraction below is ``count_noise_multiplier * s / (2 n)``, s being 1 for secret Poisson
        samples and 2 otherwise; Andrew et al. take 0.05, which for n = 100 is
        ``count_noise_multiplier = 10`` or 5.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Guarantee
    ---------
    (epsilon, delta) for all data of one client, over the whole training.

    ===========  =======  ===========================  ==================  ======================
    noise        sample   adversary                    neighbours          charged
    ===========  =======  ===========================  ==================  ======================
    distributed  either   the server and colluders;    one client's data   a client each time it
                          they know who takes part     are replaced        is asked
    server       fixed    whoever sees the models,     one client's data   a client each time it
                          and no message               are replaced        takes part
    server       poisson  whoever sees the models,     one client more or  every client, in every
                          and neither a message nor    less                round, with the sample
                          who takes part
    ===========  =======  ===========================  ==================  ======================

    Covered: the sums of all rounds and what is made of them; the clipping norm of a round may
    follow from earlier sums, the noise multiplier may not. A client that was asked `releases` times
    must not be asked again.
    Assumptions: with ``distributed`` a sum opens only if it has as many honest shares as the noise
    was planned for (`flwr_privacy.distributed_noise.share_sigma`). With ``server`` the server is
    trusted. With both ``server`` and ``poisson`` it draws each client by itself from a
    cryptographic generator, tells nobody, and divides sums by the expected number q N, N being
    public, never by the actual number, which depends on who is there; a client that fails adds
    nothing and is covered.
    Not covered: participation itself, except with ``server`` and ``poisson``; which client fails or
    declines for reasons in its data; losses and metrics, should they be sent; timing.

    Notes
    -----
    McMahan et al. and Andrew et al. count amplification by sampling. That needs a sample that the
    adversary does not see; a server that sums shares sees it. For cohorts of fixed size no
    amplification is claimed, although there is some for an adversary who does not see them.
    Secret Poisson samples are calibrated with ``rdp``, whose cap is proven; ``pld`` would do
    with 5 to 8 % less noise in trainings of usual size.

    Examples
    --------
    >>> budget = {"epsilon": 8.0, "delta": 1e-5, "rounds": 100, "q": 0.1}
    >>> schedule = Schedule(noise="distributed", sampling="fixed", **budget)
    >>> schedule.releases, round(schedule.noise_multiplier, 3)
    (18, 2.549)
    >>> round(Schedule(noise="server", sampling="poisson", **budget).noise_multiplier, 2)
    0.99
    """

    noise: str
    sampling: str
    epsilon: float
    delta: float
    rounds: int
    q: float
    count_share: float = 0.0

    def __post_init__(self) -> None:
        _amplified(self.noise, self.sampling)
        _check_budget(self.epsilon, self.delta)
        check_integer("rounds", self.rounds, minimum=1)
        _check_rate("q", self.q)
        check_number("count_share", self.count_share, minimum=0, maximum=_LARGEST_SHARE)

    @property
    def sampling_rate(self) -> float:
        """Rate of the sample that amplifies: q where samples are secret, otherwise 1."""
        return self.q if _amplified(self.noise, self.sampling) else 1.0

    @property
    def releases(self) -> int:
        """Number of charges for which the budget of a client is meant.

        All rounds where every client is charged in every round; otherwise as many as 99 % of the
        clients take part in at most.
        """
        if _amplified(self.noise, self.sampling):
            return self.rounds
        return participations(self.rounds, self.q)

    def affordable(self, releases: int) -> bool:
        """Return whether a client with so many charges can be charged once more."""
        return releases < self.releases

    @cached_property
    def noise_multiplier(self) -> float:
        """Noise multiplier of a round: of the update and the count as one release."""
        return noise_multiplier(
            epsilon=self.epsilon - self._set_aside,
            delta=self.delta * math.exp(-self._set_aside),
            releases=self.releases,
            sampling=self.sampling_rate,
            accountant="gdp" if self.sampling_rate == 1 else "rdp",
        )

    @property
    def update_noise_multiplier(self) -> float:
        """Noise multiplier of the summed updates."""
        return split(self.noise_multiplier, self.count_share)[0]

    @property
    def count_noise_multiplier(self) -> float | None:
        """Noise multiplier of the count; None where clipping is fixed."""
        return split(self.noise_multiplier, self.count_share)[1]

    @property
    def gap(self) -> float:
        """Epsilon set aside per charge for the grid, of the update and the count together."""
        return self._set_aside / self.releases

    def charge(self) -> Charge:
        """Return what a round costs a client."""
        return Charge(
            noise_multiplier=self.noise_multiplier, sampling=self.sampling_rate, gap=self.gap
        )

    @property
    def _set_aside(self) -> float:
        return min(GRID_SHARE * self.epsilon, _LARGEST_GAP)


def count_code(*, within: bool) -> int:
    """Return a client's contribution to the count, as a code on `COUNT_GRID`.

    Parameters
    ----------
    within : bool
        Whether the norm of its update was at most C.

    Returns
    -------
    int
        Code of 1 half unit if so, otherwise of -1: b - 1/2 in whole units, as Andrew et al. have
        it. So every client adds 1 half unit in absolute value, the least that tells the two cases
        apart: the sensitivity is 1 half unit for one client more or less, and 2 for one replaced
        (one whole unit). With 0 and 1, one client more would count for a whole unit.

    Notes
    -----
    The count is noised on a grid much finer than a half unit, because noise of a few steps would
    cost a gap, and has to be cut into shares of at least
    `flwr_privacy.distributed_noise.SMALLEST_SHARE` steps.

    Examples
    --------
    >>> COUNT_GRID.step * count_code(within=True), COUNT_GRID.step * count_code(within=False)
    (1.0, -1.0)
    """
    one = round(1 / COUNT_GRID.step)
    return one if within else -one


def fraction_below(sum_of_halves: float, count: float) -> float:
    """Return the fraction of updates within the norm, from the noised count.

    Parameters
    ----------
    sum_of_halves : float
        Sum of contributions and noise, in half units.
    count : float
        Number of contributions; for secret Poisson samples the expected one, q N.

    Returns
    -------
    float
        Without bias. Beyond [0, 1] where noise, or the number of contributions, makes it so.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> fraction_below(-20.0, 100)
    0.4
    """
    check_number("sum_of_halves", sum_of_halves)
    check_number("count", count, minimum=_SMALLEST)
    return 0.5 + sum_of_halves / count / 2


def next_clipping_norm(
    norm: float, below: float, *, quantile: float = 0.5, learning_rate: float = 0.2
) -> float:
    """Return the clipping norm of the next round: ``C exp(-eta (b - gamma))``.

    Andrew et al., algorithm 1. Made of released values only, so it costs no privacy.

    Parameters
    ----------
    norm : float
        Clipping norm C of this round, from 1e-100 to 1e100.
    below : float
        Noised fraction b of updates within it; what is beyond [0, 1] is moved to its end.
    quantile : float, default 0.5
        Fraction gamma to aim at, from 0 to 1.
    learning_rate : float, default 0.2
        Step eta, above 0 and at most 100.

    Returns
    -------
    float
        Kept from 1e-100 to 1e100.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> round(next_clipping_norm(1.0, 0.9), 4), round(next_clipping_norm(1.0, 0.1), 4)
    (0.9231, 1.0833)
    """
    check_number("norm", norm, minimum=SMALLEST_NORM, maximum=LARGEST_NORM)
    check_number("below", below)
    check_number("quantile", quantile, minimum=0, maximum=1)
    check_number("learning_rate", learning_rate, minimum=_SMALLEST, maximum=100)
    moved = norm * math.exp(-learning_rate * (min(1.0, max(0.0, below)) - quantile))
    return min(LARGEST_NORM, max(SMALLEST_NORM, moved))


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the server asks of a client in a round; the fields of central DP on the wire.

    Parameters
    ----------
    noise : {"distributed", "server"}
        Who adds the noise.
    sampling : {"fixed", "poisson"}
        How the cohort is drawn.
    sampling_rate : float, default 1.0
        Rate of the sample that amplifies; below 1 for secret Poisson samples only.
    noise_multiplier : float
        Noise multiplier of the update and the count as one release.
    count_share : float, default 0.0
        Share of the count in it (`split`); above 0 a client adds its `count_code`.
    epsilon, delta : float
        Budget of a client in this experiment.
    gap : float
        Epsilon set aside per charge for the grid.
    clipping_norm : float
        Bound of the update, from 1e-100 to 1e100.
    grid : int
        Exponent of the step of the update's grid.
    parties : int, default 1
        Smallest number of honest shares in a sum that is opened; 1 if the server adds the noise.
    keep_back : tuple of str
        Arrays of which nothing is released, beyond those that a client keeps back anyway.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Notes
    -----
    They are the server's word. Whether noise by the server is good enough, and whether the cohort
    has `parties` honest clients, a client must judge from elsewhere (its policy, the secure sum's
    roster).
    """

    noise: str
    sampling: str
    sampling_rate: float = 1.0
    noise_multiplier: float
    count_share: float = 0.0
    epsilon: float
    delta: float
    gap: float
    clipping_norm: float
    grid: int
    parties: int = 1
    keep_back: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        amplified = _amplified(self.noise, self.sampling)
        _check_rate("sampling_rate", self.sampling_rate)
        if not amplified and self.sampling_rate != 1:
            raise InvalidParameterError(
                "sampling_rate", self.sampling_rate, "1: only a secret Poisson sample amplifies"
            )
        split(self.noise_multiplier, self.count_share)
        _check_budget(self.epsilon, self.delta)
        check_number("gap", self.gap, minimum=0)
        sensitivity(self.clipping_norm, sampling=self.sampling, noise=self.noise)
        Grid(self.grid)
        check_integer("parties", self.parties, minimum=1, maximum=MOST_PARTIES)
        if self.noise == SERVER and self.parties != 1:
            raise InvalidParameterError("parties", self.parties, "1: the server adds the noise")

    def charge(self) -> Charge:
        """Return what the round costs a client.

        With a sampling rate below 1 each client owes it for every round, asked or not: those books
        are the server's, and a client's own would have too few entries.
        """
        return Charge(
            noise_multiplier=self.noise_multiplier, sampling=self.sampling_rate, gap=self.gap
        )

    def share_sigmas(self) -> tuple[float, float | None]:
        """Return the noise of each who adds any: a client's share, or the trusted server's whole.

        Returns
        -------
        update : float
            In units of the weights; over the grid's step it is the parameter to sample with.
        count : float or None
            In half units, over `COUNT_GRID`'s step likewise; None where there is no count.
        """
        update, count = split(self.noise_multiplier, self.count_share)
        where = {"sampling": self.sampling, "noise": self.noise}
        update = share_sigma(update * sensitivity(self.clipping_norm, **where), self.parties)
        if count is not None:
            count = share_sigma(count * sensitivity(1.0, **where), self.parties)
        return update, count

    def grid_gap(self, dimension: int) -> float:
        """Return the epsilon of a round that is lost to the grids.

        A round where it is more than `gap` must be refused. Two noises are drawn, so their gaps add
        up (and the tail of 1e-30 doubles, which is left out of charges anyway).

        Parameters
        ----------
        dimension : int
            Number of released weights.

        Raises
        ------
        InvalidParameterError
            If noise has too few steps for a proof: a finer grid is needed, or more noise.
        """
        update, count = self.share_sigmas()
        gap = summed_gap(dimension, update / Grid(self.grid).step, self.parties)
        if count is not None:
            gap += summed_gap(1, count / COUNT_GRID.step, self.parties)
        return gap

    def write(self) -> dict[str, Any]:
        """Return the fields of a message."""
        fields = {name.replace("_", "-"): getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "keep-back": list(self.keep_back)}

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
        keys = {name: name.replace("_", "-") for name in cls.__dataclass_fields__}
        # A wire may drop an empty list.
        values = {"keep-back": [], **fields}
        if missing := sorted(key for key in keys.values() if key not in values):
            raise ProtocolError(f"the question of central DP has no {missing}")
        keep_back = values["keep-back"]
        if not isinstance(keep_back, list) or not all(isinstance(n, str) for n in keep_back):
            raise ProtocolError("the entry 'keep-back' is no list of names")
        values["keep-back"] = tuple(keep_back)
        return cls(**{name: values[key] for name, key in keys.items()})


def _amplified(noise: str, sampling: str) -> bool:
    """Return whether samples are secret from the adversary, so that they amplify."""
    check_choice("noise", noise, (DISTRIBUTED, SERVER))
    check_choice("sampling", sampling, (FIXED, POISSON))
    return noise == SERVER and sampling == POISSON


def _check_budget(epsilon: float, delta: float) -> None:
    if not check_number("epsilon", epsilon) > 0:
        raise InvalidParameterError("epsilon", epsilon, "a number above 0")
    check_delta(delta)


def _check_rate(parameter: str, rate: float) -> None:
    if not 0 < check_number(parameter, rate) <= 1:
        raise InvalidParameterError(parameter, rate, "a number above 0 and of at most 1")
