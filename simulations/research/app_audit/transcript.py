"""What was said between the server and the nodes of an audited app, in a folder.

``exchanges.jsonl`` has a line for each question with its answer; ``objects/`` has what they hold,
in Flower's serialisation, each once. A process that is stopped leaves whole lines behind.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from flwr_privacy.simulations.engines.inline.flower_internals import records_from_bytes

__all__ = [
    "CARDS",
    "ENOUGH",
    "OBJECTS",
    "Exchange",
    "Training",
    "Transcript",
    "TranscriptWriter",
    "arrays_of",
]

_EXCHANGES, _ABOUT, _MODEL = "exchanges.jsonl", "about.json", "model.pkl"

ENOUGH = "enough rounds"
"""How a run ended that was to have so many."""

OBJECTS = "objects"
"""Folder in a transcript's folder with what was sent."""

CARDS = "cards"
"""Folder in a transcript's folder with the privacy cards that the app left."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """What a client's training read, as the audit saw it from inside: no server sees this.

    Parameters
    ----------
    inputs : ndarray, shape (records, ...)
        The first records that it trained on.
    labels : ndarray, shape (records,) or (records, ...)
        Their labels; empty where none were seen.
    histogram : mapping of int to int
        How often each label was trained on, in all steps.
    records : int
        Number of different records.
    steps : int
        Number of steps.
    """

    inputs: NDArray[Any]
    labels: NDArray[Any]
    histogram: Mapping[int, int]
    records: int
    steps: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """A question to a node, and its answer.

    Parameters
    ----------
    folder : Path
        Of the transcript.
    number : int
        Its place among the answers.
    round : int
        The round, from 1 on, and 0 before the first; the count of this node's trainings where the
        message says none.
    kind : str
        Flower's message type: "train", "evaluate", "query", or one with an action.
    node : int
        The node's partition.
    error : str or None
        The text of an error reply.
    seconds : float
        How long the client took.
    sizes : tuple of int
        Bytes of question and answer in Flower's serialisation.
    files : mapping of str to str
        Digests of "request" and "reply", and of "inner_request" and "inner_reply" where the app's
        own function ran: what it was given, and what it returned before any mod changed it.
    """

    folder: Path
    number: int
    round: int
    kind: str
    node: int
    error: str | None
    seconds: float
    sizes: tuple[int, int]
    files: Mapping[str, str]

    @cached_property
    def request(self) -> RecordDict:
        """What the server sent."""
        found = self._read("request")
        return RecordDict() if found is None else found

    @cached_property
    def reply(self) -> RecordDict | None:
        """What left the node; None where that was an error."""
        return self._read("reply")

    @cached_property
    def inner_request(self) -> RecordDict | None:
        """What the app's own function was given; None where it did not run."""
        return self._read("inner_request")

    @cached_property
    def inner_reply(self) -> RecordDict | None:
        """What the app's own function returned; None where it did not run."""
        return self._read("inner_reply")

    @cached_property
    def training(self) -> Training | None:
        """What the client trained on, where torch trained."""
        return self._seen("training")

    @cached_property
    def evaluated(self) -> Training | None:
        """What the client evaluated a model on, where torch took a loss of it."""
        return self._seen("evaluated")

    def _seen(self, kind: str) -> Training | None:
        name = self.files.get(kind)
        if name is None:
            return None
        with np.load(self.folder / OBJECTS / f"{name}.npz", allow_pickle=False) as found:
            return Training(
                inputs=found["inputs"],
                labels=found["labels"],
                histogram=dict(
                    zip(found["classes"].tolist(), found["counts"].tolist(), strict=True)
                ),
                records=int(found["records"]),
                steps=int(found["steps"]),
            )

    def _read(self, name: str) -> RecordDict | None:
        digest = self.files.get(name)
        if digest is None:
            return None
        return records_from_bytes((self.folder / OBJECTS / digest).read_bytes())


class Transcript:
    """A transcript that was written by `TranscriptWriter`.

    Parameters
    ----------
    folder : Path
        Its folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def exchanges(self) -> list[Exchange]:
        """All exchanges, in the order of the answers."""
        path = self.folder / _EXCHANGES
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [
            Exchange(folder=self.folder, **{**values, "sizes": tuple(values["sizes"])})
            for values in map(json.loads, lines)
        ]

    @cached_property
    def about(self) -> Mapping[str, Any]:
        """How the run ended.

        ``ended`` is "whole", "crashed", "stopped" (by its time limit), or says why it was enough;
        ``error`` of a crash, ``mods`` of the clients, what it asked of the ``network``, and the
        mechanisms of Flower that it made, ``declared``.
        """
        path = self.folder / _ABOUT
        if not path.exists():
            return {"ended": "stopped", "error": "", "mods": [], "network": [], "declared": []}
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    @property
    def model(self) -> Path | None:
        """A file with the torch module that a client trained, as cloudpickle writes it."""
        path = self.folder / _MODEL
        return path if path.exists() else None

    def trainings(self) -> Iterator[Exchange]:
        """Return the exchanges in which a client trained and answered."""
        for one in self.exchanges:
            if one.kind.partition(".")[0] == "train" and one.error is None:
                yield one


class TranscriptWriter:
    """Writes a transcript, line by line.

    Parameters
    ----------
    folder : Path
        An empty folder, or one that does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / OBJECTS).mkdir(parents=True, exist_ok=True)
        self._lines = (folder / _EXCHANGES).open("a", encoding="utf-8")
        self._number = 0
        self.bytes = 0
        """Bytes that were written."""

    @property
    def model(self) -> Path:
        """Where the model is written."""
        return self.folder / _MODEL

    def keep(self, written: bytes) -> tuple[str, int]:
        """Keep records in Flower's serialisation; return their digest and their size in bytes."""
        digest = hashlib.sha256(written).hexdigest()
        path = self.folder / OBJECTS / digest
        if not path.exists():
            path.write_bytes(written)
            self.bytes += len(written)
        return digest, len(written)

    def keep_training(self, training: Training, *, name: str = "training") -> str:
        """Keep what a client trained or evaluated on, and return the name of the file."""
        name = f"{name}-{self._number}"
        np.savez(
            self.folder / OBJECTS / f"{name}.npz",
            inputs=training.inputs,
            labels=training.labels,
            classes=np.array(list(training.histogram), dtype=np.int64),
            counts=np.array(list(training.histogram.values()), dtype=np.int64),
            records=training.records,
            steps=training.steps,
        )
        return name

    def write(self, **values: Any) -> None:
        """Write the line of an exchange; its number is added."""
        print(json.dumps({"number": self._number, **values}), file=self._lines, flush=True)
        self._number += 1

    def close(self, about: Mapping[str, Any]) -> None:
        """Write how the run ended."""
        self._lines.close()
        (self.folder / _ABOUT).write_text(json.dumps(about), encoding="utf-8")


def arrays_of(content: RecordDict | None) -> dict[str, NDArray[Any]]:
    """Return all arrays of some records, by "record/array"."""
    if content is None:
        return {}
    return {
        f"{name}/{key}": array.numpy()
        for name, record in content.items()
        if isinstance(record, ArrayRecord)
        for key, array in record.items()
    }
