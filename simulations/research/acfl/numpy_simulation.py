"""Trains ACFL and its rivals in one process: the strategy's rounds without messages.

A `SimulatedACFL` is the strategy itself: its plan of the noise, coded data, weights, step sizes and
steps are those of `flwr_privacy.strategies.ACFL`, and a device encodes its data by
`flwr_privacy.acfl.release.LocalCodedData`. What is left out is Flower, the nodes' stores and their
ledgers. All devices compute their gradients together, so that a round of 100 devices is about a
thousand times as fast as on the inline engine. A test compares the models of both.

Trainings of one seed meet the same stragglers. All noise is from that seed: this protects nobody.
"""

import math
from dataclasses import astuple, dataclass
from typing import Any, cast

import numpy as np
from flwr.app import MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.acfl.encoding import Moments, check_data, moments_gradient
from flwr_privacy.acfl.release import LocalCodedData
from flwr_privacy.acfl.sums import RoundSums
from flwr_privacy.acfl.terms import RECORD, SetupTerms
from flwr_privacy.clients.acfl_data import PreparedData
from flwr_privacy.errors import DataError, InvalidParameterError, check_integer, check_number
from flwr_privacy.pipeline.mechanism import Facts
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.ledger import Question
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.stragglers import Stragglers
from flwr_privacy.strategies import ACFL, LoopOptions
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.messenger import Assigned
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.identity import stream

from .synthetic_data import ACFLSyntheticData

__all__ = ["MODEL", "ACFLTrainingCurve", "RandomStragglers", "SimulatedACFL", "of_seed"]

MODEL = "W"
"""Name of the model's only array, of shape (d, o)."""

Array = NDArray[np.float64]

_IN_TIME, _LATE = 1.0, 10.0  # virtual seconds of an answer
_DEADLINE = 2.0


