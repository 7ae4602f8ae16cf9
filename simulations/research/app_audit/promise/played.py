"""Runs of an app with canaries, clients or records: what a verdict on a promise rests on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..processes import run_probe
from ..target import Target
from ..transcript import Transcript
from .canary_runs import CanaryRun, Scores, model_scores, read_runs, server_scores
from .record_runs import record_scores, run_records
from .training_rounds import rounds_run

__all__ = ["COINS", "Played", "with_clients", "with_records"]

COINS = 200
"""Coins that a report asks for. Where the time is over before, it has those of whole runs."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """What the runs with canaries of one kind gave.

    Parameters
    ----------
    scores : sequence of Scores
        For each of the views that there are.
    count : int
        Number of runs.
    rounds : int
        In which the client trained that was asked most.
    canaries : str
        What they are, in words.
    opposite : bool
        Whether tails are canaries too.
    why : str
        Why there are no scores.
    runs : sequence of CanaryRun
        What was heard of canary clients.
    """

    scores: Sequence[Scores]
    count: int
    rounds: int
    canaries: str
    opposite: bool
    why: str
    runs: Sequence[CanaryRun] = ()


def with_clients(
    target: Target, folder: Path, seconds: float, seed: int, rounds: int | None, opposite: bool
) -> Played:
    """Run an app with canary clients.

    Parameters
    ----------
    target : Target
        The app.
    folder : Path
        Gets the transcripts.
    seconds : float
        Time for all runs.
    seed : int
        Of coins and directions, and of what the app draws.
    rounds : int, optional
        Rounds after which a run ends; by default the app ends it.
    opposite : bool
        Whether tails is the opposite update, and not next to none.
    """
    run_probe(
        target,
        folder,
        seconds=seconds,
        seed=seed,
        rounds=rounds,
        runs=-(-COINS // target.clients),
        canaries={"opposite": opposite},
    )
    runs = read_runs(folder)
    error = Transcript(folder / "0").about["error"]
    why = "No run with canary clients was whole in time: give it more --minutes."
    views = (model_scores(runs), server_scores(runs)) if runs else ()
    turned = "one of two opposite ones" if opposite else "there or next to none"
    return Played(
        scores=[one for one in views if one is not None],
        count=len(runs),
        rounds=max([run.participations for run in runs], default=0),
        canaries=f"of canary clients whose update is {turned}",
        opposite=opposite,
        why=f"The runs with canary clients failed: {error}" if error else "" if runs else why,
        runs=runs,
    )


def with_records(target: Target, folder: Path, *, pairs: bool, **settings: Any) -> Played:
    """Run an app with canary records; parameters are those of `run_records`."""
    runs, why = run_records(target, folder, pairs=pairs, **settings)
    turned = "one of two" if pairs else "there or not"
    trained = [rounds_run(Transcript(folder / str(number))) for number in range(len(runs))]
    return Played(
        scores=record_scores(runs),
        count=len(runs),
        rounds=max(trained, default=0),
        canaries=f"of canary records that are {turned} in the clients' data. Whoever guesses knows "
        "all other records",
        opposite=pairs,
        why="" if runs else why,
    )
