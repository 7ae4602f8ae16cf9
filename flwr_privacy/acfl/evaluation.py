"""A client's evaluation of ACFL's linear model: right records and clipped losses, record by record.

The loss is ACFL's (1), half of the squared error of a record's labels.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.evaluation.terms import EvaluationTerms, Measured
from flwr_privacy.pipeline.mechanism import Facts, ReleasePlan
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.wire.arrays import Arrays

__all__ = ["LinearEvaluation", "exact_scores"]

_EXACT_BITS = 52  # float64 adds integers up to two to the power of this without rounding

_Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LinearEvaluation(EvaluationTerms):
    """The terms of a client's evaluation of a linear model, and the mechanism that answers it.

    Parameters
    ----------
    unit, neighbours, accuracy, loss_cap, noise_multiplier, epsilon, delta, gap, grid, parties,
    by_server, labels
        As of `EvaluationTerms`; the unit is a record, and the number of records a secret. A loss
        may be released: the cap is that of the loss of one record.
    feature_map : str
        Identity of what makes features of the client's raw data.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Guarantee
    ---------
    Neighbours: data of which one has one record more. The answer is the sum of a vector of each
    record: (1/2, r), (1/2, r, l), and 1/2 in the entry of its own label, where that is asked. r is
    1/2 if the largest score of the record is that of its label, and else -1/2; l is its loss,
    clipped to [0, `loss_cap`], over the cap minus 1/2, rounded to the grid by itself. So one record
    more moves the answer by the norm of its vector, at most ``sqrt((1 + k) / 4)`` for k = 1 or 2
    statistics, and with labels ``sqrt((2 + k) / 4)``. The vector of a record does not depend on
    others, not even by rounding: see `exact_scores`. Values that are no numbers count as wrong, and
    as the largest loss. Nothing is assumed of the app: there is no code of its own in it.
    """

    feature_map: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit != "record":
            raise InvalidParameterError("unit", self.unit, "'record'")

    @property
    def losses_of_records(self) -> bool:
        """Whether the loss of each record is clipped by itself."""
        return True

    def plan(self, start: Arrays, facts: Facts) -> ReleasePlan:
        """Decide or refuse everything about the release; see `Mechanism.plan`."""
        model = _model(start)
        if facts.columns and model.shape != facts.columns:
            allowed = f"shape {facts.columns}, the columns of this client's data"
            raise InvalidParameterError("model", model.shape, allowed)
        if self.labels not in (0, model.shape[1]):
            allowed = f"{model.shape[1]}, the columns of the model"
            raise InvalidParameterError("labels", self.labels, allowed)
        return super().plan(start, facts)

    def measure(self, start: Arrays, outcome: tuple[_Array, _Array]) -> Measured:
        """Return the sums over the records of the features and labels."""
        features, labels = outcome
        model, own = _model(start), np.argmax(labels, axis=1)
        scores = exact_scores(features, model)
        finite = np.isfinite(scores).all(axis=1)
        right = int(np.count_nonzero(finite & (np.argmax(scores, axis=1) == own)))
        sums = [right - len(own) / 2]
        if self.loss_cap:
            sums.append(self._losses(scores, labels))
        counts = np.bincount(own, minlength=self.labels).tolist() if self.labels else []
        return self.counts(len(own), sums, counts)

    def _losses(self, scores: _Array, labels: _Array) -> float:
        """Return the sum of the clipped losses over the cap, minus 1/2 each, each on the grid."""
        step = CodeGrid(self.grid).step
        with np.errstate(all="ignore"):  # what is no number is the largest loss
            # One after the other: how a sum is split up may depend on the number of records.
            losses = np.add.accumulate((scores - labels) ** 2, axis=1)[:, -1] / 2
            shares = np.clip(np.nan_to_num(losses / self.loss_cap, nan=1.0), 0.0, 1.0)
        return float(step * np.rint((shares - 0.5) / step).sum())


def exact_scores(features: _Array, model: _Array) -> _Array:
    """Return the products of features and model, each row as if it were alone.

    How a product of matrices is rounded depends on its size, and a server could choose a model
    with which that decides: one record more would then change the scores of all others. Here rows
    and model are rounded to integers first, of which no sum is rounded. A row that has a value
    which is no number gives none.

    Parameters
    ----------
    features : (m, d) float64
        X.
    model : (d, o) float64
        W, of finite values.

    Examples
    --------
    >>> exact_scores(np.array([[1.0, 2.0], [np.inf, 0.0]]), np.array([[1.0], [-0.25]]))
    array([[0.5],
           [nan]])
    """
    bits = (_EXACT_BITS - math.ceil(math.log2(len(model)))) // 2
    rows = np.isfinite(features).all(axis=1, keepdims=True)
    largest = np.max(np.abs(np.where(rows, features, 0.0)), axis=1, keepdims=True)
    _, exponents = np.frexp(largest)
    _, exponent = math.frexp(float(np.abs(model).max()))
    scaled = np.rint(np.ldexp(np.where(rows, features, 0.0), bits - exponents))
    weights = np.rint(np.ldexp(model, bits - exponent))
    with np.errstate(over="ignore"):  # infinity is no number
        scores = np.ldexp(scaled @ weights, exponents + exponent - 2 * bits)
    return np.where(rows, scores, np.nan)


def _model(arrays: Arrays) -> _Array:
    if len(arrays) != 1:
        raise ProtocolError(f"{len(arrays)} arrays were sent: expected one, the model")
    (array,) = arrays.values()
    if np.ndim(array) != 2 or not np.issubdtype(np.asarray(array).dtype, np.floating):
        raise ProtocolError("the model that was sent is no matrix of floats")
    model = np.asarray(array, dtype=np.float64)
    if model.size == 0 or not np.isfinite(model).all():
        raise ProtocolError("the model that was sent is empty, or has NaN or infinity")
    return model
