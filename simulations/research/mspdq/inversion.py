"""Errors of the images that iDLG finds in the uploads of MSP, MSPDQ and rivals, for experiments.

Each client has one record and trains one step, with the paper's 1 / (5 (t + 1)) in learning round
t. The server takes what it receives for the client's model, and searches for the image behind it.

The keys of a point:

``task``
    One of `flwr_privacy.simulations.research.mspdq.attack.TASKS`.
``clients``, ``images``
    How many clients take part, and of how many of them an image is searched for.
``scheme``
    ``fedavg``, ``msp``, ``mspdq`` or ``jopeq``. Keys that are not named here are its options.
``view``
    What the server takes for a model: ``message``, the first one, as the paper's attacker does, or
    ``messages``, the model that fits all of a round's messages best.
``round``
    The learning round that is attacked, from 1.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer
from flwr_privacy.simulations.research.attacks.setup import AttackSetup
from flwr_privacy.simulations.research.points import Point, Values
from flwr_privacy.strategies import MSP, MSPDQ, FedAvg, JoPEQFedAvg, SchemeStrategy

from .attack import TASKS, setup_of
from .images import reconstruct
from .mixing import layout_of, overhear, overhear_jopeq

__all__ = ["check", "errors"]

Vectors = NDArray[np.float64]

_SCHEMES: dict[str, type[SchemeStrategy]] = {
    "fedavg": FedAvg,
    "msp": MSP,
    "mspdq": MSPDQ,
    "jopeq": JoPEQFedAvg,
}
_VIEWS = ("message", "messages")
_OWN = ("task", "clients", "images", "scheme", "view", "round")


def check(point: Point) -> None:
    """Refuse a point whose settings are not allowed.

    Raises
    ------
    InvalidParameterError
        If a key is missing or unknown, or a value is not allowed.
    """
    for key in _OWN:
        if key not in point:
            raise InvalidParameterError("setting", sorted(point), f"it with {key}")
    check_choice("task", point["task"], TASKS)
    check_integer("clients", point["clients"], minimum=2)
    check_integer("images", point["images"], minimum=1, maximum=point["clients"])
    check_integer("round", point["round"], minimum=1)
    views = _VIEWS if point["scheme"] in ("msp", "mspdq") else _VIEWS[:1]
    check_choice("view", point["view"], views)
    _strategy(point)


def errors(points: Sequence[Point], seed: int, data_root: Path | None) -> list[Values]:
    """Return the mean squared error of the images that are found, of pixels from 0 to 1.

    What is found is clipped to the range of pixels, which everybody knows.

    Parameters
    ----------
    points : Sequence of Mapping
        See the top of this module.
    seed : int
        Root of the records, the first model and the starts of the search. Splits, rounding and
        noise are secret: the seed does not give them, so a second run has other errors.
    data_root : Path, optional
        Folder with the data sets that no library brings.

    Raises
    ------
    InvalidParameterError
        As `check`.
    DataError
        If data is missing.
    """
    rounds: dict[str, set[int]] = {}
    for point in points:
        check(point)
        rounds.setdefault(_training(point), set()).add(point["round"])
    found = {
        (name, t): error
        for name, wanted in rounds.items()
        for t, error in _attacked(json.loads(name), wanted, seed, data_root).items()
    }
    return [{"value": found[_training(point), point["round"]]} for point in points]


def _training(point: Point) -> str:
    """Name what of a point is about the training, not about the round that is attacked."""
    return json.dumps({key: point[key] for key in point if key != "round"}, sort_keys=True)


def _attacked(
    point: dict[str, Any], wanted: set[int], seed: int, data_root: Path | None
) -> dict[int, float]:
    """Train up to the last round that is wanted; return the error of each of those."""
    setup = setup_of(
        point["task"], clients=point["clients"], records=1, seed=seed, data_root=data_root
    )
    found = {}
    for t in range(1, max(wanted) + 1):
        rate = 1 / (5 * (t + 1))
        training = replace(setup.task.training, learning_rate=rate)
        setup = replace(setup, task=replace(setup.task, training=training))
        models, average = _round(point, setup)
        if t in wanted:
            images = reconstruct(setup, point["scheme"], models[: point["images"]])
            found[t] = float(images.errors.mean())
        start = layout_of(setup).arrays(average)
        setup = replace(
            setup, start={name: start[name].astype(own.dtype) for name, own in setup.start.items()}
        )
    return found


def _round(point: Point, setup: AttackSetup) -> tuple[Vectors, Vectors]:
    """Return what the server takes for the clients' models, and the new model."""
    strategy = _strategy(point)
    if isinstance(strategy, MSP):  # and MSPDQ
        seen = overhear(setup, strategy)
        models = seen.messages[:, 0]
        if point["view"] == "messages":
            each = range(len(setup.labels))
            models = np.array([seen.tracked(i, seen.terms.rounds) for i in each])
        return models, seen.averages[-1]
    if isinstance(strategy, JoPEQFedAvg):
        models = np.array(overhear_jopeq(setup, strategy))
    else:  # an upload of FedAvg is the model
        layout = layout_of(setup)
        each = range(len(setup.labels))
        models = np.array([layout.vector(setup.train(i, setup.start)) for i in each])
    return models, models.mean(axis=0)


def _strategy(point: Point) -> SchemeStrategy:
    """Return the server half of a point's scheme."""
    kind = _SCHEMES[check_choice("scheme", point["scheme"], _SCHEMES)]
    options = {key: value for key, value in point.items() if key not in _OWN}
    clients = point["clients"]
    return kind(min_train_nodes=clients, min_available_nodes=clients, **options)
