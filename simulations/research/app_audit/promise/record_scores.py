"""Scores of canary records, from nothing but what was released.

A record that is trained on moves the model along its own gradient. So a score is how much of what
was released is a record's gradient (`gradient_shares`), summed over the rounds; of a pair of
records, the difference. What was released is for the server the client's upload, for all others
the step from model to model. Whoever scores knows all records, as the adversary of differential
privacy does, and none of the coins.

Source: the gradient canaries of Nasr et al., "Tight Auditing of Differentially Private Machine
Learning", USENIX Security 2023; the regression is ours.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from flwr_privacy.errors import InvalidParameterError

from ..rebuilt.case import Case, Clock
from ..rebuilt.evidence import sent_model, upload_of
from ..rebuilt.networks import filled, record_gradients, trained_names
from ..transcript import Transcript
from .gradient_shares import shares
from .record_canaries import RecordCanaries
from .record_parts import Row, parts_of
from .record_runs import RecordRun

__all__ = ["score_records"]

_ENTRIES = 50_000  # of a model, chosen at random, that are compared
_MOST = 2000  # records whose gradients explain a change, together
_NO_LOADER = (
    "no training made a DataLoader of at least 4 records without a sampler of its own; "
    "--canaries names the function of the app that returns a client's records"
)
_NO_CALL = "no training called the function of --canaries, or it returned fewer than 4 records"
_NOT_SEEN = "no training of a torch module on batches of records was seen"
_OTHER_FORM = "the model gets its records in another form than they are read in"
_NO_LABEL = "no part of a record is the label that its loss was taken with"

Vector = NDArray[np.float64]
Model = Mapping[str, NDArray[Any]]


def score_records(
    canaries: RecordCanaries,
    transcript: Transcript,
    module: Callable[[], nn.Module],
    *,
    seconds: float,
) -> RecordRun:
    """Score the canaries of a run that is over.

    Parameters
    ----------
    canaries : RecordCanaries
        The canaries.
    transcript : Transcript
        Of the run.
    module : callable
        Returns the module that is trained. What is not sent of it, such as a personal layer, is as
        in there, so it must not have trained on a canary.
    seconds : float
        Time for it; the last rounds go first.
    """
    coins = {client: own.coins for client, own in sorted(canaries.clients.items())}
    everything = np.concatenate(list(coins.values()) or [np.zeros(0, bool)])
    nothing = partial(RecordRun, coins=everything, server=None, model=None)
    none = _NO_LOADER if canaries.function is None else _NO_CALL
    places = _places(canaries) if everything.size else none
    if isinstance(places, str):
        return nothing(why=places)
    try:
        model = module()
    except InvalidParameterError as error:
        return nothing(why=str(error))
    case = Case(as_is=transcript, few=None, model=model, seed=0, out=transcript.folder)
    rows = {client: _rows(canaries, client, *places) for client in coins}
    clock = Clock(seconds)
    server = _scores(model, _uploads(case, rows), clock.part(0.5))
    public = _scores(model, _steps(case, rows), clock)
    return RecordRun(
        coins=everything, server=_joined(server, coins), model=_joined(public, coins), why=""
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


def _places(canaries: RecordCanaries) -> tuple[int, int] | str:
    """Return which parts of a record are its input and its label, or why that is not known."""
    read = canaries.read
    if read.form is None:
        pairs = all(len(parts) > 1 for own in canaries.clients.values() for parts in own.known)
        return (0, 1) if read.hidden and pairs else _NOT_SEEN
    if not read.inputs:
        return _OTHER_FORM
    if not read.labels:
        return _NO_LABEL
    return read.inputs.most_common(1)[0][0], read.labels.most_common(1)[0][0]


def _rows(canaries: RecordCanaries, client: int, x: int, y: int) -> _Rows:
    own = canaries.clients[client]
    parts = [*map(parts_of, (*own.heads, *own.tails)), *own.known]
    form = parts[0][x][None] if canaries.read.form is None else canaries.read.form
    inputs = [one[x].reshape(form.shape[1:]).astype(form.dtype) for one in parts]
    return _Rows(
        inputs=np.array(inputs),
        labels=np.array([_plain(one[y]) for one in parts]),
        heads=len(own.heads),
        tails=len(own.tails),
    )


def _plain(label: Row) -> Row:
    return label.reshape(()) if label.size == 1 else label


@dataclass(frozen=True, kw_only=True, eq=False)
class _Change:
    """A change of a model that was released, and the records that may explain it, by client."""

    start: Model
    change: Model
    rows: Mapping[int, _Rows]


def _uploads(case: Case, rows: Mapping[int, _Rows]) -> list[_Change]:
    """Return the changes that clients sent."""
    found = []
    for one in case.as_is.trainings():
        upload = None if case.shapes is None else upload_of(one, case.shapes)
        if upload is not None and one.node in rows:
            own = {one.node: rows[one.node]}
            found.append(_Change(start=upload.start, change=upload.change, rows=own))
    return found


def _steps(case: Case, rows: Mapping[int, _Rows]) -> list[_Change]:
    """Return the changes from model to model."""
    return [
        _Change(
            start=start,
            change={name: end[name].astype(np.float64) - start[name] for name in end},
            rows=rows,
        )
        for start, end in pairwise(_models(case))
    ]


def _models(case: Case) -> Iterator[Model]:
    """Return the models that were sent out, each once."""
    last: Model | None = None
    for one in case.as_is.exchanges:
        model = None if case.shapes is None else sent_model(one, case.shapes)
        if model is not None and (last is None or not _same(model, last)):
            last = model
            yield model


def _scores(module: nn.Module, changes: Sequence[_Change], clock: Clock) -> dict[int, Vector]:
    """Return the scores of each client's canaries, summed over changes, from the last one on."""
    found: dict[int, Vector] = {}
    for one in reversed(changes):
        if not all(bool(np.isfinite(array).all()) for array in one.change.values()):
            continue
        score = _score(module, one, clock)
        if score is None:
            break
        # Each change counts in its own standard deviations.
        unit = max(float(np.concatenate(list(score.values())).std()), 1e-12)
        found |= {client: found.get(client, 0.0) + own / unit for client, own in score.items()}
    return found


def _score(module: nn.Module, one: _Change, clock: Clock) -> dict[int, Vector] | None:
    """Return the scores of some clients' canaries by one change; None where the time is over."""
    model = filled(module, one.start).eval()
    names = trained_names(model, one.change)
    moved = -np.concatenate([np.asarray(one.change[n], np.float64).reshape(-1) for n in names])
    entries = np.random.default_rng(0).permutation(moved.size)[:_ENTRIES]
    table: list[NDArray[np.float32]] = []
    ends: list[int] = []
    for own in one.rows.values():
        most = max(own.heads + own.tails, _MOST // len(one.rows))
        for slope in record_gradients(model, names, own.inputs[:most], own.labels[:most]):
            if not clock.left:
                return None
            table.append(slope.numpy()[entries].astype(np.float32))
        ends.append(len(table))
    found = np.split(shares(np.array(table), moved[entries]), ends[:-1])
    return {
        client: own.scores(part)
        for (client, own), part in zip(one.rows.items(), found, strict=True)
    }


def _joined(found: Mapping[int, Vector], coins: Mapping[int, NDArray[np.bool_]]) -> Vector | None:
    """Return the scores of all canaries; those of clients that were not heard are 0."""
    if not found:
        return None
    return np.concatenate([found.get(c, np.zeros(own.size)) for c, own in coins.items()])


def _same(one: Model, other: Model) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)
