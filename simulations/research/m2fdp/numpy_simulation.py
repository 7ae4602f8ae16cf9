"""Simulates multi-tier trainings in NumPy, to compare systems round by round.

The scheme of "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and
Evaluation", Algorithm 1, and what it is compared with, on the data of one `SyntheticData`. The
model is a linear one-vs-rest machine with squared hinge loss, our reading of the paper's "SVM".

All settings of a call meet the same batches, the same draws of participants and the same noise, up
to its scale, so their difference is that of the settings. Noise is drawn for averages only: the sum
of independent Gaussians is one. It is floating point from a seeded generator: this rehearses a
training and protects nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.m2fdp.control.resources import ResourceModel
from flwr_privacy.m2fdp.tree.counts import TierCounts
from flwr_privacy.wire.identity import stream

from .rounds import Event, M2FDPSettings, Rounds
from .synthetic_data import SyntheticData

__all__ = ["M2FDPSettings", "TrainingCurve", "simulate"]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingCurve:
    """Accuracy and costs of the simulated trainings; S settings, T rounds.

    Parameters
    ----------
    accuracy : ndarray of float64, shape (S, T + 1)
        On the test records, before the first round and after each. A training whose path ends
        early stands still.
    energy, seconds : ndarray of float64, shape (S, T + 1)
        Joules and seconds up to then. Local events of trusted subtrees are charged for even where
        they are not held.
    noise : ndarray of float64, shape (S, T)
        Standard deviation per value of the noise that a round has put into the global model.
    models : ndarray of float32, shape (S, d, C)
        The last models.
    """

    accuracy: Array
    energy: Array
    seconds: Array
    noise: Array
    models: Floats


def simulate(
    data: SyntheticData,
    settings: Sequence[M2FDPSettings],
    *,
    rounds: int,
    seed: int,
    resources: ResourceModel | None = None,
) -> TrainingCurve:
    """Train all settings.

    Parameters
    ----------
    data : SyntheticData
        The data.
    settings : Sequence of M2FDPSettings
        What to train, at least one; all trees have as many devices as the data. The data's first
        device is the first leaf.
    rounds : int
        T, at least 1.
    seed : int
        Root of batches, participants and noise.
    resources : ResourceModel, optional
        What steps and uploads cost; by default the paper's.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> from flwr_privacy.simulations.research.m2fdp.synthetic_data import generated_data
    >>> from flwr_privacy.m2fdp.schedule import EventSchedule
    >>> from flwr_privacy.m2fdp.tree.tree import TierTree
    >>> data = generated_data(0, N=10)
    >>> tree, schedule = TierTree.of_fanouts("2,5", p=0.5), EventSchedule(steps=4, events={1: 2})
    >>> both = [M2FDPSettings(tree=tree, schedule=schedule, calibration="none"),
    ...         M2FDPSettings(tree=tree, schedule=schedule, epsilon=0.1)]
    >>> curve = simulate(data, both, rounds=5, seed=0)
    >>> bool(curve.accuracy[0, -1] > curve.accuracy[1, -1])
    True
    """
    if not settings:
        raise InvalidParameterError("settings", [], "at least one")
    check_integer("rounds", rounds, minimum=1)
    for setting in settings:
        if len(setting.tree.devices) != data.devices:
            found = f"{len(setting.tree.devices)} devices"
            raise InvalidParameterError("tree", found, f"{data.devices} devices, as the data have")
    curve = TrainingCurve(
        accuracy=np.zeros((len(settings), rounds + 1)),
        energy=np.zeros((len(settings), rounds + 1)),
        seconds=np.zeros((len(settings), rounds + 1)),
        noise=np.zeros((len(settings), rounds)),
        models=np.zeros((len(settings), data.features.shape[2], data.classes), np.float32),
    )
    groups: dict[tuple[object, ...], list[int]] = {}  # settings whose steps are those of each other
    for row, setting in enumerate(settings):
        steps = tuple(choice[0] for choice in setting.plan(rounds))
        groups.setdefault((setting.rate, steps), []).append(row)
    for rows in groups.values():
        plans = [Rounds(settings[row], rounds) for row in rows]
        _Group(data, plans, rows, curve, seed).train(resources or ResourceModel())
    return curve


class _Group:
    """Settings that are trained side by side: S of them, C classes, N devices.

    Their models are one array of shape (N, d, S * C), so that a batch is read once for all.
    """

    def __init__(
        self,
        data: SyntheticData,
        plans: Sequence[Rounds],
        rows: Sequence[int],
        curve: TrainingCurve,
        seed: int,
    ) -> None:
        self._data, self._plans, self._rows, self._curve = data, plans, rows, curve
        self._seed = seed
        self._settings = [plan.setting for plan in plans]
        devices, records, d = data.features.shape
        self._records = data.features.reshape(devices * records, d)
        self._signs = np.full((devices * records, data.classes), -1, dtype=np.float32)
        self._signs[np.arange(devices * records), data.labels.ravel()] = 1
        self._center = np.zeros((d, len(plans) * data.classes), dtype=np.float32)
        self._models = np.empty((devices, *self._center.shape), dtype=np.float32)
        limits = [np.inf if one.clip is None else one.clip for one in self._settings]
        self._limits = np.array(limits)
        self._perturbed = [i for i, one in enumerate(self._settings) if one.perturb > 0]
        self._last_noise = np.zeros(len(plans))

    def train(self, resources: ResourceModel) -> None:
        """Train, and write into the curve."""
        curve, planned = self._curve, len(self._plans[0].plan)
        curve.accuracy[self._rows, 0] = self._accuracy()
        for t in range(1, curve.noise.shape[1] + 1):
            for of in (curve.accuracy, curve.energy, curve.seconds):
                of[self._rows, t] = of[self._rows, t - 1]
            if t <= planned:
                self._round(t)
                curve.accuracy[self._rows, t] = self._accuracy()
                self._charge(t, resources)
        for index, row in enumerate(self._rows):
            curve.models[row] = self._center[:, self._columns(index)]

    def _round(self, t: int) -> None:
        rates = np.array([one.step_size(t) for one in self._settings])
        keys = stream(self._seed, "m2fdp participants", t).random(self._data.devices)
        events: dict[int, list[tuple[int, Event]]] = {}
        taking = []
        lengths = rates * np.where(np.isfinite(self._limits), self._limits, 0)
        for index, plan in enumerate(self._plans):
            choice = plan.plan[t - 1]
            taking.append(plan.participants(choice, keys))
            one = plan.of(choice)
            self._last_noise[index] = self._curve.noise[self._rows[index], t - 1] = (
                one.std * lengths[index]
            )
            for event in one.events:
                events.setdefault(event.step, []).append((index, event))
        self._models[:] = self._center
        draws = stream(self._seed, "m2fdp batches", t)
        for k in range(1, self._plans[0].plan[t - 1][0] + 1):
            self._step(rates.astype(np.float32), draws, t, k)
            noise: dict[int, Floats] = {}  # by number of nodes, shared by all settings
            for index, event in events.get(k, []):
                nodes = len(event.std)
                if nodes not in noise and event.std.any():
                    size = (nodes, self._models.shape[1], self._data.classes)
                    own = stream(self._seed, "m2fdp noise", t, k, nodes)
                    noise[nodes] = own.standard_normal(size, dtype=np.float32)
                scaled = float(lengths[index]) * event.std
                self._event(index, event, taking[index], scaled, noise.get(nodes))
        self._center[:] = self._models[0]

    def _step(self, rates: Floats, draws: np.random.Generator, t: int, k: int) -> None:
        """Let all devices take a step of clipped stochastic gradient descent."""
        batch, signs, shares = self._batch(draws)
        moves = self._gradient(batch, signs, shares, self._models)
        for index in self._perturbed:
            columns = self._columns(index)
            own = stream(self._seed, "m2fdp perturbation", t, k)
            size = self._models[:, :, columns].shape
            shifted = own.standard_normal(size, dtype=np.float32)
            shifted *= np.float32(self._last_noise[index])
            shifted += self._models[:, :, columns]
            moves[:, :, columns] += np.float32(self._settings[index].perturb) * self._gradient(
                batch, signs, shares, shifted
            )
        squares = np.einsum("ndc,ndc->nc", moves, moves)
        norms = np.sqrt(squares.reshape(len(moves), len(self._plans), -1).sum(axis=2))
        limits = self._limits.astype(np.float32)
        factors = rates * np.minimum(1, limits / np.maximum(norms, np.float32(1e-30)))
        moves *= np.repeat(factors, self._data.classes, axis=1)[:, None, :]
        self._models -= moves

    def _batch(self, draws: np.random.Generator) -> tuple[Floats, Floats, Floats]:
        """Return records of all devices, each in with probability q, their signs and weights."""
        devices, records, _ = self._data.features.shape
        taken = draws.random((devices, records), dtype=np.float32) < self._settings[0].rate
        rows, columns = np.nonzero(taken)
        sizes = taken.sum(axis=1)
        longest = max(1, int(sizes.max()))
        place = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        index = np.zeros((devices, longest), dtype=np.intp)  # filled up with any record, weight 0
        index[rows, place] = rows * records + columns
        inside = np.arange(longest) < sizes[:, None]
        shares = (inside / np.maximum(sizes, 1)[:, None]).astype(np.float32)
        return np.take(self._records, index, axis=0), self._signs[index], shares

    def _gradient(self, batch: Floats, signs: Floats, shares: Floats, models: Floats) -> Floats:
        """Return the gradients of the squared hinge loss, mean over a batch: shape of `models`."""
        devices, longest, classes = signs.shape
        scores = (batch @ models).reshape(devices, longest, -1, classes)
        signs = signs[:, :, None]
        gaps = np.maximum(1 - signs * scores, 0)
        gaps *= -2 * signs * shares[:, :, None, None]
        found: Floats = batch.transpose(0, 2, 1) @ gaps.reshape(devices, longest, -1)
        return found

    def _event(
        self, index: int, event: Event, taking: Floats, std: Array, noise: Floats | None
    ) -> None:
        """Average the models of one setting, and hand the result back."""
        plan, columns = self._plans[index], self._columns(index)
        own = self._models[:, :, columns]
        means = np.tensordot(plan.weights[event.tier] * taking, own, axes=1)
        if noise is not None:
            means += std.astype(np.float32)[:, None, None] * noise
        node_of = plan.node_of[event.tier]
        if event.active.all():
            self._models[:, :, columns] = means[node_of]
        else:
            self._models[event.active, :, columns] = means[node_of[event.active]]

    def _columns(self, index: int) -> slice:
        classes = self._data.classes
        return slice(index * classes, (index + 1) * classes)

    def _accuracy(self) -> Array:
        scores = (self._data.test_features @ self._center).reshape(
            len(self._data.test_labels), len(self._plans), -1
        )
        right = np.argmax(scores, axis=2) == self._data.test_labels[:, None]
        return np.asarray(right.mean(axis=0))

    def _charge(self, t: int, resources: ResourceModel) -> None:
        for row, plan in zip(self._rows, self._plans, strict=True):
            choice = plan.plan[t - 1]
            schedule = plan.setting.schedule.with_steps(choice[0])
            cost = resources.round(
                TierCounts.of(plan.setting.tree),
                steps=choice[0],
                parameters=self._data.parameters,
                events={tier: len(schedule.at(tier)) for tier in schedule.events},
                participants=plan.counts(choice),
            )
            self._curve.energy[row, t] += cost.energy
            self._curve.seconds[row, t] += cost.seconds
