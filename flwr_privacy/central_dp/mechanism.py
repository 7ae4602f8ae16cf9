"""Central differential privacy of whole clients, for federated averaging (DP-FedAvg).

In a round each client of a cohort sends its update, clipped to an L2 norm C and truncated to the
grid; the sum gets Gaussian noise. With adaptive clipping (`flwr_privacy.privacy.adaptive_clipping`)
the number of updates that were not clipped is summed and noised too.

Source: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language
Models", ICLR 2018 (clients weigh the same here); for noise in shares
`flwr_privacy.privacy.distributed_noise`.

Symbols: C is the clipping norm, N the number of clients, q the fraction of them asked in a round, z
a noise multiplier (standard deviation over L2 sensitivity), n the number of contributions to a sum.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flwr_privacy.accounting import Charge, noise_multiplier
from flwr_privacy.accounting.gaussian import check_delta
from flwr_privacy.errors import (
    InvalidParameterError,
    ProtocolError,
    check_choice,
    check_integer,
    check_number,
)
from flwr_privacy.privacy.adaptive_clipping import (
    COUNT_GRID,
    COUNT_NAME,
    LARGEST_NORM,
    LARGEST_SHARE,
    count_code,
    split,
)
from flwr_privacy.privacy.distributed_noise import MOST_PARTIES, share_sigma, summed_gap
from flwr_privacy.privacy.failures import FAILED_NAME, failed_code
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid
from flwr_privacy.privacy.updates import SMALLEST_NORM, released_names
from flwr_privacy.udp import GRID_SHARE, participations
from flwr_privacy.wire.arrays import Arrays

__all__ = [
    "DISTRIBUTED",
    "FIXED",
    "POISSON",
    "SERVER",
    "SHARE_REACH",
    "CentralDPPlan",
    "CentralDPTerms",
    "sensitivity",
]

DISTRIBUTED, SERVER = "distributed", "server"
"""Who adds the noise: each client a share of it, or a trusted server."""

FIXED, POISSON = "fixed", "poisson"
"""How a cohort is drawn: a fixed number of clients, or each client by itself with probability q."""

SHARE_REACH = 12
"""Standard deviations of a share of noise that codes have room for; beyond it a client fails."""

_LARGEST_GAP = 0.1  # of epsilon, set aside for the grid in the whole training


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


@dataclass(frozen=True, kw_only=True)
class CentralDPPlan:
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

    Covered: the sums of all rounds and what is made of them, with ``distributed`` the count of
    trainings that failed too (`flwr_privacy.privacy.failures`: it adds nothing to the sensitivity);
    the clipping norm of a round may follow from earlier sums, the noise multiplier may not. A
    client that was asked `releases` times must not be asked again. Assumptions: with
    ``distributed`` a sum opens only if it has as many honest shares as the noise was planned for
    (`flwr_privacy.privacy.distributed_noise.share_sigma`). With ``server`` the server is trusted.
    With both ``server`` and ``poisson`` it draws each client by itself from a cryptographic
    generator, tells nobody, and divides sums by the expected number q N, N being public, never by
    the actual number, which depends on who is there; a client that fails adds nothing and is
    covered. Not covered: participation itself, except with ``server`` and ``poisson``; which client
    fails or declines for reasons in its data; losses and metrics, should they be sent; timing.

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
    >>> schedule = CentralDPPlan(noise="distributed", sampling="fixed", **budget)
    >>> schedule.releases, round(schedule.noise_multiplier, 3)
    (18, 2.549)
    >>> round(CentralDPPlan(noise="server", sampling="poisson", **budget).noise_multiplier, 2)
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
        check_number("count_share", self.count_share, minimum=0, maximum=LARGEST_SHARE)

    @property
    def sampling_rate(self) -> float:
        """Sampling rate that amplifies privacy: q where samples are secret, otherwise 1."""
        return self.q if _amplified(self.noise, self.sampling) else 1.0

    @cached_property
    def releases(self) -> int:
        """Number of charges that a client's budget is planned for.

        All rounds where every client is charged in every round; otherwise as many as 99 % of the
        clients take part in at most.
        """
        if _amplified(self.noise, self.sampling):
            return self.rounds
        return participations(self.rounds, self.q)

    def affordable(self, releases: int) -> bool:
        """Return whether a client with a number of charges can be charged once more."""
        return releases < self.releases

    @cached_property
    def noise_multiplier(self) -> float:
        """Noise multiplier of a round, for the update and the count as one release."""
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


@dataclass(frozen=True, kw_only=True)
class CentralDPTerms:
    """The round config of central DP: the fields that the server sends with each request.

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
        CodeGrid(self.grid)
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
        """Return the standard deviations of one party's noise: of a client's share or the server's.

        Returns
        -------
        update : float
            In units of the weights; over the grid's step it is the parameter to sample with.
        count : float or None
            In half units, over `COUNT_GRID`'s step likewise; None where there is no count.
        """
        _, count = split(self.noise_multiplier, self.count_share)
        if count is not None:
            count *= sensitivity(1.0, sampling=self.sampling, noise=self.noise)
            count = share_sigma(count, self.parties)
        return share_sigma(self.sigma(), self.parties), count

    def sigma(self) -> float:
        """Return the charged standard deviation of the summed updates, in units of the weights."""
        update, _ = split(self.noise_multiplier, self.count_share)
        return update * sensitivity(self.clipping_norm, sampling=self.sampling, noise=self.noise)

    @property
    def failed_code(self) -> int:
        """Code of a training that failed; 0 where a failure is no secret: noise by the server."""
        if self.noise == SERVER:
            return 0
        return failed_code(self.clipping_norm, CodeGrid(self.grid).step)

    def failed_sigma(self, clients: Collection[str]) -> float:
        """Return the standard deviation of the count of failed trainings in a sum, in clients."""
        return self.share_sigmas()[0] * math.sqrt(len(clients)) / self.clipping_norm

    def grid_gap(self, dimension: int) -> float:
        """Return the epsilon that a round loses to the grids.

        A round where it is more than `gap` must be refused. Two noises are drawn, so their gaps add
        up (and the tail of 1e-30 doubles, which is left out of charges anyway).

        Parameters
        ----------
        dimension : int
            Number of released weights.

        Raises
        ------
        InvalidParameterError
            If noise has too few steps for a proof, or the norm has none: a finer grid is needed, or
            more noise.
        """
        update, count = self.share_sigmas()
        entries = dimension + bool(self.failed_code)
        gap = summed_gap(entries, update / CodeGrid(self.grid).step, self.parties)
        if count is not None:
            gap += summed_gap(1, count / COUNT_GRID.step, self.parties)
        return gap

    def code_limit(self) -> int:
        """Return the largest code that a client sends.

        With noise in shares, room for `SHARE_REACH` standard deviations of one is left: a share
        that was cut off would hide less.
        """
        update, count = self.share_sigmas() if self.noise == DISTRIBUTED else (0.0, 0.0)
        largest = (self.clipping_norm + SHARE_REACH * update) / CodeGrid(self.grid).step
        if self.count_share:
            room = SHARE_REACH * (count or 0.0) / COUNT_GRID.step
            largest = max(largest, count_code(within=True) + room)
        return math.ceil(largest)

    def check_grid(self, dimension: int) -> None:
        """Refuse a grid on which the noise costs more than is charged, or codes leave 32 bits.

        Parameters
        ----------
        dimension : int
            Number of released weights.

        Raises
        ------
        InvalidParameterError
            If it is too coarse or too fine.
        """
        gap = self.grid_gap(dimension)
        if gap > self.gap:
            raise InvalidParameterError(
                "grid",
                self.grid,
                f"a finer grid (more grid_bits): epsilon {gap:.3g} of a release would be lost to "
                "it",
            )
        if self.code_limit() > CODE_LIMIT:
            raise InvalidParameterError(
                "grid",
                self.grid,
                f"a coarser grid (less grid_bits): codes up to {self.code_limit()} leave 32 bits",
            )

    def names(self, model: Arrays) -> list[str]:
        """Return the names of the arrays whose updates are released.

        Raises
        ------
        InvalidParameterError
            If there are none, or one has the name of a count.
        """
        if taken := {COUNT_NAME, FAILED_NAME}.intersection(model):
            raise InvalidParameterError("arrays", min(taken), "other names than this one")
        return released_names(model, self.keep_back)

    def write(self) -> dict[str, Any]:
        """Return the fields of a message."""
        fields = {name.replace("_", "-"): getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "keep-back": list(self.keep_back)}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "CentralDPTerms":
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
    """Return whether samples are secret from the adversary, so that they amplify privacy."""
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
