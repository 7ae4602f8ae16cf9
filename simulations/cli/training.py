"""The command `run`."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.engines.placement import Machine, crowded
from flwr_privacy.simulations.engines.ray_engine import RayResources
from flwr_privacy.simulations.reports.tree_nodes import read_tree
from flwr_privacy.simulations.runner.complete_settings import settings_of
from flwr_privacy.simulations.runner.jobs import (
    SEED_WARNING,
    Engine,
    carry_out,
    check_machine,
    next_folder,
)
from flwr_privacy.simulations.runner.loggers import logger_maker
from flwr_privacy.simulations.runner.progress import how_it_ended, planned_rounds
from flwr_privacy.simulations.settings.run_folder import RunFolder, kept

from .operator_options import RUNS
from .profiles import PROFILE, check_sampler, profiled_run, show_profile
from .run_options import (
    AcceptLostRounds,
    Assignments,
    DataRoot,
    Log,
    Out,
    Rounds,
    Scheme,
    Seed,
    Task,
    given,
)

__all__ = ["run"]


def run(
    scheme: Scheme = None,
    task: Task = None,
    clients: Annotated[
        int | None,
        typer.Option(
            help="Clients of the federation; by default 20, for fedvs as many as suit the task."
        ),
    ] = None,
    per_round: Annotated[
        int | None, typer.Option(help="Clients asked in each round; by default all.")
    ] = None,
    rounds: Rounds = None,
    partition: Annotated[
        str | None,
        typer.Option(help="Split of the data, by default iid; all kinds are listed below."),
    ] = None,
    seed: Seed = None,
    data_root: DataRoot = None,
    download: Annotated[
        bool, typer.Option("--download", help="Download the missing data sets into the data root.")
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(help="ray (Flower's simulation engine, default) or inline (this process)."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Nodes that run the clients between them; by default one per client."),
    ] = None,
    cpus_per_client: Annotated[
        float | None,
        typer.Option(help="CPUs that Ray reserves per node: a whole number; by default 1."),
    ] = None,
    gpus_per_client: Annotated[
        float | None,
        typer.Option(help="GPU share that Ray reserves per node, such as 0.5; by default 0."),
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="host:port of a running Ray cluster.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the SuperLink for Ray; by default a free one.")
    ] = None,
    test_seed: Annotated[
        int | None,
        typer.Option(help="Seed of the clients' noise, for tests: NOTHING IS PROTECTED."),
    ] = None,
    assignments: Assignments = None,
    out: Out = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume the run in this folder from its checkpoint.")
    ] = None,
    accept_lost_rounds: AcceptLostRounds = False,
    log: Log = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Say where the time goes: a table, and pages in the run's folder profile "
            "(docs/simulation.md).",
        ),
    ] = False,
) -> None:
    """Train a scheme on a task and keep everything in a run folder."""
    where = Engine(
        name=engine or "ray",
        workers=workers,
        resources=RayResources(
            cpus_per_client=1 if cpus_per_client is None else _whole(cpus_per_client),
            gpus_per_client=0.0 if gpus_per_client is None else gpus_per_client,
            ray_address=ray_address,
        ),
        port=port,
        test_seed=test_seed,
    )
    of_ray = {
        "--cpus-per-client": cpus_per_client,
        "--gpus-per-client": gpus_per_client,
        "--ray-address": ray_address,
        "--port": port,
    }
    values = given(
        assignments,
        data_root,
        scheme=scheme,
        task=task,
        clients=clients,
        per_round=per_round,
        rounds=rounds,
        seed=seed,
        **{"partition.kind": partition},
    )
    if log is not None:
        logger_maker(log)  # before there is a folder
    if profile:
        check_sampler(ray_address)
    if accept_lost_rounds and resume is None:
        raise InvalidParameterError("--accept-lost-rounds", True, "--resume FOLDER beside it")
    if resume is not None:
        if values or any(x is not None for x in (out, workers, test_seed)):
            raise InvalidParameterError(
                "--resume", str(resume), "no other setting beside it: a run keeps its own"
            )
        folder = _unfinished(resume)
        where = replace(where, **_engine_of(folder, engine))
        where.nodes(folder.settings)
        _check_engine(where, of_ray)
    else:
        _check_engine(where, of_ray)
        told: list[str] = []
        settings = settings_of(values, download=download, say=told.append)
        check_machine(where, settings)
        from flwr_privacy.simulations.tasks.lookup import task_digest  # late: it brings torch

        folder = RunFolder.create(
            out or next_folder(RUNS, settings),
            settings,
            engine=where.name,
            nodes=where.nodes(settings),
            test_seed=test_seed,
            task_digest=task_digest(settings.task),
        )
        for line in told:
            typer.echo(line)
    if where.test_seed is not None:
        typer.echo(SEED_WARNING, err=True)
    if where.workers and (warning := crowded(where.workers, Machine.here(gpus=False))):
        typer.echo(warning, err=True)
    try:
        with folder.alone(), profiled_run(folder.path, where.name, profile):
            if resume is not None:
                folder.reopen()
            carry_out(
                [folder],
                where,
                resume=resume is not None,
                accept_lost_rounds=accept_lost_rounds,
                log=log,
            )
    except KeyboardInterrupt:
        typer.echo(f"interrupted; to go on: flwr-privacy run --resume {folder.path}", err=True)
        raise
    if plans := planned_rounds(folder.rounds()):
        typer.echo(f"rounds planned: {plans}")
    if (tree := read_tree(folder.path / "tree.json")) is not None:
        from flwr_privacy.simulations.reports.tree_picture import write_picture

        write_picture(tree, folder.path / "tree.png")
        typer.echo(f"tree: {folder.path / 'tree.png'}")
    for fact in how_it_ended(folder):
        typer.echo(fact)
    if profile:
        show_profile(folder.path / PROFILE)
    typer.echo(f"run: {folder.path}")


def _unfinished(path: Path) -> RunFolder:
    """Return the simulated run in a folder, if it can be gone on with."""
    folder = RunFolder.open(path)
    if folder.summary["engine"] == "deployed":
        allowed = "a simulation; for a run that was deployed: flwr-privacy deploy --resume"
        raise InvalidParameterError("--resume", str(path), allowed)
    with kept(folder, ends=False) if folder.summary["status"] != "completed" else nullcontext():
        folder.check_resumable()
    return folder


def _check_engine(where: Engine, of_ray: Mapping[str, Any]) -> None:
    """Refuse options of Ray where another engine carries the run out."""
    for option, value in of_ray.items():
        if value is not None and where.name != "ray":
            allowed = f"nothing with the engine '{where.name}': it is for --engine ray"
            raise InvalidParameterError(option, value, allowed)


def _engine_of(folder: RunFolder, engine: str | None) -> dict[str, Any]:
    """Return where a run was carried out, for its resume."""
    nodes = int(folder.summary["nodes"])
    clients = folder.settings.clients
    cohorts = clients is not None and nodes < clients
    return {
        "name": engine or folder.summary["engine"],
        "workers": nodes if cohorts else None,
        "test_seed": folder.summary.get("test_seed"),
    }


def _whole(value: float) -> Any:
    # Ray's CPU shares are whole numbers; a fraction goes on as it is, to be refused with its name.
    return int(value) if value.is_integer() else value