@dataclass(frozen=True, kw_only=True)
class RandomStragglers(Stragglers):
    """Stragglers of a simulation: a device misses a round with a probability, or always.

    The draws of a round come from one stream. All rates are compared with the same draws: a device
    that misses a round at one rate misses it at every larger one.

    Parameters
    ----------
    rate : float, default 0.2
        Probability with which a device misses a round, at least 0 and below 1.
    silent : int, default 0
        Devices that never answer, the first ones (not in the paper).

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    rate: float = 0.2
    silent: int = 0

    def __post_init__(self) -> None:
        if not 0 <= check_number("rate", self.rate) < 1:
            allowed = "a number of at least 0 and below 1"
            raise InvalidParameterError("rate", self.rate, allowed)
        check_integer("silent", self.silent, minimum=0)

    def answered(self, devices: int, *, seed: int | str, server_round: int) -> NDArray[np.bool_]:
        """Return which of the devices "0" to "N-1" answer in a round, shape (N,)."""
        draws = stream(seed, "acfl stragglers", server_round).random(devices)
        answered: NDArray[np.bool_] = draws >= self.rate
        answered[: self.silent] = False
        return answered

    def finish_time(
        self, *, seed: int | str, server_round: int, client_id: str, phase: str, request: int = 0
    ) -> float:
        """Return the virtual seconds of an answer; the setup waits for everybody."""
        row = int(client_id)
        answered = self.answered(row + 1, seed=seed, server_round=server_round)
        return _IN_TIME if answered[row] else _LATE


@dataclass(frozen=True, kw_only=True, eq=False)
class ACFLTrainingCurve:
    """Losses and weights of a simulated training of T rounds.

    Parameters
    ----------
    excess : ndarray of float64, shape (T + 1,)
        ``f(W) - f(W*)`` before the first round and after each; infinite once the model diverges.
    least_loss : float
        f(W*).
    coded, received : ndarray of float64, shape (T,)
        The weights of the rounds; NaN where the model stayed.
    model : ndarray of float64, shape (d, o)
        The last model.
    """

    excess: Array
    least_loss: float
    coded: Array
    received: Array
    model: Array

    @property
    def losses(self) -> Array:
        """The loss f(W), ACFL, (1), a sum over all records; shape (T + 1,)."""
        return self.excess + self.least_loss


class _Present:
    """The devices of a simulation, in place of those that a grid has."""

    met = True

    def __init__(self, devices: int) -> None:
        self._devices = [str(row) for row in range(devices)]

    def clients(self) -> list[str]:
        return self._devices


class SimulatedACFL(ACFL):
    """ACFL whose devices, "0" to "N-1" by their rows of the data, answer without messages.

    Parameters are those of `flwr_privacy.strategies.ACFL`, with a seed and the stragglers
    (`of_seed`). Gradients are exact and of all records, and every device is asked in every round.

    Examples
    --------
    >>> from flwr_privacy.simulations.research.acfl.synthetic_data import paper_data
    >>> from flwr_privacy.strategies import DataBounds, SetupVariances, Weighting
    >>> def trained(alpha):
    ...     training = SimulatedACFL(
    ...         privacy=SetupVariances(sigma1_sq=1.0, sigma2_sq=1.0),
    ...         weighting=Weighting(alpha=alpha, straggler_rate=0.2),
    ...         data=DataBounds(max_records=30),
    ...         learning_rate=2e-3,
    ...         schedule="inverse",
    ...         **of_seed(0),
    ...     )
    ...     return training.simulate(paper_data(0, N=20, m=30), rounds=100)
    >>> adaptive, fixed = trained("estimated"), trained(0.5)
    >>> bool(adaptive.excess[-1] < fixed.excess[-1] < fixed.excess[0])
    True
    """

    def simulate(self, data: ACFLSyntheticData, *, rounds: int) -> ACFLTrainingCurve:
        """Train on the data for so many rounds, or until the model diverges.

        Raises
        ------
        InvalidParameterError
            If the strategy has an option that is not simulated, the data are beyond its bounds, or
            a value is not allowed.
        """
        stragglers, seed = self._drawn_from(data)
        self.planned_rounds = check_integer("rounds", rounds, minimum=1)
        self._simulated, model = data, data.start
        self._template = {MODEL: model}
        self.federation = cast("Any", _Present(data.devices))
        self._announced = True  # a guarantee would be about nobody
        self.setup(cast("Grid", None))
        own = Moments(data.gram, data.cross)
        devices, share, coded = self._devices(), self._asked_share(), self._set_up.coded
        excess, weights = np.full(rounds + 1, math.inf), np.full((2, rounds), math.nan)
        excess[0] = data.excess(model)
        for t in range(1, rounds + 1):
            found = None
            if not self.weighting.coded_only:
                here = stragglers.answered(data.devices, seed=seed, server_round=t)
                came = moments_gradient(own, model)[here]
                if len(came):
                    found = RoundSums(len(came), came.sum(axis=0), float(np.sum(came**2)))
            try:
                new = self.descent.step(
                    model, found, t=t, devices=devices, share=share, coded=coded, asked=None
                )
            except DataError:
                break  # the model diverges
            if new is not None:
                numbers, model = self.descent.numbers, new
                weights[:, t - 1] = numbers["alpha"], numbers["received_weight"]
            excess[t] = data.excess(model)
        return ACFLTrainingCurve(
            excess=excess,
            least_loss=data.least_loss,
            coded=weights[0],
            received=weights[1],
            model=model,
        )

    def setup(self, grid: Grid) -> None:
        """Have all devices encode their data."""
        self._check_begin()
        if self.weighting.needs_setup:
            self._ask_for_codes(grid, 0, {0: self.federation.clients()})

    def ask(
        self,
        grid: Grid,
        server_round: int,
        phase: str,
        content: RecordDict,
        assigned: Assigned,
        instruction: Instruction,
        *,
        quorum: int | None = None,
    ) -> tuple[WeightedMean | None, MetricRecord | None]:
        """Return the sum of the devices' coded data sets."""
        terms = records.read(SetupTerms, instruction.fields)
        release, mean = LocalCodedData(terms), instruction.accumulator()
        data, seed = self._simulated, self.loop.seed or 0
        question = Question(experiment_id=self.experiment.id, phase=phase, server_round=0)
        for device, X, Y in zip(assigned[0], data.features, data.labels, strict=True):
            prepared = PreparedData(
                *check_data(
                    X,
                    Y,
                    feature_bound=terms.feature_bound,
                    label_bound=terms.label_bound,
                    feature_norm=terms.feature_norm,
                    label_norm=terms.label_norm,
                    one_hot=terms.one_hot,
                )
            )
            plan = release.plan({}, Facts(records=len(X), columns=(X.shape[1], Y.shape[1])))
            # As the node of a device does, see `NodeRules.random`.
            random = SecureRandom.insecure(seed, "noise", device, *astuple(question))
            coded, _ = release.noise(release.measure({}, prepared), plan, random)
            mean.accumulate(device, coded, weight=1)
        return mean, None

    def _drawn_from(self, data: ACFLSyntheticData) -> tuple[RandomStragglers, int]:
        """Return the stragglers and the seed, unless an option is not simulated."""
        stragglers, seed = self.loop.stragglers, self.loop.seed
        if not isinstance(stragglers, RandomStragglers) or seed is None:
            raise InvalidParameterError("loop", self.loop, "that of `of_seed`")
        check_integer("silent", stragglers.silent, minimum=0, maximum=data.devices)
        simulated = {
            "privacy": self.privacy.noise != RECORD,
            "straggler_rate": self.weighting.own_rates is None,
            "batch_fraction": self.batch_fraction == 1,
            "fraction_train": self.fraction_train == 1,
            "inner": self.inner is None,
            "secure_sum": self.secure_sum is None,
        }
        if others := [name for name, is_simulated in simulated.items() if not is_simulated]:
            allowed = "exact gradients of all records, from every device and with one rate of all"
            raise InvalidParameterError(others[0], "an option that is not simulated", allowed)
        return stragglers, seed


def of_seed(seed: int, *, rate: float = 0.2, silent: int = 0) -> dict[str, Any]:
    """Return the keywords of a strategy whose stragglers and noise come from a seed.

    Parameters
    ----------
    seed : int
        Root of all draws.
    rate, silent
        As of `RandomStragglers`.

    Examples
    --------
    >>> sorted(of_seed(0))
    ['loop']
    """
    stragglers = RandomStragglers(rate=rate, silent=silent)
    loop = LoopOptions(
        seed=seed,
        experiment_id="numpy",
        stragglers=stragglers,
        deadline=_DEADLINE,
        write_card=False,
    )
    return {"loop": loop}
