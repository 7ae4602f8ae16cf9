"""What was heard of canary clients: the file that runs leave, and the scores that are made of it.

A score is made of nothing but what was released. The coins are read by the audit alone.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from flwr_privacy.simulations.research.audits.one_shot import normal_epsilon

__all__ = [
    "REFERENCE",
    "CanaryRun",
    "Scores",
    "model_scores",
    "read_runs",
    "repeated_noise",
    "server_scores",
]

REFERENCE = 1024
"""Entries without canaries that are kept, at most."""

_FILE = "canaries.npz"
_NUMBERS = ("own_noise", "entries", "total_length")
_SHARED = 0.5  # of a variance, from which on it is what the clients have in common

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class CanaryRun:
    """What was heard in one run.

    Parameters
    ----------
    coins : (k,) bool
        The coins of the clients.
    own_noise : bool
        Whether the app's own function, which canaries replace, adds noise to its arrays.
    entries : int
        Of the model.
    clients, rounds : (n,) int
        Of the uploads that were read, whose they were, and in which round.
    pulls : (n, k) float64
        How far each goes in all clients' directions.
    noise : (n, r) float64
        Its entries that have no canary.
    steps, step_noise : (s, k), (s, r) float64
        The same of the steps from model to model.
    total_length : float
        Of the step from the first to the last model.
    """

    coins: NDArray[np.bool_]
    own_noise: bool
    entries: int
    clients: NDArray[np.int64]
    rounds: NDArray[np.int64]
    pulls: Vector
    noise: Vector
    steps: Vector
    step_noise: Vector
    total_length: float

    @property
    def participations(self) -> int:
        """In how many rounds the client trained that trained in most."""
        own = (self.rounds[self.clients == client] for client in np.unique(self.clients))
        return max((np.unique(rounds).size for rounds in own), default=0)

    def write(self, folder: Path) -> None:
        """Write it into a run's folder."""
        np.savez(folder / _FILE, **asdict(self))


def read_runs(folder: Path) -> list[CanaryRun]:
    """Return the whole runs of a probe, in order."""
    runs: list[CanaryRun] = []
    while (path := folder / str(len(runs)) / _FILE).exists():
        with np.load(path, allow_pickle=False) as found:
            values = {name: found[name] for name in found.files}
        values |= {name: values[name].item() for name in _NUMBERS}
        runs.append(CanaryRun(**values))
    return runs


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Scores of all coins of all runs.

    Parameters
    ----------
    view : str
        "server": of what left the nodes; "model": of the models that were sent out.
    values : (m,) float64
        The larger, the likelier is heads. Of a client that was not heard, the median of the others.
    coins : (m,) bool
        The coins.
    cosines : (m,) float64
        Of each client's direction with all that was seen, in root entries; NaN of those not heard.
    """

    view: str
    values: Vector
    coins: NDArray[np.bool_]
    cosines: Vector

    def estimate(self, delta: float, *, opposite: bool) -> float:
        """Return the one-shot estimate of epsilon (arXiv 2302.03098); NaN where it has too few.

        Parameters
        ----------
        delta : float
            Of that epsilon.
        opposite : bool
            Whether tails are canaries in the opposite direction.
        """
        signs = np.where(self.coins, 1.0, -1.0 if opposite else math.nan)
        found = (signs * self.cosines)[np.isfinite(signs * self.cosines)]
        if found.size < 2:
            return math.nan
        deviation = max(float(found.std(ddof=1)), 1e-3)
        apart = 2.0 if opposite else 1.0  # neighbours are two canaries, or one and none
        return normal_epsilon(apart * float(found.mean()), deviation, delta)


def server_scores(runs: Sequence[CanaryRun]) -> Scores | None:
    """Score coins by what left the nodes; None where no upload has the arrays of the model.

    What the uploads of a round have in common is taken away: noise that all clients draw from one
    seed.
    """
    if not any(run.clients.size for run in runs):
        return None
    values, cosines = [], []
    for run in runs:
        k = run.coins.size
        total, heard = np.zeros(k), np.zeros(k, bool)
        noise = np.zeros((k, run.noise.shape[1]))
        np.add.at(noise, run.clients, run.noise)
        for number in np.unique(run.rounds):
            here = run.rounds == number
            own, pulls = run.clients[here], run.pulls[here]
            pulls = pulls - _common(own, pulls)
            np.add.at(total, own, pulls[np.arange(own.size), own])
            heard[own] = True
        values.append(np.where(heard, total, np.nan))
        # Of all that a client sent: its canary, and noise as in the entries without one.
        square = total**2 + (run.entries * (noise**2).mean(axis=1) if noise.size else 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            cosines.append(values[-1] / np.sqrt(square) * math.sqrt(run.entries))
    return _scores("server", values, cosines, runs)


def model_scores(runs: Sequence[CanaryRun]) -> Scores | None:
    """Score coins by the models that were sent out; None where there is only one."""
    if not any(run.steps.size for run in runs):
        return None
    values = [
        run.steps.sum(axis=0) if run.steps.size else np.full(run.coins.size, np.nan) for run in runs
    ]
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = [
            v / run.total_length * math.sqrt(run.entries)
            for v, run in zip(values, runs, strict=True)
        ]
    return _scores("model", values, cosines, runs)


def repeated_noise(vectors: Vector) -> tuple[float, float]:
    """Return how much two of some noise vectors are alike, at most, and the chance of that.

    Parameters
    ----------
    vectors : (n, r) float64
        Noise that is said to be drawn anew each time.

    Returns
    -------
    correlation, p : float
        The largest correlation of two, and the chance that independent normal noise has one so
        large, for all pairs together.
    """
    spread = vectors.std(axis=1) if vectors.size else np.zeros(0)
    used = vectors[spread > 0]
    if len(used) < 2 or used.shape[1] < 8:
        return 0.0, 1.0
    normed = used - used.mean(axis=1, keepdims=True)
    normed /= np.linalg.norm(normed, axis=1, keepdims=True)
    alike = np.triu(normed @ normed.T, 1)
    largest = min(float(alike.max()), 1 - 1e-12)
    # Fisher's transform of a correlation is normal, with variance one over (r - 3).
    pairs = len(used) * (len(used) - 1) / 2
    one = float(norm.sf(math.atanh(largest) * math.sqrt(used.shape[1] - 3)))
    return largest, min(1.0, pairs * one)


def _common(own: NDArray[np.int64], pulls: Vector) -> Vector:
    """Return what the uploads of a round share in each direction; zeros where they share little."""
    if len(own) < 4:
        return np.zeros(pulls.shape[1])
    others = np.where(own[:, None] == np.arange(pulls.shape[1]), np.nan, pulls)
    within = float(np.median(np.nanvar(others, axis=0)))
    between = float(np.median(np.nanmean(others, axis=0) ** 2))
    if between == 0 or within > (1 - _SHARED) * between:
        return np.zeros(pulls.shape[1])
    return np.asarray(np.nanmedian(others, axis=0), np.float64)


def _scores(
    view: str, values: list[Vector], cosines: list[Vector], runs: Sequence[CanaryRun]
) -> Scores:
    found = np.concatenate(values)
    heard = np.isfinite(found)
    middle = float(np.median(found[heard])) if heard.any() else 0.0
    return Scores(
        view=view,
        values=np.where(heard, found, middle),
        coins=np.concatenate([run.coins for run in runs]),
        cosines=np.concatenate(cosines),
    )
