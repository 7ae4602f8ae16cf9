"""The options that `run` and `deploy` share, and the settings that they make."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.runner.jobs import DEFAULT_CLIENTS
from flwr_privacy.simulations.settings.own_code import is_reference, search_current_folder
from flwr_privacy.simulations.settings.run_settings import (
    Settings,
    check_known,
    parse_assignments,
    with_scheme_parameters,
)

__all__ = [
    "AcceptLostRounds",
    "Assignments",
    "DataRoot",
    "Log",
    "Out",
    "Rounds",
    "Scheme",
    "Seed",
    "Task",
    "given",
    "settings_of",
]

Scheme = Annotated[
    str | None,
    typer.Option(
        help="Scheme or baseline, by default fedavg; all of them are listed below. With --help: "
        "the parameters of the scheme."
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        help="Task, by default digits-mlp; all of them are listed below. Or one of your own, as "
        "module:function in the current folder (docs/simulation.md)."
    ),
]
Rounds = Annotated[int | None, typer.Option(help="Learning rounds; by default 10.")]
Seed = Annotated[int | None, typer.Option(help="Root of all seeds; by default 0.")]
DataRoot = Annotated[
    Path | None, typer.Option(help="Folder with the data sets that have to be downloaded.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other setting, as often as needed: training.learning_rate=0.05, "
        "partition.alpha=0.1, stragglers.slow_fraction=0.2; and the scheme's own: unit=record "
        "or strategy.unit=record.",
    ),
]
AcceptLostRounds = Annotated[
    bool,
    typer.Option(
        "--accept-lost-rounds",
        help="With --resume: go on from a checkpoint that is older than the run folder. The rounds "
        "that it lacks are given up; their charges stay on the privacy card.",
    ),
]
Log = Annotated[
    str | None,
    typer.Option(
        help="Where to log the rounds: tensorboard:DIR, or a logger of your own as "
        "module:function (docs/simulation.md)."
    ),
]
Out = Annotated[Path | None, typer.Option(help="Folder of the run; by default a new one in runs/.")]


def given(
    assignments: Sequence[str] | None, data_root: Path | None, **options: Any
) -> dict[str, Any]:
    """Return the settings that a command line has, with dotted keys.

    Raises
    ------
    InvalidParameterError
        If two are for the same key.
    """
    root = None if data_root is None else str(data_root.resolve())
    chosen = {**options, "data_root": root}
    values = {key: value for key, value in chosen.items() if value is not None}
    own = parse_assignments(assignments or [])
    for key in values.keys() & own.keys():
        option = f"--{key.removeprefix('partition.kind') or 'partition'}".replace("_", "-")
        raise InvalidParameterError("--set", f"{key}={own[key]}", f"one value: {option} has one")
    return values | own


def settings_of(
    values: dict[str, Any], *, download: bool = False, say: Callable[[str], Any] = typer.echo
) -> Settings:
    """Return the settings of a run; refuse at once what the app would refuse later.

    Parameters
    ----------
    values : dict
        What was chosen, by dotted key.
    download : bool, default False
        Whether to download missing data sets.
    say : callable
        Is told in one line what the clients hold.
    """
    # Imported late: torch takes seconds, which `--help` need not wait for.
    from flwr_privacy.simulations.app.server_app import build_strategy
    from flwr_privacy.simulations.settings import schemes
    from flwr_privacy.simulations.settings.effect import check_effect, dotted
    from flwr_privacy.simulations.tasks.data import load
    from flwr_privacy.simulations.tasks.lookup import check_own_task
    from flwr_privacy.simulations.tasks.partition import Description
    from flwr_privacy.simulations.tasks.tasks import check_data, task_of
    from flwr_privacy.simulations.tasks.vertical_tasks import VerticalTask

    strategy = schemes.scheme(values.get("scheme", Settings.scheme)).strategy
    own = _own_parameters(strategy)
    for key in values:
        if "." not in key:
            check_known(key, [*own, *(entry.name for entry in fields(Settings))])
    values = with_scheme_parameters(values, own)
    settings = Settings(clients=DEFAULT_CLIENTS).with_values(values)
    if is_reference(settings.task):
        search_current_folder()
    chosen = task_of(settings)
    if isinstance(chosen, VerticalTask):
        common = {"clients": chosen.clients, "rounds": chosen.rounds}
        settings = settings.with_values({k: v for k, v in common.items() if k not in values})
    settings = replace(settings, training=chosen.training).with_values(values)
    if download:  # first: some strategies are made from the data
        if chosen.dataset is None:
            allowed = f"nothing: the task '{settings.task}' brings its own data"
            raise InvalidParameterError("--download", True, allowed)
        load(chosen.dataset, data_root=settings.data_root, download=True)
    found = check_data(settings)
    check_own_task(chosen, settings.data_root)
    fewest = int(found.sizes.min()) if isinstance(found, Description) else None
    usual = schemes.scheme(settings.scheme).usual(settings.strategy, fewest)
    settings = replace(settings, strategy=usual)
    check_effect(settings, dotted(values))
    build_strategy(settings, None)
    if settings.secure_sum is not None and settings.clients is not None:
        settings.secure_sum.colluders_of(settings.clients)  # no cohort has more
    if found is not None:
        say(f"data: {found}")
    return settings


def _own_parameters(strategy: Any) -> set[str]:
    """Return the parameters that a scheme has beyond those of every strategy."""
    from flwr_privacy.simulations.settings.flat_options import flat_keys
    from flwr_privacy.strategies import SchemeStrategy

    return set(flat_keys(strategy)).difference(flat_keys(SchemeStrategy))
