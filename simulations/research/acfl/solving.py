"""Attacks the view of an ACFL server, and compares the result with the truth."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.acfl.encoding import Moments
from flwr_privacy.acfl.guarantee import setup_privacy
from flwr_privacy.acfl.terms import PAPER, RECORD
from flwr_privacy.simulations.research.attacks.membership import roc

from .gram_matrix import leaked_records, span_distance
from .linear_gradients import Recovered, estimate_moments, recover_from_sums, recover_moments
from .regression import RATE, STEP, Devices, ServerView, listen

__all__ = ["FOUND", "NOISED", "PLAIN", "SUMMED", "Attacked", "SolvedView", "attack"]

PLAIN, SUMMED, NOISED = "paper", "paper, secure sum", "record"
"""What runs: the paper's noise on the setup, the same under a secure sum, noise on everything."""

FOUND = 1e-3
"""Error of a device's moments, relative to them, below which they count as given away."""

_SPARE = 3  # rounds under a secure sum for each sum that is needed
_LONGEST = 90  # and at most so many
_NOTHING = 1e-9  # of the largest eigenvalue

Matrix = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SolvedView:
    """The result of an attack on one part of the server's view.

    Parameters
    ----------
    name : str
        Which part.
    rank : str
        How many of the unknowns it determines, where that is a number.
    moments : Moments
        The moments of the devices by it, one below the other.
    errors : Moments
        Their errors for each device, relative to the true ones.
    auc : float
        Chance that a record of a device is nearer to the span of the device's features by it than
        a record of nobody of the same classes; 0.5 is guessing.
    records : list of ndarray, or None
        Pixels of each device that were found one by one; None where the features are not pixels.
    exact : int
        How many records were found to the last bit.
    """

    name: str
    rank: str
    moments: Moments
    errors: Moments
    auc: float
    records: list[Matrix] | None
    exact: int

    @property
    def devices(self) -> int:
        """How many devices' moments are given away."""
        return int((np.maximum(*self.errors) < FOUND).sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class Attacked:
    """The results of all attacks on the trainings of a task.

    Parameters
    ----------
    devices : Devices
        The data.
    claimed : dict of str to float
        Privacy of one of the paper's setup uploads by itself, see
        `flwr_privacy.acfl.guarantee.setup_privacy`.
    findings : dict of str to list of SolvedView
        By what ran, from the least that the server has to the most.
    curves : dict of str to tuple
        By what ran: numbers of rounds, and the median error of X^T X by so many.
    """

    devices: Devices
    claimed: dict[str, float]
    findings: dict[str, list[SolvedView]]
    curves: dict[str, tuple[list[int], list[float]]]


def attack(devices: Devices, *, longest: int = _LONGEST) -> Attacked:
    """Train in three ways, and attack each of them.

    Parameters
    ----------
    devices : Devices
        The data.
    longest : int, default 90
        Most rounds under the secure sum. By default three times as many as sums are needed: some
        are not opened, and more sums leave a smaller error.
    """
    count, records, _ = devices.pixels.shape
    d, o = devices.start.shape
    needed, few = math.ceil(d / o) + 1, math.ceil((records + 1) / o) + 1
    rounds, equations = math.ceil(1.4 * (needed + 2) / (1 - RATE)), math.ceil(count * (d + o) / o)
    paper = listen(devices, noise=PAPER, rounds=rounds)
    summed = listen(devices, noise=PAPER, rounds=min(_SPARE * equations, longest), secure=True)
    noised = listen(devices, noise=RECORD, rounds=rounds)
    answers = sorted({1, 2, min(few, needed), needed})
    opened = len(summed.models)
    sums = sorted({min(equations // 2, opened), min(equations + 1, opened), opened})
    last = int(noised.answered.sum(axis=0).max())
    found = {
        PLAIN: [_upload(paper), *(_solved(paper, k) for k in answers)],
        SUMMED: [_even(summed), *(_taken_apart(summed, k) for k in sums)],
        NOISED: [_upload(noised), *(_weighed(noised, k) for k in (2, last))],
    }
    steps = sorted({max(1, opened * k // 8) for k in range(1, 9)})
    true = devices.moments
    return Attacked(
        devices=devices,
        claimed=setup_privacy(paper.setup),
        findings={
            name: [_judged(devices, true, one) for one in estimates]
            for name, estimates in found.items()
        },
        curves={
            PLAIN: _curve(true, range(1, needed + 2), lambda k: _solved(paper, k)),
            SUMMED: _curve(true, steps, lambda k: _taken_apart(summed, k)),
            NOISED: _curve(true, range(1, last + 1), lambda k: _weighed(noised, k)),
        },
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Estimate:
    """The moments of all devices by some of what the server has."""

    name: str
    rank: str = ""
    moments: Moments


def _upload(heard: ServerView) -> _Estimate:
    """Take the setup uploads for the moments."""
    features, labels = heard.each_upload
    symmetric = (features + features.transpose(0, 2, 1)) / 2
    return _Estimate(name="upload", moments=Moments(symmetric, labels))


def _even(heard: ServerView) -> _Estimate:
    """Take an even share of the sum of the setups for the moments of each device."""
    count = heard.answered.shape[1]
    features = (heard.coded.features + heard.coded.features.T) / 2
    shares = (
        np.repeat(part[None] / count, count, axis=0) for part in (features, heard.coded.labels)
    )
    return _Estimate(name="sum of uploads", moments=Moments(*shares))


def _solved(heard: ServerView, most: int) -> _Estimate:
    """Solve for each device from its first answers."""
    found = [
        recover_moments(models[:most], gradients[:most]) for models, gradients in heard.each_device
    ]
    rank, size = min(one.rank for one in found), heard.models.shape[1]
    return _Estimate(
        name=f"{most} answer{'s' * (most > 1)}",
        rank=f"{rank} of {size}",
        moments=_stacked(found),
    )


def _taken_apart(heard: ServerView, rounds: int) -> _Estimate:
    """Solve for all devices from the first sums."""
    found = recover_from_sums(heard.models[:rounds], heard.sums[:rounds], heard.answered[:rounds])
    return _Estimate(
        name=f"{rounds} sums",
        rank=f"{found.rank} of {found.unknowns}",
        moments=Moments(found.features, found.labels),
    )


def _weighed(heard: ServerView, most: int) -> _Estimate:
    """Weigh the uploads and the first noised answers against each other."""
    found = [
        estimate_moments(
            models[:most],
            gradients[:most],
            gradient_variance=heard.terms.sigma**2,
            upload=upload,
            upload_variances=(heard.setup.sigma_features**2, heard.setup.sigma_labels**2),
        )
        for (models, gradients), upload in zip(
            heard.each_device, zip(*heard.each_upload, strict=True), strict=True
        )
    ]
    return _Estimate(name=f"upload, {most} answers", moments=_stacked(found))


def _stacked(found: list[Recovered]) -> Moments:
    return Moments(
        np.array([one.features for one in found]), np.array([one.labels for one in found])
    )


def _judged(devices: Devices, true: Moments, found: _Estimate) -> SolvedView:
    """Compare what was found with what is."""
    records = None
    if devices.map is None:
        records = [
            leaked_records(features, labels, one_hot=True, step=STEP).records
            for features, labels in zip(*found.moments, strict=True)
        ]
    return SolvedView(
        name=found.name,
        rank=found.rank,
        moments=found.moments,
        errors=_errors(found.moments, true),
        auc=float(np.mean([_auc(devices, i, a) for i, a in enumerate(found.moments.features)])),
        records=records,
        exact=sum(
            len({x.tobytes() for x in own} & {x.tobytes() for x in theirs})
            for own, theirs in zip(devices.pixels, records or [], strict=records is not None)
        ),
    )


def _errors(found: Moments, true: Moments) -> Moments:
    return Moments(
        *(
            np.linalg.norm(part - own, axis=(1, 2)) / np.linalg.norm(own, axis=(1, 2))
            for part, own in zip(found, true, strict=True)
        )
    )


def _auc(devices: Devices, index: int, features: Matrix) -> float:
    """Tell a device's records from others of the same classes by the strongest directions of A.

    There are as many directions as the device has records: the server is given that number.
    """
    weights, axes = np.linalg.eigh(features)
    strongest = axes[:, weights > _NOTHING * weights.max()][:, -devices.pixels.shape[1] :]
    alike = np.isin(devices.other_classes, devices.classes[index])
    own, others = devices.pixels[index], devices.other_pixels[alike]
    candidates = devices.features(np.concatenate([own, others]))
    scores = -np.round(span_distance(strongest @ strongest.T, candidates), 9)
    alarms, found = roc(scores, np.arange(len(candidates)) < len(own))
    return float(np.trapezoid(found, alarms))


def _curve(
    true: Moments, counts: Iterable[int], estimate: Callable[[int], _Estimate]
) -> tuple[list[int], list[float]]:
    rounds = list(counts)
    errors = [_errors(estimate(k).moments, true).features for k in rounds]
    return rounds, [float(np.median(one)) for one in errors]
