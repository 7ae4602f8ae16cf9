"""What all attacks of an audit share: the transcripts, the model, and records of others."""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from flwr_privacy.wire.identity import stream

from ..transcript import Exchange, Training, Transcript
from .evidence import Upload, kind_of, sent_model, upload_of
from .networks import Shapes, shapes_of

__all__ = ["Case", "Clock", "Trained", "digest"]

_OTHERS = 256  # records of others that are compared


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A training of which the upload can be attacked.

    Parameters
    ----------
    exchange : Exchange
        The question and the answer.
    training : Training
        The truth. Attacks do not read it; it is what they are measured by.
    upload : Upload
        What left the node.
    """

    exchange: Exchange
    training: Training
    upload: Upload

    @property
    def kind(self) -> str:
        """What the upload is."""
        return kind_of(self.exchange)


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """What all attacks share.

    Parameters
    ----------
    as_is : Transcript
        A run of the app as it is.
    few : Transcript or None
        A run in which clients have few records.
    model : nn.Module
        The app's module.
    seed : int
        Root of all draws.
    out : Path
        Folder for pictures.
    """

    as_is: Transcript
    few: Transcript | None
    model: nn.Module
    seed: int
    out: Path

    @cached_property
    def shapes(self) -> Shapes | None:
        """Names and shapes of what is sent of the module; None where it fits no request.

        Some apps send its parameters alone, without its buffers.
        """
        whole = shapes_of(self.model)
        parameters = {name: whole[name] for name, _ in self.model.named_parameters()}
        for shapes in (whole, parameters):
            for one in self.as_is.trainings():
                if sent_model(one, shapes) is not None:
                    return shapes
        return None

    def trained(self, transcript: Transcript) -> Iterator[Trained]:
        """Return the trainings of a transcript whose upload fits the model."""
        for one in transcript.trainings():
            training = one.training
            if training is None or self.shapes is None:
                continue
            upload = upload_of(one, self.shapes)
            if upload is not None and all(np.isfinite(c).all() for c in upload.change.values()):
                yield Trained(exchange=one, training=training, upload=upload)

    def unreadable(self, transcript: Transcript) -> str:
        """Return why no upload of a transcript fits the model."""
        kinds = {kind_of(one) for one in transcript.trainings() if one.training is not None}
        if not kinds:
            return "no torch training was seen"
        return f"no upload can be laid out over the model: what left is {'; '.join(sorted(kinds))}"

    @cached_property
    def _inputs(self) -> tuple[NDArray[Any], list[bytes]]:
        """Records of all clients, in an order that says nothing, and their digests."""
        rows: dict[bytes, NDArray[Any]] = {}
        for one in self.as_is.trainings():
            if one.training is not None:
                rows.update((digest(row), row) for row in one.training.inputs)
        shapes = [row.shape for row in rows.values()]
        kept = [d for d in sorted(rows) if rows[d].shape == shapes[0]]
        order = self.draws("others").permutation(len(kept))
        names = [kept[place] for place in order]
        return np.array([rows[name] for name in names]), names

    def others(self, own: NDArray[Any]) -> NDArray[Any]:
        """Return records of clients that are none of these, at most 256."""
        inputs, names = self._inputs
        ours = {digest(row) for row in own}
        places = [place for place, name in enumerate(names) if name not in ours][:_OTHERS]
        found = inputs[places]
        return found if found.shape[1:] == own.shape[1:] else np.zeros((0, *own.shape[1:]))

    @cached_property
    def span(self) -> float:
        """Largest value of all clients' records minus the smallest."""
        inputs = self._inputs[0]
        return float(inputs.max() - inputs.min()) if inputs.size else 0.0

    def draws(self, name: str, *places: int) -> np.random.Generator:
        """Return the draws of an attack."""
        return stream(self.seed, f"app audit {name}", *places)


class Clock:
    """Time that is divided.

    Parameters
    ----------
    seconds : float
        How much of it there is.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def part(self, share: float) -> "Clock":
        """Return a part of what is left."""
        return Clock(share * self.left)


def digest(row: NDArray[Any]) -> bytes:
    """Return a digest of a record."""
    return hashlib.sha256(np.ascontiguousarray(row).tobytes()).digest()
