"""Runs client apps: in this process when a reply is pulled, or in worker processes."""

import ctypes
import gc
import importlib
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.clients.profiling.recorder import begin_worker
from flwr_privacy.errors import InvalidParameterError, check_integer

from .shared_arrays import SharedArrays, files_of_state, folder_for_arrays, place_state

__all__ = ["WorkerPool"]

logger = logging.getLogger("flwr.privacy")

Outcome = tuple[Message, RecordDict] | str
"""A reply and the state after it, or what the app raised."""

_SPARE = "spare-"
"""Start of the name of a file that nobody reads any more, for the next state."""

_DIED = "the worker process died, twice (out of memory?)"

_worker_app: ClientApp | None = None
_worker_folder = ""


@dataclass
class _Request:
    """A request that is not answered yet, with its files and the process that it is given to."""

    message: Message
    context: Context  # as it was when the request came
    files: list[str]
    of_state: set[str] = field(default_factory=set)  # files of the state that goes with it
    spare: list[str] = field(default_factory=list)  # files for the state after it
    worker: "_Worker | None" = None
    executor: ProcessPoolExecutor | None = None
    future: Future[tuple[Outcome, list[str]]] | None = None


class _Worker:
    """One process at a time: where one dies, its pool ends all that are in it."""

    def __init__(self, *start: Any) -> None:
        self._start = start
        self.waiting = 0  # requests that it was given and whose answer nobody has asked for
        self._begin()

    def submit(self, request: _Request) -> None:
        request.worker, request.executor = self, self._executor
        work = (request.message, request.context, request.spare)
        request.future = self._executor.submit(_work, *work)

    def recover(self, request: _Request) -> None:
        """Start a new process, unless one was started since the process of this message died."""
        if request.executor is self._executor:
            self._executor.shutdown(wait=False)
            self._begin()

    def _begin(self) -> None:
        """Start the process now, while this one has something else to do."""
        # A fresh interpreter: a fork would copy the threads' locks of this one.
        self._executor = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=self._start,
        )
        with _without_script(self._start[0]):
            self._executor.submit(_nothing)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


class WorkerPool:
    """Runs a client app on messages.

    Parameters
    ----------
    client_app : ClientApp or str
        The app, or a reference "module:attribute" to it.
    workers : int
        Number of processes; 0 for none. They share the processors unless OMP_NUM_THREADS says how
        many threads each has.

    Raises
    ------
    InvalidParameterError
        If there are workers and the app is no reference.
    """

    def __init__(self, client_app: ClientApp | str, workers: int) -> None:
        check_integer("workers", workers, minimum=0)
        self._workers: list[_Worker] = []
        self._open = ExitStack()
        self._homes: dict[int, _Worker] = {}  # by node
        self._app: ClientApp | None = None
        self._waiting: dict[str, _Request] = {}
        self._of_states: dict[int, set[str]] = {}  # by node: files, until they are removed
        self._spare: dict[int, list[str]] = {}  # by node: files of states that nobody reads now
        if workers == 0:
            self._app = _load(client_app) if isinstance(client_app, str) else client_app
        elif isinstance(client_app, str):
            self._folder = str(self._open.enter_context(folder_for_arrays()))
            self._arrays = SharedArrays(self._folder)
            start = (client_app, self._folder, workers)
            self._workers = [_Worker(*start) for _ in range(workers)]
        else:
            raise InvalidParameterError(
                "client_app", client_app, "a reference 'module:attribute' where there are workers"
            )

    def submit(self, message_id: str, message: Message, context: Context) -> None:
        """Take a request; a worker process begins with it as soon as it is free."""
        if not self._workers:
            self._waiting[message_id] = _Request(message, context, [])
            return
        files = self._arrays.place(message.content)
        now = _copied(context)  # it is pickled later
        request = _Request(message, now, files, of_state=files_of_state(now.state))
        request.spare = self._spare.pop(context.node_id, [])
        self._waiting[message_id] = request
        # Where the node was before, as the app may have its data there, unless another is free.
        least = min(self._workers, key=lambda other: other.waiting)
        home = self._homes.get(context.node_id, least)
        worker = home if home.waiting == least.waiting else least
        self._homes[context.node_id] = worker
        worker.waiting += 1
        try:
            worker.submit(request)
        except BrokenProcessPool:  # it died of a request whose answer nobody asked for
            worker.recover(request)
            worker.submit(request)

    def result(self, message_id: str) -> Outcome:
        """Wait for the outcome of a message and return it.

        A request whose process dies is put to a new one, by itself.
        """
        request = self._waiting.pop(message_id)
        if request.worker is None:
            if self._app is None:
                raise RuntimeError("the pool is closed")
            return _run(self._app, request.message, request.context)
        request.worker.waiting -= 1
        try:
            outcome = _received(request)
        except BrokenProcessPool:
            logger.warning("a worker process died: its clients run again")
            outcome = _once_more(request.worker, request)
        finally:
            self._arrays.release(request.files)
        if not isinstance(outcome, str):
            files = self._of_states.setdefault(request.context.node_id, set())
            files |= files_of_state(outcome[1])
        return outcome

    def accept(self, context: Context, state: RecordDict) -> None:
        """Make the state after a reply the node's state."""
        context.state = state
        files = self._of_states.get(context.node_id)
        if not files:
            return
        needed = files_of_state(state).union(
            *(q.of_state for q in self._waiting.values() if q.context.node_id == context.node_id)
        )
        for path in files - needed:
            spare = str(Path(path).with_name(_SPARE + Path(path).name))
            os.rename(path, spare)
            self._spare.setdefault(context.node_id, []).append(spare)
        files &= needed

    def clear(self) -> None:
        """Forget what a grid asked, whose answers nobody will take, before another asks."""
        begun = [
            request.future
            for request in self._waiting.values()
            if request.future is not None and not request.future.cancel()
        ]
        wait(begun)  # a process may be about to read its arrays
        for future in begun:
            if future.exception() is None:
                for path in future.result()[1]:
                    os.unlink(path)
        for request in self._waiting.values():
            if request.files:
                self._arrays.release(request.files)
        for path in set().union(*self._of_states.values()):
            os.unlink(path)
        _removed(chain(*self._spare.values(), *(q.spare for q in self._waiting.values())))
        for worker in self._workers:
            worker.waiting = 0
        for table in (self._waiting, self._of_states, self._homes, self._spare):
            table.clear()

    def close(self) -> None:
        """Stop the processes."""
        for worker in self._workers:
            worker.close()
        self._open.close()


