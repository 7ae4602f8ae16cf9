"""Where client apps run: in this process when their reply is wanted, or in worker processes."""

import importlib
import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.errors import InvalidParameterError, check_integer

__all__ = ["WorkerPool"]

Outcome = tuple[Message, RecordDict] | str
"""A reply and the state after it, or what the app raised."""

_worker_app: ClientApp | None = None


class WorkerPool:
    """Runs a client app on questions.

    Parameters
    ----------
    client_app : ClientApp or str
        The app, or a reference "module:attribute" to it.
    workers : int
        Number of processes; 0 for none.

    Raises
    ------
    InvalidParameterError
        If there are workers and the app is no reference.
    """

    def __init__(self, client_app: ClientApp | str, workers: int) -> None:
        check_integer("workers", workers, minimum=0)
        self._executor: ProcessPoolExecutor | None = None
        self._app: ClientApp | None = None
        self._waiting: dict[str, tuple[Message, Context] | Future[Outcome]] = {}
        if workers == 0:
            self._app = _load(client_app) if isinstance(client_app, str) else client_app
        elif isinstance(client_app, str):
            # Fresh interpreters: a fork would copy the threads' locks of this one.
            self._executor = ProcessPoolExecutor(
                workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(client_app,),
            )
        else:
            raise InvalidParameterError(
                "client_app", client_app, "a reference 'module:attribute' where there are workers"
            )

    def submit(self, message_id: str, message: Message, context: Context) -> None:
        """Take a question; worker processes begin with it at once."""
        if self._executor is None:
            self._waiting[message_id] = (message, context)
        else:
            self._waiting[message_id] = self._executor.submit(_work, message, context)

    def result(self, message_id: str) -> Outcome:
        """Return the outcome of a question; waits for it."""
        work = self._waiting.pop(message_id)
        if isinstance(work, Future):
            return work.result()
        if self._app is None:
            raise RuntimeError("the pool is closed")
        return _run(self._app, *work)

    def close(self) -> None:
        """Stop the processes."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)


def _load(reference: str) -> ClientApp:
    module, _, attribute = reference.partition(":")
    app: ClientApp = getattr(importlib.import_module(module), attribute)
    return app


def _start_worker(reference: str) -> None:
    global _worker_app
    _worker_app = _load(reference)


def _work(message: Message, context: Context) -> Outcome:
    if _worker_app is None:
        raise RuntimeError("the worker was not started")
    return _run(_worker_app, message, context)


def _run(app: ClientApp, message: Message, context: Context) -> Outcome:
    own = Context(
        run_id=context.run_id,
        node_id=context.node_id,
        node_config=dict(context.node_config),
        state=RecordDict(dict(context.state)),
        run_config=context.run_config,
        series_id=context.series_id,
    )
    try:
        return app(message, own), own.state
    # What a client's code raises is an error reply of that client, as with Flower's engines.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
