"""Reads runs from their folders for a report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr_privacy.errors import refusals
from flwr_privacy.privacy.card import Answers
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.simulations.settings.card_run import CardRun
from flwr_privacy.simulations.settings.metrics_file import score
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_labels import differing_settings, labels
from flwr_privacy.simulations.settings.run_settings import Settings

from .figures import Series, Style
from .tree_nodes import TREE_FILE, TreeNode, read_tree

__all__ = ["Line", "ReportedRun", "RunResults", "read_runs"]

Line = Mapping[str, Any]
"""What a run noted of one round."""


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """What a run came to, in total or at its end.

    Parameters
    ----------
    rounds, planned : int
        Learning rounds done and planned.
    accuracy, best_accuracy, loss : float or None
        At the last evaluation, and the best of all; None where there was none. A loss may be NaN.
    evaluated_by : {"server", "clients"} or None
        Whose evaluation that is: the server's if there is any, else the clients' own.
    bytes_up, bytes_down : int
        Payload bytes of all messages from and to the nodes.
    virtual_seconds, seconds : float
        Simulated and real time.
    asked, answered, accumulated, late, refused : int
        Clients asked; replies that came, went into the model, came too late, were refused.
    skipped : int
        Rounds that left the model as it was.
    """

    rounds: int
    planned: int
    accuracy: float | None
    best_accuracy: float | None
    loss: float | None
    evaluated_by: str | None
    bytes_up: int
    bytes_down: int
    virtual_seconds: float
    seconds: float
    asked: int
    answered: int
    accumulated: int
    late: int
    refused: int
    skipped: int


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """A run as the sections see it.

    Parameters
    ----------
    name : str
        Name of its folder.
    label : str
        What tells it from the other runs, in words.
    style : Style
        Its look in every figure.
    scheme, task : str
        Its scheme, and what it trains.
    settings : Settings or None
        What it was told; None for an app of the user's own.
    told : Mapping
        The same with dotted keys.
    differing : Mapping
        The settings, with dotted keys, that the runs do not share.
    summary, rounds
        As in the run folder.
    guarantee : Guarantee or None
        What it guarantees by its privacy card; None where no round has ended yet.
    relation : str or None
        The neighbours of its charges, by the same card; None without charges.
    answers : Answers or None
        What became of its charges, by the same card.
    tree : tuple of TreeNode or None
        The tree of aggregators, with trust and noise; None for a scheme without.
    results : RunResults
        What it came to.
    """

    name: str
    label: str
    style: Style
    scheme: str
    task: str
    settings: Settings | None
    told: Mapping[str, Any]
    differing: Mapping[str, Any]
    summary: Mapping[str, Any]
    rounds: Sequence[Line]
    guarantee: Guarantee | None
    relation: str | None
    answers: Answers | None
    tree: tuple[TreeNode, ...] | None
    results: RunResults

    @property
    def neighbours(self) -> str:
        """For which neighbours its epsilon is: in words, and the relation of its charges."""
        words = "" if self.guarantee is None else self.guarantee.neighbours
        return f"{words} ({self.relation})" if self.relation else words

    @property
    def clients(self) -> int | None:
        """Number of its clients, as far as it is known."""
        asked = None if self.settings is None else self.settings.clients
        return asked or self.summary.get("nodes")

    def series(self, xs: Sequence[float], ys: Sequence[float]) -> Series:
        """Return its line through some points."""
        return Series(label=self.label, style=self.style, xs=xs, ys=ys)

    def scores(self, metric: str) -> list[tuple[Line, float]]:
        """Return the lines of the rounds that were evaluated, with the values of a metric."""
        source = {"server": "server", "clients": "evaluate"}.get(self.results.evaluated_by or "")
        return _scores(self.rounds, metric, source)


def read_runs(folders: Sequence[RunFolder], *, names: Sequence[str] = ()) -> list[ReportedRun]:
    """Read runs for a report on all of them.

    Parameters
    ----------
    folders : sequence of RunFolder
        The runs.
    names : sequence of str, default ()
        What they are called; by default the settings in which they differ say it.

    Raises
    ------
    DataError
        If a run folder is damaged.
    """
    runs = []
    told_apart = zip(folders, names or _labels(folders), differing_settings(folders), strict=True)
    for index, (folder, label, differing) in enumerate(told_apart):
        # The card is renewed in every round: it also tells of runs that go on or were broken off.
        settings, rounds, card = folder.settings, folder.rounds(), folder.card
        run = ReportedRun(
            name=folder.path.resolve().name,
            label=label,
            style=Style(index),
            scheme=settings.scheme,
            task=settings.task,
            settings=None if isinstance(folder, CardRun) else settings,
            told=folder.told,
            differing=differing,
            summary=folder.summary,
            rounds=rounds,
            guarantee=None if card is None else card.guarantee,
            relation=None if card is None else card.relation(),
            answers=None if card is None else card.answers(),
            tree=read_tree(folder.path / TREE_FILE),
            results=_results(rounds, planned=settings.rounds),
        )
        runs.append(run)
    return runs


def _labels(folders: Sequence[RunFolder]) -> list[str]:
    # Runs of different tasks differ in so much that only those of one task are told apart.
    tasks = [folder.settings.task for folder in folders]
    if len(set(tasks)) < 2:
        return labels(folders)
    names = {
        task: iter(labels([f for f, other in zip(folders, tasks, strict=True) if other == task]))
        for task in set(tasks)
    }
    return [f"{task}: {next(names[task])}" for task in tasks]


def _results(rounds: Sequence[Line], *, planned: int) -> RunResults:
    def total(key: str) -> int:
        return sum(line.get(key, 0) for line in rounds)

    sources = {"server": "server", "evaluate": "clients"}
    used = [s for s in sources if any(line.get(s) for line in rounds)]
    source = used[0] if used else None
    accuracies = [value for _, value in _scores(rounds, "accuracy", source)]
    losses = [value for _, value in _scores(rounds, "loss", source)]
    last: Line = rounds[-1] if rounds else {}
    return RunResults(
        rounds=last.get("round", 0),
        planned=last.get("rounds", planned),
        accuracy=accuracies[-1] if accuracies else None,
        best_accuracy=max(filter(math.isfinite, accuracies), default=None),
        loss=losses[-1] if losses else None,
        evaluated_by=sources[source] if source else None,
        bytes_up=last.get("total_bytes_up", 0),
        bytes_down=last.get("total_bytes_down", 0),
        virtual_seconds=last.get("virtual_seconds", 0.0),
        seconds=last.get("seconds", 0.0),
        asked=total("asked"),
        answered=total("answered"),
        accumulated=total("accumulated"),
        late=total("late"),
        refused=refusals(rounds).total(),
        skipped=total("skipped"),
    )


def _scores(rounds: Sequence[Line], metric: str, source: str | None) -> list[tuple[Line, float]]:
    sources = [source] if source else []
    values = [(line, score(line, metric, sources=sources)) for line in rounds]
    return [(line, value) for line, value in values if value is not None]
