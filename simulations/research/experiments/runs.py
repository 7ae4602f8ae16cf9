"""Trains the runs of an experiment, several at a time; finished runs are reused.

Points of curves whose settings are the same share a run.
"""

import json
import math
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from flwr_privacy.errors import (
    DataError,
    EngineError,
    FlwrPrivacyError,
    InvalidParameterError,
    NothingTrainedError,
    TooFewTrainedError,
    check_integer,
)
from flwr_privacy.simulations.research.points import Values
from flwr_privacy.simulations.runner.jobs import Engine, carry_out
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.settings.schemes import scheme
from flwr_privacy.wire.files import write_text

from .curves import TrainedRun, diverged
from .description import Curve, ExperimentDescription
from .functions import FUNCTIONS
from .search import chosen as best_runs

__all__ = ["function_points", "train"]

_SPAWN = multiprocessing.get_context("spawn")  # torch and threads do not survive a fork


def train(
    chosen: ExperimentDescription,
    out: Path,
    *,
    seeds: Sequence[int],
    engine: Engine,
    jobs: int = 1,
    full: bool = False,
    data_root: Path | None = None,
) -> list[TrainedRun]:
    """Train all curves with all seeds and return what came of them.

    A run that is complete in its folder is not trained again; one that was broken off is, from the
    start. So an experiment that was interrupted goes on where it was, and seeds may be added.

    Parameters
    ----------
    chosen : ExperimentDescription
        What to train.
    out : Path
        Folder for the runs, one folder each.
    seeds : Sequence of int
        Roots of all draws; each seed has a split of the data of its own.
    engine : Engine
        Where the runs are carried out.
    jobs : int, default 1
        Number of processes that carry out a run each; Ray is one engine for all and takes 1.
    full : bool, default False
        Whether to train at the paper's size.
    data_root : Path, optional
        Folder with the data sets that no library brings.

    Raises
    ------
    InvalidParameterError
        If a setting is not allowed, or a run's folder holds a run with other settings.
    DataError
        If data is missing, or what was kept of a seed is damaged.
    EngineError
        If a run fails for another reason than that its model is not finite any more.
    """
    check_integer("--jobs", jobs, minimum=1, maximum=1 if engine.name == "ray" else None)
    if chosen.function:
        return _values(chosen, out, seeds=seeds, jobs=jobs, full=full, data_root=data_root)
    planned = [
        (
            plan,
            chosen.settings(
                plan.curve,
                seed=seed,
                full=full,
                data_root=data_root,
                x=plan.x,
                candidate=plan.candidate,
            ),
        )
        for seed in seeds  # outside: what is broken off has all curves of its first seeds
        for plan in chosen.planned(full=full)
    ]
    _check(settings for _, settings in planned)
    folders: dict[str, RunFolder] = {}
    for plan, settings in planned:
        if (text := settings.to_toml()) not in folders:
            path = out / f"{plan.slug}-seed-{settings.seed}"
            folders[text] = _folder(path, settings, engine)
    waiting = [folder for folder in folders.values() if not _complete(folder)]
    if jobs == 1 or len(waiting) < 2:
        _carry_out(waiting, engine)
    else:
        _side_by_side(waiting, engine, jobs)
    found: dict[tuple[str, float | None], list[TrainedRun]] = {}
    for plan, settings in planned:
        run = TrainedRun.of(folders[settings.to_toml()], curve=plan.curve.label, seed=settings.seed)
        place = (plan.curve.label, plan.x)
        found.setdefault(place, []).append(replace(run, x=plan.x, candidate=plan.candidate))
    delta = {plan.curve.label: settings.strategy.get("delta", 0.0) for plan, settings in planned}
    searched = {curve.label for curve in chosen.curves if curve.search is not None}
    runs = [
        run
        for (label, _), own in found.items()
        for run in (best_runs(own, delta=delta[label]) if label in searched else own)
    ]
    return sorted(runs, key=lambda run: list(seeds).index(run.seed))


def _values(
    chosen: ExperimentDescription,
    out: Path,
    *,
    seeds: Sequence[int],
    jobs: int,
    full: bool,
    data_root: Path | None,
) -> list[TrainedRun]:
    """Return the points of a function's curves, for each seed if it depends on one.

    What a seed came to is kept in a file, as runs are in their folders.
    """
    function = FUNCTIONS[chosen.function]
    seeds = seeds if function.seeded else [0]
    if function.check is not None:
        for *_, point in function_points(chosen, full=full):
            function.check(point)
    if function.seeded:
        out.mkdir(parents=True, exist_ok=True)
    work = [(chosen, out, seed, full, data_root) for seed in seeds]
    if jobs == 1 or len(seeds) == 1:
        return [run for one in work for run in _points(*one)]
    with ProcessPoolExecutor(jobs, mp_context=_SPAWN, initializer=_quiet) as pool:
        return [run for runs in pool.map(_alone_points, work) for run in runs]


def _alone_points(
    work: tuple[ExperimentDescription, Path, int, bool, Path | None],
) -> list[TrainedRun]:
    try:
        with threadpool_limits(1):  # as many as processes would stand in each other's way
            return _points(*work)
    except InvalidParameterError as error:  # it cannot be sent to another process
        raise EngineError(str(error)) from None


