"""Simulations and counts of FedVS for experiments, from the keys of a curve.

The keys of a point of `curves`, beside those of `FedVSSettings` (``method``, ``K``, ``T``, ...),
of which order, embedding, learning rate and batch size are by default those of the task:

``data``
    A task whose clients have columns, as ``fashion-rows``; ``clients``, how many (the task's).
    Pixels are dealt out evenly in their order, row by row.
``records``, ``test_records``
    The most rows for training and for tests (all).
``rounds``
    The most steps of the server model; a training that has made them stands still.
``seconds`` or ``round``
    When the curve is read: virtual time, or steps.

Those of a point of `epochs` and `costs`: ``table``, the data set by its number in `TABLE`, with the
paper's sizes, of which ``K`` and ``T`` may be others; ``method``, and of `costs` what is counted,
``of``.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from flwr_privacy.coding.thresholds import max_partitions
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.fedvs.costs import Costs, cost_model
from flwr_privacy.simulations.research.fedvs.paper.conventions import conventions
from flwr_privacy.simulations.research.points import Point, Values
from flwr_privacy.wire.identity import derive_seed

from .in_process import FedVSTrainingCurve
from .numpy_simulation import simulate
from .synthetic_data import FedVSSettings, FedVSSyntheticData

__all__ = ["COUNTS", "TABLE", "check", "columns_of", "costs", "curves", "epochs"]

_OF_SETTING = {field.name for field in fields(FedVSSettings)}
_DATA = {"data", "clients", "records", "test_records"}
_READ = {"seconds", "round"}
_KEYS = _DATA | _READ | {"rounds"} | _OF_SETTING


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """A data set as the paper has it, and rows, features and embedding as we take it."""

    name: str
    clients: int
    rows: int
    features: int
    order: int
    batch_size: int


TABLE = {
    1: _Sizes(name="Parkinson", clients=10, rows=529, features=754, order=2, batch_size=16),
    2: _Sizes(name="Credit card", clients=11, rows=24_000, features=23, order=2, batch_size=32),
    3: _Sizes(name="HandWritten", clients=6, rows=1200, features=649, order=2, batch_size=32),
    4: _Sizes(name="Caltech-7", clients=6, rows=1179, features=3766, order=2, batch_size=8),
    5: _Sizes(name="EMNIST", clients=28, rows=112_800, features=784, order=2, batch_size=256),
    6: _Sizes(name="FashionMNIST", clients=28, rows=60_000, features=784, order=1, batch_size=256),
}
"""FedVS, appendix C. The rows are those for training; columns are dealt out evenly."""

_EMBEDDING = 64


def curves(points: Sequence[Point], seed: int, data_root: Path | None) -> list[Values]:
    """Return accuracy, loss and, of two classes, the area under the ROC curve, on test rows.

    Parameters
    ----------
    points : Sequence of Mapping
        See the top of this module. Points that differ only in when they are read share a training.
    seed : int
        Root of rows, weights, batches, roundings, noise, delays, and of who straggles.
    data_root : Path, optional
        Folder with data sets that no library brings.

    Raises
    ------
    InvalidParameterError
        If a key is unknown or a value is not allowed.
    DataError
        If data is missing.
    """
    trained: dict[str, list[int]] = {}
    for place, point in enumerate(points):
        check(point)
        own = {key: value for key, value in point.items() if key not in _READ}
        by = "seconds" if "seconds" in point else "rounds"
        trained.setdefault(json.dumps([by, sorted(own.items())]), []).append(place)
    found: list[Values] = [{}] * len(points)
    for places in trained.values():
        first = points[places[0]]
        by, key = ("seconds", "seconds") if "seconds" in first else ("rounds", "round")
        watch = sorted({float(points[place][key]) for place in places})
        curve = _trained(first, watch, by, seed, data_root)
        for place in places:
            at = watch.index(float(points[place][key]))
            found[place] = {
                "accuracy": float(curve.accuracy[at]),
                "loss": float(curve.loss[at]),
                "value": float(curve.auc[at]),
            }
    return found


def check(point: Point) -> FedVSSettings:
    """Return the setting of a point of `curves`.

    Raises
    ------
    InvalidParameterError
        If a key is unknown or a value is not allowed.
    """
    from flwr_privacy.simulations.tasks.vertical_tasks import vertical_task

    for key in point:
        check_choice("setting", key, _KEYS)
    task = vertical_task(point.get("data", ""))
    check_integer("rounds", point.get("rounds"), minimum=1)
    given = [key for key in sorted(_READ) if key in point]
    if len(given) != 1:
        raise InvalidParameterError("setting", given, "one of seconds and round")
    check_number(given[0], point[given[0]], minimum=0)
    own = {key: value for key, value in point.items() if key in _OF_SETTING}
    setting = FedVSSettings(
        **{
            "order": task.order,
            "embedding": task.embedding,
            "learning_rate": task.training.learning_rate,
            "batch_size": task.training.batch_size,
            **own,
        }
    )
    clients = check_integer("clients", point.get("clients", task.clients), minimum=1)
    setting.segments(clients)
    setting.delays(clients, seed=0)
    return setting


def epochs(point: Point) -> float:
    """Return the expected virtual seconds of an epoch, by delays alone.

    Parameters
    ----------
    point : Mapping
        ``table``; ``method``: ``wait`` or ``fedvs`` with ``log_base`` and ``batch``; ``part`` of
        the time: ``share``, ``upload`` or, by default, all of it.

    Examples
    --------
    >>> [round(epochs({"table": 1, "method": "fedvs", "log_base": base, "batch": "coded"}))
    ...     for base in ("e", "2")]
    [174, 356]
    >>> round(epochs({"table": 1, "method": "wait"}))
    253
    """
    _check_keys(point, {"table", "method", "log_base", "batch", "part", "K", "T"})
    sizes, K, T = _sizes(point)
    rounds = -(-sizes.rows // sizes.batch_size)
    found = conventions(sizes.clients, K, T, sizes.batch_size)
    if check_choice("method", point["method"], ("fedvs", "wait")) == "wait":
        return rounds * found[0].wait
    own = {(one.log_base, one.batch): one for one in found}
    bases, batches = ({key[i] for key in own} for i in (0, 1))
    check_choice("log_base", point["log_base"], bases)
    check_choice("batch", point["batch"], batches)
    one = own[point["log_base"], point["batch"]]
    seconds = {"share": one.share, "upload": one.upload, "all": one.share + one.upload}
    return rounds * seconds[check_choice("part", point.get("part", "all"), seconds)]


COUNTS = {
    "data": lambda costs: np.mean(costs.data_bytes) * (len(costs.data_bytes) - 1),
    "stored": lambda costs: costs.stored_bytes,
    "weights": lambda costs: costs.weights_relay_bytes / len(costs.weights_bytes),
    "answer": lambda costs: costs.answer_bytes,
    "gradient": lambda costs: costs.gradient_bytes,
    "plain": lambda costs: 4 * costs.plain_elements,
    "encode-products": lambda costs: np.mean(costs.encode_macs),
    "weights-products": lambda costs: np.mean(costs.weights_macs),
    "answer-products": lambda costs: costs.answer_macs,
    "update-products": lambda costs: np.mean(costs.update_macs),
    "plain-products": lambda costs: np.mean(costs.plain_macs),
}
"""What `costs` counts of a client, on average over the clients: bytes, and products of numbers."""


def costs(point: Point) -> float:
    """Return what a client sends, keeps or computes.

    Parameters
    ----------
    point : Mapping
        ``table``; ``of``, one of `COUNTS`: all that it sends of the ``data``, once, what it has
        ``stored``, all that it sends of its ``weights``, its ``answer`` and the ``gradient`` that
        it is sent in a round; of plain split learning ``plain``, its embeddings.

    Examples
    --------
    >>> [round(costs({"table": 6, "of": of})) for of in ("weights", "answer", "plain")]
    [226137, 11008, 66048]
    """
    _check_keys(point, {"table", "of", "K", "T"})
    sizes, K, T = _sizes(point)
    found: Costs = cost_model(
        N=sizes.clients,
        K=K,
        T=T,
        rows=sizes.rows,
        widths=_widths(sizes),
        h=_EMBEDDING,
        b=-(-sizes.batch_size // K),
    )
    return float(COUNTS[check_choice("of", point["of"], COUNTS)](found))


def _check_keys(point: Point, known: set[str]) -> None:
    for key in point:
        check_choice("setting", key, known)


def _sizes(point: Point) -> tuple[_Sizes, int, int]:
    sizes = TABLE[check_integer("table", int(point["table"]), minimum=1, maximum=len(TABLE))]
    T = int(point.get("T", 1))
    K = int(point.get("K", max_partitions(sizes.clients, sizes.clients // 2, T)))
    return sizes, K, T


def _widths(sizes: _Sizes) -> list[int]:
    columns = np.array_split(np.arange(sizes.features), sizes.clients)
    return [sizes.order * len(own) for own in columns]


def _trained(
    point: Point, watch: Sequence[float], by: str, seed: int, data_root: Path | None
) -> FedVSTrainingCurve:
    from flwr_privacy.clients.torch import TorchServerModel
    from flwr_privacy.simulations.tasks.vertical_tasks import vertical_task

    task, setting = vertical_task(point["data"]), check(point)
    clients = point.get("clients", task.clients)
    data = columns_of(
        task.name, clients, point.get("records"), point.get("test_records"), seed, data_root
    )
    wide = clients if setting.aggregation == "concatenate" else 1
    server_model = TorchServerModel(
        partial(task.server_model, wide * setting.embedding), seed=derive_seed(seed, "initialise")
    )
    return simulate(
        data, setting, server_model, watch=watch, by=by, rounds=point["rounds"], seed=seed
    )


@lru_cache(maxsize=1)
def columns_of(
    name: str,
    clients: int,
    records: int | None,
    test_records: int | None,
    seed: int,
    data_root: Path | None,
) -> FedVSSyntheticData:
    """Return the data of a task as the simulation takes them."""
    from flwr_privacy.simulations.settings.run_settings import Settings
    from flwr_privacy.simulations.tasks.vertical_tasks import (
        vertical_labels,
        vertical_part,
        vertical_task,
    )

    task = vertical_task(name)
    settings = Settings(
        task=name,
        train_records=records,
        test_records=test_records,
        seed=seed,
        data_root=None if data_root is None else str(data_root),
    )
    if task.pixels:
        whole = vertical_part(task, settings, 0, 1)
        blocks = [np.array_split(part.astype(np.float32), clients, axis=1) for part in whole]
    else:
        parts = [vertical_part(task, settings, n, clients) for n in range(clients)]
        blocks = [[part[i].astype(np.float32) for part in parts] for i in (0, 1)]
    labels, test_labels = vertical_labels(task, settings)
    return FedVSSyntheticData(
        blocks=blocks[0], labels=labels, test_blocks=blocks[1], test_labels=test_labels
    )
