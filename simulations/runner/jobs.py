"""Carries out runs on an engine, shows their progress, and records how they ended."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer
from flwr_privacy.simulations.engines.placement import Machine, check_cpus, check_gpus
from flwr_privacy.simulations.engines.ray_engine import RayResources, RaySession
from flwr_privacy.simulations.settings.metrics_file import follow
from flwr_privacy.simulations.settings.own_code import is_reference, search_current_folder
from flwr_privacy.simulations.settings.run_folder import RunFolder, kept
from flwr_privacy.simulations.settings.run_settings import Settings

from .complete_settings import DEFAULT_CLIENTS
from .loggers import LoggedRounds
from .progress import Progress

__all__ = [
    "Engine",
    "carry_out",
    "check_task",
    "logged",
    "model_bytes",
    "next_folder",
    "shown",
    "watched",
]

APP = Path(__file__).parent.parent
CLIENT_APP = "flwr_privacy.simulations.app.client_app:app"
SEED_WARNING = (
    "WARNING: --test-seed: what the clients draw in secret, their noise above all, can be computed "
    "from the seed. Nothing is protected. For tests only."
)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Options of the engine that carries out the runs.

    Parameters
    ----------
    name : {"ray", "inline"}, default "ray"
        Flower's Ray engine through `flwr run`, or this process.
    workers : int, optional
        Number of nodes that run the clients between them; by default one node per client. The
        inline engine gives each worker a process of its own.
    resources : RayResources
        What Ray has and what a node gets.
    port : int, optional
        Port of the SuperLink for Ray.
    test_seed : int, optional
        Seed of what the clients draw in secret, for tests: nothing is protected.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or a Ray cluster that runs already is to get the seed.
    """

    name: str = "ray"
    workers: int | None = None
    resources: RayResources = field(default_factory=RayResources)
    port: int | None = None
    test_seed: int | None = None

    def __post_init__(self) -> None:
        check_choice("engine", self.name, ("ray", "inline"))
        if self.test_seed is not None:
            check_integer("--test-seed", self.test_seed, minimum=0)
            if self.resources.ray_address is not None:
                allowed = "none with ray_address: a cluster that runs has an environment of its own"
                raise InvalidParameterError("--test-seed", self.test_seed, allowed)
        if self.workers is not None:
            check_integer("workers", self.workers, minimum=1)
        if self.port is not None:
            check_integer("--port", self.port, minimum=1, maximum=65535)

    def nodes(self, settings: Settings) -> int:
        """Return the number of nodes for a run.

        Raises
        ------
        InvalidParameterError
            If there are more workers than clients.
        """
        clients = settings.clients or DEFAULT_CLIENTS
        if self.workers is None:
            return clients
        if self.workers > clients:
            allowed = f"at most {clients}, the number of clients"
            raise InvalidParameterError("workers", self.workers, allowed)
        return self.workers


def next_folder(parent: Path, settings: Settings) -> Path:
    """Return a folder for a run that does not exist yet: ``fedavg-digits-mlp-1`` and so on."""
    number, name = 1, f"{settings.scheme}-{settings.task.replace(':', '-')}"
    while (path := parent / f"{name}-{number}").exists():
        number += 1
    return path


def model_bytes(settings: Settings) -> int:
    """Return the size of the model that a run trains."""
    from flwr_privacy.simulations.app.server_app import initial_arrays  # late: it brings torch

    return sum(len(array.data) for array in initial_arrays(settings).values())


def check_task(run: RunFolder) -> None:
    """Refuse a run of a user's task that is not the one any more with which it has begun.

    Raises
    ------
    CheckpointError, DataError, InvalidParameterError
        As `flwr_privacy.simulations.tasks.lookup.check_same_task`.
    """
    if not (digest := run.task_digest):
        return
    from flwr_privacy.simulations.tasks.lookup import check_same_task  # late: it brings torch

    if is_reference(name := run.settings.task):
        search_current_folder()
    check_same_task(name, digest)


def check_machine(engine: Engine, settings: Settings) -> None:
    """Refuse resources for a client of a run that this machine does not have.

    Raises
    ------
    InvalidParameterError
        If a client is to get more than there is.
    """
    if engine.name != "ray":
        return
    check_cpus(engine.resources, os.cpu_count() or 1)  # all that Ray sees, whatever is free
    if engine.resources.gpus_per_client:
        check_gpus(engine.resources, Machine.here(), model_bytes=model_bytes(settings))


