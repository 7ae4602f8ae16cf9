"""Runs clients of a cohort side by side, pausing each at a task that can run in a batch.

The clients' own code knows nothing of it. Where it calls a trainer of this library, the trainer
hands in a `flwr_privacy.clients.node.batched_task.BatchedTask`; the client then stands still, and
the next one goes on until it comes to a task of its own. When all stand still, those whose tasks
fit are done together, and each client goes on with what came of it. The clients take turns in one
thread, a greenlet each: it is always a single one that goes on, and it stands still nowhere but in
a trainer.
"""

import logging
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar

import numpy as np
from greenlet import getcurrent, greenlet

from .batched_task import BatchedTask, stand

__all__ = ["side_by_side"]

logger = logging.getLogger("flwr.privacy")

_MOST_BYTES = 256 * 2**20  # that the clients who stand still hold, about
_MOST_STANDING = 64  # clients
_MEASURED = 3  # times that each way is measured; the first is a warm-up
_MOST_FAILURES = 3  # tries after which a kind of task is not tried together any more

Result = TypeVar("Result")
_Made = TypeVar("_Made")


@dataclass
class _Trial:
    """Measured seconds per record of one kind of task, alone and in a batch."""

    alone: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)
    alike: bool = False  # it was compared: both ways come to the same
    unfit: bool = False  # they do not
    failures: int = 0

    def says_together(self, *, measure: bool) -> bool:
        if self.unfit or self.failures >= _MOST_FAILURES:
            return False
        if not measure or len(self.together) < _MEASURED:
            return True
        return len(self.alone) >= _MEASURED and min(self.together) < min(self.alone)


_trials: defaultdict[Hashable, _Trial] = defaultdict(_Trial)  # for as long as the process lives


class _Client(Generic[_Made]):
    """One client's call, which pauses at each batched task.

    It has the global generators of random numbers to itself: they begin anew for each client, from
    what the generator of this process draws.
    """

    def __init__(self, call: Callable[[], _Made]) -> None:
        self.task: BatchedTask[Any] | None = None
        self.done: list[Any] = []  # what the task led to, if it was done with others
        self._seed: int | None = random.getrandbits(64)
        self._put_back: Callable[[], None] = lambda: None
        self._others = getcurrent()  # who lets this one go on
        self._greenlet = greenlet(call)
        self._greenlet.gr_context = copy_context()
        self._greenlet.gr_context.run(stand.set, self._stands)

    def goes_on(self) -> list[_Made]:
        """Resume the call; return its result in a list if it ended, or else an empty list."""
        self.task = None
        before = _random_states()
        if self._seed is not None:
            _seed(self._seed)
            self._seed = None
        self._put_back()
        try:
            made = self._greenlet.switch()
        finally:
            self._put_back = _random_states()
            before()
        if not self._greenlet.dead:
            return []
        # It refers to this client, which would live on until it is found to be garbage.
        self._greenlet.gr_context = None
        return [made]

    def ends(self) -> None:
        if not self._greenlet.dead:
            self._greenlet.throw()

    def _stands(self, task: BatchedTask[Result]) -> Result:
        """Pause until the task has run in a batch or must run alone."""
        if getcurrent() is not self._greenlet or not task.may_wait():
            return task.alone()
        task.leave()
        self.task, self.done = task, []
        self._others.switch()
        if self.done:
            return task.finish(self.done[0])
        with _timed(_trials[task.kind].alone, records=task.records):
            return task.alone()


def side_by_side(calls: Iterable[Callable[[], _Made]], *, measure: bool = False) -> Iterator[_Made]:
    """Run the calls of some clients; yield each result as soon as it is there.

    Parameters
    ----------
    calls : iterable of callable
        One for each client.
    measure : bool, default False
        Whether tasks are done together only where that was measured to be faster.

    Raises
    ------
    Exception
        What a call raises; the others do not go on then.
    """
    standing: list[_Client[_Made]] = []
    try:
        for call in calls:
            client = _Client(call)
            yield from client.goes_on()
            if client.task is not None:
                standing.append(client)
            held = sum(c.task.nbytes for c in standing if c.task is not None)
            if len(standing) >= _MOST_STANDING or held >= _MOST_BYTES:
                yield from _to_their_ends(standing, measure=measure)
        yield from _to_their_ends(standing, measure=measure)
    finally:
        for client in standing:
            client.ends()


def _to_their_ends(standing: list[_Client[_Made]], *, measure: bool) -> Iterator[_Made]:
    """Resume the paused clients, from task to task."""
    while standing:
        groups = _groups(standing)
        if len(groups) == len(standing) > 1:
            _warn_once(
                "clients are trained one by one, not together: their models, losses or step sizes "
                "differ, or a loss is made anew for each, or a perturbation is drawn"
            )
        for group in groups:
            _do(group, measure=measure)
        for client in list(standing):
            made = client.goes_on()
            if client.task is None:
                standing.remove(client)
            yield from made


def _groups(standing: Iterable[_Client[Any]]) -> list[list[_Client[Any]]]:
    """Group the clients whose tasks can run together."""
    groups: list[list[_Client[Any]]] = []
    for client in standing:
        if client.task is None:
            raise RuntimeError("a client that has no task stands still")
        for group in groups:
            first = group[0].task
            if first is not None and client.task.fits(first):
                group.append(client)
                break
        else:
            groups.append([client])
    return groups


def _do(group: Sequence[_Client[Any]], *, measure: bool) -> None:
    """Run the tasks of a group together, unless running each alone is better."""
    tasks = [client.task for client in group if client.task is not None]
    trial = _trials[tasks[0].kind]
    if len(tasks) == 1 or not trial.says_together(measure=measure):
        return
    drawn = random.getstate(), _numpys_state()
    try:
        with _timed(trial.together, records=sum(task.records for task in tasks)):
            done = tasks[0].together(tasks)
        if not trial.alike:
            trial.alike = drawn == (random.getstate(), _numpys_state()) and tasks[0].alike(done[0])
            trial.unfit = not trial.alike
    # The models are the users': whatever they raise, alone each client raises what is its own.
    except Exception as error:  # noqa: BLE001
        trial.failures += 1
        _warn_once(f"clients are trained one by one, not together: {type(error).__name__}: {error}")
        return
    if trial.unfit:
        _warn_once(
            "clients are trained one by one: together it does not come to the same. A model or a "
            "loss draws random numbers, or does more than its weights and the batch say"
        )
        return
    for client, own in zip(group, done, strict=True):
        client.done = [own]


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


@contextmanager
def _timed(times: list[float], *, records: int) -> Iterator[None]:
    """Measure the seconds per record, for the first few measurements."""
    start = time.perf_counter()
    yield
    if len(times) < _MEASURED and records:
        times.append((time.perf_counter() - start) / records)


def _random_states() -> Callable[[], None]:
    """Save the states of the global random generators; return a function that restores them."""
    python, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch = sys.modules.get("torch")
    torchs = None if torch is None else torch.get_rng_state()

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpys)  # noqa: NPY002
        if torch is not None and torchs is not None:
            torch.set_rng_state(torchs)

    return put_back


def _seed(seed: int) -> None:
    """Seed the global random generators."""
    random.seed(seed)
    np.random.seed([seed >> 32, seed & 0xFFFFFFFF])  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(seed)


def _numpys_state() -> bytes:
    state: Any = np.random.get_state()  # noqa: NPY002
    return bytes(repr(state[2:]).encode() + state[1].tobytes())
