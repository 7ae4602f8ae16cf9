"""Samples where a process spends its time, and keeps the sums in a file: for ``--profile``.

A process of a profiled run has `PROFILE_VARIABLE` in its environment. From its first message on (a
node) or from the strategy's start on (a server) pyinstrument samples the stack of the thread that
works, until the process ends. Only names of functions, places in source files and times are kept,
never values.
"""

import atexit
import contextlib
import functools
import importlib.util
import json
import logging
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from flwr.app import Message

from flwr_privacy.errors import EngineError, InvalidParameterError
from flwr_privacy.wire.files import PRIVATE, open_private, write_file
from flwr_privacy.wire.message import COHORT, HELLO, RECORD

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "PROFILE_VARIABLE",
    "SAMPLES",
    "SERVER",
    "WORKER",
    "Samples",
    "begin_worker",
    "check_installed",
    "check_profile",
    "is_own",
    "of_server",
    "of_worker",
    "process_age",
    "sampling",
]

logger = logging.getLogger("flwr.privacy")

PROFILE_VARIABLE = "FLWR_PRIVACY_PROFILE"
"""Environment variable with the folder in which each process keeps its samples."""

SERVER, WORKER = "server", "worker"
"""What a process is; its file begins with that."""

SAMPLES = "samples"
"""Name of the folder with the files of the processes, within that of the profile."""

INTERVAL = 0.004
"""Seconds between two samples: where the kernel ticks as often, its clock costs next to nothing."""

_SOON, _AFTER_MESSAGE = 0.05, 0.25  # seconds between two writes, at least; and behind a message
_RARELY = 100  # within a message so many times as long as a write takes
_GROWS = 2**20  # bytes of lines that are made one line, at least

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


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
                for name in _SUMS:
                    setattr(total, name, getattr(total, name) + values[name])
                total.frames += [(frame, module) for frame, module in values["frames"]]
                for stack, seconds in values["stacks"]:
                    total.stacks[tuple(stack)] = total.stacks.get(tuple(stack), 0.0) + seconds
            return total
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidParameterError("profile", str(path), "samples of a profile") from error

    def line(self) -> bytes:
        """Return a line of a file."""
        values = {name: getattr(self, name) for name in _SUMS}
        stacks = [[list(stack), seconds] for stack, seconds in self.stacks.items()]
        return json.dumps({**values, "frames": self.frames, "stacks": stacks}).encode() + b"\n"


_SUMS = ("processes", "seconds", "before", "clients")


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


def process_age() -> float:
    """Return the seconds since this process was started; 0 where the system does not say."""
    try:
        text = Path("/proc/self/stat").read_text(encoding="utf-8")
        started = int(text.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, AttributeError):  # no Linux
        return 0.0


class _Recorder:
    """Adds up the stacks of the thread that makes it, until the process ends or `stop`."""

    def __init__(self, folder: Path, role: str, *, age: float) -> None:
        from pyinstrument.stack_sampler import get_stack_sampler  # late: an optional library

        self._path, self._lock = _free_file(folder / SAMPLES, role)
        self._total = Samples.read(self._path) if self._path.exists() else Samples(role)
        self.samples = Samples(role, processes=1, seconds=age, before=age)  # since the last write
        self._places = {frame: place for place, (frame, _) in enumerate(self._total.frames)}
        self._frames = list(self._total.frames)
        self._size, self._grown = 0, 0.0  # bytes of the first line of the file, and behind it
        self._rewrite()
        self._known: dict[str, int] = {}  # by frames as they are sampled, with their lines
        self._imports: set[int] = set()  # places of frames of an import
        self._last = self._wrote = time.perf_counter()
        self._writing = 0.0  # seconds of the last write
        self._sampler = get_stack_sampler()
        self._sampler.subscribe(self._saw, desired_interval=INTERVAL, use_async_context=False)
        atexit.register(self.stop)

    def _saw(self, call_stack: list[str], _seconds: float, _state: Any) -> None:
        # By a clock of our own: what a write takes is no time of the code that is sampled.
        self._add(call_stack, time.perf_counter())
        self.write_if_due(max(_SOON, _RARELY * self._writing))

    def _add(self, call_stack: list[str], now: float) -> None:
        known = self._known
        try:
            key = tuple([known[frame] for frame in call_stack])
        except KeyError:
            key = tuple([self._place(frame) for frame in call_stack])
        if not self._imports.isdisjoint(key):
            key = self._without_imports(key)
        stacks = self.samples.stacks
        stacks[key] = stacks.get(key, 0.0) + now - self._last
        self._last = now

    def _place(self, sampled: str) -> int:
        if sampled not in self._known:
            frame, module = _described(sampled)
            if frame not in self._places:
                self._places[frame] = len(self._places)
                self._frames.append((frame, module))
                self.samples.frames.append((frame, module))
            if frame.startswith(_IMPORT):
                self._imports.add(self._places[frame])
            self._known[sampled] = self._places[frame]
        return self._known[sampled]

    def _without_imports(self, key: tuple[int, ...]) -> tuple[int, ...]:
        """Cut a stack behind the module that is imported: what that imports has many stacks."""
        begins = next(i for i, place in enumerate(key) if place in self._imports)
        frames = self._frames
        inside = (i for i in range(begins, len(key)) if frames[key[i]][1][:9] != "importlib")
        return key[: next(inside, begins) + 1]

    def write_if_due(self, seconds: float) -> None:
        """Write what is new, unless the last write was less than some seconds ago."""
        if time.perf_counter() - self._wrote >= seconds:
            self._write()

    def _write(self) -> None:
        begins = time.perf_counter()
        new = self.samples
        new.seconds += begins - self._wrote
        self.samples = Samples(new.role)
        for name in _SUMS:
            setattr(self._total, name, getattr(self._total, name) + getattr(new, name))
        for stack, seconds in new.stacks.items():
            self._total.stacks[stack] = self._total.stacks.get(stack, 0.0) + seconds
        line = new.line()
        grown, self._grown = self._grown + len(line), math.inf  # until the file has it
        with contextlib.suppress(OSError):  # a full disk ends no training
            if grown > max(_GROWS, self._size):
                self._rewrite()
            else:
                with open(self._path, "ab", opener=open_private) as file:
                    file.write(line)
                self._grown = grown
        self._wrote = begins
        ends = time.perf_counter()
        self._writing = ends - begins
        self._add([_WRITE_FRAME], ends)

    def _rewrite(self) -> None:
        """Write one line for all that was written so far."""
        self._total.frames = list(self._frames)
        line = self._total.line()
        if self._total.processes:
            write_file(self._path, [line], durable=False)
        self._size, self._grown = len(line), 0.0

    def stop(self) -> None:
        """End the sampling and write the file."""
        self.forget()
        self._write()
        os.close(self._lock)

    def forget(self) -> None:
        """End the sampling without a trace."""
        global _recorder
        _recorder = None
        atexit.unregister(self.stop)
        with contextlib.suppress(Exception):  # it may be another thread that ends
            self._sampler.unsubscribe(self._saw)


