"""The server's model of split learning as a torch module, with its steps of gradient descent.

It computes on the CPU, on one thread: the same weights, embeddings and labels give the same bits in
every process.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flwr_privacy.errors import DataError, InvalidParameterError, check_integer, check_number

from .computing import Loss, one_thread
from .training import get_arrays, initialise, set_arrays

__all__ = ["TorchServerModel"]

Arrays = Mapping[str, NDArray[Any]]


class TorchServerModel:
    """The server's model W_0 as a torch module: a `flwr_privacy.fedvs.server_model.ServerModel`.

    Parameters
    ----------
    module_fn : callable
        Makes the module, which maps (m, h) embeddings to (m, classes) logits; a head for two
        classes may also have one output, the logit of class 1. No layer may draw random numbers in
        training (as dropout does).
    loss : callable, optional
        From the logits (m, classes) and int64 labels (m,) to their mean loss; with one output from
        logits (m,) and float32 labels (m,). By default the cross entropy, with one output the
        binary one.
    seed : int, default 0
        Seed of the weights to start from, 0 to 2**63 - 1.
    threshold : float, default 0.5
        Of two classes, the probability from which on class 1 is predicted, above 0 and below 1.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.

    Notes
    -----
    A step is plain gradient descent, without momentum. The weights are the module's parameters and
    its buffers, so that the statistics of BatchNorm travel with them. A step on a single row, which
    has no statistics, takes those of the steps before and leaves them as they are.

    Examples
    --------
    >>> from functools import partial
    >>> from flwr_privacy.clients.torch import mlp
    >>> server_model = TorchServerModel(partial(mlp, (4, 8, 3)))
    >>> rows, labels = np.ones((2, 4), dtype=np.float32), np.array([0, 2])
    >>> arrays, gradient, loss = server_model.step(server_model.initial(), rows, labels, 0.1)
    >>> gradient.shape
    (2, 4)
    """

    def __init__(
        self,
        module_fn: Callable[[], nn.Module],
        *,
        loss: Loss | None = None,
        seed: int = 0,
        threshold: float = 0.5,
    ) -> None:
        check_integer("seed", seed, minimum=0, maximum=2**63 - 1)
        if not 0 < check_number("threshold", threshold) < 1:
            raise InvalidParameterError("threshold", threshold, "a number above 0 and below 1")
        self._module = initialise(module_fn, seed)
        self._initial = get_arrays(self._module)
        self._loss = loss
        self._least = math.log(threshold / (1 - threshold))  # the least logit of class 1

    def initial(self) -> dict[str, NDArray[Any]]:
        """Return the weights to start from, by name."""
        return {name: array.copy() for name, array in self._initial.items()}

    def step(
        self,
        arrays: Arrays,
        embedding: NDArray[np.float32],
        labels: NDArray[Any],
        learning_rate: float,
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32], float]:
        """Make one step of gradient descent on the mean loss of some rows.

        Parameters
        ----------
        arrays : mapping of str to ndarray
            The weights; they stay as they are.
        embedding : (m, h) float32
            The embeddings of m rows.
        labels : (m,) int
            Their classes.
        learning_rate : float
            Step size, >= 0.

        Returns
        -------
        arrays : dict of str to ndarray
            The new weights.
        gradient : (m, h) float32
            Gradient of the mean loss with respect to the embeddings, before the step.
        loss : float
            The mean loss before the step.

        Raises
        ------
        DataError
            If there are no rows, not one label per row, or labels that are no classes.
        InvalidParameterError
            If the weights are not the module's, it does not take such embeddings, or the step size
            is out of range.
        """
        check_number("learning_rate", learning_rate, minimum=0)
        rows = _rows(embedding).requires_grad_()
        set_arrays(self._module, arrays)
        self._module.train(len(rows) > 1)
        with one_thread():
            logits = self._logits(rows)
            value = self._mean_loss(logits, _classes(labels, logits))
            parameters = [p for p in self._module.parameters() if p.requires_grad]
            slope, *slopes = torch.autograd.grad(
                value, [rows, *parameters], allow_unused=True, materialize_grads=True
            )
            with torch.no_grad():
                for parameter, own in zip(parameters, slopes, strict=True):
                    parameter.sub_(learning_rate * own)
        return get_arrays(self._module), slope.numpy(), float(value.detach())

    def scores(self, arrays: Arrays, embedding: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits of some rows, (m, classes), or (m, 1) of a head with one output.

        Raises
        ------
        InvalidParameterError
            As `step`.
        """
        logits: NDArray[np.float32] = self._evaluated(arrays, embedding).numpy()
        return logits

    def metrics(
        self, arrays: Arrays, embedding: NDArray[np.float32], labels: NDArray[Any]
    ) -> dict[str, float]:
        """Return the classification metrics of some rows.

        Parameters and errors are those of `step`.

        Returns
        -------
        dict of str to float
            ``loss``, the mean loss; ``accuracy``, the share of hits; of two classes also ``f1`` of
            class 1 (0 where no row is or is taken for one) and, if both occur among the labels,
            ``auc``, the area under the ROC curve.
        """
        logits = self._evaluated(arrays, embedding)
        truth = _classes(labels, logits)
        with one_thread(), torch.no_grad():
            loss = float(self._mean_loss(logits, truth))
        classes = truth.numpy()
        margins = _margins(logits)
        if margins is None:
            hits = logits.argmax(dim=1).numpy() == classes
            return {"loss": loss, "accuracy": float(hits.mean())}
        positive = margins >= self._least
        found = {"loss": loss, "accuracy": float((positive == classes).mean())}
        right, wrong = int((positive & (classes == 1)).sum()), int((positive != classes).sum())
        found["f1"] = 2 * right / (2 * right + wrong) if right else 0.0
        if 0 < classes.sum() < len(classes):
            found["auc"] = _area(margins, classes)
        return found

    def _evaluated(self, arrays: Arrays, embedding: NDArray[np.float32]) -> Tensor:
        rows = _rows(embedding)
        set_arrays(self._module, arrays)
        self._module.eval()
        with one_thread(), torch.no_grad():
            return self._logits(rows)

    def _logits(self, rows: Tensor) -> Tensor:
        try:
            logits: Tensor = self._module(rows)
        except RuntimeError as error:
            raise InvalidParameterError(
                "embedding",
                f"shape {tuple(rows.shape)}",
                f"one that the server model takes ({error})",
            ) from error
        if logits.ndim != 2 or len(logits) != len(rows):
            shape = f"one with logits of shape ({len(rows)}, classes)"
            raise InvalidParameterError("module_fn", f"logits {tuple(logits.shape)}", shape)
        return logits

    def _mean_loss(self, logits: Tensor, truth: Tensor) -> Tensor:
        if logits.shape[1] > 1:
            return (self._loss or functional.cross_entropy)(logits, truth)
        if self._loss is functional.cross_entropy:  # of one class it is zero
            allowed = "none, or a binary loss: the server model has one output"
            raise InvalidParameterError("loss", "cross_entropy", allowed)
        loss = self._loss or functional.binary_cross_entropy_with_logits
        return loss(logits[:, 0], truth.to(logits.dtype))