def check_cluster(engine: Engine, runs: list[RunFolder]) -> None:
    """Refuse a running Ray cluster with a host that cannot run the clients of all runs.

    Raises
    ------
    EngineError
        If there is one; see `flwr_privacy.simulations.engines.ray_hosts.check_hosts`.
    """
    if engine.name != "ray" or engine.resources.ray_address is None:
        return
    # Late: they bring Flower.
    from flwr_privacy.simulations.engines.ray_hosts import HostNeeds, check_hosts
    from flwr_privacy.simulations.settings.schemes import client_of

    def has_cohorts(run: RunFolder) -> bool:
        return int(run.summary["nodes"]) < (run.settings.clients or DEFAULT_CLIENTS)

    needs = HostNeeds(
        cohorts=any(map(has_cohorts, runs)),
        folders=[run.path for run in runs if not client_of(run.settings).bare],
    )
    check_hosts(engine.resources.ray_address, needs)


def carry_out(
    runs: list[RunFolder],
    engine: Engine,
    *,
    resume: bool = False,
    accept_lost_rounds: bool = False,
    log: str | None = None,
    show: Callable[[RunFolder], AbstractContextManager[None]] | None = None,
) -> None:
    """Carry out runs one after another on one engine.

    Parameters
    ----------
    runs, engine
        What to carry out, and where.
    resume, accept_lost_rounds : bool, default False
        Whether to go on from the runs' checkpoints, and from older ones: see `LoopOptions`.
    log : str, optional
        What their rounds are logged to: see `flwr_privacy.simulations.runner.loggers.logger_maker`.
    show : callable, optional
        Shows a run while its context is open, in place of `shown`, which logs.

    Raises
    ------
    FlwrPrivacyError
        If a run fails; its folder then says why. Also if the logger raised, once the run is over.
    """
    with kept(*runs, ends=False):
        for run in runs:
            check_task(run)
            check_machine(engine, run.settings)
    with ExitStack() as stack:
        session: RaySession | None = None
        if engine.name == "ray":
            session = RaySession(
                resources=engine.resources,
                port=engine.port,
                log_path=runs[0].log_path,
                test_seed=engine.test_seed,
            )
            with kept(*runs, ends=False):
                stack.enter_context(session)
                check_cluster(engine, runs)
        pool = None
        if engine.name == "inline":
            from flwr_privacy.simulations.engines.inline.workers import WorkerPool  # brings Flower

            workers = 0 if engine.workers in (None, 1) else engine.workers
            pool = WorkerPool(CLIENT_APP, workers or 0)  # the processes take seconds to start
            stack.callback(pool.close)
        for run in runs:
            with show(run) if show else shown(run, log=log), kept(run):
                run.begin()
                config = run.app_config(resume=resume, accept_lost_rounds=accept_lost_rounds)
                nodes = int(run.summary["nodes"])
                if session is not None:
                    session.run(APP, nodes=nodes, run_config=config)
                else:
                    with logged(run.log_path):
                        _inline(run, config, engine, pool, nodes=nodes)


def _inline(
    run: RunFolder,
    config: dict[str, str | bool],
    engine: Engine,
    pool: Any,
    *,
    nodes: int,
) -> None:
    # Imported late: the apps bring torch, which no other command needs.
    from flwr_privacy.simulations.app.server_app import app
    from flwr_privacy.simulations.engines.inline import run_inline
    from flwr_privacy.simulations.settings.schemes import client_of

    state = None
    if not client_of(run.settings).bare:
        state = run.path.resolve() / "clients"
        state.mkdir(exist_ok=True)
    run_inline(
        app,
        CLIENT_APP,
        nodes=nodes,
        run_config=config,
        state=state,
        insecure_seed=engine.test_seed,
        pool=pool,
    )


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Send Flower's log to a file; the terminal shows the progress."""
    logger = logging.getLogger("flwr")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = logger.handlers
    logger.handlers = [handler]
    try:
        yield
    finally:
        logger.handlers = before
        handler.close()


@contextmanager
def shown(run: RunFolder, *, log: str | None = None) -> Iterator[None]:
    """Show the progress of a run on standard output, and log its rounds.

    Raises
    ------
    FlwrPrivacyError
        If the logger cannot be made; or it raised, at the end of a run that did not fail.
    """
    with (
        Progress(run.path.name, run.settings.rounds) as progress,
        watched(run, progress.update, log=log),
    ):
        yield


@contextmanager
def watched(
    run: RunFolder, update: Callable[[Mapping[str, Any]], None], *, log: str | None = None
) -> Iterator[None]:
    """Tell of the rounds while the app writes them, in whichever process it runs.

    `update` gets the line of each round, in a thread of its own. The errors are those of `shown`.
    """
    done, opened = threading.Event(), threading.Event()
    logged = LoggedRounds(log, run.path.resolve().name)

    def watch() -> None:
        logged.open()
        opened.set()
        told = -1  # a resumed run writes its earlier rounds again
        for line in follow(run.metrics_path, done.is_set):
            logged.log(line)
            if line["round"] > told:
                update(line)
                told = line["round"]
        logged.close()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        opened.wait()
        logged.check()
        yield
    finally:
        done.set()
        watcher.join()
    logged.check()
