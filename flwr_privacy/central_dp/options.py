"""Constructor options of central DP: the budget, who adds the noise, and adaptive clipping."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from flwr_privacy.central_dp.correlated.options import BandedMF, CorrelatedNoise
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.keywords import check_options, checked_keywords
from flwr_privacy.privacy.adaptive_clipping import LARGEST_SHARE, next_clipping_norm
from flwr_privacy.privacy.cohorts import CYCLIC_POISSON

from .joint_cost import unproven
from .plan import GROUPS, CentralDPNoisePlan
from .sensitivity import DISTRIBUTED, SERVER, relation, sensitivity

__all__ = [
    "AUTO",
    "AdaptiveClipping",
    "CentralNoise",
    "DistributedNoise",
    "NoiseCommittee",
    "ServerNoise",
]

AUTO: Final = "auto"
"""In place of a factor, where the plan is to decide."""


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping:
    """Moves the clipping norm from round to round, until a fraction of the updates is within it.

    Parameters
    ----------
    quantile : float
        Fraction of the updates that the clipping norm aims to leave as they are.
    clipping_learning_rate : float, default 0.2
        Step of the norm, as an exponent.
    count_share : float, default 0.1
        Share of a round's budget that goes to the count of updates within the norm; up to 0.99.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    quantile: float
    clipping_learning_rate: float = 0.2
    count_share: float = 0.1

    def __post_init__(self) -> None:
        rate = self.clipping_learning_rate
        next_clipping_norm(1.0, 0.5, quantile=self.quantile, learning_rate=rate)  # or refuses it
        check_number("count_share", self.count_share, minimum=1e-6, maximum=LARGEST_SHARE)


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class NoiseCommittee:
    """A few reliable nodes that add the noise in place of the clients, correlated over the rounds.

    Each member keeps a stream of noise of its own and adds a vector of it to the secure sum of a
    round. A sum opens only with the vectors of all members. A fifth of them counts as colluding
    with the server, one at least, and the noise is scaled for the others. The operators of all
    nodes list the members in their policies (``noise_members``) and pin their keys.

    Parameters
    ----------
    members : int, default 5
        How many nodes, from 3 to 50.
    names : sequence of str, optional
        From which nodes they are chosen: those in the nodes' policies. None of them trains. By
        default from those that say that they are members, so that a node that says so falsely
        stops the training: set this in a deployment. Where no node says so (in simulations) they
        are chosen from all clients, and the others train.

    Raises
    ------
    InvalidParameterError
        If the number is not allowed, or there are fewer names, or one is there twice.
    """

    members: int = 5
    names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_integer("committee.members", self.members, minimum=3, maximum=50)
        names = self.names
        if names is None:
            return
        is_list = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        if not is_list or not self.members <= len(names) == len(set(names)):
            allowed = f"at least {self.members} different names"
            raise InvalidParameterError("committee.names", names, allowed)


