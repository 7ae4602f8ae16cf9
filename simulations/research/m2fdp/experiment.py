"""Simulations of M2FDP for experiments: trees, schedules and noise from the keys of a curve.

The keys of a point, beside those of the scheme on the command line (``unit``, ``alpha``,
``epsilon``, ``events``, ``clean_events``, ``step_rule``, ...):

``data``
    ``fashion-mnist``, ``mnist``, ``digits``, ``isolet``, ``leaves``, ``cifar10-jpeg`` (its images
    as `random_patches`) or ``synthetic``; ``labels``, how many of the classes a device has (3);
    ``records``, the most of a device (all).
``fanouts``, ``depth``
    The tree as text, "10,5", and how many of the numbers count (all). Or ``devices`` of a tree with
    two tiers, and one of ``subnets``, as many nodes of tier 1, and ``subnet``, their size.
``p``
    Share of secure children, a number or one for each tier (0).
``steps``, ``rounds``, ``round``
    K, T, and after which round the curve is read (the last).
``learning_rate``, ``clip``, ``rate``, ``perturb``
    Those of `LocalSteps`. The scheme's ``clipping_norm`` is the first two's product, and its
    ``sampling_rate`` the third.
``control``
    A table for an `AdaptiveControl`, of which the local steps are those of all rounds.
``target``
    For costs: the accuracy that is to be reached.

Keys of noise that a curve's ``unit`` has not are those of the other curves, and left out.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer
from flwr_privacy.m2fdp import (
    AdaptiveControl,
    AdaptiveController,
    DeviceNoise,
    NoNoise,
    PaperNoise,
    RecordNoise,
    ResourceModel,
    TierTree,
)
from flwr_privacy.simulations.research.m2fdp.paper_epsilons import paper_epsilons
from flwr_privacy.simulations.research.points import Point, Values, in_digits
from flwr_privacy.simulations.settings.flat_options import flat_keys, strategy_of
from flwr_privacy.simulations.tasks.data import load
from flwr_privacy.strategies.m2fdp.tree_members import any_trusted

from .numpy_simulation import LocalSteps, SimulatedM2FDP, TrainingCurve, of_seed
from .synthetic_data import SyntheticData, generated_data, labelled_data, random_patches

__all__ = ["accuracies", "check", "choices", "costs", "privacy"]

Features = NDArray[np.float32]
Labels = NDArray[np.int64]

_LABELS = 3  # of a device
_FILTERS = 64  # of `random_patches`
_IMAGES = (20_000, 5000)  # of CIFAR-10: for training, for tests
_CALM = 20  # rounds over which the jitter is taken
_SECURE, _INSECURE = 1, 2  # places in a controller's choice

_DATA = {"data", "labels", "records"}
_TREE = {"fanouts", "depth", "devices", "subnets", "subnet", "p"}
_READ = {"round", "target"}
_LINKS = {"star_link", "delay_mode", "step_energy"}
_LOCAL = {"learning_rate", "clip", "rate", "perturb"}
_NOISES: dict[str, Any] = {
    "device": DeviceNoise,
    "record": RecordNoise,
    "paper": PaperNoise,
    "none": NoNoise,
}
_KEYS = {*_DATA, *_TREE, *_READ, *_LINKS, *_LOCAL, "rounds", *flat_keys(SimulatedM2FDP)}


def accuracies(points: Sequence[Point], seed: int, data_root: Path | None) -> list[Values]:
    """Return accuracies on test records, and how much they jump.

    The jitter is the mean change of the accuracy from one round to the next, over the last 20
    rounds.

    Parameters
    ----------
    points : Sequence of Mapping
        See the top of this module.
    seed : int
        Root of the split, batches and noise; all points share them.
    data_root : Path, optional
        Folder with data sets that no library brings.

    Raises
    ------
    InvalidParameterError
        If a key is unknown or a value is not allowed.
    DataError
        If data is missing.
    """

    def read(point: Point, curve: TrainingCurve) -> Values:
        last = int(point.get("round", point["rounds"]))
        reached = curve.accuracy[: last + 1]
        jumps = np.abs(np.diff(reached[-_CALM - 1 :]))
        jitter = float(jumps.mean()) if len(jumps) else 0.0
        return {"accuracy": float(reached[-1]), "jitter": jitter}

    return _simulated(points, seed, data_root, read)


def costs(points: Sequence[Point], seed: int, data_root: Path | None) -> list[Values]:
    """Return joules and seconds until an accuracy of ``target``; infinite if it is not reached.

    Parameters and errors are those of `accuracies`.
    """

    def read(point: Point, curve: TrainingCurve) -> Values:
        there = np.flatnonzero(curve.accuracy >= point["target"])
        if not len(there):
            return {"energy": np.inf, "delay": np.inf}
        return {
            "energy": float(curve.energy[there[0]]),
            "delay": float(curve.seconds[there[0]]),
        }

    return _simulated(points, seed, data_root, read)


def choices(point: Point) -> Values:
    """Return what a controller chooses on average over a training: local steps and participants.

    Parameters
    ----------
    point : Mapping
        ``fanouts``, ``p``, ``parameters``, ``step_energy`` and others of `ResourceModel`; those of
        an `AdaptiveController`, whose three weights are ``energy_weight``, ``delay_weight`` and
        ``noise_weight`` (1); ``local_events``, how many events of tier 1 every round has.

    Raises
    ------
    InvalidParameterError
        If a key is unknown or a value is not allowed.

    Examples
    --------
    >>> point = {"fanouts": "2,4,4,8", "p": [0.5, 0, 0], "parameters": 7840, "total_steps": 4000,
    ...     "max_steps": 40, "local_events": 3}
    >>> choices(point)["insecure"]
    1.0
    """
    own = dict(point)
    tree = TierTree.of_fanouts(own.pop("fanouts"), p=own.pop("p"))
    weights = [own.pop(f"{name}_weight", 1.0) for name in ("energy", "delay", "noise")]
    events = {1: own.pop("local_events", 0)}
    resources = ResourceModel(**{name: own.pop(name) for name in _LINKS if name in own})
    known = {field.name for field in fields(AdaptiveController)}
    for key in own:
        check_choice("setting", key, known)
    controller = AdaptiveController.of(
        tree, weights=weights, events=events, resources=resources, **own
    )
    path = np.array(_path(controller), dtype=float)
    steps, secure, insecure = path.mean(axis=0)
    return {"steps": float(steps), "secure": float(secure), "insecure": float(insecure)}


def privacy(point: Point) -> str:
    """Return what a training costs its devices, in words: epsilon at its delta.

    Where there are two figures, the first is of devices below secure aggregators, whose noise
    enters nearest to the cloud, the last of those that add noise themselves. Of the paper's noise:
    what all data of a device cost (Gaussian DP) and what one record costs at most (RDP, Poisson
    batches), both with the sensitivity that holds under the worst drift.
    """
    left = {key: value for key, value in point.items() if key not in _DATA | _READ}
    return _privacy(json.dumps(left, sort_keys=True))


@lru_cache(maxsize=2**8)
def _privacy(text: str) -> str:
    point = json.loads(text)
    training = _training(point, 0)
    noise = training.privacy
    if isinstance(noise, NoNoise):
        return "no privacy"
    if not isinstance(noise, PaperNoise):
        return f"epsilon {noise.epsilon:g} of a {point.get('unit', 'device')}"
    if training.control is not None:
        return f"stated epsilon {noise.epsilon:g}"
    found = paper_epsilons(
        tree=training.tree,
        schedule=training.schedule,
        q=noise.sampling_rate,
        rounds=point["rounds"],
        epsilon=noise.epsilon,
        delta=noise.delta,
        alpha=noise.alpha,
        release_steps=noise.release_steps,
        clean_events=noise.clean_events,
        accountant="rdp",
    )

    def shown(table: Mapping[int, float]) -> str:
        return " / ".join(in_digits(value, 3) for _, value in sorted(table.items()))

    return f"epsilon of a device {shown(found.device)}, of a record {shown(found.drifted)}"


def check(point: Point) -> None:
    """Refuse a point of `accuracies` or `costs` that cannot be trained.

    Raises
    ------
    InvalidParameterError
        If a key is unknown or a value is not allowed.
    """
    for key in point:
        check_choice("setting", key, _KEYS)
    for key in ("steps", "rounds"):
        check_integer(key, point.get(key), minimum=1)
    check_integer("round", point.get("round", 0), minimum=0, maximum=point["rounds"])
    check_choice("data", point.get("data", ""), [*_READERS, "synthetic"])
    _training(point, 0)


def _simulated(
    points: Sequence[Point],
    seed: int,
    data_root: Path | None,
    read: Callable[[Point, TrainingCurve], Values],
) -> list[Values]:
    """Train each setting once, all on the same data, and read the points off."""
    curves: dict[str, TrainingCurve] = {}
    data: dict[str, SyntheticData] = {}
    found = []
    for point in points:
        check(point)
        own = {key: value for key, value in point.items() if key not in _READ}
        name = json.dumps(own, sort_keys=True)
        if name not in curves:
            training = _training(point, seed)
            devices = len(training.tree.devices)
            part = json.dumps([devices, *sorted((key, point.get(key)) for key in _DATA)])
            if part not in data:
                data[part] = _data(point, devices, seed, data_root)
            local = {key: value for key, value in point.items() if key in _LOCAL}
            curves[name] = training.simulate(
                LocalSteps(data=data[part], seed=seed, **local), rounds=_rounds(point, training)
            )
        found.append(read(point, curves[name]))
    return found


def _rounds(point: Point, training: SimulatedM2FDP) -> int:
    """Return the most rounds of a training; a controller may make them as short as a step."""
    return int(point["rounds"]) if training.control is None else training.control.total_steps


def _training(point: Point, seed: int) -> SimulatedM2FDP:
    """Return the strategy of a point."""
    unit = check_choice("unit", point.get("unit", "device"), _NOISES)
    left_out = {field.name for kind in _NOISES.values() for field in fields(kind)}
    left_out -= {field.name for field in fields(_NOISES[unit])}
    others = {*_DATA, *_TREE, *_READ, *_LINKS, *_LOCAL, "rounds", "control"}
    own = {key: value for key, value in point.items() if key not in left_out | others}
    if point.get("clip", 1.0) is not None:
        own["clipping_norm"] = point.get("learning_rate", 1.0) * point.get("clip", 1.0)
    if unit in ("record", "paper"):
        own["sampling_rate"] = point.get("rate", 0.05)
    if "control" in point:
        steps = point["steps"]
        total = {"total_steps": steps * point["rounds"], "initial_steps": steps}
        own["control"] = AdaptiveControl(**total, **point["control"])
    tree = _tree(point)
    own = {
        **({"min_children": 1} if any_trusted(tree) else {}),  # the paper has none
        **({} if unit == "none" else {"epsilon": 1.0}),  # the paper's
        "perturb_reg": bool(point.get("perturb", 0)),
        "tree": tree,
        "resources": ResourceModel(**{key: point[key] for key in _LINKS if key in point}),
        **own,
        **of_seed(seed),
    }
    return strategy_of(SimulatedM2FDP, own)


def _path(controller: AdaptiveController) -> list[tuple[int, int, int]]:
    """Return the choices of a whole training."""
    left, path = controller.total_steps, []
    while left:
        decision = controller.decide(left)
        path.append((decision.steps, decision.secure, decision.insecure))
        left -= decision.steps
    return path


def _tree(point: Point) -> TierTree:
    if "devices" in point:
        number = int(point["devices"])
        given = [key for key in ("fanouts", "subnets", "subnet") if key in point]
        if given not in (["subnets"], ["subnet"]):
            raise InvalidParameterError("devices", number, "it with one of subnets and subnet")
        other = point[given[0]]
        if number % other:
            raise InvalidParameterError("devices", number, f"a multiple of {given[0]} = {other}")
        fanouts = [other, number // other] if given == ["subnets"] else [number // other, other]
        return TierTree.of_fanouts(fanouts, p=point.get("p", 0))
    numbers = [int(number) for number in str(point["fanouts"]).split(",")]
    depth = int(point.get("depth", len(numbers)))
    check_integer("depth", depth, minimum=1, maximum=len(numbers))
    return TierTree.of_fanouts(numbers[:depth], p=point.get("p", 0))


def _data(point: Point, devices: int, seed: int, data_root: Path | None) -> SyntheticData:
    name, each = point["data"], point.get("labels", _LABELS)
    if name == "synthetic":
        return generated_data(seed, N=devices, each=each)
    features, labels, test_features, test_labels = _READERS[name](data_root)
    return labelled_data(
        features,
        labels,
        test_features,
        test_labels,
        devices=devices,
        each=each,
        records=point.get("records"),
        seed=seed,
    )


Records = tuple[Features, Labels, Features, Labels]


@lru_cache(maxsize=1)
def _digits(data_root: Path | None) -> Records:
    digits = load("digits")
    return _scaled(digits.features, digits.labels, digits.test_features, digits.test_labels)


@lru_cache(maxsize=1)
def _images(name: str, data_root: Path | None) -> Records:
    images = load(name, data_root=data_root)
    return _scaled(images.features, images.labels, images.test_features, images.test_labels)


@lru_cache(maxsize=1)
def _table(name: str, data_root: Path | None) -> Records:
    """Return a table whose columns have the mean 0 and the deviation 1 on the training rows."""
    table = load(name, data_root=data_root)
    mean, deviation = table.features.mean(axis=0), table.features.std(axis=0)
    deviation[deviation == 0] = 1  # a column with one value
    features, tests = ((x - mean) / deviation for x in (table.features, table.test_features))
    return _scaled(features, table.labels, tests, table.test_labels)


@lru_cache(maxsize=1)
def _cifar10(data_root: Path | None) -> Records:
    images = load("cifar10-jpeg", data_root=data_root)
    train, test = _IMAGES
    # The filters are the same for all seeds: they are part of the task.
    features = random_patches(images.features[:train], filters=_FILTERS, seed=0)
    test_features = random_patches(images.test_features[:test], filters=_FILTERS, seed=0)
    center = features.mean(axis=0)
    return _scaled(
        features - center, images.labels[:train], test_features - center, images.test_labels[:test]
    )


def _scaled(features: Features, labels: Labels, test: Features, test_labels: Labels) -> Records:
    """Return records of which the mean square is 1: the paper's step size is not known anyway."""
    flat, flat_test = features.reshape(len(features), -1), test.reshape(len(test), -1)
    size = np.sqrt(np.mean(np.square(flat, dtype=np.float64)) * flat.shape[1])
    return flat / np.float32(size), labels, flat_test / np.float32(size), test_labels


_READERS: dict[str, Callable[[Path | None], Records]] = {
    "digits": _digits,
    "cifar10-jpeg": _cifar10,
    **{name: partial(_images, name) for name in ("fashion-mnist", "mnist")},
    **{name: partial(_table, name) for name in ("isolet", "leaves")},
}
