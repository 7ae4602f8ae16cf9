"""Runs real ACFL trainings inline for the attack, and records what the server receives."""

import logging
import math
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from flwr_privacy.acfl.encoding import Moments, moments, one_hot
from flwr_privacy.acfl.sums import FEATURES, GRADIENT, LABELS, moments_of, sums_of
from flwr_privacy.acfl.terms import RECORD, GradientTerms, SetupTerms
from flwr_privacy.clients import acfl_client_app
from flwr_privacy.errors import check_choice, check_integer
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.simulations.engines.quiet import quiet
from flwr_privacy.simulations.tasks.data import load
from flwr_privacy.simulations.tasks.linear_tasks import BoundedMap
from flwr_privacy.simulations.tasks.task_list import TASKS as ALL_TASKS
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import (
    ACFL,
    DataBounds,
    LoopOptions,
    NoisedRecords,
    NoisedSetup,
    Weighting,
)
from flwr_privacy.strategies.requests.instruction import Instruction, noting
from flwr_privacy.strategies.requests.messenger import Assigned
from flwr_privacy.strategies.requests.request_log import ClientReply
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.identity import stream
from flwr_privacy.wire.message import TRAIN

__all__ = [
    "DELTA",
    "EPSILON",
    "MI_EPSILON",
    "RATE",
    "STEP",
    "TASKS",
    "Devices",
    "ServerView",
    "listen",
]

TASKS = ("digits-pixels", "digits-rff")
"""Linear regressions on the digits: of the pixels as they are, and of random Fourier features."""

MI_EPSILON = 1.0  # nats, of the paper's setup
EPSILON, DELTA = 8.0, 1e-5  # with noise on the gradients too
RATE = 0.2  # of stragglers, anew in every round
STEP = 1 / 16  # of the pixels

_CLASSES = 10
_LARGEST_START = 1 / 30  # of the entries of the first model, as in the paper
_IN_TIME = 2.0  # virtual seconds; who is in time takes 1, a straggler 10

