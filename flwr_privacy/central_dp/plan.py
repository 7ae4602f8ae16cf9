"""Computes the noise of a training under central DP from its budget."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial

from flwr_privacy.accounting import Charge, noise_multiplier
from flwr_privacy.errors import check_integer, check_number
from flwr_privacy.privacy.adaptive_clipping import LARGEST_SHARE, split
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid
from flwr_privacy.udp import participations
from flwr_privacy.udp.budgets import check_budget
from flwr_privacy.udp.schedule import set_aside

from .sensitivity import amplified, relation, sensitivity
from .terms import SHARE_REACH, CentralDPTerms

__all__ = ["CentralDPNoisePlan"]

_GRID_BITS = 18
"""Steps of the grid up to the clipping norm, as a power of two, if noise leaves the room."""


@dataclass(frozen=True, kw_only=True)
class CentralDPNoisePlan:
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

    With ``neighbours="zero_out"`` the neighbours are, in all modes, data sets in which the update
    of one client is zero: the sensitivity is C where it is 2C for replaced data. That relation is
    of Kairouz et al., *Practical and private (deep) learning without sampling or shuffling*, ICML
    2021; libraries such as jax_privacy count by it. For replaced data the same noise is worth half
    its multiplier (`flwr_privacy.accounting.as_replaced`), which the guarantee says in numbers.

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

    def __post_init__(self) -> None:
        found = relation(self.neighbours, noise=self.noise, sampling=self.sampling)
        object.__setattr__(self, "neighbours", found)
        check_budget(rounds=self.rounds, q=self.q, epsilon=self.epsilon, delta=self.delta)
        check_number("count_share", self.count_share, minimum=0, maximum=LARGEST_SHARE)
        check_number("evaluation_share", self.evaluation_share, minimum=0, maximum=LARGEST_SHARE)
        check_integer("evaluations", self.evaluations, minimum=1 if self.evaluation_share else 0)

    @property
    def relation(self) -> str:
        """Which data sets are neighbours."""
        return relation(self.neighbours, noise=self.noise, sampling=self.sampling)

    @property
    def sampling_rate(self) -> float:
        """Sampling rate that amplifies privacy: q where samples are secret, otherwise 1."""
        return self.q if amplified(self.noise, self.sampling) else 1.0

    @cached_property
    def releases(self) -> int:
        """Number of charges that a client's budget is planned for.

        All rounds where every client is charged in every round; otherwise as many as 99 % of the
        clients take part in at most.
        """
        if amplified(self.noise, self.sampling):
            return self.rounds
        return participations(self.rounds, self.q)

    def affordable(self, releases: int) -> bool:
        """Return whether a client with a number of charges can be charged once more."""
        return releases < self.releases

    @cached_property
    def noise_multiplier(self) -> float:
        """Noise multiplier of a round, for the update and the count as one release."""
        z = partial(self._least_noise, releases=self.releases)
        if self.sampling_rate == 1:
            return z() / math.sqrt(1 - self.evaluation_share)
        beside: tuple[Charge, ...] = ()
        if self.evaluations:
            evaluation = Charge(
                noise_multiplier=self.evaluation_multiplier,
                neighbours=self.relation,
                count=self.evaluations,
            )
            beside = (evaluation,)
        return z(sampling=self.sampling_rate, accountant="rdp", beside=beside)

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

    def charge(self) -> Charge:
        """Return what a round costs a client."""
        return Charge(
            noise_multiplier=self.noise_multiplier,
            neighbours=self.relation,
            sampling=self.sampling_rate,
            gap=self.gap,
        )

    def terms(
        self,
        clipping_norm: float,
        *,
        parties: int = 1,
        grid_bits: int | None = None,
        keep_back: Collection[str] = (),
    ) -> CentralDPTerms:
        """Return the terms for a clipping norm.

        Parameters
        ----------
        clipping_norm : float
            Bound of an update.
        parties : int, default 1
            Smallest number of honest shares of the noise in a sum.
        grid_bits : int, optional
            The grid has at least ``2**grid_bits`` steps up to the clipping norm; by default 18, or
            as many as leave room in 31 bits for twelve standard deviations of a share.
        keep_back : collection of str
            Arrays of which nothing is released, beside those that a client keeps back anyway.
        """
        if grid_bits is None:
            spread = self.update_noise_multiplier * sensitivity(1.0, neighbours=self.relation)
            reach = 1 + SHARE_REACH * spread / math.sqrt(parties)
            grid_bits = max(1, min(_GRID_BITS, math.floor(math.log2(CODE_LIMIT / reach)) - 1))
        return CentralDPTerms(
            noise=self.noise,
            sampling=self.sampling,
            neighbours=self.relation,
            sampling_rate=float(self.sampling_rate),
            noise_multiplier=self.noise_multiplier,
            count_share=float(self.count_share),
            epsilon=float(self.epsilon),
            delta=self.delta,
            gap=self.gap,
            clipping_norm=float(clipping_norm),
            grid=CodeGrid.below(clipping_norm, bits=grid_bits).exponent,
            parties=parties,
            keep_back=list(keep_back),
        )

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
