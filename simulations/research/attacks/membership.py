"""Membership inference: decides from a model whether a record was in the training data.

The attacker has records, the trained model's loss or confidence on each, and nothing else; with
shadow models, which it trains itself on data of which it knows the members, it also knows how a
record looks in and how it looks out.

- Loss threshold: the smaller the loss, the likelier a member.
- Likelihood ratio (LiRA): the likelihood of the record's confidence by a normal law that is fitted
  to the shadow models with the record, over that by those without it. Offline it has only the
  latter, and takes how far above their confidences the record's is.

Sources: Yeom, Giacomelli, Fredrikson and Jha, "Privacy Risk in Machine Learning: Analyzing the
Connection to Overfitting", CSF 2018; Carlini, Chien, Nasr, Song, Terzis and Tramer, "Membership
Inference Attacks From First Principles", S&P 2022.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp
from scipy.stats import rankdata

from flwr_privacy.errors import InvalidParameterError, check_number
from flwr_privacy.wire.arrays import is_finite

from .audit import at_least, at_most
from .scores import labelled, vector

__all__ = [
    "Membership",
    "Rate",
    "evaluate",
    "likelihood_ratio",
    "logit_confidence",
    "loss_threshold",
    "roc",
]

Vector = NDArray[np.float64]

_ENOUGH = 32  # shadow models for a variance of each record; with fewer all records share one
_SMALLEST_SPREAD = 1e-6


def loss_threshold(losses: ArrayLike) -> Vector:
    """Return the scores of the loss-threshold attack, minus the losses.

    Parameters
    ----------
    losses : array_like, shape (n,)
        The model's loss on each record.

    Examples
    --------
    >>> loss_threshold([0.1, 2.0])
    array([-0.1, -2. ])
    """
    return -vector("losses", losses)


def logit_confidence(logits: ArrayLike, labels: ArrayLike) -> Vector:
    """Return ``ln(p / (1 - p))``, p being the probability that a model gives to the right class.

    Over records this is nearly normal, which the loss is not (Carlini et al., section VI). From the
    logits it is exact, however near p is to 0 or 1.

    Parameters
    ----------
    logits : array_like, shape (n, classes)
        The model's output, at least two classes.
    labels : array_like of int, shape (n,)
        The right classes.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit or a value is not finite.

    Examples
    --------
    >>> logit_confidence([[2.0, -1.0], [0.0, 50.0]], [0, 1])
    array([ 3., 50.])
    """
    outputs, classes = np.asarray(logits, np.float64), np.asarray(labels)
    if outputs.ndim != 2 or outputs.shape[1] < 2 or not is_finite(outputs):
        raise InvalidParameterError(
            "logits", outputs.shape, "finite values with a column for each of two classes or more"
        )
    if classes.shape != outputs.shape[:1] or not np.issubdtype(classes.dtype, np.integer):
        raise InvalidParameterError("labels", classes.shape, f"{len(outputs)} classes")
    right = np.arange(outputs.shape[1]) == classes[:, None]
    own: Vector = outputs[right]
    others: Vector = logsumexp(np.where(right, -np.inf, outputs), axis=1)
    return own - others


def likelihood_ratio(
    confidences: ArrayLike, shadows: ArrayLike, inside: ArrayLike, *, online: bool = True
) -> Vector:
    """Return the scores of the likelihood-ratio attack.

    Parameters
    ----------
    confidences : array_like, shape (n,)
        `logit_confidence` of the attacked model on each record.
    shadows : array_like, shape (k, n)
        Those of k shadow models.
    inside : array_like of bool, shape (k, n)
        Whether the shadow model was trained with the record.
    online : bool, default True
        Whether shadow models with the record count too. Offline, the score is how many standard
        deviations the confidence lies above those of the models without the record.

    Returns
    -------
    ndarray, shape (n,)
        The larger, the likelier a member.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit, a value is not finite, or a record has fewer than two shadow
        models on a side that counts.

    Notes
    -----
    With fewer than 32 shadow models on a side the records share a variance there (Carlini et al.,
    section VI-C).

    Examples
    --------
    >>> shadows = [[2.0, 0.0], [3.0, 1.0], [0.0, 2.0], [1.0, 3.0]]
    >>> inside = [[True, False], [True, False], [False, True], [False, True]]
    >>> likelihood_ratio([2.5, 0.5], shadows, inside)
    array([ 4., -4.])
    """
    seen = vector("confidences", confidences)
    known, members = np.asarray(shadows, np.float64), np.asarray(inside)
    if known.ndim != 2 or known.shape[1] != seen.size or not is_finite(known):
        raise InvalidParameterError(
            "shadows", known.shape, f"finite values with a column for each of {seen.size} records"
        )
    if members.dtype != np.bool_ or members.shape != known.shape:
        raise InvalidParameterError(
            "inside", f"{members.dtype} {members.shape}", f"truth values of shape {known.shape}"
        )
    without = _distances(seen, known, ~members)
    if not online:
        return without.signed
    return _distances(seen, known, members).log_likelihood - without.log_likelihood


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The share of the members that is found at a given rate of false alarms.

    Parameters
    ----------
    limit : float
        Largest share of false alarms.
    fpr, tpr : float
        Share of the non-members and of the members at or above the threshold. The threshold is the
        smallest that keeps the limit.
    low, high : float
        Two-sided confidence interval of the tpr of this threshold. The threshold depends on the
        non-members alone, so the interval of Clopper and Pearson is exact.
    """

    limit: float
    fpr: float
    tpr: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Membership:
    """How well an attack separates members from non-members.

    Parameters
    ----------
    auc : float
        Chance that a member scores above a non-member; 0.5 is guessing.
    advantage : float
        True minus false positives at the threshold that is best on one half of the records,
        measured on the other half; 0 is guessing.
    rates : tuple of Rate
        What is found at few false alarms.
    epsilon : float
        Lower bound that a threshold certifies at `delta`: chosen on one half of the records, tested
        on the other. A run that is (epsilon, delta)-DP for these members and non-members has a
        larger one with a chance of at most ``1 - confidence``, if the scores are independent.
    delta, confidence : float
        See there; the confidence is also that of the intervals.
    """

    auc: float
    advantage: float
    rates: tuple[Rate, ...]
    epsilon: float
    delta: float
    confidence: float


