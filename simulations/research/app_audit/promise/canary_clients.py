"""Clients that train on nothing and send a canary: an update in a direction of their own.

Inside of all mods the app's own function is replaced. Its first real answer is the template, so
that records and metrics have the app's form. The arrays are the request's; by a fair coin a long
step in the client's direction is added for heads, and next to nothing for tails (or the opposite
step, for neighbours in which an update is replaced by any other). A client keeps its coin through a
run. A canary costs no training, and many runs of an app give the coins that a one-run audit needs.

The directions of a run share no entry of the model. They are at right angles to each other, also
after any noise or clipping of single entries. A tenth of the entries has no canary: what is in them
is noise.
"""

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from flwr_privacy.simulations.engines.inline.flower_internals import (
    ClientFunction,
    records_from_bytes,
    records_to_bytes,
)

from ..probe import RecordingGrid
from ..transcript import TranscriptWriter, arrays_of
from .canary_runs import REFERENCE, CanaryRun
from .normal_draws import NormalDraws

__all__ = ["LENGTH", "Canaries", "CanaryGrid"]

LENGTH = 1e3
"""Length of a canary, in lengths of a run's first model; at least this."""

_NEXT_TO_NOTHING = 1e-6  # of an entry: Flower's clipping divides by an update's norm

Vector = NDArray[np.float64]
Arrays = list[NDArray[Any]]


