"""Trains under central DP without messages: cohorts, clipped updates and noise in plain NumPy.

Noise is that of the plans that the strategies make, drawn as floats: the simulation protects nobody
and shows accuracy only. Clients of a cohort train together, so that a training of hundreds of
clients takes about a second.

The keys of a point:

``task``
    Name of a task with a linear model or a perceptron; ``train_records`` (all).
``clients``, ``per_round``, ``trainings``
    N, n, and how often each client trains: there are ``trainings N / n`` rounds.
``noise``
    ``server``, ``distributed``, or ``each-client``: UDP at user level, where each client adds all
    the noise that its own update needs.
``sampling``, ``correlated``, ``groups``, ``epsilon``, ``delta``, ``clipping_norm``
    Those of the scheme. Cohorts of ``each-client`` are balanced. Of a list of clipping norms the
    one is taken with which trainings of other seeds come to the least loss.
``threshold``, ``colluders``
    Answers that are enough for a sum of shares, and clients that collude.
``epochs``, ``batch_size``, ``learning_rate``
    Of a client's SGD.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.central_dp.correlated.factors import TreeFactor
from flwr_privacy.central_dp.plan import CentralDPNoisePlan
from flwr_privacy.central_dp.sensitivity import DISTRIBUTED
from flwr_privacy.errors import InvalidParameterError, check_choice
from flwr_privacy.privacy.cohorts import BALANCED, CYCLIC_POISSON, FIXED, POISSON
from flwr_privacy.simulations.research.points import Point, Values
from flwr_privacy.simulations.settings.flat_options import strategy_of
from flwr_privacy.simulations.settings.run_settings import PartitionSettings, Settings
from flwr_privacy.simulations.tasks.lookup import task
from flwr_privacy.simulations.tasks.partition import partition
from flwr_privacy.simulations.tasks.tasks import dataset, initial_arrays
from flwr_privacy.strategies import CentralDP
from flwr_privacy.udp import UDPNoisePlan
from flwr_privacy.wire.identity import derive_seed

__all__ = ["EACH_CLIENT", "accuracies", "check", "cohorts", "plan_of", "sum_noise"]

EACH_CLIENT = "each-client"

Floats = NDArray[np.float32]
Layers = list[tuple[Floats, Floats]]
"""Weights (..., outputs, inputs) and biases (..., outputs) of each layer."""

_OPTIONS = ("noise", "sampling", "correlated", "groups", "epsilon", "delta", "clipping_norm")
_KEYS = {
    *("task", "train_records", "clients", "per_round", "trainings", "threshold", "colluders"),
    *("epochs", "batch_size", "learning_rate", *_OPTIONS),
}


def check(point: Point) -> None:
    """Refuse a point with an unknown key, or values that do not go together.

    Raises
    ------
    InvalidParameterError
        If there is one.
    """
    for key in point:
        check_choice("setting", key, _KEYS)
    rounds_of(point)
    norms = point["clipping_norm"]
    for norm in norms if isinstance(norms, list) else [norms]:
        if point["noise"] != EACH_CLIENT:
            plan_of({**point, "clipping_norm": norm})


def accuracies(points: Sequence[Point], seed: int, data_root: Path | None) -> list[Values]:
    """Return accuracy and loss on test records after each training.

    Parameters
    ----------
    points : Sequence of Mapping
        See the top of this module.
    seed : int
        Root of the split, the first model, cohorts, batches and noise.
    data_root : Path, optional
        Folder with data sets that no library brings.
    """
    return [_trained(_tuned(point, seed, data_root), seed, data_root) for point in points]


def rounds_of(point: Point) -> int:
    """Return the number of rounds in which each client trains as often as it is to.

    Raises
    ------
    InvalidParameterError
        If it is no whole number.
    """
    rounds, rest = divmod(point["trainings"] * point["clients"], point["per_round"])
    if rest:
        allowed = f"a divisor of {point['trainings'] * point['clients']}, all trainings"
        raise InvalidParameterError("per_round", point["per_round"], allowed)
    return int(rounds)


def plan_of(point: Point) -> CentralDPNoisePlan:
    """Return the plan that `CentralDP` makes for a point."""
    options = {name: point[name] for name in _OPTIONS if name in point}
    if point["noise"] == DISTRIBUTED:
        options.pop("correlated", None)  # that of the other curves
    strategy = strategy_of(CentralDP, options)
    model = initial_arrays(task(point["task"]), seed=0)
    q = point["per_round"] / point["clients"]
    return strategy.budget.choice_of(model, rounds=rounds_of(point), q=q).plan


def sum_noise(point: Point, size: int, random: np.random.Generator) -> Iterator[Floats]:
    """Yield the noise of each round's sum, in units of the weights.

    Parameters
    ----------
    point : Mapping
        The training.
    size : int
        Number of weights.
    random : Generator
        Where it comes from.
    """
    rounds, n = rounds_of(point), point["per_round"]

    def normal(sigma: float) -> Floats:
        return (sigma * random.standard_normal(size, np.float32)).astype(np.float32)

    if point["noise"] == EACH_CLIENT:
        schedule = UDPNoisePlan(
            noise="gdp_fixed",
            epsilon=point["epsilon"],
            delta=point["delta"],
            rounds=rounds,
            q=n / point["clients"],
            cohorts=BALANCED,
        )
        own = schedule.noise_multiplier * 2 * point["clipping_norm"]
        yield from (normal(own * np.sqrt(n)) for _ in range(rounds))
        return
    plan = plan_of(point)
    parties = point["threshold"] - point["colluders"] if plan.noise == DISTRIBUTED else 1
    sigma = plan.terms(point["clipping_norm"], parties=parties).share_sigmas()[0]
    sigma *= np.sqrt(n) if plan.noise == DISTRIBUTED else 1.0
    if plan.joint is None:
        yield from (normal(sigma) for _ in range(rounds))
        return
    factor = plan.joint.factor
    if isinstance(factor, TreeFactor):
        raise InvalidParameterError("correlated", "tree", "banded-mf, blt or none here")
    column = factor.column(rounds).astype(np.float32)
    reach = int(np.flatnonzero(column)[-1])
    earlier: list[Floats] = []  # newest first
    for _ in range(rounds):
        noise = normal(sigma)
        for coefficient, one in zip(column[1:], earlier, strict=False):
            noise -= coefficient * one
        earlier = [noise, *earlier][:reach]
        yield noise


def cohorts(point: Point, random: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Yield who takes part in each round.

    Parameters and source of randomness are those of `sum_noise`.
    """
    clients, n, rounds = point["clients"], point["per_round"], rounds_of(point)
    sampling = BALANCED if point["noise"] == EACH_CLIENT else point["sampling"]
    order = random.permutation(clients)
    groups = plan_of(point).separation if sampling == CYCLIC_POISSON else 1
    for t in range(rounds):
        if sampling == FIXED:
            yield random.choice(np.arange(clients), n, replace=False)
        elif sampling == BALANCED:
            yield order[np.arange(t * n, (t + 1) * n) % clients]
        elif sampling in (POISSON, CYCLIC_POISSON):
            group = order[t % groups :: groups]
            yield group[random.random(len(group)) < n * groups / clients]
        else:
            raise InvalidParameterError("sampling", sampling, "a way to draw a cohort")


