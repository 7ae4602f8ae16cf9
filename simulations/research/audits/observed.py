"""What an audit hears of a scheme: each release beside what it should be, and the charges for it.

A session is one training with fresh nodes. An audit takes several sessions that ask the same: what
repeats from one to the next did not come from a secret source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Claim", "Coins", "Guessed", "Released", "Session", "clipped"]

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Released:
    """One release, as an observer has it, and what it is without noise.

    Parameters
    ----------
    place : tuple
        Who released it, in which round, and under which name: the same place in another session is
        the answer to the same question.
    kind : str
        The data behind it: which canary.
    values : (d,) float64
        What was released.
    expected : (d,) float64
        The same without noise, by the auditor's own clipping.
    sigma : float or (d,) float64
        Standard deviation of the noise that the charge pays for.
    blocks : tuple of int
        Sizes of the arrays, one after the other.
    canary : (d,) or (k, d) float64, optional
        Direction of length 1 in which the data of the canary pull; of several canaries, directions
        at right angles.
    reach : float, default 0.0
        How far a canary may move the release along its direction, in units of the values.
    said : tuple
        Everything else in the answer, which data must not change.
    phase : str, default "train"
        Kind of release: those of one kind cost the same.
    """

    place: tuple[str | int, ...]
    kind: str
    values: Vector
    expected: Vector
    sigma: float | Vector
    blocks: tuple[int, ...]
    canary: Vector | None = None
    reach: float = 0.0
    said: tuple[object, ...] = ()
    phase: str = "train"

    @property
    def noise(self) -> Vector:
        """The noise in it, over the standard deviation that it should have."""
        residual: Vector = (self.values - self.expected) / self.sigma
        return residual

    @property
    def worth(self) -> float:
        """How far a canary may move the release, in standard deviations."""
        if self.canary is None or not self.reach:
            return 0.0
        return self.reach * float(np.linalg.norm(np.atleast_2d(self.canary / self.sigma)[0]))

    @property
    def excess(self) -> Vector:
        """How far beyond that each canary moved it: standard normal, where all is well.

        It is read off along the best directions: those of the canaries over the variances.
        """
        return self.best @ self.noise

    @property
    def best(self) -> Vector:
        """Directions of length 1 in which the noise is tested, (k, d)."""
        if self.canary is None:
            return np.zeros((0, self.values.size))
        weighed = np.atleast_2d(self.canary / self.sigma)
        unit: Vector = weighed / np.linalg.norm(weighed, axis=1, keepdims=True)
        return unit


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a scheme says of a whole training.

    Parameters
    ----------
    epsilon, delta : float
        By the charges of the client that was charged most; infinite where nothing is promised.
    budget : float
        Epsilon that the training was asked not to exceed.
    charged : int
        Charges of that client.
    turn : float, default 1.0
        How many reaches apart two neighbours are: 2 where data are replaced, 1 where they are there
        or not.
    """

    epsilon: float
    delta: float
    budget: float
    charged: int
    turn: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Coins:
    """Coins that a scheme says it throws in secret, as the audit read them.

    Parameters
    ----------
    rate : float
        Chance of each, as claimed.
    thrown : (rounds, members) bool
        Who was in which round.
    """

    rate: float
    thrown: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Guessed:
    """Canaries that pull one way or the other, each by a coin of its own, and what is seen of them.

    Parameters
    ----------
    coins : (k,) bool
        The coins.
    directions : (k, d) float64
        In which each canary pulls, or pulls back.
    scores : (k,) float64
        What was seen of each, in the releases that have it.
    total : (d,) float64
        The sum of all releases.
    """

    coins: NDArray[np.bool_]
    directions: Vector
    scores: Vector
    total: Vector


@dataclass(frozen=True, kw_only=True, eq=False)
class Session:
    """All that was heard of one training.

    Parameters
    ----------
    releases : list of Released
        In order.
    claim : Claim
        What the ledgers say of it.
    answered : Mapping of str to int
        Releases about the data of the client that answered most, by their kind, as observed.
    silent : tuple of str
        Of what kind the data were where a question got no answer.
    uncharged : tuple of str
        Who gave more answers than its ledger has charges, in words; where nodes have ledgers.
    coins : Coins, optional
        Secret samples.
    guessed : Guessed, optional
        Canaries by coins.
    weights : Mapping
        For clients that must weigh the same, the weight that each announced.
    """

    releases: list[Released]
    claim: Claim
    answered: Mapping[str, int]
    silent: tuple[str, ...] = ()
    uncharged: tuple[str, ...] = ()
    coins: Coins | None = None
    guessed: Guessed | None = None
    weights: Mapping[str, float] = field(default_factory=dict)


def clipped(vector: Vector, norm: float) -> Vector:
    """Return a vector scaled to a length of at most `norm`; zero where an entry is not finite.

    It is written apart from the package's own clipping, which it is to check.

    Examples
    --------
    >>> clipped(np.array([3e200, 4e200]), 1.0).round(3).tolist()
    [0.6, 0.8]
    >>> clipped(np.array([np.nan, 1.0]), 1.0).tolist()
    [0.0, 0.0]
    """
    largest = float(np.abs(vector).max(initial=0.0))
    if not np.isfinite(largest) or largest == 0.0:
        return np.zeros_like(vector)
    unit = vector / largest
    length = float(np.sqrt(unit @ unit))
    return vector if length * largest <= norm else unit * (norm / length)