def evaluate(
    scores: ArrayLike,
    members: ArrayLike,
    *,
    delta: float,
    limits: Sequence[float] = (0.01, 0.1),
    confidence: float = 0.95,
) -> Membership:
    """Say how well scores tell members from non-members.

    Parameters
    ----------
    scores : array_like, shape (n,)
        Score of each record. The records at even places choose thresholds, those at odd places test
        them: shuffle the records if their order says anything.
    members : array_like of bool, shape (n,)
        Which of them are members; on both halves some are and some are not.
    delta : float
        Delta for which epsilon is bounded, from 0 and below 1.
    limits : sequence of float, default (0.01, 0.1)
        Shares of false alarms at which the found members are counted.
    confidence : float, default 0.95
        Of the intervals and of the bound.

    Raises
    ------
    InvalidParameterError
        If a value is out of range or the shapes do not fit.

    Notes
    -----
    The bound takes records for independent, which those of one training run are not quite. Where
    each record was one of two by a coin,
    `flwr_privacy.simulations.research.attacks.audit.one_run_audit` assumes nothing.

    Examples
    --------
    >>> members = np.arange(400) // 2 % 2 == 0
    >>> found = evaluate(members, members, delta=0.0)
    >>> found.auc, found.advantage, round(found.epsilon, 2)
    (1.0, 1.0, 3.28)
    """
    values, inside = labelled(scores, "members", members)
    if not 0 <= check_number("delta", delta) < 1:
        raise InvalidParameterError("delta", delta, "a number of at least 0 and below 1")
    choosing, testing = [(values[half::2], inside[half::2]) for half in (0, 1)]
    for _, part in (choosing, testing):
        if part.all() or not part.any():
            raise InvalidParameterError(
                "members", f"{inside.sum()} of {inside.size}", "some of each kind on both halves"
            )
    thresholds = np.unique(choosing[0])
    gains = [_gain(_rates(*choosing, threshold)) for threshold in thresholds]
    bounds = [_certified(*choosing, t, delta, confidence) for t in thresholds]
    best = float(thresholds[int(np.argmax(gains))])
    sharpest = float(thresholds[int(np.argmax(bounds))])
    ranks = rankdata(values)[inside].sum()
    count, others = int(inside.sum()), int((~inside).sum())
    return Membership(
        auc=float(ranks - count * (count + 1) / 2) / (count * others),
        advantage=_gain(_rates(*testing, best)),
        rates=tuple(_rate(values, inside, limit, confidence) for limit in limits),
        epsilon=_certified(*testing, sharpest, delta, confidence),
        delta=delta,
        confidence=confidence,
    )


