"""Says on the wire which weights a training leaves as they are, without sending them."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from .arrays import Arrays
from .digests import values_digest

__all__ = ["FROZEN", "drawn_like", "frozen_digest"]

FROZEN = "frozen"
"""Field of a request: the digest of all arrays of the model that do not travel."""

_SCALE = 0.02  # of weights that are made up: about that of a new layer


def frozen_digest(digests: Mapping[str, bytes]) -> bytes:
    """Return the SHA-256 of frozen arrays: of their names, types, shapes and values.

    Parameters
    ----------
    digests : Mapping of str to bytes
        `flwr_privacy.wire.arrays.array_digest` of each array by its name; the order has no effect.

    Examples
    --------
    >>> from flwr_privacy.wire.arrays import array_digest
    >>> a, b = array_digest(np.zeros(2)), array_digest(np.ones(2))
    >>> frozen_digest({"a": a, "b": b}) == frozen_digest({"b": b, "a": a})
    True
    >>> frozen_digest({"a": a, "b": b}) == frozen_digest({"a": b, "b": a})
    False
    """
    return values_digest(*([name, digests[name]] for name in sorted(digests)))


def drawn_like(arrays: Arrays) -> dict[str, NDArray[np.generic]]:
    """Return made-up arrays with the names, shapes and types of some arrays, always the same.

    A rehearsal starts from them. Zeros would not do: where both factors of an adapter are zero, so
    are their gradients. Arrays that are no floats are zeros.
    """
    draws = np.random.default_rng(0)
    return {
        name: (_SCALE * draws.standard_normal(array.shape)).astype(array.dtype)
        if np.issubdtype(array.dtype, np.floating)
        else np.zeros_like(array)
        for name, array in arrays.items()
    }