_WRITE_FRAME = f"_write\x00{__file__}\x000"
_IMPORT = "_find_and_load\x00<frozen importlib._bootstrap>"

_recorder: _Recorder | None = None


def _in_forked_process() -> None:
    # A copy of the recorder would write into the file of the one that it is a copy of.
    if _recorder is not None:
        _recorder.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_process)


def _free_file(folder: Path, role: str) -> tuple[Path, int]:
    """Return the first file of a role that no other process writes, and its lock.

    A deployed node has a new process for each message: they use one file, one after another.
    """
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


_LIBRARIES = tuple(
    path
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_path(name))
)
_modules: dict[str, str] = {}  # by file
_modules_of = 0  # how many were imported then


def _described(sampled: str) -> tuple[str, str]:
    """Return a sampled frame and its module; without its line unless it is the user's own code."""
    identifier, *attributes = sampled.split("\x01")
    function, file, _ = identifier.split("\x00")
    if file == "<thread>":
        return f"{function}\x00{file}\x000", ""  # its number differs in each process
    module = _module_of(file)
    # Class and line; pyinstrument would not show functions that hide from tracebacks.
    marks = ("c", "l") if is_own(file, module) else ("c",)
    attributes = [a for a in attributes if a.startswith(marks)]
    return "\x01".join([identifier, *attributes]), module


def is_own(file: str, module: str) -> bool:
    """Tell whether a file is code of the user's: neither ours nor installed, nor built in."""
    ours = module.partition(".")[0] == "flwr_privacy"
    return not (ours or file.startswith("<") or file.startswith(_LIBRARIES))


def _module_of(file: str) -> str:
    global _modules_of
    if file.startswith("<frozen "):
        return file[len("<frozen ") : -1]
    if file not in _modules and _modules_of != len(sys.modules):
        _modules_of = len(sys.modules)
        for name, module in list(sys.modules.items()):
            place = getattr(module, "__file__", None)
            if isinstance(place, str) and not name.startswith("__m"):
                _modules.setdefault(place, name)
    return _modules.get(file, "")


@contextmanager
def sampling(folder: Path, role: str, *, age: float = 0.0) -> Iterator[None]:
    """Sample this thread, unless this process is sampled already.

    Parameters
    ----------
    folder : Path
        Where the samples are kept, of `check_profile`.
    role : {"server", "worker"}
        What this process is.
    age : float, default 0.0
        Seconds before this call that count as its start.
    """
    global _recorder
    if _recorder is not None:
        yield
        return
    _recorder = recorder = _Recorder(folder, role, age=age)
    try:
        yield
    finally:
        recorder.stop()


def begin_worker() -> None:
    """Sample this thread until the process ends, if the environment names a folder.

    Raises
    ------
    EngineError
        If no profile can be made in it. The error does not name it: it is sent to the server.
    """
    global _recorder
    folder = os.environ.get(PROFILE_VARIABLE)
    if _recorder is None and folder:
        _recorder = _Recorder(_checked(folder), WORKER, age=process_age())


def of_worker(reply: Callable[[], Message], message: Message) -> Callable[[], Message]:
    """Wrap the answer to a message, so that it is sampled and its clients are counted."""

    def sampled() -> Message:
        begin_worker()
        recorder = _recorder
        try:
            return reply()
        finally:
            if recorder is not None:
                recorder.samples.clients += _clients_of(message)
                recorder.write_if_due(_AFTER_MESSAGE)  # Ray kills processes without a word

    return sampled


def of_server(start: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorate a strategy's start, so that it is sampled if the environment names a folder."""

    @functools.wraps(start)
    def started(*given: _Given.args, **named: _Given.kwargs) -> _Made:
        folder = os.environ.get(PROFILE_VARIABLE)
        if not folder:
            return start(*given, **named)
        with sampling(_checked(folder), SERVER, age=process_age()):
            return start(*given, **named)

    return started


def _checked(folder: str) -> Path:
    try:
        return check_profile(folder)
    except InvalidParameterError as error:
        logger.error("%s", error)
        text = f"{PROFILE_VARIABLE} names a folder that cannot be written; the log says which"
        raise EngineError(text) from None


def _clients_of(message: Message) -> int:
    record: Any = message.content.get(RECORD, {})
    if record.get("phase") == HELLO:
        return 0
    asked: Any = message.content.get(COHORT, {})
    return len(asked.get("clients", "1"))