@dataclass(frozen=True, kw_only=True)
class CentralNoise:
    """Base of `DistributedNoise` and `ServerNoise`: what both have."""

    noise: ClassVar[str]
    epsilon: float = 8.0
    delta: float = 1e-5
    clipping_norm: float = 1.0
    sampling: Literal["fixed", "balanced", "poisson", "cyclic_poisson"] = "balanced"
    neighbours: Literal["add_remove", "replace_one", "zero_out"] | None = None
    grid_bits: int | None = None

    def __post_init__(self) -> None:
        if self.grid_bits is not None:
            check_integer("grid_bits", self.grid_bits, minimum=1, maximum=30)
        neighbours = relation(self.neighbours, noise=self.noise, sampling=self.sampling)
        sensitivity(self.clipping_norm, neighbours=neighbours)  # or refuses it
        self.plan(None, rounds=1, q=1.0)  # or refuses the budget

    def plan(
        self,
        clipping: AdaptiveClipping | None,
        *,
        rounds: int,
        q: float,
        evaluation_share: float = 0.0,
        evaluations: int = 0,
    ) -> CentralDPNoisePlan:
        """Return the noise of a training, independent where `choose` is still to decide."""
        return CentralDPNoisePlan(
            noise=self.noise,
            sampling=self.sampling,
            epsilon=self.epsilon,
            delta=self.delta,
            rounds=rounds,
            q=q,
            neighbours=self.neighbours,
            **self._rounds(),
            count_share=0.0 if clipping is None else clipping.count_share,
            evaluation_share=evaluation_share,
            evaluations=evaluations,
        )

    def _rounds(self) -> dict[str, Any]:
        """Return how the noise of the rounds goes together."""
        return {}


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class DistributedNoise(CentralNoise):
    """The clients add the noise, each a share under a secure sum, so that nobody is trusted.

    Parameters
    ----------
    epsilon, delta : float, default 8.0 and 1e-5
        Budget of a client over the whole training.
    clipping_norm : float, default 1.0
        L2 bound of an update; of the first round, where clipping is adaptive.
    sampling : {"fixed", "balanced", "poisson", "cyclic_poisson"}, default "balanced"
        How a cohort is drawn: see `flwr_privacy.privacy.cohorts`. With ``balanced`` everybody takes
        part equally often, which takes less noise than the random sets of ``fixed``. With the last
        two each client is drawn by itself; only a trusted server can do that in secret, and only
        that makes the noise less.
    neighbours : {"replace_one", "zero_out"}, optional
        What a client's data are compared with: with any other data (the default), or, by name only,
        with a contribution of zero. The latter takes half the noise and says half as much; it is
        there for comparison with libraries that count so. A deployed node answers it only if its
        policy lists ``zero_out`` among its ``neighbours``.
    grid_bits : int, optional
        The grid has at least ``2**grid_bits`` steps up to the clipping norm; by default 18, or as
        many as leave room in 31 bits for twelve standard deviations of a share.
    correlated : BandedMF, optional
        Noise that partly cancels that of earlier rounds; only a `committee` can add it, with
        ``balanced`` cohorts. By default each round has noise of its own.
    committee : NoiseCommittee, optional
        The nodes that add the noise, where it is correlated.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    noise = DISTRIBUTED
    correlated: CorrelatedNoise | None = None
    committee: NoiseCommittee | None = None
    insecure_seed = None

    def __post_init__(self) -> None:
        if self.committee is not None and self.correlated is None:
            allowed = "None without correlated=BandedMF(...): independent noise needs no committee"
            raise InvalidParameterError("committee", self.committee, allowed)
        super().__post_init__()

    def _rounds(self) -> dict[str, Any]:
        members = 0 if self.committee is None else self.committee.members
        return {"correlated": self.correlated, "members": members}


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class ServerNoise(CentralNoise):
    """The server adds the noise: the operators of the nodes trust it with the sums.

    Deployed nodes send it answers without noise only if they list ``central-dp`` in
    ``allow_unprotected``.

    Parameters
    ----------
    epsilon, delta, clipping_norm, sampling, grid_bits
        As in `DistributedNoise`.
    neighbours : {"replace_one", "add_remove", "zero_out"}, optional
        As in `DistributedNoise`; with Poisson samples, which are secret here, the default is
        ``add_remove``, and replaced data have no guarantee of their own.
    correlated : BandedMF, BLT, TreeNoise, "auto" or None, default "auto"
        Noise that partly cancels that of earlier rounds, with ``balanced`` cohorts, or `BandedMF`
        with ``cyclic_poisson``: see `flwr_privacy.central_dp.correlated`. With None each round has
        noise of its own. By default `flwr_privacy.central_dp.choice.choose` decides by the plan and
        the model, the log and the forecast say how, and a resumed training keeps to it: correlated
        where that is at least 5 % less noise for the same budget, adversary and neighbours.
    groups : int, optional
        Number of groups that take turns, with ``sampling="cyclic_poisson"``; by default 4, or as
        many as there are cohorts if that is less.
    insecure_seed : int, optional
        Seed of the server's noise and samples, for tests: nothing is protected then.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    noise = SERVER
    correlated: CorrelatedNoise | Literal["auto"] | None = AUTO
    groups: int | None = None
    insecure_seed: int | None = None

    def __post_init__(self) -> None:
        check_options(ServerNoise, self, "correlated")
        super().__post_init__()
        given = None if self.correlated == AUTO else self.correlated
        if self.sampling == CYCLIC_POISSON and given is not None:
            bands = given.bands if isinstance(given, BandedMF) else math.inf
            if (bands or 1) > (self.groups or GROUPS):
                raise unproven(given, self.groups or GROUPS)
        if self.insecure_seed is not None:
            check_integer("insecure_seed", self.insecure_seed, minimum=0)

    def _rounds(self) -> dict[str, Any]:
        correlated = None if self.correlated == AUTO else self.correlated
        return {"correlated": correlated, "groups": self.groups}