def _tuned(point: Point, seed: int, data_root: Path | None) -> Point:
    """Return a point with one clipping norm: the best for three seeds that are not its own."""
    norms = point["clipping_norm"]
    if not isinstance(norms, list):
        return point
    others = [derive_seed(seed, f"central-dp tuning {other}") % 2**31 for other in range(3)]

    def loss(norm: float) -> float:
        tried = {**point, "clipping_norm": norm}
        return float(sum(_trained(tried, other, data_root)["loss"] for other in others))

    return {**point, "clipping_norm": min(norms, key=loss)}


def _trained(point: Point, seed: int, data_root: Path | None) -> Values:
    """Return what the model of one training comes to."""
    settings = Settings(
        task=point["task"],
        seed=seed,
        data_root=None if data_root is None else str(data_root.absolute()),
        train_records=point.get("train_records"),
    )
    records = dataset(task(point["task"]), settings)
    features, labels, present = _held(settings, point["clients"])
    arrays = initial_arrays(task(point["task"]), seed)
    values = list(arrays.values())
    model: Layers = [
        (weights.astype(np.float32), bias.astype(np.float32))
        for weights, bias in zip(values[::2], values[1::2], strict=True)
    ]
    draws, batches, noise = (
        np.random.default_rng(derive_seed(seed, f"central-dp {name}"))
        for name in ("cohorts", "batches", "noise")
    )
    size = sum(value.size for value in values)
    rounds = zip(cohorts(point, draws), sum_noise(point, size, noise), strict=True)
    for cohort, noised in rounds:
        total = noised
        if len(cohort):
            held = (features[cohort], labels[cohort], present[cohort])
            total = total + _summed(model, held, point, batches)
        _step(model, total / point["per_round"])
    outputs = _forward([(w[None], b[None]) for w, b in model], _flat(records.test_features)[None])
    scores = outputs[-1][0]
    losses = _log_sum(scores) - scores[np.arange(len(scores)), records.test_labels]
    right = scores.argmax(axis=1) == records.test_labels
    return {"accuracy": float(right.mean()), "loss": float(losses.mean())}


