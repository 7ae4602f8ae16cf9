"""Shows how far a sweep has come: a live bar, or a line for each run."""

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from flwr_privacy.simulations.runner.jobs import watched
from flwr_privacy.simulations.runner.progress import format_seconds
from flwr_privacy.simulations.settings.metrics_file import score
from flwr_privacy.simulations.settings.run_folder import RunFolder

__all__ = ["SweepBar"]


class SweepBar:
    """Shows the runs of a sweep, and the round of the present one.

    Parameters
    ----------
    rounds : int
        Rounds of all runs that are to be done.
    runs : int
        Number of these runs.
    progress : bool, optional
        Whether to show anything; by default in a terminal and in a notebook. It is a live bar
        there, and elsewhere a line for each run. (A notebook needs ipywidgets for the bar.)
    console : Console, optional
        Where to show it; by default on standard output.
    """

    def __init__(
        self,
        *,
        rounds: int,
        runs: int,
        progress: bool | None = None,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console()
        notebook = self._console.is_jupyter
        shown = self._console.is_terminal or notebook if progress is None else progress
        widgets = notebook and importlib.util.find_spec("ipywidgets") is not None
        self._lines = shown and not (self._console.is_terminal or widgets)
        self._runs, self._done = runs, 0
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if shown and not self._lines and runs:
            self._bar = Progress(
                TextColumn("{task.fields[run]}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[facts]}", style="dim"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=rounds, run="", facts="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @contextmanager
    def show(self, run: RunFolder) -> Iterator[None]:
        """Show a run and its rounds while the context is open."""
        with self.running(run.path.name, run.settings.rounds) as update, watched(run, update):
            yield

    @contextmanager
    def running(self, name: str, rounds: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Show a run while the context is open; what it gives takes the lines of the rounds."""
        began = time.monotonic()
        started = self._bar.tasks[0].completed if self._bar is not None else 0
        accuracy: float | None = None

        def update(line: Mapping[str, Any]) -> None:
            nonlocal accuracy
            measured = score(line, "accuracy")
            accuracy = accuracy if measured is None else measured
            if self._bar is not None:
                facts = [f"run {self._done + 1}/{self._runs}", f"round {line['round']}/{rounds}"]
                facts += [] if accuracy is None else [f"accuracy {accuracy:.3f}"]
                self._bar.update(
                    self._task,
                    completed=started + line["round"],
                    run=name,
                    facts=", ".join(facts),
                )

        update({"round": 0})
        yield update
        self._done += 1
        if self._bar is not None:  # a training may end before its last round
            self._bar.update(self._task, completed=started + rounds)
        if self._lines:
            facts = [] if accuracy is None else [f"accuracy {accuracy:.3f}"]
            facts.append(format_seconds(time.monotonic() - began))
            text = f"{self._done}/{self._runs} {name}: {', '.join(facts)}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
