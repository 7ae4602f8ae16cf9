"""The options that `run` and `deploy` share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.settings.run_settings import parse_assignments

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