def _held(settings: Settings, clients: int) -> tuple[Floats, NDArray[np.int64], NDArray[np.bool_]]:
    """Return features, labels and which are records, of all clients, padded to the largest."""
    data = dataset(task(settings.task), settings)
    flat = _flat(data.features)
    split = PartitionSettings(kind="iid")
    parts = partition(data.labels, clients=clients, settings=split, seed=settings.seed)
    most = max(map(len, parts))
    places = np.zeros((clients, most), np.int64)
    present = np.zeros((clients, most), bool)
    for row, part in enumerate(parts):
        places[row, : len(part)], present[row, : len(part)] = part, True
    return flat[places], data.labels[places], present


def _summed(model: Layers, held: Any, point: Point, random: np.random.Generator) -> Floats:
    """Return the sum of the clipped updates of a cohort, whose clients train together."""
    features, labels, present = held
    clients, most = present.shape
    rows = np.arange(clients)[:, None]
    local: Layers = [
        (np.repeat(weights[None], clients, axis=0), np.repeat(bias[None], clients, axis=0))
        for weights, bias in model
    ]
    for _ in range(point["epochs"]):
        # Each client's records in an order of its own, what is only padding last.
        order = np.argsort(np.where(present, random.random((clients, most)), 2.0), axis=1)
        for begin in range(0, most, point["batch_size"]):
            batch = order[:, begin : begin + point["batch_size"]]
            _descend(
                local,
                features[rows, batch],
                labels[rows, batch],
                present[rows, batch],
                point["learning_rate"],
            )
    updates = np.concatenate(
        [
            (after - before).reshape(clients, -1)
            for one, other in zip(local, model, strict=True)
            for after, before in zip(one, other, strict=True)
        ],
        axis=1,
    )
    norms = np.maximum(np.linalg.norm(updates, axis=1), 1e-12)
    scale = np.minimum(1.0, point["clipping_norm"] / norms).astype(np.float32)
    return np.asarray(scale @ updates, np.float32)


def _descend(
    local: Layers,
    features: Floats,
    labels: NDArray[np.int64],
    present: NDArray[np.bool_],
    rate: float,
) -> None:
    """Make one step of each client in place, on the mean cross entropy of its batch."""
    outputs = _forward(local, features)
    scores = outputs[-1]
    error = np.exp(scores - _log_sum(scores)[..., None])
    rows, columns = np.indices(labels.shape)
    error[rows, columns, labels] -= 1
    error *= present[..., None] / np.maximum(present.sum(axis=1), 1)[:, None, None]
    error = error.astype(np.float32)
    for place in reversed(range(len(local))):
        weights, bias = local[place]
        inputs = outputs[place]
        below = error @ weights if place else error
        weights -= rate * (error.transpose(0, 2, 1) @ inputs)
        bias -= rate * error.sum(axis=1)
        error = below * (inputs > 0) if place else error


def _forward(layers: Layers, inputs: Floats) -> list[Floats]:
    """Return the inputs of each layer and the scores, for clients with models of their own."""
    found = [inputs]
    for place, (weights, bias) in enumerate(layers):
        outputs = found[-1] @ weights.transpose(0, 2, 1) + bias[:, None]
        found.append(outputs if place == len(layers) - 1 else np.maximum(outputs, 0))
    return found


def _step(model: Layers, update: Floats) -> None:
    """Add an update to a model in place."""
    begin = 0
    for part in (part for layer in model for part in layer):
        part += update[begin : begin + part.size].reshape(part.shape)
        begin += part.size


def _flat(features: NDArray[Any]) -> Floats:
    return np.asarray(features, np.float32).reshape(len(features), -1)


def _log_sum(scores: Floats) -> Floats:
    top = scores.max(axis=-1)
    found: Floats = top + np.log(np.exp(scores - top[..., None]).sum(axis=-1))
    return found