def roc(scores: ArrayLike, members: ArrayLike) -> tuple[Vector, Vector]:
    """Return the false and the true positive rates of all thresholds, from none to all.

    Parameters are those of `evaluate`.

    Examples
    --------
    >>> roc([3.0, 2.0, 1.0], [True, False, True])
    (array([0., 0., 1., 1.]), array([0. , 0.5, 0.5, 1. ]))
    """
    values, inside = labelled(scores, "members", members)
    order = np.argsort(-values, kind="stable")
    last = np.append(np.diff(values[order]) != 0, True)  # of equal scores
    found = np.cumsum(inside[order])[last]
    alarms = np.cumsum(~inside[order])[last]
    zero = np.zeros(1)
    return (
        np.concatenate([zero, alarms / max(1, alarms[-1])]),
        np.concatenate([zero, found / max(1, found[-1])]),
    )


@dataclass(frozen=True, eq=False)
class _Distances:
    """Distances of confidences from the means of shadow models, in standard deviations."""

    signed: Vector
    spread: Vector

    @property
    def log_likelihood(self) -> Vector:
        """Logarithm of the normal density, up to a constant."""
        return -(self.signed**2) / 2 - np.log(self.spread)


def _distances(seen: Vector, shadows: Vector, chosen: NDArray[np.bool_]) -> _Distances:
    counts = chosen.sum(axis=0)
    if counts.min() < 2:
        raise InvalidParameterError(
            "inside", f"{counts.min()} on a side", "two shadow models with and without each record"
        )
    means = np.where(chosen, shadows, 0.0).sum(axis=0) / counts
    squares = (np.where(chosen, shadows - means, 0.0) ** 2).sum(axis=0)
    if counts.min() >= _ENOUGH:
        variances = squares / (counts - 1)
    else:
        variances = np.full(seen.size, squares.sum() / (counts - 1).sum())
    spread = np.maximum(np.sqrt(variances), _SMALLEST_SPREAD)
    return _Distances((seen - means) / spread, spread)


def _rates(
    scores: Vector, members: NDArray[np.bool_], threshold: float
) -> tuple[int, int, int, int]:
    """Return the false alarms, the non-members, the found members and the members."""
    above = scores >= threshold
    return (
        int(np.count_nonzero(above & ~members)),
        int(np.count_nonzero(~members)),
        int(np.count_nonzero(above & members)),
        int(np.count_nonzero(members)),
    )


def _gain(rates: tuple[int, int, int, int]) -> float:
    alarms, others, found, members = rates
    return found / members - alarms / others


def _certified(
    scores: Vector, members: NDArray[np.bool_], threshold: float, delta: float, confidence: float
) -> float:
    """Return the epsilon that a threshold certifies; both kinds of error count.

    ``TPR <= e^epsilon FPR + delta``, and the same with the complements. The two rates have bounds
    that hold together with the confidence.
    """
    alarms, others, found, inside = _rates(scores, members, threshold)
    each = (1 + confidence) / 2
    tpr, fpr = at_least(found, inside, each), at_most(alarms, others, each)
    pairs = ((tpr, fpr), (1 - fpr, 1 - tpr))
    return max(
        [0.0] + [math.log((high - delta) / low) for high, low in pairs if high > delta and low > 0]
    )


def _rate(scores: Vector, members: NDArray[np.bool_], limit: float, confidence: float) -> Rate:
    check_number("limits", limit, minimum=0, maximum=1)
    others = np.sort(scores[~members])[::-1]
    allowed = int(limit * others.size)
    # The threshold is just above the first non-member that would be one too many.
    barrier = others[allowed] if allowed < others.size else -np.inf
    alarms = int(np.count_nonzero(others > barrier))
    inside = int(np.count_nonzero(members))
    found = int(np.count_nonzero(scores[members] > barrier))
    each = (1 + confidence) / 2
    return Rate(
        limit=limit,
        fpr=alarms / others.size,
        tpr=found / inside,
        low=at_least(found, inside, each),
        high=at_most(found, inside, each),
    )
