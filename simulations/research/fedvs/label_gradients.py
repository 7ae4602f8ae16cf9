"""Finds rows with the same label from the gradients that clients receive.

In a vertical split model the labels are the server's alone, and all clients are sent the gradient
of the loss with respect to each row's embedding. For a loss of scores it is ``J^T (q - y)`` with
the predicted chances q, the one-hot label y and the slopes J of the server model: rows of one
class are pulled the same way. So a client

- tells pairs of one label from others by the cosine of their gradients (`similarities`,
  `pairs_told_apart`);
- and with one known row of each class, its own say, names the labels of all (`spread_labels`).

The length of a gradient says besides how hard a row is. Nothing in a secure sum is about that, as
what is sent goes the other way.

Source: Li, Sun, Yang and others, "Label Leakage and Protection in Two-party Split Learning" (ICLR
2022), for two classes.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.wire.arrays import is_finite

__all__ = ["pairs_told_apart", "similarities", "spread_labels"]

Matrix = NDArray[np.float64]


def similarities(gradients: ArrayLike) -> Matrix:
    """Return the cosines of the gradients of rows.

    Parameters
    ----------
    gradients : array_like, shape (m, h) or (rounds, m, h)
        Gradients with respect to the embeddings of m rows. Of several rounds the mean cosine is
        taken, over those in which both have a gradient.

    Returns
    -------
    ndarray of float64, shape (m, m)
        From -1 to 1; 0 for rows without a gradient.

    Raises
    ------
    InvalidParameterError
        If the shape is another or a value is not finite.

    Examples
    --------
    >>> similarities([[3.0, 0.0], [0.5, 0.0], [0.0, 2.0]])
    array([[1., 1., 0.],
           [1., 1., 0.],
           [0., 0., 1.]])
    """
    sent = np.asarray(gradients, np.float64)
    if sent.ndim == 2:
        sent = sent[None]
    if sent.ndim != 3 or not sent.size or not is_finite(sent):
        raise InvalidParameterError("gradients", sent.shape, "(m, h) or (rounds, m, h), finite")
    lengths = np.linalg.norm(sent, axis=2, keepdims=True)
    directions = np.divide(sent, lengths, out=np.zeros_like(sent), where=lengths > 0)
    there = (lengths[:, :, 0] > 0).astype(np.float64)
    count = there.T @ there
    total = np.einsum("rmh,rnh->mn", directions, directions)
    cosines: Matrix = np.divide(total, count, out=np.zeros_like(total), where=count > 0)
    return cosines


def pairs_told_apart(cosines: ArrayLike, labels: ArrayLike) -> float:
    """Return the chance that a pair of one label is more alike than a pair of two.

    Parameters
    ----------
    cosines : array_like, shape (m, m)
        What `similarities` returns.
    labels : array_like of int, shape (m,)
        True labels.

    Returns
    -------
    float
        Area under the curve: 0.5 is guessing, 1 is all pairs right. Equal cosines count half.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit, or there are no pairs of either kind.

    Examples
    --------
    >>> pairs_told_apart(similarities([[3.0, 0.0], [0.5, 0.0], [0.0, 2.0]]), [7, 7, 1])
    1.0
    """
    alike, classes = np.asarray(cosines, np.float64), np.asarray(labels)
    if classes.ndim != 1 or alike.shape != (len(classes), len(classes)):
        raise InvalidParameterError("labels", classes.shape, f"a label for each of {alike.shape}")
    first, second = np.triu_indices(len(classes), 1)
    same, scores = classes[first] == classes[second], alike[first, second]
    if same.all() or not same.any():
        raise InvalidParameterError("labels", "one kind of pairs", "pairs of one and two labels")
    inside, outside = np.sort(scores[same]), np.sort(scores[~same])
    below = np.searchsorted(outside, inside, "left") + np.searchsorted(outside, inside, "right")
    return float(below.mean() / (2 * len(outside)))


def spread_labels(cosines: ArrayLike, known: Mapping[int, int]) -> NDArray[np.int64]:
    """Return the label of each row by the known rows that its gradient is most like.

    Parameters
    ----------
    cosines : array_like, shape (m, m)
        What `similarities` returns.
    known : Mapping of int to int
        Labels of some rows by their place; at least one of each label that may come up.

    Returns
    -------
    ndarray of int64, shape (m,)
        For each row the label whose known rows have the largest mean cosine with it; the known ones
        as they are known.

    Raises
    ------
    InvalidParameterError
        If a row does not exist or none is known.

    Examples
    --------
    >>> spread_labels(similarities([[3.0, 0.0], [0.5, 0.0], [0.0, 2.0]]), {0: 7, 2: 1})
    array([7, 7, 1])
    """
    alike = np.asarray(cosines, np.float64)
    if alike.ndim != 2 or len(alike) != alike.shape[1]:
        raise InvalidParameterError("cosines", alike.shape, "a square matrix")
    if not known:
        raise InvalidParameterError("known", known, "labels of one row or more")
    for place in known:
        check_integer("known", place, minimum=0, maximum=len(alike) - 1)
    classes = sorted(set(known.values()))
    scores = np.stack(
        [alike[:, [i for i, own in known.items() if own == label]].mean(1) for label in classes]
    )
    labels: NDArray[np.int64] = np.array(classes, np.int64)[scores.argmax(axis=0)]
    labels[list(known)] = list(known.values())
    return labels