def _rows(embedding: NDArray[Any]) -> Tensor:
    found = np.asarray(embedding)
    if found.ndim != 2 or found.dtype.kind not in "fiu":
        shown = f"{found.dtype} of shape {found.shape}"
        raise InvalidParameterError("embedding", shown, "numbers of shape (rows, embedding)")
    if len(found) == 0:
        raise DataError("there are no rows: a step and an evaluation need at least one")
    return torch.tensor(found, dtype=torch.float32)


def _classes(labels: NDArray[Any], logits: Tensor) -> Tensor:
    found = np.asarray(labels)
    if found.shape != (len(logits),):
        raise DataError(f"{len(logits)} rows but labels of shape {found.shape}")
    classes = max(logits.shape[1], 2)
    if found.dtype.kind not in "biu" or found.min() < 0 or found.max() >= classes:
        raise DataError(f"labels must be integers from 0 to {classes - 1}")
    return torch.from_numpy(found.astype(np.int64))


def _margins(logits: Tensor) -> NDArray[np.float64] | None:
    """Return the logit of class 1 over class 0 for each row; None for more than two classes."""
    wide: NDArray[np.float64] = logits.double().numpy()
    if wide.shape[1] > 2:
        return None
    return wide[:, 0] if wide.shape[1] == 1 else wide[:, 1] - wide[:, 0]


def _area(margins: NDArray[np.float64], classes: NDArray[np.int64]) -> float:
    """Return how often a row of class 1 is above one of class 0, ties counting half."""
    # Imported late: it takes a second, and a deployed client has a process for each message.
    from scipy.stats import rankdata

    ones = int(classes.sum())
    above = rankdata(margins)[classes == 1].sum() - ones * (ones + 1) / 2
    return float(above / (ones * (len(classes) - ones)))