Matrix = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Devices:
    """Devices with a few digits each, sorted by class, and digits of nobody.

    Parameters
    ----------
    task : str
        One of `TASKS`.
    seed : int
        Root of the draws.
    pixels : ndarray, shape (devices, records, 64)
        Digits of each device, pixels from 0 to 1.
    classes : ndarray of int64, shape (devices, records)
        Which digits they are.
    other_pixels, other_classes : ndarray, shapes (n, 64) and (n,)
        Digits of nobody.
    """

    task: str
    seed: int
    pixels: Matrix
    classes: NDArray[np.int64]
    other_pixels: Matrix
    other_classes: NDArray[np.int64]

    @classmethod
    def of(cls, task: str, *, devices: int, records: int, seed: int) -> "Devices":
        """Draw digits of the training data, and deal them out sorted by class.

        Raises
        ------
        InvalidParameterError
            If a value is out of range.
        """
        check_choice("task", task, TASKS)
        check_integer("seed", seed, minimum=0)
        data = load("digits")
        check_integer("clients", devices, minimum=3, maximum=len(data.labels))
        check_integer("records", records, minimum=1, maximum=len(data.labels) // devices)
        drawn = stream(seed, "attack").permutation(len(data.labels))[: devices * records]
        drawn = drawn[np.argsort(data.labels[drawn], kind="stable")]
        return cls(
            task=task,
            seed=seed,
            pixels=data.features[drawn].astype(np.float64).reshape(devices, records, -1),
            classes=data.labels[drawn].reshape(devices, records),
            other_pixels=data.test_features.astype(np.float64),
            other_classes=data.test_labels,
        )

    @property
    def map(self) -> BoundedMap | None:
        """What makes features of pixels; None where they are the features."""
        make = ALL_TASKS[self.task].features if self.task in ALL_TASKS else None
        return None if make is None else make()

    def features(self, pixels: Matrix) -> Matrix:
        """Return the features of digits."""
        return pixels if self.map is None else self.map(pixels)

    @property
    def moments(self) -> Moments:
        """The moments of all devices, one below the other."""
        own = [
            moments(self.features(pixels), one_hot(classes, _CLASSES))
            for pixels, classes in zip(self.pixels, self.classes, strict=True)
        ]
        return Moments(*(np.array(parts) for parts in zip(*own, strict=True)))

    @property
    def start(self) -> Matrix:
        """The model before the training."""
        size = self.features(self.other_pixels[:1]).shape[1]
        return stream(self.seed, "start").uniform(0, _LARGEST_START, (size, _CLASSES))


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerView:
    """Everything that the server receives in a training.

    Parameters
    ----------
    models : ndarray, shape (T, d, o)
        The models of the rounds that had a result.
    answered : ndarray of bool, shape (T, devices)
        Whose answers are in it.
    sums : ndarray, shape (T, d, o)
        Sums of their gradients.
    gradients : ndarray, shape (T, devices, d, o), or None
        Their gradients, zeros where there is none; None under a secure sum.
    uploads : Moments or None
        Coded data sets of the devices, one below the other; None under a secure sum.
    coded : Moments
        Their sum.
    setup, terms : SetupTerms and GradientTerms
        What was asked of the devices, in the setup and in the last round.
    """

    models: Matrix
    answered: NDArray[np.bool_]
    sums: Matrix
    gradients: Matrix | None
    uploads: Moments | None
    coded: Moments
    setup: SetupTerms
    terms: GradientTerms

    @property
    def each_device(self) -> list[tuple[Matrix, Matrix]]:
        """For each device the models that it answered, and its answers."""
        if self.gradients is None:
            raise RuntimeError("under a secure sum nobody's gradient is seen")
        return [
            (self.models[own], self.gradients[own, index])
            for index, own in enumerate(self.answered.T)
        ]

    @property
    def each_upload(self) -> Moments:
        """What each device sent as its setup."""
        if self.uploads is None:
            raise RuntimeError("under a secure sum nobody's setup is seen")
        return self.uploads


def listen(devices: Devices, *, noise: str, rounds: int, secure: bool = False) -> ServerView:
    """Train, with stragglers, and return what the server has.

    Parameters
    ----------
    devices : Devices
        The data.
    noise : {"paper", "record"}
        The paper's noise, on the setup alone, or noise on everything.
    rounds : int
        Rounds of the training.
    secure : bool, default False
        Whether answers go through a secure sum.
    """
    count, per_device, pixels = devices.pixels.shape
    embed = devices.map
    bound, norm = (1.0, math.sqrt(pixels)) if embed is None else (embed.bound, embed.norm)
    privacy: NoisedSetup | NoisedRecords = NoisedSetup(mi_epsilon=MI_EPSILON)
    if noise == RECORD:
        # At first residuals have a length of about 1, and nothing is clipped.
        privacy = NoisedRecords(epsilon=EPSILON, delta=DELTA, clipping_norm=norm or 1.0)
    strategy = _KeepingServer(
        privacy=privacy,
        # In a secure sum one may miss the dealing or the round.
        weighting=Weighting(alpha="estimated", straggler_rate=None if secure else RATE),
        data=DataBounds(
            feature_bound=bound,
            feature_norm=norm,
            features=embed,
            one_hot=True,
            max_records=per_device,
        ),
        min_train_nodes=count,
        min_available_nodes=count,
        loop=LoopOptions(
            seed=devices.seed,
            stragglers=StragglerModel(kind="constant", slow_fraction=RATE),
            deadline=_IN_TIME,
            write_card=False,
        ),
        secure_sum=SecureSum() if secure else None,
    )

    def data_of(context: Context) -> tuple[Matrix, Matrix]:
        index = int(context.node_config["partition-id"])
        return devices.pixels[index], one_hot(devices.classes[index], _CLASSES)

    app = acfl_client_app(data_of, features=embed)
    start = ArrayRecord({"weights": Array(devices.start)})
    grid = InlineGrid(app, count)
    # No rounds, nor that a sum was not opened because too many were late.
    with closing(grid), quiet(logging.ERROR), acting_as_server(grid.run_id):
        strategy.start(grid, start, num_rounds=rounds)
    return strategy.kept.heard(count)


@dataclass(eq=False)
class _Kept:
    """What came, in the order in which it came."""

    setup: SetupTerms | None = None
    coded: Moments | None = None
    uploads: dict[str, Moments] = field(default_factory=dict)
    terms: GradientTerms | None = None
    models: list[Matrix] = field(default_factory=list)
    sums: list[Matrix] = field(default_factory=list)
    in_sum: list[set[str]] = field(default_factory=list)
    gradients: list[dict[str, Matrix]] = field(default_factory=list)

    def heard(self, devices: int) -> ServerView:
        """Return it in the order of the devices."""
        if self.setup is None or self.terms is None or self.coded is None:
            raise RuntimeError("nothing was trained")
        names = [str(index) for index in range(devices)]
        nothing = np.zeros_like(self.models[0])
        uploads = None
        if self.uploads:
            parts = zip(*(self.uploads[name] for name in names), strict=True)
            uploads = Moments(*(np.array(part) for part in parts))
        gradients = None
        if any(self.gradients):
            gradients = np.array(
                [[answers.get(name, nothing) for name in names] for answers in self.gradients]
            )
        return ServerView(
            models=np.array(self.models),
            answered=np.array([[name in those for name in names] for those in self.in_sum]),
            sums=np.array(self.sums),
            gradients=gradients,
            uploads=uploads,
            coded=self.coded,
            setup=self.setup,
            terms=self.terms,
        )


class _KeepingServer(ACFL):
    """The server half as it is; it keeps what it sends and what it is sent."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept = _Kept()
        self._answers: dict[str, dict[str, Matrix]] = {}
        self._now: SetupTerms | GradientTerms | None = None

    def put(
        self,
        server_round: int,
        phase: str,
        content: RecordDict,
        assigned: Assigned,
        instruction: Instruction,
        *,
        quorum: int | None = None,
    ) -> list[Message]:
        if phase == TRAIN:
            self._now = records.read(GradientTerms, instruction.fields)
        else:
            self._now = records.read(SetupTerms, instruction.fields)
        if self.secure_sum is None:
            instruction = noting(instruction, self.take, self._note)
        return super().put(server_round, phase, content, assigned, instruction, quorum=quorum)

    def _note(self, reply: ClientReply) -> None:
        if self._now is not None:
            step = CodeGrid(self._now.grid).step if self._now.coded else 1.0
            self._answers[reply.client_id] = {
                name: step * np.asarray(array, np.float64) for name, array in reply.arrays().items()
            }

    def collect(
        self, phase: str, messages: Iterable[Message]
    ) -> tuple[WeightedMean | None, MetricRecord | None]:
        self._answers = {}
        mean, metrics = super().collect(phase, messages)
        terms, kept = self._now, self.kept
        if mean is not None and isinstance(terms, SetupTerms):
            kept.setup = terms
            kept.coded = moments_of(sums_of(mean, terms), terms)
            kept.uploads = {
                client: Moments(arrays[FEATURES], arrays[LABELS])
                for client, arrays in self._answers.items()
            }
        elif mean is not None and isinstance(terms, GradientTerms):
            kept.terms = terms
            kept.models.append(self._model())
            kept.sums.append(sums_of(mean, terms)[GRADIENT])
            kept.in_sum.append(set(mean.clients))
            kept.gradients.append({c: arrays[GRADIENT] for c, arrays in self._answers.items()})
        return mean, metrics
