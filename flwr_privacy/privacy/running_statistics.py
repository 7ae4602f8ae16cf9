"""Finds the arrays of a model that are running statistics of normalisation layers.

Noise ruins them: a variance becomes negative. So a private scheme leaves them with the server. An
app names them (``keep_back``), or their names tell (torch's). Arrays that came as a list have only
positions as names; there the order of torch's ``state_dict`` gives them away, and the app is asked.

Nothing of this protects anybody: statistics that are sent are clipped, noised and charged like
weights. So a node may believe a server that says which arrays are statistics.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.wire.arrays import Arrays

__all__ = ["SETTLED", "check_question", "is_statistic", "not_told", "suspected"]

SETTLED = "keep-back-settled"
"""Field of a request: the server looked for statistics, or was told which arrays are some."""

_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
"""Last part of the names that torch gives to the statistics of its normalisation layers."""


def is_statistic(name: str) -> bool:
    """Tell whether an array has a name that torch gives to running statistics.

    Examples
    --------
    >>> is_statistic("layers.1.running_var"), is_statistic("my_running_var")
    (True, False)
    """
    return name.rpartition(".")[2] in _STATISTICS


def suspected(arrays: Arrays) -> list[str]:
    """Return the arrays that look like running statistics, if names are positions ("0", "1", ...).

    Two places in torch's order look like it: a 0-d integer (the counter of batches) directly after
    two vectors of equal length; and four vectors of equal length in a row with the values that a
    new layer has, which are any weights, a bias of zeros, a mean of zeros and a variance of ones.
    Statistics without a counter that have been trained, or without weight and bias, go unnoticed.

    Examples
    --------
    >>> layer = [np.ones(3), np.zeros(3), np.zeros(3), np.ones(3), np.array(0)]
    >>> suspected({str(place): array for place, array in enumerate(layer)})
    ['2', '3']
    >>> suspected({"weight": np.ones(3), "bias": np.zeros(3), "steps": np.array(0)})
    []
    """
    if not all(name.isdecimal() for name in arrays):
        return []
    order = sorted(arrays, key=lambda name: (len(name), name))  # by number
    values = [np.asarray(arrays[name]) for name in order]
    found: set[int] = set()
    for place, array in enumerate(values):
        counter = array.ndim == 0 and np.issubdtype(array.dtype, np.integer)
        if counter and place >= 2 and _equal_vectors(values[place - 2 : place]):
            found |= {place - 2, place - 1}
        if len(values) >= place + 4 and _is_new_layer(values[place : place + 5]):
            found |= {place + 2, place + 3}
    return [order[place] for place in sorted(found)]


def not_told(names: Sequence[str]) -> InvalidParameterError:
    """Return the error that asks the app to say which arrays are running statistics."""
    return InvalidParameterError(
        "keep_back",
        None,
        f"the running statistics by name: arrays {list(names)} look like those of normalisation "
        "layers, and a private scheme must not add noise to them. Write keep_back="
        "statistics_of(model, positions=True), with statistics_of from flwr_privacy.clients.torch, "
        "or a list of names of your own; if all of them are weights, write keep_back=[]",
    )


def check_question(arrays: Arrays, fields: Mapping[str, Any]) -> None:
    """Refuse a request if arrays look like running statistics and the app has not said so.

    Raises
    ------
    InvalidParameterError
        If there are such arrays, the request does not name them in ``keep-back``, and its server
        has not settled what they are.
    """
    if fields.get(SETTLED) is True:
        return
    named = fields.get("keep-back", [])
    kept = named if isinstance(named, list) else []
    if left := [name for name in suspected(arrays) if name not in kept]:
        raise not_told(left)


def _equal_vectors(arrays: Sequence[NDArray[Any]]) -> bool:
    return all(
        array.ndim == 1
        and array.size > 0
        and array.size == arrays[0].size
        and np.issubdtype(array.dtype, np.floating)
        for array in arrays
    )


def _is_new_layer(arrays: Sequence[NDArray[Any]]) -> bool:
    """Tell whether four arrays are those of a new layer; the fifth is the one after, if any."""
    if not _equal_vectors(arrays[:4]):
        return False
    _, bias, mean, variance = arrays[:4]
    if bias.any() or mean.any() or not (variance == 1).all():
        return False
    # Ones with zeros after them are the weight and the bias of a layer without statistics, which
    # follows on a vector of zeros, e.g. of an adapter.
    return not (len(arrays) == 5 and _equal_vectors(arrays[3:]) and not arrays[4].any())
