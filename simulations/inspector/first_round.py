"""Runs an app's server up to its first round and writes what it starts from; a process of its own.

`python -m flwr_privacy.simulations.inspector.first_round` reads what to run from its input.
"""

import importlib
import inspect
import json
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import ArrayRecord, Context, RecordDict
from flwr.common import parameters_to_ndarrays
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from flwr_privacy.privacy.running_statistics import suspected
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server

__all__ = ["main"]

NODES = 2


class FirstRoundError(BaseException):
    """The first round would begin; no `except Exception` of the app's catches it."""

    def __init__(self, strategy: Any, arrays: ArrayRecord | None, rounds: int) -> None:
        super().__init__()
        self.strategy, self.arrays, self.rounds = strategy, arrays, rounds


class NoGrid(Grid):
    """A grid with some nodes that takes no message."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes."""
        return list(range(1, NODES + 1))

    def _stop(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FirstRoundError(None, None, 0)

    run = property(_stop)
    set_run = create_message = push_messages = pull_messages = send_and_receive = _stop


def main() -> None:
    """Read which app to run, run it, and write the arrays that it starts from."""
    asked = json.load(sys.stdin)
    _disconnect()
    module, _, attribute = asked["server"].partition(":")
    app: ServerApp = getattr(importlib.import_module(module), attribute)
    _stop_at_start()
    context = Context(
        run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=asked["config"]
    )
    try:
        found = _legacy(app, context)
        if found is None:
            with acting_as_server(context.run_id):
                app(NoGrid(), context)
            raise SystemExit("main ended before a round")
    except FirstRoundError as first:
        found = first
    if found.arrays is None:
        raise SystemExit("main sent a message before it called a strategy's start")
    Path(asked["out"]).write_text(json.dumps(_description(found)))


def _disconnect() -> None:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError("`flwr-privacy check` runs an app without a network")

    socket.socket.connect = refused  # type: ignore[method-assign]
    socket.socket.connect_ex = refused  # type: ignore[method-assign]
    socket.getaddrinfo = refused


def _stop_at_start() -> None:
    """Have every strategy stop where it would begin, also those with a `start` of their own."""
    found: set[Any] = {Strategy, *_subclasses(Strategy)}
    for strategy in found:
        if "start" in vars(strategy):
            strategy.start = _stopping(vars(strategy)["start"])


def _subclasses(of: Any) -> Iterator[Any]:
    for subclass in of.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _stopping(start: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(start)

    def stop(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        arrays = values.get("initial_arrays")
        if not isinstance(arrays, ArrayRecord):
            arrays = next((v for v in values.values() if isinstance(v, ArrayRecord)), None)
        rounds = values.get("num_rounds")
        raise FirstRoundError(self, arrays, rounds if isinstance(rounds, int) else 1)

    return stop


def _legacy(app: ServerApp, context: Context) -> FirstRoundError | None:
    """Return what a server of Flower's older API starts from; None for another one."""
    server_fn = getattr(app, "_server_fn", None)
    if server_fn is None:
        return None
    parts = server_fn(context)
    strategy = getattr(parts.strategy, "strategy", parts.strategy)  # inside Flower's wrapper
    parameters = getattr(strategy, "initial_parameters", None)
    if parameters is None:
        raise SystemExit("the strategy has no initial_parameters")
    arrays = ArrayRecord(parameters_to_ndarrays(parameters))
    return FirstRoundError(parts.strategy, arrays, parts.config.num_rounds if parts.config else 1)


def _description(found: FirstRoundError) -> dict[str, Any]:
    assert found.arrays is not None
    arrays = {name: array.numpy() for name, array in found.arrays.items()}
    looks = set(suspected(arrays))
    strategy = getattr(found.strategy, "strategy", found.strategy)  # inside Flower's wrapper

    def said(name: str, older: str, otherwise: float) -> Any:
        return getattr(strategy, name, getattr(strategy, older, otherwise))

    return {
        "arrays": [
            {
                "name": name,
                "shape": list(array.shape),
                "dtype": str(array.dtype),
                "suspected": name in looks,
            }
            for name, array in arrays.items()
        ],
        "rounds": found.rounds,
        "fraction_train": float(said("fraction_train", "fraction_fit", 1.0)),
        "min_train_nodes": int(said("min_train_nodes", "min_fit_clients", 2)),
        "min_available_nodes": int(said("min_available_nodes", "min_available_clients", 2)),
    }


if __name__ == "__main__":
    main()