class Canaries:
    """The canary clients of all runs of a probe, and what is heard of them.

    Parameters
    ----------
    clients : int
        Number of clients in a run.
    seed : int
        Of coins and directions.
    opposite : bool, default False
        Whether tails is the opposite step, and not next to none.
    """

    def __init__(self, *, clients: int, seed: int, opposite: bool = False) -> None:
        self.clients, self.opposite = clients, opposite
        self.own_noise = False
        """Whether the app's own function adds noise to its arrays."""
        self._noise = NormalDraws()
        self._seed = seed
        self._templates: dict[str, bytes] = {}
        self._run = -1
        self.begin()

    def begin(self) -> None:
        """Begin the next run: other coins, other directions."""
        self._run += 1
        self._draws = np.random.default_rng([self._seed, self._run])
        self.coins = self._draws.random(self.clients) < 0.5
        self.shapes: list[tuple[int, ...]] = []
        """Shapes of the arrays of an update; empty before the first."""
        self.owner = np.zeros(0, np.int64)
        """Whose entry it is, from 1 on; 0 for nobody's."""
        self.step = np.zeros(0)
        """All directions, which share no entry, in one vector."""

    def answer(self, message: Message, context: Context, function: ClientFunction) -> Message:
        """Answer in place of the app's own function."""
        kind = message.metadata.message_type
        phase = kind.partition(".")[0]
        if phase not in ("train", "evaluate"):
            return function(message, context)
        if kind not in self._templates:
            # A mod may have put its own keys into the question; the function may change it.
            question = records_to_bytes(message.content)
            reply = function(message, context)
            if reply.has_error():
                return reply
            if phase == "train":
                if _matching(records_from_bytes(question), reply.content) is None:
                    return reply
                self.own_noise |= self._adds_noise(message, question, context, function)
            self._templates[kind] = records_to_bytes(reply.content)
            message.content = records_from_bytes(question)
        content = records_from_bytes(self._templates[kind])
        if phase == "train":
            names = _matching(message.content, content)
            if names is None:
                return function(message, context)
            asked, answered = names
            start = _arrays(message.content[asked])
            client = int(context.node_config["partition-id"])
            content[answered] = _rebuilt(content[answered], self._moved(start, client))
        return Message(content=content, reply_to=message)

    def fitting(self, content: RecordDict | None) -> Vector | None:
        """Return the entries of a model or an update in a message; None where it has none."""
        for record in [] if content is None else content.array_records.values():
            arrays = _arrays(record)
            if self.shapes and [a.shape for a in arrays] == self.shapes:
                return _entries(arrays)
        return None

    def pulls(self, change: Vector) -> Vector:
        """Return how far a change goes in each client's direction."""
        found = np.bincount(self.owner, weights=change * self.step, minlength=self.clients + 1)
        return np.asarray(found[1:], np.float64)

    def reference(self, change: Vector) -> Vector:
        """Return a change in some entries that no canary has."""
        return change[np.flatnonzero(self.owner == 0)[:REFERENCE]]

    def _adds_noise(
        self, message: Message, question: bytes, context: Context, function: ClientFunction
    ) -> bool:
        """Tell whether the app's own function gives other arrays where its normal draws are 0."""
        replies = []
        for silent in (False, True):
            message.content = records_from_bytes(question)
            with self._noise.from_one_state(silent=silent):
                replies.append(function(message, context))
        return not _alike(*(reply.content for reply in replies))

    def _moved(self, arrays: Arrays, client: int) -> Arrays:
        start = _entries(arrays)
        if not self.shapes:
            self._length = LENGTH * max(1.0, float(np.linalg.norm(start)))
            self._lay_out(arrays, start.size)
        own = np.flatnonzero(self.owner == client + 1)
        moved = start.copy()
        heads = bool(self.coins[client])
        if heads or self.opposite:
            moved[own] += (self._length if heads else -self._length) * self.step[own]
        elif own.size:
            small = _NEXT_TO_NOTHING * max(1.0, abs(start[own[0]]))
            moved[own[0]] += small
        return _with_entries(arrays, moved)

    def _lay_out(self, arrays: Arrays, size: int) -> None:
        self.shapes = [a.shape for a in arrays]
        kept = max(size // 10, min(size, 8))
        each = (size - kept) // self.clients
        self.owner, self.step = np.zeros(size, np.int64), np.zeros(size)
        if each < 1:
            return  # more clients than entries: there are no canaries
        order = self._draws.permutation(size)[: each * self.clients]
        self.owner[order] = np.repeat(np.arange(1, self.clients + 1), each)
        signs = np.where(self._draws.random(order.size) < 0.5, 1.0, -1.0)
        self.step[order] = signs / np.sqrt(each)


class CanaryGrid(RecordingGrid):
    """A grid that writes what was heard of canaries, in place of all messages.

    Parameters
    ----------
    *args
        Of `RecordingGrid`.
    canaries : Canaries
        The clients.
    writer : TranscriptWriter
        Whose folder gets the file.
    **options
        Of `RecordingGrid`.
    """

    def __init__(
        self, *args: Any, canaries: Canaries, writer: TranscriptWriter, **options: Any
    ) -> None:
        super().__init__(*args, writer=writer, **options)
        self._canaries = canaries
        self._path: Path = writer.folder
        self._models: list[Vector] = []
        self._oldest = self._newest = np.zeros(0)
        self._heard: dict[str, list[Any]] = defaultdict(list)

    def close(self) -> None:
        """Write what was heard, and begin the next run."""
        super().close()
        canaries, heard = self._canaries, self._heard
        clients = canaries.clients
        CanaryRun(
            coins=canaries.coins,
            own_noise=canaries.own_noise,
            entries=canaries.step.size,
            clients=np.array(heard["client"], np.int64),
            rounds=np.array(heard["round"], np.int64),
            pulls=np.array(heard["pulls"], np.float64).reshape(-1, clients),
            noise=_rows(heard["noise"]),
            steps=np.array(heard["steps"], np.float64).reshape(-1, clients),
            step_noise=_rows(heard["step noise"]),
            total_length=float(np.linalg.norm(self._newest - self._oldest)),
        ).write(self._path)
        canaries.begin()

    def _write(self, request: Message, number: int, reply: Message, seconds: float) -> None:
        canaries = self._canaries
        model = canaries.fitting(request.content)
        if model is None:
            return
        if not self._newest.size:
            self._oldest = model
        elif not np.array_equal(model, self._newest):
            self._heard["steps"].append(canaries.pulls(model - self._newest))
            self._heard["step noise"].append(canaries.reference(model - self._newest))
        self._newest = model
        trains = request.metadata.message_type.partition(".")[0] == "train"
        after = None if reply.has_error() or not trains else canaries.fitting(reply.content)
        if after is None or self.partition is None:
            return
        change = after - model
        self._heard["client"].append(self.partition)
        self._heard["round"].append(number)
        self._heard["pulls"].append(canaries.pulls(change))
        self._heard["noise"].append(canaries.reference(change))


def _matching(question: RecordDict, answer: RecordDict) -> tuple[str, str] | None:
    """Return the names of array records of a question and its answer that have the same shapes."""
    for name, record in answer.array_records.items():
        shapes = [a.shape for a in _arrays(record)]
        for asked, start in question.array_records.items():
            if shapes and [a.shape for a in _arrays(start)] == shapes:
                return asked, name
    return None


def _alike(one: RecordDict, other: RecordDict) -> bool:
    pairs = zip(arrays_of(one).values(), arrays_of(other).values(), strict=True)
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in pairs)


def _arrays(record: Any) -> Arrays:
    return [array.numpy() for array in record.values()]


def _rebuilt(record: Any, arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({n: Array(a) for n, a in zip(record, arrays, strict=True)})


def _entries(arrays: Arrays) -> Vector:
    """Return the entries that are floating-point numbers."""
    floating = [a for a in arrays if np.issubdtype(a.dtype, np.floating)]
    return np.concatenate([a.reshape(-1).astype(np.float64) for a in floating] or [np.zeros(0)])


def _rows(vectors: list[Vector]) -> Vector:
    return np.array(vectors, np.float64) if vectors else np.zeros((0, 0))


def _with_entries(arrays: Arrays, entries: Vector) -> Arrays:
    found, place = [], 0
    for array in arrays:
        if np.issubdtype(array.dtype, np.floating):
            part = entries[place : place + array.size]
            found.append(part.reshape(array.shape).astype(array.dtype))
            place += array.size
        else:
            found.append(copy.copy(array))
    return found
