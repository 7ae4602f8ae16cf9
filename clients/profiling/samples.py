"""The samples of a process: sums by stack, in a file of lines that add up."""

import importlib.util
import json
import os
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from flwr_privacy.errors import EngineError, InvalidParameterError
from flwr_privacy.wire.files import PRIVATE

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "SAMPLES",
    "SERVER",
    "SUMS",
    "WORKER",
    "Samples",
    "check_installed",
    "check_profile",
    "free_file",
]

SERVER, WORKER = "server", "worker"
"""What a process is; its file begins with that."""

SAMPLES = "samples"
"""Name of the folder with the files of the processes, within that of the profile."""


@dataclass
class Samples:
    """The samples of one process after another, added up.

    Parameters
    ----------
    role : {"server", "worker"}
        What the processes are.
    processes : int
        Their number.
    seconds : float
        The time that they lived, from their start to their last write.
    before : float
        The part of it before the first sample.
    clients : int
        The requests to single clients that they answered, greetings apart.
    frames : list of (str, str)
        Frames, each as pyinstrument writes it, and the module it is of.
    stacks : dict
        Seconds of each stack, from the outermost frame to the innermost, by places in `frames`.
    """

    role: str
    processes: int = 0
    seconds: float = 0.0
    before: float = 0.0
    clients: int = 0
    frames: list[tuple[str, str]] = field(default_factory=list)
    stacks: dict[tuple[int, ...], float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Samples":
        """Read a file of `line`s, which add up; the last one may have been cut by a crash.

        Raises
        ------
        OSError
            If it cannot be read.
        InvalidParameterError
            If it is another file.
        """
        try:
            *lines, _ = path.read_bytes().split(b"\n")
            total = cls(path.name.partition("-")[0])
            for values in map(json.loads, lines):
                for name in SUMS:
                    setattr(total, name, getattr(total, name) + values[name])
                total.frames += [(frame, module) for frame, module in values["frames"]]
                for stack, seconds in values["stacks"]:
                    total.stacks[tuple(stack)] = total.stacks.get(tuple(stack), 0.0) + seconds
            return total
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidParameterError("profile", str(path), "samples of a profile") from error

    def line(self) -> bytes:
        """Return a line of a file."""
        values = {name: getattr(self, name) for name in SUMS}
        stacks = [[list(stack), seconds] for stack, seconds in self.stacks.items()]
        return json.dumps({**values, "frames": self.frames, "stacks": stacks}).encode() + b"\n"


SUMS = ("processes", "seconds", "before", "clients")


def check_installed() -> None:
    """Refuse a profile without pyinstrument.

    Raises
    ------
    EngineError
        If it is not installed.
    """
    if importlib.util.find_spec("pyinstrument") is None:
        raise EngineError("pyinstrument is not installed: pip install 'flwr-privacy[profile]'")


def check_profile(folder: str | Path) -> Path:
    """Return the folder of a profile, if one can be made in it.

    Raises
    ------
    EngineError
        If pyinstrument is not installed.
    InvalidParameterError
        If the folder cannot be written.
    """
    check_installed()
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe-{os.getpid()}"
        probe.touch(mode=PRIVATE)
        probe.unlink()
    except OSError as error:
        allowed = f"a folder that can be written ({error.strerror})"
        raise InvalidParameterError("profile", str(folder), allowed) from error
    return path.resolve()


def free_file(folder: Path, role: str) -> tuple[Path, int]:
    """Return the first file of a role that no other process writes, and its lock.

    A deployed node has a new process for each message: they use one file, one after another.
    """
    # Not `exclusive_lock`: a fork that drops its copy of that one would free it for all.
    folder.mkdir(mode=0o700, exist_ok=True)
    for number in count():
        path = folder / f"{role}-{number}.json"
        lock = os.open(folder / f".{role}-{number}.lock", os.O_RDWR | os.O_CREAT, PRIVATE)
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return path, lock
            if not path.exists():
                return path, lock
        except BlockingIOError:
            pass
        os.close(lock)
    raise AssertionError("there is always a next number")
