"""Recovers images from a model that is one gradient step away, by gradient matching."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from flwr_privacy.clients.torch import initialise, set_arrays
from flwr_privacy.simulations.research.attacks.gradient_matching import (
    Reconstruction,
    infer_label,
    match_gradient,
    observed_gradient,
)
from flwr_privacy.simulations.research.attacks.inversion import Recovery
from flwr_privacy.simulations.research.attacks.setup import AttackSetup
from flwr_privacy.simulations.research.attacks.torch_gradients import matching_loss
from flwr_privacy.wire.identity import stream

from .mixing import layout_of

__all__ = ["Images", "reconstruct", "reconstruct_sum"]

Vectors = NDArray[np.float64]

_STARTS = 3  # as long as the search does not converge
_ITERATIONS = 300
_SUM_ITERATIONS = 1000  # of more images at once
_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """The images of the first clients that were found in one view.

    Parameters
    ----------
    view : str
        What was seen.
    recovery : Recovery
        Similarity to each image, beside guesses.
    found : ndarray, shape (images, features)
        The candidate nearest to each, in the range of the pixels.
    errors : ndarray, shape (images,)
        Mean squared error of each, of pixels from 0 to 1.
    labels : int or None
        How many labels were inferred correctly; None where they were given to the attack.
    converged : ndarray of bool, shape (images,)
        Whether the search did its work: its loss is no larger than that of the true images, or
        below its tolerance.
    """

    view: str
    recovery: Recovery
    found: Vectors
    errors: Vectors
    labels: int | None
    converged: NDArray[np.bool_]


def reconstruct(setup: AttackSetup, view: str, models: Vectors) -> Images:
    """Attack each client's model, or what the server takes for it.

    Parameters
    ----------
    setup : AttackSetup
        The clients.
    view : str
        Name of the view.
    models : ndarray, shape (clients, d)
        A model for each of the first clients of `setup`.
    """
    found = [_search(setup, model, i, i + 1, _ITERATIONS) for i, model in enumerate(models)]
    inferred = None
    if setup.labels.shape[1] == 1:
        inferred = sum(
            label == own
            for (_, label, _), own in zip(found, setup.labels[: len(found), 0], strict=True)
        )
    return _images(
        setup,
        view,
        [best.records for best, _, _ in found],
        labels=inferred,
        converged=[done for *_, done in found],
    )


def reconstruct_sum(setup: AttackSetup, view: str, model: Vectors, *, clients: int) -> Images:
    """Attack the mean model of the first clients, as if all their records were one client's.

    The labels are given to the attack.
    """
    best, _, done = _search(setup, model, 0, clients, _SUM_ITERATIONS)
    return _images(setup, view, [best.records], labels=None, converged=[done])


def _search(
    setup: AttackSetup, model: Vectors, first: int, end: int, iterations: int
) -> tuple[Reconstruction, int, bool]:
    """Return the candidates for the records of some clients, the label, and whether it converged.

    The label is inferred where they have one record, and -1 otherwise.
    """
    layout = layout_of(setup)
    start = layout.vector(setup.start)
    rate = setup.task.training.learning_rate
    gradient = layout.arrays(observed_gradient(start, model, learning_rate=rate))
    records = setup.records(first, end)
    labels, label = setup.labels[first:end].reshape(-1), -1
    if len(labels) == 1:
        last = [name for name, array in gradient.items() if array.ndim == 2][-1]
        label = infer_label(gradient[last])
        labels = np.array([label])
    network = initialise(setup.task.model, 0)
    set_arrays(network, setup.start)
    loss = matching_loss(network, gradient, labels)
    draws = stream(setup.seed, "starts", first, end)
    enough = max(_TOLERANCE, loss(records)[0])
    with threadpool_limits(limits=1):  # on vectors this short, threads only wait for each other
        tries = (
            match_gradient(
                loss,
                draws.normal(size=records.shape),
                iterations=iterations,
                tolerance=_TOLERANCE,
            )
            for _ in range(_STARTS)
        )
        best = next(tries)
        while best.loss > enough and (another := next(tries, None)) is not None:
            best = min(best, another, key=lambda one: one.loss)
    return best, label, best.loss <= enough


def _images(
    setup: AttackSetup,
    view: str,
    candidates: Sequence[Vectors],
    *,
    labels: int | None,
    converged: Sequence[bool],
) -> Images:
    """Compare groups of candidates with the records of equal groups of clients."""
    low, high = setup.span
    each = sum(map(len, candidates)) // setup.labels.shape[1] // len(candidates)
    matches = [
        setup.matches(np.clip(group, low, high), i * each, (i + 1) * each)
        for i, group in enumerate(candidates)
    ]
    clients = each * len(candidates)
    found = np.concatenate([one.found for one in matches])
    missed = (found - setup.records(0, clients)) / (high - low)
    return Images(
        view=view,
        recovery=Recovery(
            similarities=np.concatenate([one.similarities for one in matches]),
            guessed=setup.matches(setup.guesses, 0, clients).similarities,
        ),
        found=found,
        errors=(missed**2).mean(axis=1),
        labels=labels,
        converged=np.repeat(converged, [len(group) for group in candidates]),
    )
