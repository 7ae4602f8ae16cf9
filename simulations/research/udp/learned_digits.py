"""How clearly a perceptron has learned its digits, with and without UDP's noise, for experiments.

The picture of a digit is the gradient of its log-probability by the pixels, at the mean test image
(Simonyan, Vedaldi and Zisserman, "Deep Inside Convolutional Networks", 2014). Its likeness to the
digit is the cosine of the picture and of the mean test image of that digit, the mean of all test
images taken off.

The keys of a point:

``task``, ``clients``, ``records``
    What is trained, with how many clients and records of each.
``rounds``, ``learning_rate``
    T, in each of which every client takes one step of clipped gradients, and its size. The clipping
    norm is 1.
``noise``
    ``none``, or ``paper``: that of the paper's (10) for ``epsilon`` and ``delta``.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_privacy.clients.torch import initialise, set_arrays
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.simulations.research.points import Point, Values
from flwr_privacy.simulations.tasks import tasks
from flwr_privacy.simulations.tasks.records import Dataset
from flwr_privacy.udp import NONE, RECORD_UNIT, sensitivity, sigma_paper
from flwr_privacy.wire.identity import stream

from .training import imitate

__all__ = ["check", "likenesses"]

_PAPER = "paper"
_OF_NOISE = ("epsilon", "delta")
_KEYS = ("task", "clients", "records", "rounds", "learning_rate", "noise", *_OF_NOISE)
_CLIPPING_NORM = 1.0  # that of `imitate`


def check(point: Point) -> None:
    """Refuse a point whose settings are not allowed.

    Raises
    ------
    InvalidParameterError
        If a key is missing or unknown, or a value is not allowed.
    """
    if {*point} != {*_KEYS}:
        raise InvalidParameterError("setting", sorted(point), f"the keys {', '.join(_KEYS)}")
    tasks.task(point["task"])
    for key in ("clients", "records", "rounds"):
        check_integer(key, point[key], minimum=1)
    if not check_number("learning_rate", point["learning_rate"]) > 0:
        raise InvalidParameterError("learning_rate", point["learning_rate"], "a number above 0")
    check_choice("noise", point["noise"], (NONE, _PAPER))
    _sigma(point)


def likenesses(points: Sequence[Point], seed: int, data_root: Path | None) -> list[Values]:
    """Return how like the pictures are to their digits, the mean over all of them.

    Parameters
    ----------
    points : Sequence of Mapping
        See the top of this module.
    seed : int
        Root of the clients' records, the first model and the noise; all points share the first two.
    data_root : Path, optional
        Folder with the data sets that no library brings.

    Raises
    ------
    InvalidParameterError
        As `check`, or if there are too few records.
    DataError
        If data is missing.
    """
    found: dict[str, float] = {}
    names = []
    for point in points:
        check(point)
        left_out = _OF_NOISE if point["noise"] == NONE else ()
        own = {key: value for key, value in point.items() if key not in left_out}
        name = json.dumps(own, sort_keys=True)
        if name not in found:
            found[name] = _likeness(point, seed, data_root)
        names.append(name)
    return [{"value": found[name]} for name in names]


def _sigma(point: Point) -> float:
    """Return the standard deviation of the noise of one upload."""
    if point["noise"] == NONE:
        return 0.0
    bound = sensitivity(
        RECORD_UNIT,
        learning_rate=point["learning_rate"],
        clipping_norm=_CLIPPING_NORM,
        records=point["records"],
    )
    return sigma_paper(
        rounds=point["rounds"], q=1.0, epsilon=point["epsilon"], delta=point["delta"], Dl=bound
    )


def _likeness(point: Point, seed: int, data_root: Path | None) -> float:
    """Train a model; return how like its pictures are to the digits."""
    task = tasks.task(point["task"])
    data = tasks.all_records(task, data_root)
    clients, records = point["clients"], point["records"]
    check_integer("records", records, minimum=1, maximum=len(data.labels) // clients)
    order = stream(seed, "records").permutation(len(data.labels))[: clients * records]
    start = tasks.initial_arrays(task, seed)

    def network() -> nn.Module:
        model = initialise(task.model, seed)
        set_arrays(model, start)
        return model

    arrays = imitate(
        network,
        [(data.features[own], data.labels[own]) for own in order.reshape(clients, records)],
        point["rounds"],
        learning_rate=point["learning_rate"],
        sigma=_sigma(point),
        draws=stream(seed, "noise"),
    )
    model = network()
    set_arrays(model, arrays)
    return float(np.mean(_cosines(_pictures(model, data), _digits(data))))


def _pictures(model: nn.Module, data: Dataset) -> NDArray[np.float64]:
    """Return a model's picture of each class, (classes, pixels)."""
    mean = torch.tensor(data.test_features.mean(axis=0, keepdims=True), requires_grad=True)
    likely = torch.log_softmax(model(mean), dim=1)[0]
    slopes = [torch.autograd.grad(one, mean, retain_graph=True)[0] for one in likely]
    pictures: NDArray[Any] = torch.stack(slopes).reshape(len(slopes), -1).double().numpy()
    return pictures


def _digits(data: Dataset) -> NDArray[np.float64]:
    """Return the mean test image of each class less that of all, (classes, pixels)."""
    public = data.test_features.reshape(len(data.test_labels), -1).astype(np.float64)
    means = [public[data.test_labels == label].mean(axis=0) for label in range(data.classes)]
    differences: NDArray[np.float64] = np.array(means) - public.mean(axis=0)
    return differences


def _cosines(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosine of each pair; 0 where a picture is blank."""
    products = (first * second).sum(axis=1)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    # A model that noise has made certain has a gradient of 0.
    cosines: NDArray[np.float64] = np.divide(
        products, lengths, out=np.zeros_like(products), where=lengths > 0
    )
    return cosines
