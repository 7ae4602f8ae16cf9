"""Rows of linear layers: what a layer was given, from its update alone.

The attack of `flwr_privacy.simulations.research.attacks.inversion` works on any linear layer. The
inputs are the records where it comes first, and else what the layers before make of them. Plain
steps of gradient descent, with momentum or without, keep the quotient of weight and bias for a
single record; Adam divides each entry by its own size and does not.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.simulations.research.attacks.inversion import best_matches, invert_linear

from .evidence import Upload

__all__ = ["EXACT", "Rows", "candidates", "compared"]

Vectors = NDArray[np.float64]

EXACT = 1e-3
"""Relative error below which a row is exact."""

LEVEL = 0.95
"""Cosine similarity from which on a row is recovered."""


def candidates(upload: Upload, layer: str) -> Vectors:
    """Return what the units of a layer say of its inputs, one row each.

    Parameters
    ----------
    upload : Upload
        What left the node.
    layer : str
        The layer's name, as in "classifier.1".

    Returns
    -------
    ndarray, shape (candidates, inputs)
        Without a bias in the upload the rows have no scale: their length is 1.
    """
    weight = upload.change[f"{layer}.weight"]
    bias = upload.change.get(f"{layer}.bias")
    if bias is not None:
        return invert_linear(weight, bias)
    lengths = np.linalg.norm(weight, axis=1)
    heard = lengths > 1e-3 * lengths.max(initial=0.0)
    rows: Vectors = weight[heard] / lengths[heard, None]
    return rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Candidates beside the truth, and beside as many guesses.

    Parameters
    ----------
    errors, guessed_errors : ndarray, shape (records,)
        Relative error of the nearest candidate, and of the nearest guess.
    similarities, guessed : ndarray, shape (records,)
        Absolute cosine similarity of the most similar one, less what is known of all records.
    """

    errors: Vectors
    guessed_errors: Vectors
    similarities: Vectors
    guessed: Vectors

    @property
    def exact(self) -> NDArray[np.bool_]:
        """Which records are exact, and are not among the guesses."""
        return (self.errors < EXACT) & ~(self.guessed_errors < EXACT)

    @property
    def near(self) -> NDArray[np.bool_]:
        """Which records are recovered, and no guess is."""
        return (self.similarities >= LEVEL) & (self.guessed < LEVEL)

    @property
    def missed(self) -> NDArray[np.bool_]:
        """Which records are guessed, and not recovered."""
        return (self.similarities < LEVEL) & (self.guessed >= LEVEL)


def compared(offered: Vectors, truth: Vectors, others: Vectors) -> Rows:
    """Compare candidates with the true inputs, and as many of others with them.

    Parameters
    ----------
    offered : ndarray, shape (candidates, inputs)
        What the attack returned.
    truth : ndarray, shape (records, inputs)
        What the layer was given.
    others : ndarray, shape (others, inputs)
        What it is given for records of others. Their mean is taken as known, and the first of them
        are the guesses, one for each candidate.
    """
    known = others.mean(axis=0) if len(others) else np.zeros(truth.shape[1])
    guesses = others[: max(1, len(offered))]
    return Rows(
        errors=_errors(offered, truth),
        guessed_errors=_errors(guesses, truth),
        similarities=best_matches(offered, truth, known=known).similarities,
        guessed=best_matches(guesses, truth, known=known).similarities,
    )


def _errors(offered: Vectors, truth: Vectors) -> Vectors:
    lengths = np.maximum(np.linalg.norm(truth, axis=1), 1e-12)
    if not len(offered):
        return np.full(len(truth), np.inf)
    gaps = np.array([np.linalg.norm(offered - row, axis=1).min() for row in truth])
    errors: Vectors = gaps / lengths
    return errors
