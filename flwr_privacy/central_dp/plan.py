"""Computes the noise of a training under central DP from its budget."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

from flwr_privacy.accounting import Charge, noise_multiplier
from flwr_privacy.central_dp.correlated.factors import ToeplitzFactor
from flwr_privacy.central_dp.correlated.options import BandedMF, CorrelatedNoise
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.pipeline.participation_limits import INDEPENDENT
from flwr_privacy.privacy.adaptive_clipping import LARGEST_SHARE, split
from flwr_privacy.privacy.cohorts import (
    BALANCED,
    CYCLIC_POISSON,
    POISSON,
    planned_participations,
    rest,
)
from flwr_privacy.privacy.distributed_noise import honest_members
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid
from flwr_privacy.udp.budgets import check_budget
from flwr_privacy.udp.schedule import set_aside

from .joint_cost import JointCost
from .sensitivity import SERVER, amplified, relation, sensitivity
from .terms import SHARE_REACH, CentralDPTerms

__all__ = ["GROUPS", "CentralDPNoisePlan"]

_GRID_BITS = 18
"""Steps of the grid up to the clipping norm, as a power of two, if noise leaves the room."""

GROUPS = 4
"""With independent noise fewer groups are better, and with correlated noise more, up to a point."""


@dataclass(frozen=True, kw_only=True)
class CentralDPNoisePlan:
    """The noise of a training, from its budget.

    Parameters
    ----------
    noise : {"distributed", "server"}
        Who adds the noise.
    sampling : {"fixed", "balanced", "poisson", "cyclic_poisson"}
        How a cohort is drawn: see `flwr_privacy.privacy.cohorts`.
    epsilon, delta : float
        Budget of a client over the whole training.
    rounds : int
        Rounds planned.
    q : float
        Fraction of the clients that is asked in a round, or is in expectation.
    neighbours : {"add_remove", "replace_one", "zero_out"}, optional
        Which data sets are neighbours; by default as in the table below.
    count_share : float, default 0.0
        Share of a round's budget that goes to the count of updates within the norm, where clipping
        is adaptive: see `split`. With 0 clipping is fixed. The standard error that noise adds to
        the fraction below is ``count_noise_multiplier * s / (2 n)``, s being 2 for the neighbours
        ``replace_one`` and 1 otherwise; Andrew et al. take 0.05, which for n = 100 is
        ``count_noise_multiplier = 10`` or 5.
    evaluation_share : float, default 0.0
        Share of the budget for evaluations; at least 0 and below 1.
    evaluations : int, default 0
        Evaluations of a client that this share is for; at least 1 where it is above 0.
    correlated : BandedMF, BLT or TreeNoise, optional
        How the noise of a round goes with that of earlier rounds: see
        `flwr_privacy.central_dp.correlated`. By default it is independent.
    groups : int, optional
        Number of groups that take turns, with cyclic Poisson samples: at most ``1 / q``, with which
        a group is asked as a whole. By default 4, or fewer where that is more.
    members : int, default 0
        Members of a noise committee, which adds the noise in place of the clients: with correlated
        noise that is distributed. 0: there is none.

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
    distributed  any      the server and colluders;    one client's data   a client each time it
                          they know who takes part     are replaced        is asked
    committee    turns    the same; a fifth of the     the same            the same
                          members may be colluders
    server       fixed    whoever sees the models,     one client's data   a client each time it
                          and no message               are replaced        takes part
    server       poisson  whoever sees the models,     one client more or  every client, in every
                          and neither a message nor    less                round, with the sample
                          who takes part
    ===========  =======  ===========================  ==================  ======================

    ``balanced`` is as ``fixed``, with fewer participations of a client. ``cyclic_poisson`` is as
    ``poisson``; a client is charged in the rounds of its group. The groups are no secret: a hash of
    the client's name decides.

    With `correlated` noise the rounds cost a client something together, not one by one: the noise
    on C x over the joint sensitivity of C x, which holds for at most `releases` participations at
    least `separation` rounds apart. See `charge` for how it is charged, and
    `flwr_privacy.central_dp.correlated.stream` for the proof that rounding and late choices are
    covered. Under ``cyclic_poisson`` the bands are at most as many as the groups, so what a client
    adds in its rounds is orthogonal, and each of them is a Gaussian mechanism with a secret sample
    (Choquette-Choo et al., *(Amplified) Banded Matrix Factorization*, NeurIPS 2023, theorem 4).

    With ``neighbours="zero_out"`` the neighbours are, in all modes, data sets in which the update
    of one client is zero: the sensitivity is C where it is 2C for replaced data. That relation is
    of Kairouz et al., *Practical and private (deep) learning without sampling or shuffling*, ICML
    2021; libraries such as jax_privacy count by it. For replaced data the same noise is worth half
    its multiplier (`flwr_privacy.accounting.as_replaced`), which the guarantee says in numbers.

    With `members` the noise is the sum of a stream of each (`MemberStream` of
    `flwr_privacy.central_dp.correlated.member_stream`), and a sum opens only with all of them. The
    noise is scaled for those that count as honest
    (`flwr_privacy.privacy.distributed_noise.honest_members`). A committee may begin new streams in
    any round at no cost: no entry of C^T C is negative, so what two blocks of rounds move by
    themselves is at most what they move together.

    Covered: the sums of all rounds and what is made of them, with ``distributed`` the count of
    trainings that failed too (`flwr_privacy.privacy.failures`: it adds nothing to the sensitivity);
    the clipping norm of a round may follow from earlier sums, the noise multiplier may not. A
    client that was asked `releases` times must not be asked again. Assumptions: with
    ``distributed`` a sum opens only if it has as many honest shares as the noise was planned for
    (`flwr_privacy.privacy.distributed_noise.share_sigma`), or all members of the committee. With
    ``server`` the server is trusted. With both ``server`` and ``poisson`` it draws each client by
    itself from a cryptographic generator, tells nobody, and divides sums by the expected number q
    N, N being public, never by the actual number, which depends on who is there; a client that
    fails adds nothing and is covered. Not covered: participation itself, except with ``server`` and
    ``poisson``; which client fails or declines for reasons in its data; losses and metrics, should
    they be sent; timing.

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
    >>> schedule = CentralDPNoisePlan(noise="distributed", sampling="fixed", **budget)
    >>> schedule.releases, round(schedule.noise_multiplier, 3)
    (18, 2.549)
    >>> round(CentralDPNoisePlan(noise="server", sampling="poisson", **budget).noise_multiplier, 2)
    0.99
    """

    noise: str
    sampling: str
    epsilon: float
    delta: float
    rounds: int
    q: float
    neighbours: str | None = None
    count_share: float = 0.0
    evaluation_share: float = 0.0
    evaluations: int = 0
    correlated: CorrelatedNoise | None = None
    groups: int | None = None
    members: int = 0

    def __post_init__(self) -> None:
        found = relation(self.neighbours, noise=self.noise, sampling=self.sampling)
        object.__setattr__(self, "neighbours", found)
        check_budget(rounds=self.rounds, q=self.q, epsilon=self.epsilon, delta=self.delta)
        check_number("count_share", self.count_share, minimum=0, maximum=LARGEST_SHARE)
        check_number("evaluation_share", self.evaluation_share, minimum=0, maximum=LARGEST_SHARE)
        check_integer("evaluations", self.evaluations, minimum=1 if self.evaluation_share else 0)
        if self.sampling == CYCLIC_POISSON and self.noise != SERVER:
            allowed = "another one with noise in shares: such sums have no secret samples"
            raise InvalidParameterError("sampling", self.sampling, allowed)
        if self.groups is not None:
            check_integer("groups", self.groups, minimum=1)
            if self.sampling != CYCLIC_POISSON:
                raise InvalidParameterError(
                    "groups", self.groups, f"None with sampling = '{self.sampling}'"
                )
        check_integer("members", self.members, minimum=0)
        if self.members and (self.noise == SERVER or not isinstance(self.correlated, BandedMF)):
            allowed = "None, unless the noise is distributed, and correlated = BandedMF(...)"
            raise InvalidParameterError("committee", self.members, allowed)
        if self.correlated is not None:
            self._check_correlated()

    def _check_correlated(self) -> None:
        for clash, name, value, allowed in (
            (
                self.noise != SERVER and not self.members,
                "noise",
                self.noise,
                "'server' with correlated noise, or a committee=NoiseCommittee(...) that adds it",
            ),
            (
                self.members > 0 and self.sampling != BALANCED,
                "sampling",
                self.sampling,
                "'balanced' with a committee",
            ),
            (
                self.members > 0 and self.evaluation_share > 0,
                "evaluation",
                self.evaluation_share,
                "None with a committee, which adds no noise to evaluations",
            ),
            (
                self.sampling not in (BALANCED, CYCLIC_POISSON),
                "sampling",
                self.sampling,
                "'balanced' or 'cyclic_poisson' with correlated noise: a client has to rest "
                "between two rounds",
            ),
            (
                self.count_share > 0,
                "clipping",
                self.count_share,
                "None with correlated noise: another clipping norm would break the cancellation",
            ),
        ):
            if clash:
                raise InvalidParameterError(name, value, allowed)
        _ = self.joint  # or refuses more bands than groups

    @property
    def relation(self) -> str:
        """Which data sets are neighbours."""
        return relation(self.neighbours, noise=self.noise, sampling=self.sampling)

    @property
    def sampling_rate(self) -> float:
        """Sampling rate that amplifies privacy; 1 where samples are no secret."""
        secret = amplified(self.noise, self.sampling)
        return min(1.0, self.q * self._groups) if secret else 1.0

    @cached_property
    def releases(self) -> int:
        """Number of charges that a client's budget is planned for.

        All rounds where every client is charged in every round (``poisson`` by a trusted server);
        otherwise those of `flwr_privacy.privacy.cohorts.planned_participations`.
        """
        if self.sampling == POISSON and amplified(self.noise, self.sampling):
            return self.rounds
        return planned_participations(
            self.sampling, rounds=self.rounds, q=self.q, groups=self._groups
        )

    @property
    def separation(self) -> int:
        """Least number of rounds from one participation of a client to its next.

        It is kept to where noise is correlated. Groups that take turns keep to it anyway.
        """
        if self.sampling == BALANCED and self.correlated is not None:
            return rest(self.q)
        return self._groups

    @property
    def _groups(self) -> int:
        """Number of groups that take turns, with cyclic Poisson samples; otherwise 1."""
        if self.sampling != CYCLIC_POISSON:
            return 1
        return min(rest(self.q), self.rounds, self.groups or GROUPS)

    @cached_property
    def joint(self) -> JointCost | None:
        """What the rounds cost a client together; None where their noise is independent."""
        if self.correlated is None:
            return None
        return JointCost.planned(
            self.correlated,
            rounds=self.rounds,
            separation=self.separation,
            participations=self.releases,
            sampled=self.sampling == CYCLIC_POISSON and self.sampling_rate < 1,
        )

    def affordable(self, releases: int) -> bool:
        """Return whether a client with a number of charges can be charged once more."""
        return releases < self.releases

    @cached_property
    def noise_multiplier(self) -> float:
        """Noise multiplier of a round, for the update and the count as one release.

        With correlated noise the standard deviation of z over the sensitivity of a single x.
        """
        if self.sampling_rate == 1:
            share = math.sqrt(1 - self.evaluation_share)
            if self.joint is not None:
                return self.joint.spread(self._least_noise(releases=1) / share)
            return self._least_noise(releases=self.releases) / share
        beside: tuple[Charge, ...] = ()
        if self.evaluations:
            evaluation = Charge(
                noise_multiplier=self.evaluation_multiplier,
                neighbours=self.relation,
                count=self.evaluations,
            )
            beside = (evaluation,)
        each = self._least_noise(
            releases=self.releases,
            sampling=self.sampling_rate,
            accountant="rdp",
            beside=beside,
        )
        return each if self.joint is None else self.joint.spread(each)

    @property
    def evaluation_multiplier(self) -> float:
        """Noise multiplier of an evaluation; 0 where there is none."""
        if not self.evaluation_share:
            return 0.0
        # By the accountant that adds it to the rounds.
        accountant = "gdp" if self.sampling_rate == 1 else "rdp"
        z = self._least_noise(releases=self.evaluations, accountant=accountant)
        return z / math.sqrt(self.evaluation_share)

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
        return self._set_aside / (self.releases + self.evaluations)

    def charge(self, participation: int = 1) -> Charge:
        """Return what a round costs a client.

        Parameters
        ----------
        participation : int, default 1
            The client's how manieth it is. With correlated noise participations do not cost the
            same: each is charged as what it adds to the square of the joint sensitivity, so that
            by Gaussian differential privacy the charges of the first j add up to what j
            participations cost together, whichever rounds they are. Where the server adds the
            noise, the first one pays for the grid of all rounds; with a committee, whose grid may
            change from block to block, each pays for the sums that it reaches.

        Raises
        ------
        InvalidParameterError
            If it is none of `releases`.
        """
        check_integer("participation", participation, minimum=1, maximum=self.releases)
        multiplier, gap = self.noise_multiplier, self.gap
        if self.joint is not None:
            multiplier = self.joint.multiplier(multiplier, participation)
            if not self.members:
                gap = self.gap * self.releases if participation == 1 else 0.0
        return Charge(
            noise_multiplier=multiplier,
            neighbours=self.relation,
            sampling=self.sampling_rate,
            gap=gap,
        )

    @property
    def effective_multiplier(self) -> float:
        """Noise multiplier of independent noise with the same mean squared error of the models."""
        error = 1.0 if self.joint is None else self.joint.error
        if self.members:  # the noise of all of them is in every sum
            error *= math.sqrt(self.members / honest_members(self.members))
        return self.update_noise_multiplier * error

    def text(self) -> str:
        """Return how the noise of the rounds goes together, and what that is worth."""
        if self.correlated is None:
            return "the noise of the rounds is independent"
        return (
            f"the noise of the rounds is correlated ({type(self.correlated).__name__}): the models "
            f"have the error of independent noise of multiplier {self.effective_multiplier:.6g}"
        )

    def state(self) -> dict[str, Any]:
        """Return everything that the plan was made of, as plain values.

        The factor is among them: another version of what optimises it may come to another one.
        """
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        told = {"factor": INDEPENDENT} if self.joint is None else self.joint.fields()
        return {**values, "correlated": repr(self.correlated), "factor": told["factor"]}

    def terms(
        self,
        clipping_norm: float,
        *,
        parties: int = 1,
        grid_bits: int | None = None,
        keep_back: Collection[str] = (),
        members: Sequence[str] = (),
        block: int | None = None,
    ) -> CentralDPTerms:
        """Return the terms for a clipping norm.

        Parameters
        ----------
        clipping_norm : float
            Bound of an update.
        parties : int, default 1
            Smallest number of honest shares of the noise in a sum; of a committee, its own number.
        grid_bits : int, optional
            The grid has at least ``2**grid_bits`` steps up to the clipping norm; by default 18, or
            as many as leave room in 31 bits for twelve standard deviations of a share.
        keep_back : collection of str
            Arrays of which nothing is released, beside those that a client keeps back anyway.
        members : sequence of str
            The members of the committee, as many as planned.
        block : int, optional
            The round in which they began their streams.

        Raises
        ------
        InvalidParameterError
            If there are too many groups, or another number of members than planned.
        """
        if len(members) != self.members:
            raise InvalidParameterError("members", list(members), f"{self.members} names")
        if self.members:
            parties = honest_members(self.members)
        if self.groups is not None and self.groups > (most := min(rest(self.q), self.rounds)):
            allowed = f"at most {most}, so that a group is as large as a cohort at least"
            raise InvalidParameterError("groups", self.groups, allowed)
        if grid_bits is None:
            spread = self.update_noise_multiplier * sensitivity(1.0, neighbours=self.relation)
            reach = 1 + SHARE_REACH * spread / math.sqrt(parties)
            room = CODE_LIMIT / reach
            if self.joint is not None:
                # Noise of the server is in no code. That of a member varies more than z.
                room = CODE_LIMIT / (reach * self.joint.growth if self.members else 1)
                room = min(room, self.joint.largest_sigma / spread)
            grid_bits = max(1, min(_GRID_BITS, math.floor(math.log2(room)) - 1))
        return CentralDPTerms(
            noise=self.noise,
            sampling=self.sampling,
            neighbours=self.relation,
            sampling_rate=float(self.sampling_rate),
            noise_multiplier=self.noise_multiplier,
            count_share=float(self.count_share),
            epsilon=float(self.epsilon),
            delta=self.delta,
            gap=self.charge().gap,
            clipping_norm=float(clipping_norm),
            grid=CodeGrid.below(clipping_norm, bits=grid_bits).exponent,
            parties=parties,
            keep_back=list(keep_back),
            **({} if self.joint is None else self.joint.fields()),
            **self._of_committee(members, block),
        )

    def _of_committee(self, members: Sequence[str], block: int | None) -> dict[str, Any]:
        """Return what the terms of a committee say beside the factor's digest."""
        if self.joint is None or not isinstance(self.joint.factor, ToeplitzFactor) or not members:
            return {}
        coefficients = list(self.joint.factor.coefficients)
        return {"members": sorted(members), "block": block, "coefficients": coefficients}

    @property
    def _least_noise(self) -> Callable[..., float]:
        """`noise_multiplier` for the budget without what is set aside for the grid."""
        return partial(
            noise_multiplier,
            neighbours=self.relation,
            epsilon=self.epsilon - self._set_aside,
            delta=self.delta * math.exp(-self._set_aside),
        )

    @property
    def _set_aside(self) -> float:
        return set_aside(self.epsilon)
