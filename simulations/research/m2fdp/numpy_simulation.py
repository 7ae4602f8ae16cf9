"""Trains M2FDP and its baselines in one process: the strategy's rounds without messages.

A `SimulatedM2FDP` is the strategy itself: its plans, participants, averages, noise, controller and
costs are those of `flwr_privacy.strategies.M2FDP`, and a device's update is measured and noised by
`flwr_privacy.m2fdp.DeviceUpdate`. What is left out is Flower, the nodes' stores and their ledgers.
All devices of an exchange take their local steps together, so that a round is about ten times as
fast as on the inline engine. A test compares the models of both.

The model is a linear one-vs-rest machine with squared hinge loss, our reading of the paper's "SVM".
All noise is from a seed: this protects nobody.
"""

from dataclasses import astuple, dataclass
from typing import Any, cast

import numpy as np
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.m2fdp import DeviceUpdate, Exchange, TierSums, TreeModels
from flwr_privacy.pipeline.mechanism import Facts
from flwr_privacy.privacy.ledger import Question
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.strategies import M2FDP, LoopOptions
from flwr_privacy.strategies.m2fdp.tier_requests import TierRequests
from flwr_privacy.strategies.requests.messenger import Assigned
from flwr_privacy.strategies.requests.request_log import arrays_of
from flwr_privacy.strategies.state.experiment import to_record
from flwr_privacy.wire.identity import stream
from flwr_privacy.wire.message import TRAIN

from .synthetic_data import SyntheticData

__all__ = ["MODEL", "LocalSteps", "SimulatedM2FDP", "TrainingCurve", "of_seed"]

MODEL = "W"
"""Name of the model's only array, of shape (d, C)."""

