"""Shows the progress of a run: a live panel in a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flwr_privacy.privacy.card.folder import CARD_PAGE
from flwr_privacy.simulations.settings.metrics_file import score
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.strategies.state.ending import ending, next_commands

__all__ = ["Progress", "format_bytes", "format_seconds", "how_it_ended", "planned_rounds"]

REFRESH_PER_SECOND = 4
_ROUNDING = 1e-6  # epsilon


class Progress:
    """Shows the progress of one run.

    On a terminal it is a bar with the figures of the last round below it; the clock and the time
    left go on between rounds. Elsewhere (a pipe, a CI job) each round is one line of text.

    Parameters
    ----------
    label : str
        Name of the run.
    rounds : int
        Rounds planned.
    console : Console, optional
        Where to show it; by default on standard output.

    Examples
    --------
    >>> with Progress("fedavg", 3) as progress:
    ...     progress.update({"round": 0, "server": {"accuracy": 0.1}, "seconds": 0.5})
    ...     progress.update({"round": 1, "bytes_down": 900, "bytes_up": 300, "seconds": 2.5})
    fedavg: round 0/3, accuracy 0.100, 0 B, 0.5 s
    fedavg: round 1/3, accuracy 0.100, 1.2 kB, 2.5 s
    """

    def __init__(self, label: str, rounds: int, *, console: Console | None = None) -> None:
        self.label = label
        self.rounds = rounds
        self._console = console or Console()
        self._live: Live | None = None
        self._stopped = False
        self._round: int | None = None
        self._first: tuple[int, float] = (0, 0.0)
        self._seconds = 0.0
        self._updated = time.monotonic()
        self._bytes: dict[int, int] = {}
        self._accuracy: float | None = None
        self._virtual_seconds = 0.0
        self._budget = ""

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._panel,
                console=self._console,
                refresh_per_second=REFRESH_PER_SECOND,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped = True  # what stays on the screen has no running clock
        if self._live is not None:
            self._live.stop()

    def update(self, line: Mapping[str, Any]) -> None:
        """Show a line of ``metrics.jsonl``."""
        self._seconds = float(line.get("seconds", self._seconds))
        if self._round is None or line["round"] <= self._round:  # the first, or rounds done again
            self._bytes = {r: count for r, count in self._bytes.items() if r < line["round"]}
            self._first = (line["round"], self._seconds)
        elif self._first[0] == 0:  # the first round has the start of the workers in it
            self._first = (line["round"], self._seconds)
        self._round = int(line["round"])
        # A scheme may plan anew how many there will be.
        planned = int(_scheme(line).get("T", self.rounds))
        self.rounds = max(planned, self._round)
        self._updated = time.monotonic()
        self._bytes[self._round] = line.get("bytes_down", 0) + line.get("bytes_up", 0)
        self._virtual_seconds = float(line.get("virtual_seconds", self._virtual_seconds))
        self._budget = _budget(line) or self._budget
        accuracy = score(line, "accuracy")
        if accuracy is not None:
            self._accuracy = accuracy
        if forecast := line.get("forecast"):
            self._console.print(forecast, markup=False, highlight=False, soft_wrap=True)
        if self._live is None:
            text = f"{self.label}: round {self._round}/{self.rounds}, {', '.join(self._facts())}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _facts(self) -> list[str]:
        facts = []
        if self._accuracy is not None:
            facts.append(f"accuracy {self._accuracy:.3f}")
        if self._budget:
            facts.append(self._budget)
        facts.append(format_bytes(sum(self._bytes.values())))
        if self._virtual_seconds:
            facts.append(f"{format_seconds(self._virtual_seconds)} virtual")
        ticking = self._live is not None and not self._stopped
        since = time.monotonic() - self._updated if ticking else 0.0
        facts.append(format_seconds(self._seconds + since))
        left = self._seconds_left()
        if left is not None and not self._stopped:
            facts.append(f"{format_seconds(max(left - since, 0.0))} left")
        return facts

    def _seconds_left(self) -> float | None:
        first_round, first_seconds = self._first
        if self._round is None or self._round == first_round or self._round >= self.rounds:
            return None
        per_round = (self._seconds - first_seconds) / (self._round - first_round)
        return per_round * (self.rounds - self._round)

    def _panel(self) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self.label, style="bold"),
            ProgressBar(total=self.rounds, completed=self._round or 0, width=24),
            Text(f"round {self._round or 0}/{self.rounds}"),
        )
        return Group(head, Text("  " + " · ".join(self._facts()), style="dim"))


def how_it_ended(run: RunFolder) -> list[str]:
    """Return the end of a run in words, one fact a line."""
    card = run.card
    return ending(
        run.rounds(),
        planned=run.settings.rounds,
        guarantee=None if card is None else card.guarantee,
        card=None if card is None else run.path / CARD_PAGE,
        commands=next_commands(run.path),
    )


def planned_rounds(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return what a scheme that plans its rounds anew has planned; empty for the others.

    Examples
    --------
    >>> history = [{"round": 0, "rounds": 200}, {"round": 1, "rounds": 200, "scheme": {"T": 200}}]
    >>> planned_rounds([*history, {"round": 2, "rounds": 200, "scheme": {"T": 179}}])
    '200, 179 after round 2'
    """
    planned = [(line["round"], line["scheme"]["T"]) for line in lines if "T" in _scheme(line)]
    if not planned:
        return ""
    changes = [f"{lines[0]['rounds']:.0f}"]
    last = lines[0]["rounds"]
    for server_round, T in planned:
        if last != T:
            changes.append(f"{T:.0f} after round {server_round}")
        last = T
    return ", ".join(changes)


def _budget(line: Mapping[str, Any]) -> str:
    """Return the epsilon spent so far and what is left; empty where none is counted."""
    numbers = _scheme(line)
    if numbers.get("epsilon") is None:
        return ""
    left = numbers.get("epsilon_left")
    more = "" if left is None else f" ({0 if left < _ROUNDING else left:.3g} left)"
    return f"epsilon {numbers['epsilon']:.3g}{more}"


def _scheme(line: Mapping[str, Any]) -> Mapping[str, Any]:
    return line.get("scheme") or {}


def format_bytes(count: float) -> str:
    """Return a number of bytes in decimal units.

    Examples
    --------
    >>> format_bytes(999), format_bytes(12_345), format_bytes(2_500_000_000)
    ('999 B', '12.3 kB', '2.5 GB')
    """
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def format_seconds(seconds: float) -> str:
    """Return a duration to about three digits.

    Examples
    --------
    >>> format_seconds(4.21), format_seconds(200), format_seconds(7500)
    ('4.2 s', '3 min 20 s', '2 h 5 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
