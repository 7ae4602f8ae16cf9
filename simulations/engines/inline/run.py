"""Run a Flower app inline: the ServerApp and the ClientApp of a run, in one process."""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flwr_privacy.clients.profiling import PROFILE_VARIABLE
from flwr_privacy.clients.profiling.recorder import sampling
from flwr_privacy.clients.profiling.samples import SERVER, check_profile
from flwr_privacy.simulations.engines.profiling.report import profiled

from .faults import Fault
from .flower_internals import SERVER_NODE_ID, acting_as_server
from .grid import InlineGrid
from .workers import WorkerPool

__all__ = ["run_inline", "run_on"]


def run_inline(
    server_app: ServerApp,
    client_app: ClientApp | str,
    *,
    nodes: int | Sequence[Mapping[str, Any]],
    run_config: Mapping[str, Any] | None = None,
    faults: Sequence[Fault] = (),
    workers: int = 0,
    serialise: bool = False,
    state: str | Path | None = None,
    insecure_seed: int | None = None,
    pool: WorkerPool | None = None,
    profile: str | Path | None = None,
) -> None:
    """Run an app to its end.

    Parameters
    ----------
    server_app : ServerApp
        The app's server half.
    client_app : ClientApp or str
        Its client half; with workers a reference "module:attribute".
    nodes : int or sequence of mappings
        Number of nodes, or the configuration of each.
    run_config : mapping, optional
        The run's configuration.
    faults : sequence of Fault
        Faults to inject.
    workers : int, default 0
        Number of worker processes.
    serialise : bool, default False
        Whether messages go through Flower's serialisation, as in a deployment.
    state : path, optional
        Folder for what clients keep (ledgers, replies); by default one that is removed at the end.
    insecure_seed : int, optional
        Seed of the clients' noise, for tests: nothing is protected then.
    pool : WorkerPool, optional
        Runs `client_app`, in place of a new pool with `workers` processes; it stays open.
    profile : path, optional
        Folder for a profile of the run: where the time of the server and of the workers goes. An
        earlier profile there is replaced. By default the environment's FLWR_PRIVACY_PROFILE names
        one, to which samples are added.

    Raises
    ------
    EngineError
        If there is to be a profile, and pyinstrument is not installed.
    InvalidParameterError
        If a value is not allowed, or the folder of the profile cannot be written.
    Exception
        Whatever the ServerApp raises.
    """
    grid_of_run = partial(
        InlineGrid,
        client_app,
        nodes,
        run_config=run_config,
        faults=faults,
        workers=workers,
        serialise=serialise,
        state=state,
        insecure_seed=insecure_seed,
        pool=pool,
    )
    with _profiled(profile):
        run_on(grid_of_run(), server_app, run_config)


def _profiled(folder: str | Path | None) -> AbstractContextManager[None]:
    if folder is not None:
        return profiled(folder)
    if named := os.environ.get(PROFILE_VARIABLE):
        return sampling(check_profile(named), SERVER)
    return nullcontext()


def run_on(
    grid: InlineGrid, server_app: ServerApp, run_config: Mapping[str, Any] | None = None
) -> None:
    """Run an app's server half on a grid to its end, and close the grid.

    Raises
    ------
    Exception
        Whatever the ServerApp raises.
    """
    context = Context(
        run_id=grid.run_id,
        node_id=SERVER_NODE_ID,
        node_config={},
        state=RecordDict(),
        run_config=dict(run_config or {}),
    )
    try:
        with acting_as_server(grid.run_id):
            server_app(grid, context)
    finally:
        grid.close()
