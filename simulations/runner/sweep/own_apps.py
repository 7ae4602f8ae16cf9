"""Runs a user's ServerApp and ClientApp over run configurations and seeds."""

import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flwr_privacy.errors import DataError, InvalidParameterError, check_integer
from flwr_privacy.privacy.card.folder import CARD, RUNS_VARIABLE
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.runner.jobs import logged
from flwr_privacy.simulations.settings.card_run import CardRun
from flwr_privacy.simulations.tasks.offered import offered_app
from flwr_privacy.wire.files import exclusive_lock, write_text

from .bar import SweepBar
from .points import Point
from .results import Results
from .run_folders import check_same

__all__ = ["app_of", "app_points", "carry_out_app"]

_CONFIG = "run-config.json"
_LOCK = "lock"
_DONE = "completed"  # a file beside the card of a run that came to its end
Config = dict[str, str | int | float | bool]


def app_of(app: Any) -> tuple[ClientApp | str, ServerApp]:
    """Return the two halves of an app.

    Raises
    ------
    InvalidParameterError
        If it is no pair of a ClientApp, or a reference to it, and a ServerApp.
    """
    if not isinstance(app, tuple | list) or len(app) != 2:
        allowed = "(client_app, server_app)"
        raise InvalidParameterError("app", type(app).__name__, allowed)
    client, server = app
    if not isinstance(client, ClientApp | str) or not isinstance(server, ServerApp):
        found = f"({type(client).__name__}, {type(server).__name__})"
        allowed = "(client_app, server_app): a ClientApp, or 'module:attribute', and a ServerApp"
        raise InvalidParameterError("app", found, allowed)
    return client, server


def app_points(
    common: Mapping[str, Any], sweep: Mapping[str, Sequence[Any]], seeds: Sequence[int]
) -> list[tuple[Point, Config]]:
    """Return the runs of an app with their run configurations, the first seed first.

    Raises
    ------
    InvalidParameterError
        If a value is none that a run configuration may have.
    """
    found = []
    for seed in seeds:
        for values in itertools.product(*sweep.values()):
            swept = dict(zip(sweep, values, strict=True))
            config = {**common, **swept, "seed": seed}
            for key, value in config.items():
                if not isinstance(value, str | int | float | bool):
                    allowed = "text, a number or true or false, as a run configuration has them"
                    raise InvalidParameterError(key, value, allowed)
            epsilon = swept.get("epsilon", common.get("epsilon"))
            found.append((Point(label="app", swept=swept, epsilon=epsilon, seed=seed), config))
    return found


def carry_out_app(
    app: tuple[ClientApp | str, ServerApp],
    runs: Sequence[tuple[Point, Config]],
    folder: Path,
    *,
    clients: int,
    workers: int,
    progress: bool | None,
) -> Results:
    """Run an app with each configuration, and return what its strategy left.

    A run that was broken off begins again: only the strategy knows how to go on.

    Raises
    ------
    InvalidParameterError
        If a folder has a run with another configuration.
    DataError
        If the strategy left no privacy card.
    Exception
        Whatever the app raises.
    """
    check_integer("clients", clients, minimum=1)
    client_app, server_app = app
    config = {folder / point.folder: own for point, own in runs}
    for path, own in config.items():
        if (kept := path / _CONFIG).exists():
            check_same(path, json.loads(kept.read_bytes()), {**own, "clients": clients})
    waiting = [path for path in config if _completed(path) is None]
    rounds = sum(int(config[path]["num-server-rounds"]) for path in waiting)
    with (
        SweepBar(rounds=rounds, runs=len(waiting), progress=progress) as bar,
        offered_app(client_app, elsewhere=workers > 1) as client_app,
    ):
        for path in waiting:
            own = config[path]
            path.mkdir(parents=True, exist_ok=True)
            with (
                exclusive_lock(path / _LOCK, timeout=1.0),
                bar.running(path.name, int(own["num-server-rounds"])),
                logged(path / "log.txt"),
            ):
                _run(path, own, (client_app, server_app), clients, workers)
    found = [_found(folder / point.folder) for point, _ in runs]
    labels = [run.settings.scheme for run in found]
    named = [replace(point, label=label) for (point, _), label in zip(runs, labels, strict=True)]
    return Results(folder, list(zip(named, found, strict=True)))


def _run(
    path: Path,
    config: Config,
    app: tuple[ClientApp | str, ServerApp],
    clients: int,
    workers: int,
) -> None:
    for card in path.glob(f"*/{CARD}"):  # of a run that was broken off
        shutil.rmtree(card.parent)
    write_text(path / _CONFIG, json.dumps({**config, "clients": clients}, indent=1) + "\n")
    client_app, server_app = app
    with _cards_in(path):
        run_inline(
            server_app,
            client_app,
            nodes=clients,
            run_config=config,
            workers=0 if workers == 1 else workers,
        )
    (_found(path).path / _DONE).touch()


def _completed(path: Path) -> CardRun | None:
    """Return the run in a folder, if it came to its end."""
    return next((CardRun(done.parent) for done in path.glob(f"*/{_DONE}")), None)


def _found(path: Path) -> CardRun:
    cards = sorted(path.glob(f"*/{CARD}"))
    if not cards:
        raise DataError(
            f"{path}: the app left no privacy card there. Its strategy must be one of "
            "flwr_privacy, without a run_dir of its own and with write_card=True"
        )
    return CardRun(cards[-1].parent)


@contextmanager
def _cards_in(path: Path) -> Iterator[None]:
    """Have strategies leave their cards in a folder."""
    before = os.environ.get(RUNS_VARIABLE)
    os.environ[RUNS_VARIABLE] = str(path.resolve())
    try:
        yield
    finally:
        if before is None:
            del os.environ[RUNS_VARIABLE]
        else:
            os.environ[RUNS_VARIABLE] = before
