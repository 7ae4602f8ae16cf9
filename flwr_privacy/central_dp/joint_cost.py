"""What rounds with correlated noise cost a client together, and what each of its rounds adds."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.central_dp.correlated.errors import prefix_error
from flwr_privacy.central_dp.correlated.factors import Factor, ToeplitzFactor, inverse_column
from flwr_privacy.central_dp.correlated.options import CorrelatedNoise
from flwr_privacy.central_dp.correlated.sensitivity import joint_sensitivities
from flwr_privacy.central_dp.correlated.stream import digest_of, largest_sigma, margin
from flwr_privacy.errors import InvalidParameterError

__all__ = ["JointCost", "unproven"]

_ROUNDED = 1e-8
"""By how much a noise multiplier is rounded down at most, of itself: it has nine digits then."""

_LEAST_ADDED = 1e-9
"""A participation that adds next to nothing is charged as this much: a charge has some cost."""


@dataclass(frozen=True, kw_only=True)
class JointCost:
    """The factor of a training, and how far a client's updates of norm 1 move C x.

    Parameters
    ----------
    factor : Factor
        The factor C.
    rounds, separation, participations : int
        Rounds planned, the least number of them from one participation of a client to its next, and
        the largest number of participations.
    sampled : bool, default False
        Whether secret samples amplify privacy. Each round of a client is then a release with a
        sample of its own, which is proven where turns are as far apart as the factor has bands.
    """

    factor: Factor
    rounds: int
    separation: int
    participations: int
    sampled: bool = False

    @classmethod
    def planned(
        cls,
        correlated: CorrelatedNoise,
        *,
        rounds: int,
        separation: int,
        participations: int,
        sampled: bool,
    ) -> "JointCost":
        """Return what a training costs with the factor that an option chooses for it.

        Raises
        ------
        InvalidParameterError
            If samples are secret and the factor has more bands than the separation.
        """
        factor = correlated.factor(
            rounds=rounds, separation=separation, participations=participations
        )
        bands = factor.bands if isinstance(factor, ToeplitzFactor) else rounds
        if sampled and bands > separation:
            raise unproven(correlated, separation)
        return cls(
            factor=factor,
            rounds=rounds,
            separation=separation,
            participations=participations,
            sampled=sampled,
        )

    @cached_property
    def _joint(self) -> NDArray[np.float64]:
        """How far participations move C x together, from one to all of them."""
        return margin(self.factor) * joint_sensitivities(
            self.factor,
            rounds=self.rounds,
            separation=self.separation,
            participations=self.participations,
        )

    def spread(self, needed: float) -> float:
        """Return the noise multiplier of z over the distance of a single update.

        Parameters
        ----------
        needed : float
            Noise multiplier that all rounds need as one release; where `sampled`, that each of
            `participations` releases needs.
        """
        whole = self._joint[0 if self.sampled else -1]
        return float(whole) * needed * (1 + _ROUNDED)

    def multiplier(self, spread: float, participation: int) -> float:
        """Return the noise multiplier that a participation is charged with.

        Squares of what participations add up to the joint sensitivity. The result is rounded, so
        that what costs the same is the same charge on the card.
        """
        before = 0.0 if participation == 1 or self.sampled else self._joint[participation - 2]
        after = self._joint[0 if self.sampled else participation - 1]
        added = max(math.sqrt(max(0.0, float(after**2 - before**2))), _LEAST_ADDED)
        return _rounded_down(spread / added)

    @property
    def error(self) -> float:
        """Error of the models over that of independent noise as large as z."""
        return prefix_error(self.factor, rounds=self.rounds) / math.sqrt((self.rounds + 1) / 2)

    @property
    def growth(self) -> float:
        """Standard deviation of a round's noise ``w = C^-1 z`` over that of z, at most."""
        if not isinstance(self.factor, ToeplitzFactor):
            raise TypeError("only a Toeplitz factor has a column that says it")
        return float(np.linalg.norm(inverse_column(self.factor, self.rounds)))

    @property
    def largest_sigma(self) -> float:
        """The largest standard deviation of z in grid steps for which there is a sampler."""
        return largest_sigma(self.factor)

    def fields(self) -> dict[str, Any]:
        """Return what clients are told of it."""
        return {
            "factor": digest_of(self.factor),
            "rounds": self.rounds,
            "separation": self.separation,
            "participations": self.participations,
        }


def unproven(correlated: CorrelatedNoise | None, groups: int) -> InvalidParameterError:
    """Return the error of a factor that reaches from one turn of a group to its next."""
    return InvalidParameterError(
        "correlated",
        correlated,
        f"BandedMF with at most {groups} bands, the rounds between two turns of a client, with "
        "sampling = 'cyclic_poisson': for more no amplification is proven",
    )


def _rounded_down(multiplier: float) -> float:
    """Return a noise multiplier with nine digits."""
    unit = 10.0 ** (math.floor(math.log10(multiplier)) - 8)
    return min(multiplier, math.floor(multiplier / unit) * unit)
