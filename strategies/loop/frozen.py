"""Splits a model into the part that is trained and travels, and the frozen rest."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from flwr.app import ArrayRecord

from flwr_privacy.errors import CheckpointError, InvalidParameterError
from flwr_privacy.strategies.requests.request_log import arrays_of
from flwr_privacy.wire.arrays import array_digest
from flwr_privacy.wire.frozen import FROZEN, frozen_digest
from flwr_privacy.wire.message import Fields

__all__ = ["Frozen", "check_trainable", "split"]

logger = logging.getLogger("flwr.privacy")


@dataclass(frozen=True)
class Frozen:
    """The weights of a model that no round changes; they stay on the server.

    Parameters
    ----------
    names : tuple of str
        All arrays of the model, in its order.
    arrays : ArrayRecord
        Those that are frozen.
    digest : bytes
        Their `frozen_digest`.
    """

    names: tuple[str, ...]
    arrays: ArrayRecord
    digest: bytes

    def whole(self, trained: ArrayRecord) -> ArrayRecord:
        """Return the whole model, in its order."""
        return ArrayRecord({n: (trained if n in trained else self.arrays)[n] for n in self.names})

    def fields(self) -> Fields:
        """Return the field that every question has."""
        return {FROZEN: self.digest}

    def text(self) -> str:
        """Return what a guarantee says of them."""
        return (
            f"the frozen weights, which are not sent: {len(self.arrays)} arrays with the digest "
            f"{self.digest.hex()}, the same for everybody"
        )

    def check_state(self, digest: str) -> None:
        """Refuse to go on with another base model than that of the checkpoint.

        Raises
        ------
        CheckpointError
            If it is another one.
        """
        if digest != self.digest.hex():
            raise CheckpointError(
                "the checkpoint is of another base model: the frozen weights of the initial arrays "
                f"have the digest {self.digest.hex()}, those of the checkpoint {digest or 'none'}"
            )


def check_trainable(trainable: Sequence[str] | None) -> None:
    """Refuse what is no list of names and patterns, before there is a model.

    Raises
    ------
    InvalidParameterError
        If it is not.
    """
    if trainable is None:
        return
    allowed = (
        "names or patterns of arrays, as ('*.lora_*', 'head.*'); what requires_grad says is "
        "trainable_names(model), from flwr_privacy.clients.torch"
    )
    if isinstance(trainable, str) or not trainable:
        raise InvalidParameterError("trainable", trainable, allowed)
    for pattern in trainable:
        if not isinstance(pattern, str):
            raise InvalidParameterError("trainable", trainable, allowed)


def split(
    arrays: ArrayRecord, trainable: Sequence[str] | None
) -> tuple[Frozen | None, ArrayRecord]:
    """Split a model; without `trainable` all of it is trained.

    Parameters
    ----------
    arrays : ArrayRecord
        The model.
    trainable : sequence of str, optional
        Names of the arrays that are trained, or patterns with ``*``, ``?`` and ``[...]``.

    Returns
    -------
    frozen : Frozen or None
        What is not trained.
    trained : ArrayRecord
        What is, in the order of the model.

    Raises
    ------
    InvalidParameterError
        If one of them fits no array, or all arrays fit.
    """
    if trainable is None:
        return None, arrays
    names = list(arrays)
    fitting = {
        pattern: [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        for pattern in trainable
    }
    if unfit := [pattern for pattern, found in fitting.items() if not found]:
        raise InvalidParameterError("trainable", unfit, f"names of the model or patterns: {names}")
    trained = {name for found in fitting.values() for name in found}
    rest = [name for name in names if name not in trained]
    if not rest:
        allowed = "a part of the model; without it all arrays are trained"
        raise InvalidParameterError("trainable", list(trainable), allowed)
    frozen = ArrayRecord({name: arrays[name] for name in rest})
    values = arrays_of(frozen)
    digest = frozen_digest({name: array_digest(values[name]) for name in rest})
    part = ArrayRecord({name: arrays[name] for name in names if name in trained})
    sizes = [sum(array.size for array in arrays_of(record).values()) for record in (part, frozen)]
    logger.info(
        "a part of the model travels: %d of %d numbers (%d arrays); %d arrays are frozen",
        *(sizes[0], sum(sizes), len(part), len(rest)),
    )
    return Frozen(tuple(names), frozen, digest), part
