"""Scores of canary records, from nothing but what was released, and the file that a run leaves.

A record that is trained on moves the model along its own gradient. So a score is how much of what
was released is a record's gradient (`gradient_shares`), summed over the rounds; of a pair of
records, the difference. What was released is for the server the client's upload, for all others
the step from model to model. Whoever scores knows all records, as the adversary of differential
privacy does, and none of the coins.

Source: the gradient canaries of Nasr et al., "Tight Auditing of Differentially Private Machine
Learning", USENIX Security 2023; the regression is ours.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from flwr_privacy.errors import InvalidParameterError

from ..rebuilt.case import Case, Clock
from ..rebuilt.evidence import sent_model, upload_of
from ..rebuilt.networks import filled, load_model, record_gradients, trained_names
from ..transcript import Transcript
from .gradient_shares import shares
from .record_canaries import Read, RecordCanaries
from .record_parts import Row, parts_of
from .record_runs import RecordRun

__all__ = ["score_records"]

_ENTRIES = 50_000  # of a model, chosen at random, that are compared
_MOST = 2000  # records whose gradients explain a change, together
_NONE = (
    "no training made a DataLoader of at least 4 records; --canaries names the function of the app "
    "that returns a client's records"
)
_OTHER_FORM = "the model gets its records in another form than they are read in"
_NO_LABEL = "no part of a record is the label that its loss was taken with"

Vector = NDArray[np.float64]
Model = Mapping[str, NDArray[Any]]


def score_records(
    canaries: RecordCanaries, transcript: Transcript, *, model: str | None, seconds: float
) -> RecordRun:
    """Score the canaries of a run that is over.

    Parameters
    ----------
    canaries : RecordCanaries
        The canaries.
    transcript : Transcript
        Of the run.
    model : str or None
        "module:function" of a function that returns the module; by default the one that trained.
    seconds : float
        Time for it; the last rounds go first.
    """
    coins = {client: own.coins for client, own in sorted(canaries.clients.items())}
    everything = np.concatenate(list(coins.values()) or [np.zeros(0, bool)])
    places = _places(canaries.read) if everything.size else _NONE
    if isinstance(places, str):
        return RecordRun(coins=everything, server=None, model=None, why=places)
    try:
        module = load_model(transcript.model, model)
    except InvalidParameterError as error:
        return RecordRun(coins=everything, server=None, model=None, why=str(error))
    case = Case(as_is=transcript, few=None, model=module, seed=0, out=transcript.folder)
    rows = {client: _rows(canaries, client, *places) for client in coins}
    clock = Clock(seconds)
    return RecordRun(
        coins=everything,
        server=_joined(_of_uploads(case, rows, clock.part(0.5)), coins),
        model=_joined(_of_models(case, rows, clock), coins),
        why="",
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """Records as the model gets them: canaries for heads, those for tails, and others.

    Parameters
    ----------
    inputs, labels : ndarray, shape (n, ...)
        All of them.
    heads, tails : int
        How many are canaries for heads, and for tails.
    """

    inputs: NDArray[Any]
    labels: NDArray[Any]
    heads: int
    tails: int

    def scores(self, found: Vector) -> Vector:
        """Return the scores of the coins from the shares of all records."""
        tails = found[self.heads : self.heads + self.tails]
        return found[: self.heads] - (tails if self.tails else 0.0)


def _places(read: Read) -> tuple[int, int] | str:
    """Return which parts of a record are its input and its label, or why that is not known."""
    if read.shape is None:  # torch trained with functions that hide what they are given
        return 0, 1
    if not read.inputs:
        return _OTHER_FORM
    if not read.labels:
        return _NO_LABEL
    return read.inputs.most_common(1)[0][0], read.labels.most_common(1)[0][0]


def _rows(canaries: RecordCanaries, client: int, x: int, y: int) -> _Rows:
    own = canaries.clients[client]
    parts = [*map(parts_of, (*own.heads, *own.tails)), *own.known]
    shape = parts[0][x].shape if canaries.read.shape is None else canaries.read.shape
    return _Rows(
        inputs=np.array([one[x].reshape(shape) for one in parts]),
        labels=np.array([_plain(one[y]) for one in parts]),
        heads=len(own.heads),
        tails=len(own.tails),
    )


def _plain(label: Row) -> Row:
    return label.reshape(()) if label.size == 1 else label


def _of_uploads(case: Case, rows: Mapping[int, _Rows], clock: Clock) -> dict[int, Vector]:
    """Return the scores of each client's canaries by its own uploads."""
    found: dict[int, Vector] = {}
    for one in reversed(list(case.as_is.trainings())):
        upload = None if case.shapes is None else upload_of(one, case.shapes)
        if upload is None or one.node not in rows or not _finite(upload.change):
            continue
        score = _score(case.model, upload.start, upload.change, {one.node: rows[one.node]}, clock)
        if score is None:
            break
        found = _summed(found, score)
    return found


def _of_models(case: Case, rows: Mapping[int, _Rows], clock: Clock) -> dict[int, Vector]:
    """Return the scores of all canaries by the steps from model to model."""
    found: dict[int, Vector] = {}
    models = list(_models(case))
    for start, end in reversed(list(pairwise(models))):
        change = {name: end[name].astype(np.float64) - start[name] for name in end}
        if not _finite(change):
            continue
        score = _score(case.model, start, change, rows, clock)
        if score is None:
            break
        found = _summed(found, score)
    return found


def _models(case: Case) -> Iterator[Model]:
    """Return the models that were sent out, each once."""
    last: Model | None = None
    for one in case.as_is.exchanges:
        model = None if case.shapes is None else sent_model(one, case.shapes)
        if model is not None and (last is None or not _same(model, last)):
            last = model
            yield model


def _score(
    module: nn.Module, start: Model, change: Model, rows: Mapping[int, _Rows], clock: Clock
) -> dict[int, Vector] | None:
    """Return the scores of some clients' canaries by one change; None where the time is over."""
    model = filled(module, start).eval()
    names = trained_names(model, change)
    moved = -np.concatenate([np.asarray(change[name], np.float64).reshape(-1) for name in names])
    entries = np.random.default_rng(0).permutation(moved.size)[:_ENTRIES]
    parts, sizes = [], []
    others = _MOST // len(rows)
    for own in rows.values():
        most = max(own.heads + own.tails, others)
        table = []
        for one in record_gradients(model, names, own.inputs[:most], own.labels[:most]):
            if not clock.left:
                return None
            table.append(one.numpy()[entries].astype(np.float32))
        parts.append(np.array(table))
        sizes.append(len(table))
    found = np.split(shares(np.concatenate(parts), moved[entries]), np.cumsum(sizes)[:-1])
    return {client: own.scores(one) for (client, own), one in zip(rows.items(), found, strict=True)}


def _summed(one: Mapping[int, Vector], other: Mapping[int, Vector]) -> dict[int, Vector]:
    """Return sums of scores, each change in its own standard deviations."""
    new = {c: v / max(float(v.std()), 1e-12) for c, v in other.items()}
    return {c: one.get(c, 0.0) + new.get(c, 0.0) for c in {**one, **new}}


def _joined(found: Mapping[int, Vector], coins: Mapping[int, NDArray[np.bool_]]) -> Vector | None:
    """Return the scores of all canaries; those of clients that were not heard are 0."""
    if not found:
        return None
    return np.concatenate([found.get(c, np.zeros(own.size)) for c, own in coins.items()])


def _finite(change: Model) -> bool:
    return all(bool(np.isfinite(array).all()) for array in change.values())


def _same(one: Model, other: Model) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)
