"""The terms of central DP: their fields on the wire, and the noise, grid and codes they mean.

In a round each client of a cohort sends its update, clipped to an L2 norm C and truncated to the
grid; the sum gets Gaussian noise. With adaptive clipping (`flwr_privacy.privacy.adaptive_clipping`)
the number of updates that were not clipped is summed and noised too.

Source: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language
Models", ICLR 2018 (clients weigh the same here); for noise in shares
`flwr_privacy.privacy.distributed_noise`.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.pipeline.participation_limits import INDEPENDENT, ParticipationLimit
from flwr_privacy.privacy.adaptive_clipping import COUNT_GRID, COUNT_NAME, count_code, split
from flwr_privacy.privacy.cohorts import BALANCED
from flwr_privacy.privacy.distributed_noise import (
    MOST_PARTIES,
    honest_members,
    share_sigma,
    summed_gap,
)
from flwr_privacy.privacy.failures import FAILED_NAME, failed_code
from flwr_privacy.privacy.grid import CodeGrid, check_codes, check_gap
from flwr_privacy.privacy.updates import released_names
from flwr_privacy.udp.budgets import check_budget
from flwr_privacy.wire.arrays import Arrays

from .sensitivity import DISTRIBUTED, SERVER, amplified, relation, sensitivity

if TYPE_CHECKING:  # what is only of use beside a committee is loaded late
    from flwr_privacy.central_dp.correlated.factors import ToeplitzFactor

    from .joint_cost import JointCost

__all__ = ["MEMBER", "SHARE_REACH", "CentralDPTerms"]

SHARE_REACH = 12
"""Standard deviations of a share of noise that codes have room for; beyond it a client fails."""


MEMBER = "noise-member"
"""Entry of a node's hello that says that its operator made it a member of noise committees."""

MOST_ROUNDS = 2**16
"""Rounds that a client hears of with a committee: it computes what they cost together."""


