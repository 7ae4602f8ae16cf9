"""An upload as an attacker lays it out over the model: which array is which parameter's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..transcript import Exchange, arrays_of
from ..uploads import described, payloads
from .networks import Shapes

__all__ = ["Upload", "kind_of", "laid_out", "sent_model", "upload_of"]

Vectors = NDArray[np.float64]

_RELATED = 0.5  # correlation of codes with the model that was sent, if they are codes of a model


@dataclass(frozen=True, kw_only=True, eq=False)
class Upload:
    """What left a node, laid out over the model, and nothing that did not.

    Parameters
    ----------
    start : dict of str to ndarray
        The model that the node was sent, by name in torch.
    change : dict of str to ndarray of float64
        The upload minus this model; of codes and masks, what stands in the place of it.
    """

    start: dict[str, NDArray[Any]]
    change: dict[str, Vectors]


def laid_out(
    arrays: Mapping[str, NDArray[Any]] | Sequence[NDArray[Any]], shapes: Shapes
) -> dict[str, NDArray[Any]] | None:
    """Return arrays by the names of a module's parameters; None where they do not fit.

    They fit if their keys are names of the module and the shapes are the same; or the shapes are,
    in order; or it is one vector with all entries.

    Parameters
    ----------
    arrays : mapping or sequence of ndarray
        What was sent, by "record/array" where that is known.
    shapes : dict of str to tuple
        Names and shapes of the module.

    Examples
    --------
    >>> shapes = {"weight": (1, 2), "bias": (1,)}
    >>> laid_out([np.zeros((1, 2)), np.ones(1)], shapes)
    {'weight': array([[0., 0.]]), 'bias': array([1.])}
    >>> laid_out([np.arange(3)], shapes)
    {'weight': array([[0, 1]]), 'bias': array([2])}
    >>> laid_out([np.zeros(2)], shapes) is None
    True
    """
    if isinstance(arrays, Mapping):
        named = {key.rpartition("/")[2]: array for key, array in arrays.items()}
        if named and all(shapes.get(name) == array.shape for name, array in named.items()):
            return named
        arrays = list(arrays.values())
    if [a.shape for a in arrays] == list(shapes.values()):
        return dict(zip(shapes, arrays, strict=True))
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    if len(arrays) == 1 and arrays[0].shape == (sum(sizes),):
        parts = np.split(arrays[0], np.cumsum(sizes)[:-1])
        return {n: p.reshape(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}
    return None


def sent_model(exchange: Exchange, shapes: Shapes) -> dict[str, NDArray[Any]] | None:
    """Return the model that a node was sent, maybe in an exchange before; None where none fits."""
    found = laid_out(arrays_of(exchange.request), shapes)
    return laid_out(arrays_of(exchange.inner_request), shapes) if found is None else found


def upload_of(exchange: Exchange, shapes: Shapes) -> Upload | None:
    """Return the upload of an answer; None where nothing in it fits the model.

    Codes are taken for those of a model where they are like the one that was sent, up to their
    unit, and else for those of its change.
    """
    start = sent_model(exchange, shapes)
    if start is None or exchange.reply is None:
        return None
    shapes = {name: shapes[name] for name in shapes if name in start}
    end = laid_out(arrays_of(exchange.reply), shapes)
    if end is None:
        numbers = [a for a in payloads(exchange.reply) if np.issubdtype(a.dtype, np.number)]
        # Some put a weight before the arrays.
        codes = laid_out(numbers, shapes) or laid_out(numbers[1:], shapes)
        return None if codes is None else Upload(start=start, change=_decoded(start, codes))
    change = {n: end[n].astype(np.float64) - start[n].astype(np.float64) for n in end}
    return Upload(start=start, change=change)


def kind_of(exchange: Exchange) -> str:
    """Return what an upload is, for the report: only the audit can tell."""
    found = described(exchange)
    return "not known" if found is None else found.said


def _decoded(
    start: Mapping[str, NDArray[Any]], codes: Mapping[str, NDArray[Any]]
) -> dict[str, Vectors]:
    """Return codes in the unit of the model, as its change where they are codes of a model."""
    before, after = _flat([start[name] for name in codes]), _flat(list(codes.values()))
    x, y = before - before.mean(), after - after.mean()
    lengths = float(np.linalg.norm(x) * np.linalg.norm(y))
    if not lengths or abs(float(x @ y)) / lengths < _RELATED:
        return {name: array.astype(np.float64) for name, array in codes.items()}
    slope = float(x @ y) / float(x @ x)
    offset = after.mean() - slope * before.mean()
    return {n: (a.astype(np.float64) - offset) / slope - start[n] for n, a in codes.items()}


def _flat(arrays: Sequence[NDArray[Any]]) -> Vectors:
    return np.concatenate([np.asarray(a, np.float64).reshape(-1) for a in arrays])