def _once_more(worker: _Worker, request: _Request) -> Outcome:
    worker.recover(request)
    _removed(request.spare)
    request.spare = []
    try:
        worker.submit(request)
        return _received(request)
    except BrokenProcessPool:
        worker.recover(request)
        return _DIED


def _removed(paths: Iterable[str]) -> None:
    """Remove files that the process which they were given to has perhaps taken or removed."""
    for path in paths:
        Path(path).unlink(missing_ok=True)


def _received(request: _Request) -> Outcome:
    if request.future is None:
        raise RuntimeError("the request was not sent")
    outcome, files = request.future.result()
    for path in files:  # they are mapped by now
        os.unlink(path)
    return outcome


def _load(reference: str) -> ClientApp:
    module, _, attribute = reference.partition(":")
    app: ClientApp = getattr(importlib.import_module(module), attribute)
    return app


def _start_worker(reference: str, folder: str, workers: int) -> None:
    global _worker_app, _worker_folder
    threads = max(1, (os.cpu_count() or 1) // workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read when torch is imported
    _keep_freed_memory()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_folder = folder
    _worker_app = _load(reference)
    gc.freeze()  # modules stay: to look through those of torch each time takes as long as training
    begin_worker()


def _end_with_parent() -> None:
    """End this process when its parent is gone: the pipe on which it waits never says so."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _keep_freed_memory() -> None:
    """Let malloc keep what is freed for what comes next.

    By default it gives large blocks back to the system, which hands them out again page by page,
    zeroed: for a model of some megabytes that takes as long as a pass over it in each operation.
    """
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)


@contextmanager
def _without_script(reference: str) -> Iterator[None]:
    """Start processes that do not import the script of this one, unless the app is in it.

    Python has each new process import it. A script that starts its simulation outside of
    ``if __name__ == "__main__":`` would begin it again in every worker.
    """
    script = sys.modules["__main__"]
    if reference.partition(":")[0] != "__main__":
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _nothing() -> None:
    """Do nothing: a process is started for it."""


def _work(message: Message, context: Context, spare: list[str]) -> tuple[Outcome, list[str]]:
    if _worker_app is None:
        raise RuntimeError("the worker was not started")
    outcome = _run(_worker_app, message, context)
    if not isinstance(outcome, str):
        place_state(_worker_folder, outcome[1], context.state, spare)
    _removed(spare)
    if isinstance(outcome, str):
        return outcome, []
    if outcome[0].has_error():
        return outcome, []
    return outcome, SharedArrays(_worker_folder).place(outcome[0].content)


def _copied(context: Context) -> Context:
    """Return a context whose state changes by itself."""
    return Context(
        run_id=context.run_id,
        node_id=context.node_id,
        node_config=dict(context.node_config),
        state=RecordDict(dict(context.state)),
        run_config=context.run_config,
        series_id=context.series_id,
    )


def _run(app: ClientApp, message: Message, context: Context) -> Outcome:
    own = _copied(context)
    try:
        return app(message, own), own.state
    # What a client's code raises is an error reply of that client, as with Flower's engines.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
