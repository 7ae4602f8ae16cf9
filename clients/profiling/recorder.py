"""Samples where a process spends its time, and keeps the sums in a file: for ``--profile``.

A process of a profiled run has `PROFILE_VARIABLE` in its environment. From its first message on (a
node) or from the strategy's start on (a server) pyinstrument samples the stack of the thread that
works, until the process ends. Only names of functions, places in source files and times are kept,
never values.
"""

import atexit
import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from flwr.app import Message

from flwr_privacy.errors import EngineError, InvalidParameterError
from flwr_privacy.wire.files import open_private, write_file
from flwr_privacy.wire.message import COHORT, HELLO, RECORD

from . import PROFILE_VARIABLE
from .frames import described
from .samples import (
    SAMPLES,
    SERVER,
    SUMS,
    WORKER,
    Samples,
    check_profile,
    free_file,
)

__all__ = ["begin_worker", "of_server", "of_worker", "process_age", "sampling"]

logger = logging.getLogger("flwr.privacy")

INTERVAL = 0.004
"""Seconds between two samples: where the kernel ticks as often, its clock costs next to nothing."""

_SOON, _AFTER_MESSAGE = 0.05, 0.25  # seconds between two writes, at least; and behind a message
_RARELY = 100  # within a message so many times as long as a write takes
_GROWS = 2**20  # bytes of lines that are made one line, at least

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


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

        self._path, self._lock = free_file(folder / SAMPLES, role)
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
            frame, module = described(sampled)
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
        for name in SUMS:
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
