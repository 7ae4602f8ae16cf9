"""Reads ``metrics.jsonl``, the lines of a run's rounds, also while another process writes it."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr_privacy.errors import DataError

__all__ = ["MetricsFile", "follow", "rounds_in", "score"]

POLL_SECONDS = 0.1

_NUMBERS = (
    *("asked", "answered", "accumulated", "late", "exchanges", "charged"),
    *("rounds", "bytes_down", "bytes_up", "virtual_seconds", "seconds"),
)
_TABLES = ("refused", "train", "evaluate", "server", "scheme")


def follow(path: str | Path, stop: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a ``metrics.jsonl`` as another process appends them.

    Parameters
    ----------
    path : str or Path
        The file; it need not exist yet.
    stop : callable
        Asked about ten times a second whether the writer is done. What it had written by then is
        still yielded.

    Yields
    ------
    dict
        The line of a round. When a resumed run replaces the file, its lines are yielded from the
        first.

    Raises
    ------
    DataError
        If a line is damaged.
    """
    tail = MetricsFile(Path(path))
    inode = None
    while True:
        stopped = stop()  # before the file is read: nothing is written after that
        if tail.path.exists():
            status = tail.path.stat()
            if status.st_ino != inode or status.st_size < tail.position:
                tail, inode = MetricsFile(tail.path), status.st_ino
            yield from tail.rest() if stopped else tail.lines()
        if stopped:
            return
        time.sleep(POLL_SECONDS)


def rounds_in(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that nobody writes any more, in order.

    A last line that was cut when the run was killed is dropped. Where a resumed run did rounds
    again, their new lines count.

    Raises
    ------
    DataError
        If another line is damaged; the message names file and line.
    """
    lines: list[dict[str, Any]] = []
    for line in MetricsFile(path).rest():
        while lines and lines[-1]["round"] >= line["round"]:
            lines.pop()
        lines.append(line)
    return lines


def score(
    line: Mapping[str, Any], metric: str, *, sources: Sequence[str] = ("server", "evaluate")
) -> float | None:
    """Return a metric of the server's evaluation, or else of the clients' own.

    Parameters
    ----------
    line : Mapping
        Line of a round.
    metric : str
        Such as ``accuracy`` or ``loss``.
    sources : Sequence of str, default ("server", "evaluate")
        Tables of the line in which to look, the first that has the metric counts.

    Returns
    -------
    float or None
        None if the model was not evaluated in this round; NaN if the metric was not finite, for
        which JSON has null.

    Examples
    --------
    >>> line = {"round": 1, "server": {"accuracy": 0.9}, "evaluate": {"accuracy": 0.8}}
    >>> score(line, "accuracy")
    0.9
    >>> score(line, "accuracy", sources=["evaluate"])
    0.8
    """
    for source in sources:
        table = line.get(source) or {}
        if metric in table:
            return math.nan if table[metric] is None else float(table[metric])
    return None


class MetricsFile:
    """Reads a metrics file from the place up to which it was read before.

    Attributes
    ----------
    position : int
        Bytes of the whole lines that were read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self._count = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the whole lines that follow."""
        with self.path.open("rb") as file:
            file.seek(self.position)
            for text in file:
                if not text.endswith(b"\n"):
                    return
                self._count += 1
                self.position += len(text)
                try:
                    line = _parsed(text)
                except ValueError as error:
                    raise DataError(f"{self.path}, line {self._count}: {error}") from error
                yield line

    def last(self) -> dict[str, Any] | None:
        """Return the unfinished last line, or None if it was cut."""
        with self.path.open("rb") as file:
            file.seek(self.position)
            try:
                return _parsed(file.read())
            except ValueError:
                return None

    def rest(self) -> Iterator[dict[str, Any]]:
        """Yield the remaining lines once nobody writes any more."""
        yield from self.lines()
        last = self.last()
        if last is not None:
            yield last


def _parsed(text: bytes) -> dict[str, Any]:
    line = json.loads(text)
    if not isinstance(line, dict) or type(line.get("round")) is not int:
        raise ValueError("no JSON object with an integer 'round'")
    for key in _NUMBERS:
        if not isinstance(line.get(key, 0), int | float):
            raise ValueError(f"{key} = {line[key]!r} is no number")
    for key in _TABLES:
        if not isinstance(line.get(key) or {}, dict):
            raise ValueError(f"{key} = {line[key]!r} is no object")
    for key in ("server", "evaluate"):
        for metric in ("accuracy", "loss"):
            value = (line.get(key) or {}).get(metric)
            if not isinstance(value, int | float | None):
                raise ValueError(f"{key}.{metric} = {value!r} is no number")
    return line