Array = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """Clipped stochastic gradient descent on Poisson batches, for several devices at a time.

    Parameters
    ----------
    data : SyntheticData
        The records of all devices.
    seed : int
        Root of the batches. Trainings of one seed meet the same batches.
    learning_rate : float, default 1.0
        Step size eta.
    clip : float or None, default 1.0
        G, the largest norm of a batch's gradient. None: gradients as they are.
    rate : float, default 0.05
        q: every record is in a batch with this probability.
    perturb : float, default 0.0
        PEDPFL's regularisation: the weight of the loss at a model with noise as large as that of
        the round's average.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    data: SyntheticData
    seed: int
    learning_rate: float = 1.0
    clip: float | None = 1.0
    rate: float = 0.05
    perturb: float = 0.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "perturb"):
            check_number(name, getattr(self, name), minimum=0)
        if self.clip is not None:
            check_number("clip", self.clip, minimum=0)
        if not 0 < check_number("rate", self.rate) <= 1:
            raise InvalidParameterError("rate", self.rate, "above 0 and at most 1")

    def trained(
        self, models: Floats, rows: list[int], *, server_round: int, steps: range, told: Any
    ) -> Floats:
        """Return the models of some devices after local steps.

        Parameters
        ----------
        models : ndarray, shape (n, d, C)
            What they start from; it is changed.
        rows : list of int
            Which devices of the data they are.
        server_round : int
            The round.
        steps : range
            The numbers of the steps in their round.
        told : Mapping
            The configuration of the training: ``learning-rate-scale``, and ``classifier-noise``
            where there is a regularisation.
        """
        eta = self.learning_rate * told["learning-rate-scale"]
        for k in steps:
            batch, signs, shares = self._batch(rows, server_round, k)
            moves = _gradient(batch, signs, shares, models)
            if self.perturb:
                own = stream(self.seed, "m2fdp perturbation", server_round, k)
                noise = own.standard_normal((self.data.devices, *models.shape[1:]))[rows]
                shifted = models + (told["classifier-noise"] * noise).astype(models.dtype)
                moves += self.perturb * _gradient(batch, signs, shares, shifted)
            factors = np.full(len(rows), eta)
            if self.clip is not None:
                norms = np.sqrt(np.einsum("ndc,ndc->n", moves, moves))
                factors *= np.minimum(1, self.clip / np.maximum(norms, 1e-30))
            moves *= factors[:, None, None].astype(models.dtype)
            models -= moves
        return models

    def _batch(self, rows: list[int], server_round: int, k: int) -> tuple[Floats, Floats, Floats]:
        """Return the devices' batches, padded to the longest, with signs and records' weights."""
        data = self.data
        draws = stream(self.seed, "m2fdp batches", server_round, k)
        taken = (draws.random(data.labels.shape, dtype=np.float32) < self.rate)[rows]
        devices, records = np.nonzero(taken)
        sizes = taken.sum(axis=1)
        longest = max(1, int(sizes.max()))
        place = np.arange(len(devices)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        index = np.zeros((len(rows), longest), dtype=np.intp)  # filled up with any, of weight 0
        index[devices, place] = records
        at = np.asarray(rows)[:, None], index
        inside = np.arange(longest) < sizes[:, None]
        shares = (inside / np.maximum(sizes, 1)[:, None]).astype(data.features.dtype)
        signs = np.where(data.labels[at][..., None] == np.arange(data.classes), 1, -1)
        return data.features[at], signs.astype(data.features.dtype), shares


def _gradient(batch: Floats, signs: Floats, shares: Floats, models: Floats) -> Floats:
    """Return the gradients of the squared hinge loss, mean over a batch: shape of `models`."""
    gaps = np.maximum(1 - signs * (batch @ models), 0)
    gaps *= -2 * signs * shares[:, :, None]
    found: Floats = batch.transpose(0, 2, 1) @ gaps
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingCurve:
    """Accuracy and costs of a simulated training of T rounds.

    Parameters
    ----------
    accuracy : ndarray of float64, shape (T + 1,)
        On the test records, before the first round and after each.
    energy, seconds : ndarray of float64, shape (T + 1,)
        Joules and seconds up to then.
    noise_var : ndarray of float64, shape (T,)
        Variance per value of the noise that a round has put into the global model.
    model : ndarray, shape (d, C)
        The last model.
    """

    accuracy: Array
    energy: Array
    seconds: Array
    noise_var: Array
    model: Floats


class _Present:
    """The devices of a simulation, in place of those that a grid has."""

    def __init__(self, devices: int) -> None:
        self.introductions: dict[str, Any] = {}
        self._devices = [str(row) for row in range(devices)]

    def clients(self) -> list[str]:
        return self._devices

    def sample(self, *args: Any, **options: Any) -> Assigned:
        return {0: self._devices}


class SimulatedM2FDP(M2FDP):
    """M2FDP whose devices, "0" to "N-1" by their rows of the data, answer without messages.

    Parameters are those of `flwr_privacy.strategies.M2FDP`, with a seed for all noise
    (`of_seed`). Clients and aggregators have no nodes.

    Examples
    --------
    >>> from flwr_privacy.m2fdp import EventSchedule, TierTree
    >>> from flwr_privacy.simulations.research.m2fdp.synthetic_data import generated_data
    >>> from flwr_privacy.strategies import DeviceNoise
    >>> training = SimulatedM2FDP(
    ...     tree=TierTree.of_fanouts("2,5", p=0.5),
    ...     privacy=DeviceNoise(epsilon=100.0),
    ...     schedule=EventSchedule(steps=4, events={1: 2}),
    ...     **of_seed(0),
    ... )
    >>> curve = training.simulate(LocalSteps(data=generated_data(0, N=10), seed=0), rounds=5)
    >>> curve.accuracy.shape
    (6,)
    """

    def _adds_noise(self) -> bool:
        """Tell that noise is drawn here: that of the devices too."""
        return True

    def simulate(self, local: LocalSteps, *, rounds: int) -> TrainingCurve:
        """Train on the data of `local`, for so many rounds or until the controller ends it.

        Raises
        ------
        InvalidParameterError
            If the tree has another number of devices than the data, or a value is not allowed.
        """
        data = local.data
        if len(self.tree.devices) != data.devices:
            found = f"{len(self.tree.devices)} devices"
            raise InvalidParameterError("tree", found, f"{data.devices} devices, as the data have")
        if self.insecure_seed is None:
            raise InvalidParameterError("insecure_seed", None, "a seed: this protects nobody")
        self.planned_rounds = check_integer("rounds", rounds, minimum=1)
        self._local = local
        present = _Present(data.devices)
        self.federation = self.messenger = cast("Any", present)
        model = np.zeros((data.features.shape[2], data.classes), data.features.dtype)
        grid, arrays = cast("Grid", None), to_record({MODEL: model})
        self._template = arrays_of(arrays)
        self.setup(grid)
        accuracy, costs = [self._accuracy(model)], [(0.0, 0.0)]
        noise_var = []
        for t in range(1, rounds + 1):
            if self.stop():
                break
            arrays = self.train_round(grid, t, arrays, ConfigRecord())[0] or arrays
            model = arrays_of(arrays)[MODEL]
            numbers = self._tiers.metrics()
            accuracy.append(self._accuracy(model))
            costs.append((numbers["energy_j"], numbers["delay_s"]))
            noise_var.append(numbers["noise_var"])
        energy, seconds = np.cumsum(costs, axis=0).T
        return TrainingCurve(
            accuracy=np.array(accuracy),
            energy=energy,
            seconds=seconds,
            noise_var=np.array(noise_var),
            model=model,
        )

    def _accuracy(self, model: Floats) -> float:
        data = self._local.data
        return float(np.mean(np.argmax(data.test_features @ model, axis=1) == data.test_labels))

    def _asked(
        self,
        grid: Grid,
        server_round: int,
        exchange: Exchange,
        models: TreeModels,
        config: ConfigRecord,
    ) -> tuple[TierSums | None, MetricRecord | None]:
        """Have the devices of an exchange train; return the sums of their answers."""
        requests = TierRequests(self.plan, exchange, self._taking_part(exchange), models, None)
        sums = TierSums(self._template, [MODEL], requests.groups)
        told = {
            "learning-rate-scale": self.plan.scale,
            "classifier-noise": self._tiers.planned_deviation(self.plan),
        }
        segment = self.plan.schedule.segments()[exchange.index]
        last = segment.start + segment.steps
        leaves: dict[int, list[str]] = {}  # by local steps: those that are asked for as many
        for leaf in requests.drawn:
            leaves.setdefault(exchange.leaves[leaf].steps, []).append(leaf)
        for steps, alike in leaves.items():
            starts = {leaf: models.model(leaf) for leaf in alike}
            devices = [(device, leaf) for leaf in alike for device in requests.drawn[leaf]]
            trained = self._local.trained(
                np.stack([starts[leaf][MODEL] for _, leaf in devices]),
                [int(device) for device, _ in devices],
                server_round=server_round,
                steps=range(last - steps + 1, last + 1),
                told=told,
            )
            updates = {leaf: DeviceUpdate(requests.terms(leaf, []), {}) for leaf in alike}
            plans = {leaf: updates[leaf].plan(starts[leaf], Facts()) for leaf in alike}
            for (device, leaf), own in zip(devices, trained, strict=True):
                update = updates[leaf]
                measured = update.measure(starts[leaf], {MODEL: own})
                random = self._random(device, server_round, update.terms.period)
                codes, _ = update.noise(measured, plans[leaf], random)
                sums.accumulate(device, codes, weight=1)
        return (sums if sums.weight else None), None

    def _random(self, device: str, server_round: int, period: int) -> SecureRandom:
        """Return the source of a device's noise, see `NodeRules.random` of its node store."""
        question = Question(
            experiment_id=self.experiment.id,
            phase=TRAIN,
            server_round=server_round,
            request=period,
        )
        return SecureRandom.insecure(self.insecure_seed or 0, "noise", device, *astuple(question))


def of_seed(seed: int, experiment_id: str = "numpy") -> dict[str, Any]:
    """Return the keywords of a strategy all of whose draws come from a seed.

    Examples
    --------
    >>> sorted(of_seed(0))
    ['insecure_seed', 'loop']
    """
    loop = LoopOptions(seed=seed, experiment_id=experiment_id, write_card=False)
    return {"loop": loop, "insecure_seed": seed}
