"""The rounds of a run as the audit knows them: updates from inside, and the step of the model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from ..transcript import Exchange, Transcript
from ..uploads import Upload, described, model_change

__all__ = ["TrainingRound", "rounds_of", "rounds_run", "uneven_weights"]

_ENTRIES = 200_000  # of a model that are looked at

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingRound:
    """One round of training.

    Parameters
    ----------
    number : int
        The round.
    updates : mapping of int to (d,) float64
        By node: what its own function returned minus what that was given, in some entries.
    uploads : mapping of int to Upload
        By node: what its upload is, where the audit can tell.
    step : (d,) float64, optional
        The next model minus this one, in the same entries; None where no later model was sent out.
    """

    number: int
    updates: Mapping[int, Vector]
    uploads: Mapping[int, Upload]
    step: Vector | None


def rounds_of(as_is: Transcript) -> Iterator[TrainingRound]:
    """Return the rounds in which clients trained."""
    trained = [e for e in as_is.trainings() if e.inner_reply is not None and _has_arrays(e.request)]
    sent = [e for e in as_is.exchanges if _has_arrays(e.request)]
    for number in sorted({e.round for e in trained}):
        here = [e for e in trained if e.round == number]
        updates: dict[int, Vector] = {}
        uploads: dict[int, Upload] = {}
        for one in here:
            update = model_change(one.inner_request, one.inner_reply)
            if update is None:
                continue
            updates[one.node] = _some(update)
            if (upload := described(one)) is not None:
                uploads[one.node] = upload
        digest = here[0].files["request"]
        later = (e for e in sent if e.number > here[-1].number and e.files["request"] != digest)
        step = next((s for e in later if (s := _step(here[0], e)) is not None), None)
        yield TrainingRound(number=number, updates=updates, uploads=uploads, step=step)


def rounds_run(as_is: Transcript) -> int:
    """Return how many rounds the client was asked to train in that was asked most, at least 1."""
    asked: dict[int, set[int]] = {}
    for one in as_is.trainings():
        if "inner_reply" in one.files:
            asked.setdefault(one.node, set()).add(one.round)
    return max([len(rounds) for rounds in asked.values()], default=1)


def uneven_weights(as_is: Transcript) -> float:
    """Return the largest weight of a client in a round over the mean weight; 1.0 without any."""
    rounds: dict[int, list[float]] = {}
    for one in as_is.trainings():
        if (weight := _weight(one.inner_reply)) is not None:
            rounds.setdefault(one.round, []).append(weight)
    return max([max(w) * len(w) / sum(w) for w in rounds.values() if sum(w) > 0], default=1.0)


def _weight(content: RecordDict | None) -> float | None:
    for record in [] if content is None else content.metric_records.values():
        for name in ("num-examples", "num_examples"):
            if isinstance(found := record.get(name), int | float):
                return float(found)
    return None


def _step(before: Exchange, after: Exchange) -> Vector | None:
    change = model_change(before.request, after.request)
    return None if change is None or not np.any(change) else _some(change)


def _some(values: Vector) -> Vector:
    return values[:: max(1, -(-values.size // _ENTRIES))]


def _has_arrays(content: RecordDict) -> bool:
    return bool(content.array_records)
