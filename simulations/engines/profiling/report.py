"""Makes a table, pages and flame graphs of the samples of a profile."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flwr_privacy.clients.profiling import PROFILE_VARIABLE
from flwr_privacy.clients.profiling.frames import is_own
from flwr_privacy.clients.profiling.recorder import sampling
from flwr_privacy.clients.profiling.samples import (
    SAMPLES,
    SERVER,
    Samples,
    check_profile,
)
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.wire.files import PRIVATE, write_text

from .phases import CLIENTS, PHASES, Frame, is_clients, phase_of

__all__ = ["FILE", "Profile", "Side", "profiled", "read_profile", "write_profile"]

FILE = "profile.json"
SIDES = ("server", "workers")
PAGES = {"html": "html", "speedscope.json": "speedscope"}
"""Endings of the files of a side, and pyinstrument's renderers of them."""

HOT_LINES = 10
ONCE = ("start", "wait")
"""Phases that clients have no share in."""


@dataclass
class Side:
    """Where the time of the server went, or that of all workers together.

    Parameters
    ----------
    processes : int
        The processes.
    seconds : float
        The sum of their lives.
    clients : int
        The requests to single clients that they answered.
    phases : dict
        Seconds of each of `PHASES`, `seconds` together.
    stacks : dict
        Seconds of each stack, as pyinstrument writes its frames.
    """

    processes: int = 0
    seconds: float = 0.0
    clients: int = 0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    stacks: dict[tuple[str, ...], float] = field(default_factory=dict)

    def add(self, stack: tuple[str, ...], phase: str, seconds: float) -> None:
        """Add the time of a stack."""
        self.phases[phase] += seconds
        self.stacks[stack] = self.stacks.get(stack, 0.0) + seconds

    def numbers(self) -> dict[str, Any]:
        """Return the numbers as JSON has them, the phases in the order of `PHASES`."""
        phases = {phase: round(seconds, 4) for phase, seconds in self.phases.items() if seconds}
        return {
            "processes": self.processes,
            "seconds": round(self.seconds, 4),
            "client_messages": self.clients,
            "phases": phases,
        }


@dataclass(frozen=True)
class Profile:
    """Where the time of a run went.

    Parameters
    ----------
    server, workers : Side
        The two sides. Clients that share a process with the server are in both: as the phase
        ``clients`` of the server, and as workers.
    lines : dict
        Seconds of each line of the user's own code with what it calls: by file, line, function.
    """

    server: Side
    workers: Side
    lines: Mapping[tuple[str, int, str], float]

    @property
    def hot_lines(self) -> list[tuple[tuple[str, int, str], float]]:
        """The lines that took longest."""
        return sorted(self.lines.items(), key=lambda line: -line[1])[:HOT_LINES]

    def text(self) -> str:
        """Return the table for a terminal."""
        server, workers = self.server, self.workers
        together = f"{workers.processes} worker{'s' * (workers.processes > 1)}"
        rows = [["", "server", "", together if workers.processes else "clients", "", "per client"]]
        for phase in PHASES:
            if server.phases[phase] or workers.phases[phase]:
                each = ""
                if workers.clients and workers.phases[phase] and phase not in ONCE:
                    each = f"{1000 * workers.phases[phase] / workers.clients:.2f} ms"
                cells = [*_cells(server, phase), *_cells(workers, phase)]
                rows.append([phase, *cells, each])
        total = [f"{server.seconds:.2f} s", "", f"{workers.seconds:.2f} s", "", ""]
        lines = _aligned([*rows, ["total", *total]])
        if self.lines:
            lines += ["", "lines of your own code, with what they call:"]
            for (file, line, function), seconds in self.hot_lines:
                lines.append(f"{seconds:8.2f} s  {_short(file)}:{line} {function}")
        return "\n".join(lines)


def read_profile(folder: Path) -> Profile:
    """Return what the processes of a run have sampled so far.

    Raises
    ------
    InvalidParameterError
        If nobody has sampled anything, or a file is damaged.
    """
    paths = sorted((folder / SAMPLES).glob("*.json"))
    if not paths:
        allowed = f"a folder with the samples of a run: {folder / SAMPLES} has none"
        raise InvalidParameterError("profile", str(folder), allowed)
    server, workers, lines = Side(), Side(), dict[tuple[str, int, str], float]()
    for samples in map(Samples.read, paths):
        own = server if samples.role == SERVER else workers
        own.processes += samples.processes
        own.seconds += samples.seconds
        workers.clients += samples.clients
        own.phases["start"] += samples.before
        shared = 0.0
        for stack, frames, seconds in _stacks(samples):
            phase = phase_of(frames)
            if own is server and is_clients(frames):
                workers.add(stack, phase, seconds)
                shared += seconds
                own.add(stack, CLIENTS, seconds)
            else:
                own.add(stack, phase, seconds)
            if (line := _own_line(stack, frames)) is not None:
                lines[line] = lines.get(line, 0.0) + seconds
        workers.seconds += shared
        rest = samples.seconds - samples.before - sum(samples.stacks.values())
        own.phases["other" if own is server else "wait"] += max(0.0, rest)
    return Profile(server, workers, lines)


