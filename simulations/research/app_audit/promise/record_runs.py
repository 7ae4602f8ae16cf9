"""Runs of an app with canary records in its clients' data, each in a process of its own."""

import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..processes import run_probe
from ..target import Target
from ..transcript import ENOUGH, OBJECTS, Transcript
from .canary_runs import Scores

__all__ = ["RecordRun", "record_scores", "run_records"]

COINS = 1000
"""Coins that a report asks for."""

_LEAST = 10  # coins
_EACH = 50  # canaries of a client
_SLOWER = 1.2  # a run than the one before, at most
_SCORING = 0.3  # of a run's time, at most
_FILE = "records.npz"

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordRun:
    """What was heard of the canary records of a run.

    Parameters
    ----------
    coins : (k,) bool
        The coins of all clients.
    server, model : (k,) float64, optional
        Scores of them by what left the nodes, and by the models that were sent out; None where
        nothing of that can be read.
    why : str
        Why there are no scores at all; empty where there are some.
    """

    coins: NDArray[np.bool_]
    server: Vector | None
    model: Vector | None
    why: str

    def write(self, folder: Path) -> None:
        """Write it into a run's folder."""
        scores = {name: getattr(self, name) for name in ("server", "model")}
        heard = {name: values for name, values in scores.items() if values is not None}
        np.savez(folder / _FILE, coins=self.coins, why=np.array(self.why), **heard)

    @classmethod
    def read(cls, folder: Path) -> "RecordRun | None":
        """Return what a run left in its folder; None where it is not whole."""
        if not (folder / _FILE).exists():
            return None
        with np.load(folder / _FILE, allow_pickle=False) as found:
            scores = {name: found.get(name) for name in ("server", "model")}
            return cls(coins=found["coins"], why=str(found["why"]), **scores)


def run_records(
    target: Target,
    folder: Path,
    *,
    delta: float,
    pairs: bool,
    function: str | None,
    model: str | None,
    as_is: Transcript,
    rounds: int | None,
    seconds: float,
    seed: int,
) -> tuple[list[RecordRun], str]:
    """Run the app again and again, and return its whole runs, and why there are no more of them.

    Parameters
    ----------
    target : Target
        The app.
    folder : Path
        Gets the transcripts. Whole runs that are there already count.
    delta : float
        Of the claim: with more than ``1 / (2 delta)`` coins nothing could be refuted.
    pairs : bool
        Whether neighbours replace a record.
    function, model : str, optional
        "module:function" of what returns a client's records, and of what returns the module.
    as_is : Transcript
        Of the app without canaries, with the module that trained in it.
    rounds : int, optional
        Rounds after which a run ends; by default the app ends it.
    seconds : float
        Time for all.
    seed : int
        Of canaries, coins, and what the app draws.
    """
    most = COINS if delta == 0 else min(COINS, int(1 / (2 * delta)))
    if most < _LEAST:
        return [], f"With a delta of {delta:g} over the training no number of coins refutes it."
    each = max(1, min(_EACH, most // target.clients))
    asked: dict[str, Any] = {
        "records": True,
        "most": each,
        "clients": most // each,
        "pairs": pairs,
        "function": function,
        "model": model,
        "pickled": None if as_is.model is None else str(as_is.model.resolve()),
    }
    end, took, coins = time.monotonic() + seconds, 0.0, each * min(target.clients, most // each)
    runs = _read(folder)
    while sum(run.coins.size for run in runs) + coins <= most:
        start = time.monotonic()
        left = end - start
        if runs and left < _SLOWER * took:
            break
        path = folder / str(len(runs))
        shutil.rmtree(path, ignore_errors=True)  # an interrupted run
        transcript = run_probe(
            target,
            path,
            seconds=left,
            seed=seed + len(runs),
            rounds=rounds,
            canaries={**asked, "seconds": _SCORING * left},
        )
        took = time.monotonic() - start
        run = RecordRun.read(path)
        if why := _failure(transcript, run, in_time=took < left):
            (path / _FILE).unlink(missing_ok=True)  # it does not count
            return runs, why
        shutil.rmtree(path / OBJECTS)  # it is scored
        runs = _read(folder)
        coins = runs[-1].coins.size
    return runs, ""


def _read(folder: Path) -> list[RecordRun]:
    """Return the whole runs in the folders 0, 1, ... of a folder."""
    runs: list[RecordRun] = []
    while (run := RecordRun.read(folder / str(len(runs)))) is not None:
        runs.append(run)
    return runs


def record_scores(runs: Sequence[RecordRun]) -> list[Scores]:
    """Return the scores of the coins of all runs: those of the server, and those of the models."""
    found = []
    for view in ("model", "server"):
        values = [getattr(run, view) for run in runs]
        if not runs or any(one is None for one in values):
            continue
        coins = np.concatenate([run.coins for run in runs])
        nothing = np.full(coins.size, np.nan)
        found.append(Scores(view=view, values=np.concatenate(values), coins=coins, cosines=nothing))
    return found


def _failure(transcript: Transcript, run: RecordRun | None, *, in_time: bool) -> str:
    """Return why a run has no scores; an empty text where it has."""
    errors = [one.error for one in transcript.exchanges if one.error]
    if transcript.about["error"]:
        return f"The run with canary records failed: {transcript.about['error']}."
    if transcript.about["ended"] not in ("stopped", "whole", ENOUGH):
        return f"The run with canary records was ended: {transcript.about['ended']}."
    if run is None and not in_time:
        return "No run with canary records was whole in time: give it more --minutes."
    if run is None:
        log = (transcript.folder / "log.txt").read_text(encoding="utf-8")
        raised = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", log, re.M)
        why = raised[-1] if raised else "its process was ended, maybe for want of memory"
        return f"No canary record was scored: {why}."
    if not any(True for _ in transcript.trainings()) and errors:
        return f"No client trained with canary records: {errors[0]}."
    if run.why:
        return f"No canary record was scored: {run.why}."
    if run.server is None and run.model is None:
        return (
            "No upload could be laid out over the model that trained, and no second one was sent."
        )
    return ""
