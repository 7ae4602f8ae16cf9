"""The function `flwr_privacy.simulate`: own model, own data, schemes, settings and seeds."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from flwr_privacy.clients.torch import Loss
from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.simulations.engines.ray_engine import RayResources
from flwr_privacy.simulations.runner.complete_settings import DEFAULT_CLIENTS
from flwr_privacy.simulations.runner.jobs import Engine
from flwr_privacy.simulations.settings.run_settings import GIVEN, flat_table
from flwr_privacy.simulations.tasks.offered import offered
from flwr_privacy.simulations.tasks.task_list import Task

from .own_apps import app_of, app_points, carry_out_app
from .own_task import digests, own_task
from .points import points, seeds_of, swept_values
from .results import Results
from .run_folders import carry_out_missing, check_same_task, open_or_create, sweep_folder
from .scheme_choices import scheme_choices

__all__ = ["simulate"]


def simulate(
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    data: Any = None,
    test: Any = None,
    app: Any = None,
    schemes: Any = None,
    clients: int | None = None,
    per_round: int | None = None,
    rounds: int = 10,
    partition: str | Mapping[str, Any] | None = None,
    epsilon: float | Sequence[float] | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    seeds: int | Sequence[int] = 1,
    epochs: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    loss: Loss | None = None,
    options: Mapping[str, Any] | None = None,
    name: str = "own",
    engine: str = "inline",
    workers: int = 1,
    gpus_per_client: float | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
) -> Results:
    """Train a model on data of simulated clients, under each scheme with each setting and seed.

    Every run keeps its folder in `out`. The same call with the same `out` again reads the runs that
    are finished and goes on with the others.

    Parameters
    ----------
    model : callable or torch.nn.Module
        A function or class that makes the model: each seed then starts from weights of its own. A
        module is copied, and every run starts from the weights that it has. The model maps a batch
        of features to (n, classes) outputs; its layers draw no random numbers in training.
    data : (features, labels), list or Dataset
        Arrays or tensors of n records, (n, ...) numbers and (n,) classes from 0 on, or a torch
        ``Dataset`` of such pairs, which `partition` splits over the clients. Or a *list* with one
        of these for each client.
    test : (features, labels) or Dataset, optional
        Records on which every model is evaluated after each round. By default a fifth of `data` is
        held out, drawn once for all seeds: of each class, or of each client in a list.
    app : (ClientApp or str, ServerApp), optional
        In place of model and data, an app of your own. Its run configuration has ``seed``,
        ``num-server-rounds``, `options` and one value of each list in `sweep`; its strategy is one
        of this package, without a ``run_dir``. There is a node for each of the `clients`.
    schemes : str, strategy, mapping or list, default "fedavg"
        What to train under: names as `flwr-privacy run --scheme` has them, strategies such as
        ``UDP(privacy=UserLevel())``, or tables of the command line's settings such as
        ``{"scheme": "udp", "unit": "user"}``. Several of them are a list, or a mapping from what
        each is to be called.
    clients : int, default 20
        Number of clients; those of a list of data are counted.
    per_round : int, optional
        Clients asked in each round; by default all.
    rounds : int, default 10
        Rounds of each run.
    partition : str or mapping, default "iid"
        How the records are split: "iid", "dirichlet", "shards", "labels" or "label-sets"; with
        parameters ``{"kind": "dirichlet", "alpha": 0.1}``.
    epsilon : float or list of float, optional
        Privacy budgets, each a run. Schemes without a budget run once for each seed. By default
        each scheme has its own.
    sweep : mapping, optional
        Lists of values of other settings, named as on the command line: ``{"clipping_norm": [0.5,
        1.0], "training.epochs": [1, 5]}``. Schemes that do not have one run without it.
    seeds : int or list of int, default 1
        How many seeds, from 0 on, or which. A seed is the root of the split of the data, of the
        first weights, of the sampling and of the training, and of no noise.
    epochs, batch_size, learning_rate : default 1, 32 and 0.1
        The clients' stochastic gradient descent in a round.
    loss : callable, default cross entropy
        From the outputs for a batch and its labels to their mean loss.
    options : mapping, optional
        Any other setting of all runs, named as on the command line: ``{"deadline": 5.0,
        "stragglers.slow_fraction": 0.2}``.
    name : str, default "own"
        What the model and its data are called in reports, before their digest.
    engine : {"inline", "ray"}, default "inline"
        This process, or Flower's Ray engine.
    workers : int, default 1
        Processes that run the clients between them; inline, one is this process. A script needs no
        ``if __name__ == "__main__":`` for them.
    gpus_per_client : float, optional
        Share of a GPU for each of Ray's workers; by default none.
    out : path, optional
        Folder of the runs; by default a new one in ``runs/``.
    progress : bool, optional
        Whether to show the progress; by default in a terminal and in a notebook.

    Returns
    -------
    Results
        Tables, a picture, the privacy cards, and a report.

    Raises
    ------
    InvalidParameterError
        If an argument is not allowed or has no effect, model, data and loss do not fit, or `out`
        has runs with other settings. Nothing has been trained then.
    DataError
        If a client would have no data.
    FlwrPrivacyError
        If a run fails. Its folder says why, and finished runs are kept.
    KeyboardInterrupt
        If it is interrupted; the same call with the same `out` goes on.

    Notes
    -----
    The guarantee of each run is on its privacy card. Choosing among runs on private data, such as a
    learning rate by its accuracy, is a release of its own that no card has.

    Examples
    --------
    >>> import numpy as np
    >>> from torch import nn
    >>> rng = np.random.default_rng(0)
    >>> features = rng.normal(size=(200, 4)).astype(np.float32)
    >>> results = simulate(  # doctest: +SKIP
    ...     model=lambda: nn.Linear(4, 2),
    ...     data=(features, (features[:, 0] > 0).astype(int)),
    ...     schemes=["fedavg", "central-dp"],
    ...     epsilon=[2, 8],
    ... )
    """
    place = _engine(engine, workers, gpus_per_client)
    check_integer("rounds", rounds, minimum=1)
    training = {
        "training.epochs": epochs,
        "training.batch_size": batch_size,
        "training.learning_rate": learning_rate,
    }
    swept, more = _swept(epsilon, sweep), _mapping("options", options)
    folder, listed = sweep_folder(out, name), seeds_of(seeds)
    try:
        if app is not None:
            of_model = {"model": model, "data": data, "test": test, "schemes": schemes}
            of_model |= {"loss": loss, "per_round": per_round, "partition": partition, **training}
            _check_app(place, of_model)
            _check_once({"num-server-rounds": rounds}, more, swept)
            planned = app_points({"num-server-rounds": rounds, **more}, swept, listed)
            nodes = DEFAULT_CLIENTS if clients is None else clients
            return carry_out_app(
                app_of(app), planned, folder, clients=nodes, workers=workers, progress=progress
            )
        if model is None or data is None:
            missing = "model" if model is None else "data"
            raise InvalidParameterError(missing, None, "a model and data, or an app in their place")
        task = own_task(model, data, test=test, loss=loss, name=name)
        given = {
            "task": task.name,
            "rounds": rounds,
            "per_round": per_round,
            **_split(task, clients, partition),
            **training,
        }
        common = {key: value for key, value in given.items() if value is not None}
        _check_once(common, flat_table(more), swept)
        common |= flat_table(more)
        with offered(task, elsewhere=engine == "ray" or workers > 1):
            chosen = scheme_choices("fedavg" if schemes is None else schemes)
            runs = points(chosen, common=common, sweep=swept, seeds=listed)
            trained = digests(task)
            check_same_task(folder, trained)
            folders = open_or_create(folder, runs, place, trained)
            carry_out_missing(folders, place, progress)
        return Results(folder, list(zip(runs, folders, strict=True)))
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"To go on, call simulate again with out={str(folder)!r}.")
        raise


def _swept(
    epsilon: float | Sequence[float] | None, sweep: Mapping[str, Sequence[Any]] | None
) -> dict[str, list[Any]]:
    """Return the lists of values, those of epsilon first."""
    listed = {key: swept_values(key, own) for key, own in _mapping("sweep", sweep).items()}
    if epsilon is None:
        return listed
    if "epsilon" in listed:
        raise InvalidParameterError("epsilon", epsilon, "nothing beside sweep['epsilon']")
    return {"epsilon": swept_values("epsilon", epsilon), **listed}


def _mapping(argument: str, value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise InvalidParameterError(argument, value, "a mapping from names of settings")
    return value or {}


def _check_app(place: Engine, of_model: Mapping[str, Any]) -> None:
    """Refuse what an app of the user's says itself."""
    for argument, value in of_model.items():
        if value is not None:
            shown = argument.removeprefix("training.")
            allowed = "nothing with an app, which says that itself; its run configuration: options"
            raise InvalidParameterError(shown, type(value).__name__, allowed)
    if place.name != "inline":
        allowed = "'inline' with an app; on Ray an app is a folder, for `flwr run`"
        raise InvalidParameterError("engine", place.name, allowed)


