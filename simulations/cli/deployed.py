"""The command `deploy`."""

from pathlib import Path
from typing import Annotated

import typer

from flwr_privacy.errors import EngineError, InvalidParameterError
from flwr_privacy.simulations.runner.complete_settings import settings_of
from flwr_privacy.simulations.runner.jobs import SEED_WARNING, next_folder
from flwr_privacy.simulations.runner.loggers import logger_maker
from flwr_privacy.simulations.runner.progress import how_it_ended
from flwr_privacy.simulations.settings.run_folder import RunFolder

from .operator_options import RUNS
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

__all__ = ["deploy"]


def deploy(
    nodes: Annotated[
        int | None, typer.Option(help="Clients, at least 2, each with a SuperNode of its own.")
    ] = None,
    scheme: Scheme = None,
    task: Task = None,
    rounds: Rounds = None,
    seed: Seed = None,
    data_root: DataRoot = None,
    assignments: Assignments = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="TOML file with the policy of every node (docs/privacy.md)."),
    ] = None,
    no_policy: Annotated[
        bool,
        typer.Option(
            "--no-policy", help="No policy: the nodes give what the server asks for. For trials."
        ),
    ] = False,
    test_seed: Annotated[
        int | None,
        typer.Option(help="Seed of the nodes' noise, for tests: NOTHING IS PROTECTED."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the SuperLink; by default a free one.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which the run is stopped; by default never.")
    ] = None,
    out: Out = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume the deployed run in this folder.")
    ] = None,
    accept_lost_rounds: AcceptLostRounds = False,
    log: Log = None,
) -> None:
    """Train on a SuperLink and SuperNodes of this machine, with TLS and keys of their own."""
    from flwr_privacy.simulations.deployment import deploy as deployed
    from flwr_privacy.simulations.deployment.nodes import check_policy, members_of
    from flwr_privacy.simulations.tasks.lookup import task_digest

    values = given(assignments, data_root, scheme=scheme, task=task, rounds=rounds, seed=seed)
    if log is not None:
        logger_maker(log)  # before there is a folder
    if accept_lost_rounds and resume is None:
        raise InvalidParameterError("--accept-lost-rounds", True, "--resume FOLDER beside it")
    if resume is not None:
        if values or no_policy or any(x is not None for x in (nodes, policy, test_seed, out)):
            allowed = "no other setting beside it but port and timeout: a run keeps its own"
            raise InvalidParameterError("--resume", str(resume), allowed)
        folder, nodes, test_seed = deployed.reopened(resume)
    if nodes is None:
        raise InvalidParameterError("--nodes", None, "the number of clients")
    options = deployed.DeployOptions(
        nodes=nodes, policy=policy, test_seed=test_seed, port=port, timeout=timeout
    )
    if resume is None:
        told: list[str] = []
        settings = settings_of(options.settings_of(values), say=told.append)
        members = members_of(settings, nodes)
        if no_policy == (policy is not None):
            given_policy = None if policy is None else str(policy)
            allowed = "a TOML file with limits such as max_epsilon = 10, or else --no-policy"
            raise InvalidParameterError("--policy", given_policy, allowed)
        if policy is not None:
            check_policy(policy, members)
        folder = RunFolder.create(
            out or next_folder(RUNS, settings),
            settings,
            engine="deployed",
            nodes=len(members),
            test_seed=test_seed,
            task_digest=task_digest(settings.task),
        )
        for line in told:
            typer.echo(line)
    else:
        members = members_of(folder.settings, nodes)
    if test_seed is not None:
        typer.echo(SEED_WARNING, err=True)
    on = f"to go on: flwr-privacy deploy --resume {folder.path}"
    with folder.alone():
        if resume is not None:
            folder.reopen()
        try:
            deployed.deploy(
                folder,
                members,
                options,
                say=typer.echo,
                resume=resume is not None,
                accept_lost_rounds=accept_lost_rounds,
                log=log,
            )
        except KeyboardInterrupt:
            typer.echo(f"interrupted; all that was started is stopped\n{on}", err=True)
            raise
        except EngineError as error:
            whole = folder.summary["status"] == "completed"  # and its logger raised
            if not whole and InvalidParameterError.__name__ not in str(error):  # a kept setting
                error.add_note(on)
            raise
    for line in (*deployed.what_happened(folder), *how_it_ended(folder)):
        typer.echo(line)
    typer.echo(f"run: {folder.path}")
