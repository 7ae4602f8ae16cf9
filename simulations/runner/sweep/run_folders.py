"""The folders of a sweep: new ones for new runs, and those of an earlier call as they are."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.runner.jobs import Engine, carry_out
from flwr_privacy.simulations.settings.effect import flat_settings
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.wire.files import write_text

from .bar import SweepBar
from .points import Point

__all__ = ["carry_out_missing", "check_same", "check_same_task", "open_or_create", "sweep_folder"]

RUNS = Path("runs")
_TASK_FILE = "task.json"


def sweep_folder(out: str | Path | None, name: str) -> Path:
    """Return the folder of a sweep; by default one that does not exist yet."""
    if out is not None:
        return Path(out)
    number = 1
    while (path := RUNS / f"{name}-{number}").exists():
        number += 1
    return path


def check_same_task(folder: Path, digests: Mapping[str, str]) -> None:
    """Refuse what the earlier runs of a folder did not train.

    Raises
    ------
    InvalidParameterError
        If the folder has runs with other data, or another model or loss; it says what differs.
    """
    path = folder / _TASK_FILE
    if path.exists():
        before = json.loads(path.read_bytes())
        if differing := [part for part in digests if before.get(part) != digests[part]]:
            allowed = f"another folder: its runs were made with other {', '.join(differing)}"
            raise InvalidParameterError("out", str(folder), allowed)


def open_or_create(
    folder: Path, points: Sequence[Point], engine: Engine, digests: Mapping[str, str]
) -> list[RunFolder]:
    """Return the folder of each run, and note beside them what they train.

    Raises
    ------
    InvalidParameterError
        If there is a run with other settings; it says what differs.
    """
    for point in points:  # before the first new folder is made
        path = folder / point.folder
        if path.exists():
            there = flat_settings(RunFolder.open(path).settings)
            check_same(path, there, flat_settings(_settings_of(point)))
        engine.nodes(_settings_of(point))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / _TASK_FILE, json.dumps(dict(digests), indent=1) + "\n")
    runs = []
    for point in points:
        path, settings = folder / point.folder, _settings_of(point)
        if path.exists():
            runs.append(RunFolder(path))
            continue
        nodes = engine.nodes(settings)
        runs.append(RunFolder.create(path, settings, engine=engine.name, nodes=nodes))
    return runs


def carry_out_missing(runs: Sequence[RunFolder], engine: Engine, progress: bool | None) -> None:
    """Carry out the runs that are not complete; those that were broken off go on.

    Raises
    ------
    FlwrPrivacyError
        If a run fails; its folder then says why.
    """
    waiting = [run for run in runs if run.summary["status"] != "completed"]
    rounds = sum(run.settings.rounds for run in waiting)
    with (
        ExitStack() as locks,
        SweepBar(rounds=rounds, runs=len(waiting), progress=progress) as bar,
    ):
        for run in waiting:
            locks.enter_context(run.alone())
            if run.summary["status"] != "created":
                run.check_resumable()
                run.reopen()
        if waiting:
            carry_out(waiting, engine, resume=True, show=bar.show)


def check_same(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse a folder whose run has other settings than the one that is to go there.

    Raises
    ------
    InvalidParameterError
        If it has; it says what differs.
    """
    differing = [
        f"{key} = {_told(there, key)} there and {_told(here, key)} here"
        for key in dict.fromkeys([*there, *here])
        if there.get(key) != here.get(key)
    ]
    if differing:
        allowed = f"another folder: the run in it has {'; '.join(differing)}"
        raise InvalidParameterError("out", str(path), allowed)


def _settings_of(point: Point) -> Settings:
    if point.settings is None:
        raise TypeError("a run of an app has no settings")
    return point.settings


def _told(settings: Mapping[str, Any], key: str) -> str:
    return repr(settings[key]) if key in settings else "nothing"
