"""The server half of the app: trains as the settings say and writes the run folder."""

import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from flwr_privacy.errors import InvalidParameterError, check_number
from flwr_privacy.keywords import option_types
from flwr_privacy.simulations.settings.effect import check_effect, dotted
from flwr_privacy.simulations.settings.flat_options import flat_keys, strategy_of
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.settings.schemes import scheme
from flwr_privacy.simulations.tasks import tasks
from flwr_privacy.simulations.tasks.lookup import check_same_task
from flwr_privacy.simulations.tasks.vertical_tasks import (
    VerticalTask,
    server_model_of,
    vertical_labels,
    vertical_task,
)
from flwr_privacy.strategies import SchemeStrategy

__all__ = ["app", "build_strategy", "initial_arrays"]

app = ServerApp()

DATA = "data"
"""Value of ``strategy.shares`` that stands for the numbers of the clients' records."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, as the run's configuration says."""
    text = str(context.run_config["settings"])
    settings = Settings.from_toml(text)
    check_same_task(settings.task, str(context.run_config.get("task-digest", "")))
    run_dir = str(context.run_config["run-dir"])
    if not run_dir:  # `flwr run`: nobody has looked at these settings before
        check_effect(settings, dotted(tomllib.loads(text)))
    run = RunFolder.open(run_dir) if run_dir else None
    with nullcontext() if run is None else run.served():
        strategy = build_strategy(
            settings,
            run,
            resume=bool(context.run_config["resume"]),
            accept_lost_rounds=bool(context.run_config.get("accept-lost-rounds", False)),
        )
        result = strategy.start(
            grid,
            initial_arrays(settings),
            num_rounds=settings.rounds,
            train_config=ConfigRecord({"seed": settings.seed}),
            evaluate_fn=_evaluate_fn(settings),
        )
        if run is not None:
            save_model(run.model_path, result.arrays)


def build_strategy(
    settings: Settings,
    run: RunFolder | None,
    *,
    resume: bool = False,
    accept_lost_rounds: bool = False,
) -> SchemeStrategy:
    """Return the strategy of a run.

    Raises
    ------
    InvalidParameterError
        If a setting of the scheme is unknown, out of range or without effect.
    """
    chosen = scheme(settings.scheme)
    tasks.task_of(settings)  # one that the scheme can train
    nodes = None if run is None else int(run.summary["nodes"])
    # Exactly so many clients: a fraction that is too small to count, and a minimum that does.
    fraction, minimum = (1.0, 1) if settings.per_round is None else (1e-9, settings.per_round)
    own = dict(settings.strategy)
    # Clients evaluate by default where that is what was chosen.
    usual = 1.0 if own.get("evaluation") and "evaluation" in option_types(chosen.strategy) else 0.0
    parameters: dict[str, Any] = {
        "fraction_train": fraction,
        "min_train_nodes": minimum,
        "fraction_evaluate": settings.fraction_evaluate or usual,
        "min_evaluate_nodes": 1,
        "min_available_nodes": nodes or 1,
        "seed": settings.seed,
        "clients": settings.clients,
        "quorum": settings.quorum,
        "deadline": settings.deadline,
        "stragglers": settings.stragglers,
        "secure_sum": settings.secure_sum,
        "name": f"task {settings.task}",
        "run_dir": None if run is None else run.path,
        "experiment_id": None if run is None else run.summary["experiment_id"],
        "resume": resume,
        "accept_lost_rounds": accept_lost_rounds,
    }
    if chosen.validated and own.get("schedule") in ("discounting", "plateau"):
        own.setdefault("validation", _validation_fn(settings))
    parameters |= chosen.fixed(settings)
    if clashing := sorted(set(settings.strategy) & set(parameters)):
        raise InvalidParameterError("strategy", clashing, "the scheme's own parameters only")
    if chosen.own_client:
        parameters |= _of_the_task(settings)
    if chosen.vertical:
        parameters |= _of_the_columns(settings)
    if own.get("shares") == DATA and "shares" in flat_keys(chosen.strategy):
        own["shares"] = tasks.client_sizes(tasks.task(settings.task), settings)
    strategy = strategy_of(chosen.strategy, {**parameters, **own})
    if settings.fraction_evaluate not in (0, strategy.fraction_evaluate):
        allowed = f"0: the clients of '{settings.scheme}' evaluate nothing with these settings"
        raise InvalidParameterError("fraction_evaluate", settings.fraction_evaluate, allowed)
    return strategy


def initial_arrays(settings: Settings) -> ArrayRecord:
    """Return the model to start from: in float64 where clients compute gradients themselves."""
    task = tasks.task_of(settings)
    if isinstance(task, VerticalTask):
        initial = server_model_of(task, settings).initial()
    else:
        initial = tasks.initial_arrays(task, settings.seed)
    if scheme(settings.scheme).own_client:
        initial = {name: array.astype(np.float64) for name, array in initial.items()}
    return ArrayRecord({name: Array(array) for name, array in initial.items()})


def _evaluate_fn(settings: Settings) -> Callable[[int, ArrayRecord], MetricRecord] | None:
    """Return what evaluates a model on the test records; None if the strategy does, or nothing."""
    task = tasks.task_of(settings)
    if isinstance(task, VerticalTask) or not tasks.is_tested(task, settings):
        return None

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = {name: array.numpy() for name, array in arrays.items()}
        return MetricRecord(dict(tasks.evaluate_server(task, settings, model)))

    return evaluate


def _of_the_columns(settings: Settings) -> dict[str, Any]:
    """Return what the server has where clients have columns, and the task's usual parameters."""
    task = vertical_task(settings.task)
    labels, test_labels = vertical_labels(task, settings)
    own = {
        "labels": labels,
        "test_labels": test_labels,
        "server_model": server_model_of(task, settings),
    }
    if clashing := sorted(set(settings.strategy) & set(own)):
        allowed = f"nothing: they follow from the task '{settings.task}'"
        raise InvalidParameterError("strategy", clashing, allowed)
    chosen, training = settings.strategy, settings.training
    step = chosen.get("learning_rate")
    own["learning_rate"] = training.learning_rate if step is None else step
    rate = check_number("learning_rate", own["learning_rate"]) * task.client_rate
    usual = {"embedding": task.embedding, "order": task.order, "client_learning_rate": rate}
    own |= {name: value for name, value in usual.items() if name not in chosen}
    return own if "batch_size" in chosen else {**own, "batch_size": training.batch_size}


def _of_the_task(settings: Settings) -> dict[str, Any]:
    """Return the parameters that follow from the task; those of them that may be chosen are."""
    parameters = tasks.regression_parameters(tasks.task(settings.task), settings)
    for name in ("learning_rate", "max_records"):
        if name in settings.strategy:
            del parameters[name]
    if clashing := sorted(set(settings.strategy) & set(parameters)):
        allowed = f"nothing: they follow from the task '{settings.task}'"
        raise InvalidParameterError("strategy", clashing, allowed)
    return parameters


def _validation_fn(settings: Settings) -> Callable[[int, ArrayRecord], float]:
    """Return what tells a strategy how good a model is, on records that the server holds."""
    task = tasks.task(settings.task)

    def validate(server_round: int, arrays: ArrayRecord) -> float:
        model = {name: array.numpy() for name, array in arrays.items()}
        return tasks.validation_loss(task, settings, model)

    return validate


def save_model(path: Path, arrays: ArrayRecord) -> None:
    """Write the final model as an npz archive of its arrays by name."""
    model: dict[str, Any] = {name: array.numpy() for name, array in arrays.items()}
    np.savez(path, allow_pickle=False, **model)
