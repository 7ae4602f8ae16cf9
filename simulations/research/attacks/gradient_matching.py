"""Gradient matching: searches for images that have a given gradient.

An update of one gradient step is the gradient, times the learning rate. The attack starts from
noise and moves its pixels until the model's gradient at them is the one that was seen. It needs no
layer that sees all of an image, as `flwr_privacy.simulations.research.attacks.inversion` does, only
the model, which the server has. The label need not be searched for: of a single record, the sign of
the last layer's gradient tells it.

Like every search, it proves a leak where it finds an image. Where it finds none, either the view of
the gradient is to blame or the search is; `Reconstruction.loss` tells the one from the other, see
there.

Sources: Zhu, Liu and Han, "Deep Leakage from Gradients", NeurIPS 2019 (the search, for one record
or several); Zhao, Mopuri and Bilen, "iDLG: Improved Deep Leakage from Gradients", 2020, section 3
(the label).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import OptimizeResult, minimize

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.wire.arrays import is_finite

__all__ = ["MatchingLoss", "Reconstruction", "infer_label", "match_gradient", "observed_gradient"]

Vectors = NDArray[np.float64]

MatchingLoss = Callable[[Vectors], tuple[float, Vectors]]
"""From candidate records to the squared distance of their gradient from the one that was seen, and
the derivative of this distance by the records. torch's is
`flwr_privacy.simulations.research.attacks.torch_gradients.matching_loss`."""

_MEMORY = 100  # steps that L-BFGS keeps, as the authors' optimiser does
_LEAST_GAIN = 1e-10  # of a step, relative to the loss: the search ends where there is less


def observed_gradient(start: ArrayLike, seen: ArrayLike, *, learning_rate: float) -> Vectors:
    """Return the gradient of which a model is one step away from another, ``(start - seen) / eta``.

    Parameters
    ----------
    start : array_like
        The model that the client was sent.
    seen : array_like, same shape
        The model that was seen, or what the attack takes for it.
    learning_rate : float
        The step's, above 0.

    Examples
    --------
    >>> observed_gradient([1.0, 1.0], [0.5, 1.25], learning_rate=0.5)
    array([ 1. , -0.5])
    """
    if not check_number("learning_rate", learning_rate) > 0:
        raise InvalidParameterError("learning_rate", learning_rate, "a number above 0")
    gradient: Vectors = np.asarray(start, np.float64) - np.asarray(seen, np.float64)
    return gradient / learning_rate


def infer_label(weight_gradient: ArrayLike) -> int:
    """Return the class of the one record behind the gradient of the last layer's weight.

    With cross entropy the row of class c is ``(p[c] - [c is the label]) h``. Where the layer's
    inputs h are not negative, as behind a sigmoid or ReLU, the label's is the only row with a
    negative sum.

    Parameters
    ----------
    weight_gradient : array_like, shape (classes, inputs)
        The gradient of the last layer's weight, in any unit.

    Returns
    -------
    int
        The row with the least sum; noise may make it another.

    Raises
    ------
    InvalidParameterError
        If it has not two axes, no entries, or values that are not finite.

    Examples
    --------
    >>> probabilities, inputs = np.array([0.2, 0.7, 0.1]), np.array([0.5, 0.9])
    >>> infer_label(np.outer(probabilities - [0, 0, 1], inputs))
    2
    """
    gradient = np.asarray(weight_gradient, np.float64)
    if gradient.ndim != 2 or gradient.size == 0 or not is_finite(gradient):
        raise InvalidParameterError(
            "weight_gradient", gradient.shape, "a finite array with a row for each class"
        )
    return int(gradient.sum(axis=1).argmin())


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruction:
    """The images that the search found.

    Parameters
    ----------
    records : ndarray of float64
        The candidates, in the shape of the starts.
    loss : float
        Their loss. For somebody who knows the true records it says why an attack failed: if it is
        no larger than the loss of the true ones, these are not what the gradient as it was seen
        points to, and no better search for the same minimum would return them. If it is larger,
        the search has stopped short, and nothing is shown.
    """

    records: Vectors
    loss: float


def match_gradient(
    loss: MatchingLoss, start: ArrayLike, *, iterations: int = 300, tolerance: float = 1e-6
) -> Reconstruction:
    """Search for records with the gradient that was seen, by L-BFGS.

    Parameters
    ----------
    loss : callable
        The loss to be made small, and its derivative.
    start : array_like
        Where to start, e.g. standard normal draws in the shape of the records.
    iterations : int, default 300
        Most steps.
    tolerance : float, default 1e-6
        Loss below which the search is done.

    Raises
    ------
    InvalidParameterError
        If a setting is out of range.

    Notes
    -----
    The authors run torch's L-BFGS at step size 1, which makes 300 times up to 20 steps and may
    diverge; here each step is a line search, which cannot.

    Examples
    --------
    >>> found = match_gradient(lambda x: (float(((x - 3) ** 2).sum()), 2 * (x - 3)), np.zeros(2))
    >>> found.records.round(3), found.loss < 1e-6
    (array([3., 3.]), True)
    """
    check_integer("iterations", iterations, minimum=1)
    check_number("tolerance", tolerance, minimum=0)
    first = np.asarray(start, np.float64)

    def flat(values: Vectors) -> tuple[float, Vectors]:
        value, slope = loss(values.reshape(first.shape))
        return value, slope.reshape(-1)

    def stop(*, intermediate_result: OptimizeResult) -> None:
        if intermediate_result.fun < tolerance:
            raise StopIteration

    result = minimize(
        flat,
        first.reshape(-1),
        jac=True,
        method="L-BFGS-B",
        callback=stop,
        options={
            "maxiter": iterations,
            "maxfun": 10 * iterations,
            "maxcor": _MEMORY,
            "ftol": _LEAST_GAIN,
            "gtol": 0.0,
        },
    )
    return Reconstruction(records=result.x.reshape(first.shape), loss=float(result.fun))