def _engine(name: str, workers: int, gpus_per_client: float | None) -> Engine:
    if gpus_per_client is not None and name != "ray":
        allowed = f"nothing with the engine {name!r}: it is for engine='ray'"
        raise InvalidParameterError("gpus_per_client", gpus_per_client, allowed)
    resources = RayResources(gpus_per_client=gpus_per_client or 0.0)
    return Engine(name=name, workers=workers, resources=resources)


def _split(
    task: Task, clients: int | None, partition: str | Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the settings of the clients and of what each of them has."""
    if task.sizes is None:
        split = partition if isinstance(partition, Mapping) else {"kind": partition or "iid"}
        number = DEFAULT_CLIENTS if clients is None else clients
        return {"clients": number, **flat_table({"partition": split})}
    if clients not in (None, len(task.sizes)):
        allowed = f"{len(task.sizes)}, the number of clients in the list of data"
        raise InvalidParameterError("clients", clients, allowed)
    if partition is not None:
        allowed = "nothing with a list of data, which is split already"
        raise InvalidParameterError("partition", partition, allowed)
    return {"clients": len(task.sizes), "partition.kind": GIVEN}


_ARGUMENTS = ("scheme", "seed", "task", "partition.kind")


def _check_once(*given: Mapping[str, Any]) -> None:
    """Refuse a setting that is given in two ways, or that has an argument."""
    seen: set[str] = set(_ARGUMENTS)
    for settings in given:
        for key, value in settings.items():
            if key in seen and settings is not given[0]:
                allowed = "a setting that is not given already, and has no argument of its own"
                raise InvalidParameterError(key, value, allowed)
        seen |= settings.keys()