@dataclass(frozen=True, kw_only=True)
class CentralDPTerms:
    """The terms of central DP: what the server sends with each request.

    Parameters
    ----------
    noise : {"distributed", "server"}
        Who adds the noise.
    sampling : {"fixed", "balanced", "poisson", "cyclic_poisson"}
        How the cohort is drawn: see `flwr_privacy.privacy.cohorts`.
    neighbours : {"add_remove", "replace_one", "zero_out"}
        Which data sets the charge is for; those that `relation` allows.
    sampling_rate : float, default 1.0
        Rate of the sample that amplifies; below 1 for secret Poisson samples only.
    noise_multiplier : float
        Noise multiplier of the update and the count as one release; with correlated noise that
        of a single update before the factor.
    count_share : float, default 0.0
        Share of the count in it (`split`); above 0 a client adds its `count_code`.
    epsilon, delta : float
        Budget of a client in this experiment.
    gap : float
        Epsilon set aside for the grid, per charge; with correlated noise by the server for all
        rounds.
    clipping_norm : float
        Bound of the update, from 1e-100 to 1e100.
    grid : int
        Exponent of the step of the update's grid.
    parties : int, default 1
        Smallest number of honest shares in a sum that is opened; 1 if the server adds the noise.
    keep_back : list of str
        Arrays of which nothing is released, beyond those that a client keeps back anyway.
    factor : str, default "independent"
        Digest of the factor of correlated noise, or that the noise of rounds is independent.
    rounds : int, default 1
        Rounds whose noise is correlated.
    separation, participations : int, default 1
        With correlated noise: least number of rounds from one participation of a client to its
        next, and how many it has at most. A client keeps to the first that it is told.
    members : list of str
        The members of the noise committee, sorted; empty where there is none. Then the clients add
        no noise, and `parties` is the number of members that count as honest.
    block : int, optional
        The round in which these members began their streams; None where there are none.
    coefficients : list of int
        The factor, a banded one, where members and clients have to know it.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Notes
    -----
    The server says them. Whether noise by the server is good enough follows from the client's
    policy, and whether the cohort has `parties` honest clients from the secure sum's roster.
    """

    noise: str
    sampling: str
    neighbours: str
    sampling_rate: float = 1.0
    noise_multiplier: float
    count_share: float = 0.0
    epsilon: float
    delta: float
    gap: float
    clipping_norm: float
    grid: int
    parties: int = 1
    keep_back: list[str] = field(default_factory=list)
    factor: str = INDEPENDENT
    rounds: int = 1
    separation: int = 1
    participations: int = 1
    members: list[str] = field(default_factory=list)
    block: int | None = None
    coefficients: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 < check_number("sampling_rate", self.sampling_rate) <= 1:
            allowed = "a number above 0 and of at most 1"
            raise InvalidParameterError("sampling_rate", self.sampling_rate, allowed)
        if not amplified(self.noise, self.sampling) and self.sampling_rate != 1:
            raise InvalidParameterError(
                "sampling_rate", self.sampling_rate, "1: only a secret Poisson sample amplifies"
            )
        split(self.noise_multiplier, self.count_share)
        check_budget(epsilon=self.epsilon, delta=self.delta)
        check_number("gap", self.gap, minimum=0)
        relation(self.neighbours, noise=self.noise, sampling=self.sampling)
        sensitivity(self.clipping_norm, neighbours=self.neighbours)
        CodeGrid(self.grid)
        check_integer("parties", self.parties, minimum=1, maximum=MOST_PARTIES)
        if self.noise == SERVER and self.parties != 1:
            raise InvalidParameterError("parties", self.parties, "1: the server adds the noise")
        for name in ("rounds", "separation", "participations"):
            check_integer(name, getattr(self, name), minimum=1)
        together = self.noise == SERVER or self.members
        if self.factor != INDEPENDENT and (not together or self.count_share):
            allowed = (
                f"'{INDEPENDENT}', unless the server or a committee adds all noise, and no count "
                "is summed"
            )
            raise InvalidParameterError("factor", self.factor, allowed)
        if self.members:
            self._check_committee()
        elif self.block is not None or self.coefficients:
            raise InvalidParameterError("block", self.block, "None without a committee")

    def _check_committee(self) -> None:
        names = self.members
        if names != sorted(set(names)):
            raise InvalidParameterError("members", names, "different names, sorted")
        if not 1 <= self.parties <= honest_members(len(names)):
            allowed = f"1 to {honest_members(len(names))} of {len(names)} members, the honest ones"
            raise InvalidParameterError("parties", self.parties, allowed)
        if self.noise == SERVER or self.sampling != BALANCED:
            allowed = "'balanced' and no noise of the server beside a committee"
            raise InvalidParameterError("sampling", self.sampling, allowed)
        check_integer("rounds", self.rounds, minimum=1, maximum=MOST_ROUNDS)
        check_integer("block", self.block, minimum=1, maximum=self.rounds)
        check_integer("participations", self.participations, minimum=1, maximum=self.rounds)
        from flwr_privacy.central_dp.correlated.stream import digest_of

        if digest_of(self.toeplitz) != self.factor:
            raise InvalidParameterError("factor", self.factor, "the digest of the coefficients")

    @property
    def toeplitz(self) -> "ToeplitzFactor":
        """The factor of a committee."""
        from flwr_privacy.central_dp.correlated.factors import ToeplitzFactor

        return ToeplitzFactor(coefficients=tuple(self.coefficients))

    @cached_property
    def _joint(self) -> "JointCost":
        """What the rounds cost a client together, with a committee."""
        from .joint_cost import JointCost

        return JointCost(
            factor=self.toeplitz,
            rounds=self.rounds,
            separation=self.separation,
            participations=self.participations,
        )

    def charge(self, participation: int = 1) -> Charge:
        """Return what the round costs a client.

        With a committee it depends on the client's how manieth participation it is:
        `flwr_privacy.central_dp.plan.CentralDPNoisePlan.charge`, from what the terms say. With a
        sampling rate below 1 each client owes it for every round, asked or not: the server
        accounts for it, as a client's ledger would have too few entries.
        """
        multiplier = self.noise_multiplier
        if self.members:
            multiplier = self._joint.multiplier(multiplier, participation)
        return Charge(
            noise_multiplier=multiplier,
            neighbours=self.neighbours,
            sampling=self.sampling_rate,
            gap=self.gap,
        )

    def least_multiplier(self) -> float:
        """Return the least noise multiplier with which any participation is charged."""
        if not self.members:
            return self.noise_multiplier
        numbers = range(1, self.participations + 1)
        return min(self._joint.multiplier(self.noise_multiplier, number) for number in numbers)

    def limit(self) -> ParticipationLimit | None:
        """Return how often a client may take part, where rounds cost something together."""
        if self.noise != SERVER and not self.members:
            return None
        return ParticipationLimit(self.factor, self.rounds, self.separation, self.participations)

    def share_sigmas(self) -> tuple[float, float | None]:
        """Return the standard deviations of one party's noise, with correlated noise that of z.

        A party is a client, a member of the committee, or the server.

        Returns
        -------
        update : float
            In units of the weights; over the grid's step it is the parameter to sample with.
        count : float or None
            In half units, over `COUNT_GRID`'s step likewise; None where there is no count.
        """
        _, count = split(self.noise_multiplier, self.count_share)
        if count is not None:
            count *= sensitivity(1.0, neighbours=self.neighbours)
            count = share_sigma(count, self.parties)
        return share_sigma(self.sigma(), self.parties), count

    def sigma(self) -> float:
        """Return the charged standard deviation of the summed updates, in units of the weights."""
        update, _ = split(self.noise_multiplier, self.count_share)
        return update * sensitivity(self.clipping_norm, neighbours=self.neighbours)

    @property
    def failed_code(self) -> int:
        """Code of a training that failed; 0 where a failure is no secret: noise by the server."""
        if self.noise == SERVER:
            return 0
        return failed_code(self.clipping_norm, CodeGrid(self.grid).step)

    def failed_sigma(self, clients: Collection[str]) -> float:
        """Return the standard deviation of the count of failed trainings in a sum, in clients."""
        if self.members:
            shares = math.sqrt(len(self.members))
            return self.share_sigmas()[0] * self._joint.growth * shares / self.clipping_norm
        return self.share_sigmas()[0] * math.sqrt(len(clients)) / self.clipping_norm

    def grid_gap(self, dimension: int) -> float:
        """Return the epsilon that a charge loses to the grids.

        A round where it is more than `gap` must be refused. Two noises are drawn, so their gaps add
        up (and the tail of 1e-30 doubles, which is left out of charges anyway).

        With a committee it is that of all sums which one participation reaches: the grid may be
        another one in each block, but within a block it stays. The streams of members beyond
        `parties`, which the server may corrupt late, are shown in each of these rounds
        (`flwr_privacy.central_dp.correlated.member_stream.shown_gap`).

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
        steps = update / CodeGrid(self.grid).step
        gap = summed_gap(entries, steps, self.parties)
        if count is not None:
            gap += summed_gap(1, count / COUNT_GRID.step, self.parties)
        if not self.members:
            return gap * self.rounds
        from flwr_privacy.central_dp.correlated.member_stream import shown_gap

        shown = range(self.parties + 1, len(self.members) + 1)
        gap += sum(shown_gap(entries, steps, members) for members in shown)
        return gap * min(self.toeplitz.bands, self.rounds)

    def code_limit(self) -> int:
        """Return the largest code that a client sends.

        With noise in shares, room for `SHARE_REACH` standard deviations of one is left: a share
        that was cut off would hide less.
        """
        update, count = self.share_sigmas() if self.noise == DISTRIBUTED else (0.0, 0.0)
        largest = (self.clipping_norm + SHARE_REACH * update) / CodeGrid(self.grid).step
        if self.members:  # whose codes have no update, and whose noise varies more than z
            reach = max(self.clipping_norm, SHARE_REACH * self._joint.growth * update)
            largest = reach / CodeGrid(self.grid).step
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
        check_gap(self.grid, self.grid_gap(dimension), charged=self.gap)
        check_codes(self.grid, self.code_limit())
        if self.members:
            from flwr_privacy.central_dp.correlated.stream import check_sigma

            check_sigma(self.toeplitz, self.share_sigmas()[0] / CodeGrid(self.grid).step)

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