def _stacks(samples: Samples) -> Iterator[tuple[tuple[str, ...], list[Frame], float]]:
    frames: list[Frame] = []
    for written, module in samples.frames:
        function, file, _ = written.partition("\x01")[0].split("\x00")
        frames.append((module, function, file))
    for places, seconds in samples.stacks.items():
        stack = tuple(samples.frames[place][0] for place in places)
        yield stack, [frames[place] for place in places], seconds


def _own_line(stack: Sequence[str], frames: Sequence[Frame]) -> tuple[str, int, str] | None:
    """Return the innermost line of the user's own functions in a stack."""
    for written, (module, function, file) in zip(reversed(stack), reversed(frames), strict=True):
        if is_own(file, module) and function != "<module>":
            marks = written.split("\x01")[1:]
            line = next((int(mark[1:]) for mark in marks if mark.startswith("l")), 0)
            return file, line, function
    return None


def write_profile(folder: Path) -> tuple[Profile, list[Path]]:
    """Write table, pages and flame graphs of a profile beside its samples.

    Returns
    -------
    tuple of Profile and list of Path
        The profile and the files.

    Raises
    ------
    EngineError
        If pyinstrument is not installed.
    InvalidParameterError
        If there are no samples, or a file cannot be written.
    """
    check_profile(folder)
    profile = read_profile(folder)
    lines = [
        {"file": file, "line": line, "function": function, "seconds": round(seconds, 4)}
        for (file, line, function), seconds in profile.hot_lines
    ]
    sides = dict(zip(SIDES, (profile.server, profile.workers), strict=True))
    numbers = {**{name: side.numbers() for name, side in sides.items()}, "lines": lines}
    texts: dict[str, Callable[[], str]] = {FILE: lambda: json.dumps(numbers, indent=2) + "\n"}
    for name, side in sides.items():
        for ending, kind in PAGES.items():
            if side.stacks:
                texts[f"{name}.{ending}"] = partial(_rendered, side, kind)
    for name, text in texts.items():
        write_text(folder / name, text(), mode=PRIVATE)
    return profile, [folder / name for name in texts]


def _rendered(side: Side, kind: str) -> str:
    from pyinstrument.renderers import HTMLRenderer, SpeedscopeRenderer
    from pyinstrument.session import Session

    records = [(list(stack), seconds) for stack, seconds in sorted(side.stacks.items())]
    seconds = sum(side.stacks.values())
    session = Session.from_json(
        {
            "frame_records": records,
            "start_time": 0.0,
            "duration": seconds,
            "sample_count": len(records),
            "start_call_stack": [""],
            "target_description": f"{side.processes} processes",
            "cpu_time": seconds,
        }
    )
    text: str = (HTMLRenderer() if kind == "html" else SpeedscopeRenderer()).render(session)
    return text


@contextmanager
def profiled(folder: str | Path, *, sample: bool = True, age: float = 0.0) -> Iterator[None]:
    """Profile a run: this process, if it is the server, and all that are started meanwhile.

    An earlier profile in the folder is replaced. The files of `write_profile` are there at the end,
    also if the run fails.

    Parameters
    ----------
    folder : path
        Where the profile goes.
    sample : bool, default True
        Whether the server is in this process and thread.
    age : float, default 0.0
        Seconds before this call that count as its start.

    Raises
    ------
    EngineError
        If pyinstrument is not installed.
    InvalidParameterError
        If the folder cannot be written.
    """
    path = check_profile(folder)
    old = [*(path / SAMPLES).glob("*.json"), path / FILE]
    for one in old + [path / f"{side}.{ending}" for side in SIDES for ending in PAGES]:
        one.unlink(missing_ok=True)
    before = os.environ.get(PROFILE_VARIABLE)
    os.environ[PROFILE_VARIABLE] = str(path)
    try:
        with sampling(path, SERVER, age=age) if sample else nullcontext():
            yield
    finally:
        if before is None:
            del os.environ[PROFILE_VARIABLE]
        else:
            os.environ[PROFILE_VARIABLE] = before
        if any((path / SAMPLES).glob("*.json")):  # of Ray there are none if it did not start
            write_profile(path)


def _cells(side: Side, phase: str) -> list[str]:
    seconds = side.phases[phase]
    return [f"{seconds:.2f} s", f"{100 * seconds / side.seconds:.1f} %"] if seconds else ["", ""]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = (
        [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    )
    return ["  ".join(row).rstrip() for row in aligned]


def _short(file: str) -> str:
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