def function_points(
    chosen: ExperimentDescription, *, full: bool
) -> list[tuple[Curve, float, dict[str, Any]]]:
    """Return what a function is to draw: for each curve and place the settings of the point."""
    sweep = chosen.sweep
    assert sweep is not None  # checked when the file was read
    found = []
    for curve in chosen.curves:
        settings = {**chosen.base, **curve.settings}
        if full:
            settings = {**chosen.base, **chosen.full, **curve.settings, **curve.full}
        found += [(curve, x, {**settings, sweep.key: x}) for x in sweep.of(full=full)]
    return found


def _points(
    chosen: ExperimentDescription, out: Path, seed: int, full: bool, data_root: Path | None
) -> list[TrainedRun]:
    """Return all points of a function's curves for one seed."""
    function = FUNCTIONS[chosen.function]
    places = function_points(chosen, full=full)
    points = [point for *_, point in places]
    path = out / f"seed-{seed}.json"
    found: Sequence[Values]
    if function.seeded and path.exists():
        found, seconds = _kept(path, points)
    else:
        started = time.perf_counter()
        found = function.of(points, seed, data_root)
        seconds = (time.perf_counter() - started) / len(places)
        if function.seeded:
            kept = {"points": points, "values": found, "seconds": seconds}
            write_text(path, json.dumps(kept, default=float) + "\n")
    runs = []
    for (curve, x, point), values in zip(places, found, strict=True):
        rounds = {"rounds": [point["round"]]} if "round" in point else {}
        runs.append(
            TrainedRun(
                curve=curve.label,
                seed=seed,
                values={**{name: [value] for name, value in values.items()}, **rounds},
                diverged=not all(math.isfinite(value) for value in values.values()),
                model=Path(),
                x=x,
                exact=not function.seeded,
                note=function.note(point) if function.note else "",
                seconds=seconds,
            )
        )
    return runs


def _kept(path: Path, points: list[dict[str, Any]]) -> tuple[list[Values], float]:
    """Return the values of points, and the seconds of each, from a file."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        of, values, seconds = (kept[key] for key in ("points", "values", "seconds"))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no values of a seed ({error!r}); remove it") from error
    if of != json.loads(json.dumps(points, default=float)):
        allowed = f"another folder: {path.name} has other settings"
        raise InvalidParameterError("--out", str(path.parent), allowed)
    return values, seconds


def _check(planned: Iterable[Settings]) -> None:
    """Refuse at once what the app would refuse later."""
    from flwr_privacy.simulations.app.server_app import build_strategy
    from flwr_privacy.simulations.tasks.lookup import check_own_task
    from flwr_privacy.simulations.tasks.tasks import check_data, task_of

    for settings in planned:
        scheme(settings.scheme)
        check_own_task(task_of(settings), settings.data_root)
        build_strategy(settings, None)
        check_data(settings)


def _folder(path: Path, settings: Settings, engine: Engine) -> RunFolder:
    """Return the folder of a run: as it is if the run is complete, else a new one."""
    from flwr_privacy.simulations.tasks.lookup import task_digest

    digest = task_digest(settings.task)
    if path.exists():
        folder = RunFolder.open(path)
        if folder.task_digest != digest:
            allowed = f"another folder: {path.name} was trained on another task of that name"
            raise InvalidParameterError("--out", str(path.parent), allowed)
        if replace(folder.settings, data_root=None) != replace(settings, data_root=None):
            raise InvalidParameterError(
                "--out", str(path.parent), f"another folder: {path.name} has other settings"
            )
        if _complete(folder):
            return folder
        shutil.rmtree(path)
    return RunFolder.create(
        path,
        settings,
        engine=engine.name,
        nodes=engine.nodes(settings),
        task_digest=digest,
    )


def _complete(folder: RunFolder) -> bool:
    status = folder.summary["status"]
    return status == "completed" or (status == "failed" and diverged(folder.rounds()))


def _carry_out(runs: list[RunFolder], engine: Engine) -> None:
    """Carry out runs; one whose model is not finite any more is a result, and the rest goes on."""
    while runs:
        try:
            return carry_out(runs, engine)
        except (EngineError, NothingTrainedError, TooFewTrainedError):
            failed = [run.summary["status"] == "failed" for run in runs].index(True)
            if not diverged(runs[failed].rounds()):
                raise
            runs = runs[failed + 1 :]


def _side_by_side(runs: list[RunFolder], engine: Engine, jobs: int) -> None:
    console = Console()
    with ProcessPoolExecutor(jobs, mp_context=_SPAWN, initializer=_quiet) as pool:
        futures = [pool.submit(_alone, run.path, engine) for run in runs]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                name = future.result()
                console.print(f"{done}/{len(runs)} runs: {name}", highlight=False)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _alone(path: Path, engine: Engine) -> str:
    try:
        _carry_out([RunFolder.open(path)], engine)
    except FlwrPrivacyError as error:  # not all of them can be sent to another process
        raise EngineError(f"{path.name}: {error}") from None
    return path.name


def _quiet() -> None:
    """Give up this process's part of the screen: there is one, and several runs."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (as long as the process)
