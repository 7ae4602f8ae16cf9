"""Constructor options of UDP: the protected unit, its budget and noise, a schedule."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flwr_privacy.errors import (
    InvalidParameterError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from flwr_privacy.evaluation.caps import LARGEST_CAP, SMALLEST_CAP
from flwr_privacy.keywords import check_usual, checked_keywords
from flwr_privacy.privacy.updates import SMALLEST_NORM

from .pace import Discounted, LinearDecay, Pace, PlateauDecay
from .private_steps import LARGEST_CLIP, MOST_STEPS, SMALLEST_CLIP
from .schedule import FIXED, NONE, UDPNoisePlan
from .sensitivity import BOUNDS, RECORD_UNIT, USER_UNIT

__all__ = [
    "DPSGD",
    "ClientLosses",
    "Discounting",
    "LinearNoise",
    "NoiseSchedule",
    "PlateauNoise",
    "PrivacyLevel",
    "RecordLevel",
    "UserLevel",
]

Budget = float | Mapping[str, float]
"""A number for all clients, or one for each by its name."""

Noise = Literal["gdp_fixed", "gdp", "gdp_worst", "zcdp", "paper", "pld_secret", "none"]

ValidationLoss = Callable[[int, Any], float]
"""From a round and the model that it led to (round 0: the model to start from) to its loss."""


_BUDGET = {"epsilon": 8.0, "delta": 1e-5}
_MOST_RECORDS = 2**14


class _Training:
    """What is known of the training that is protected.

    Without values: a value here would be the default of a dataclass below.
    """

    unit: str
    learning_rate: float
    sampling_rate: float
    local_epochs: int
    batch_size: int | None
    sensitivity_bound: str
    max_records: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class PrivacyLevel(_Training):
    """Base of `UserLevel`, `RecordLevel` and `DPSGD`: what all have."""

    epsilon: Budget = _BUDGET["epsilon"]
    delta: Budget = _BUDGET["delta"]
    clipping_norm: float = 1.0
    noise: Noise = "gdp_fixed"
    shared_noise: bool = False
    grid_bits: int | None = None

    def __post_init__(self) -> None:
        check_number("clipping_norm", self.clipping_norm, minimum=SMALLEST_NORM)
        check_flag("shared_noise", self.shared_noise)
        if self.grid_bits is not None:
            check_integer("grid_bits", self.grid_bits, minimum=1, maximum=30)
        if self.own_budgets and not self.named():
            raise InvalidParameterError(
                "epsilon", self.epsilon, "budgets of the same clients as delta's, one at least"
            )
        if self.shared_noise and self.noise == NONE:
            raise InvalidParameterError("shared_noise", True, "false where there is no noise")
        if self.noise == NONE:
            check_usual(self, _BUDGET, "with noise='none', which spends nothing")
        for client in self.named() or [""]:
            self.schedule(*self.budget(client), rounds=1, q=1.0)  # or says what is not allowed

    def schedule(
        self,
        epsilon: float,
        delta: float,
        *,
        rounds: int,
        q: float,
        cohorts: str = "fixed",
        validation_share: float = 0.0,
        validations: int | None = None,
    ) -> UDPNoisePlan:
        """Return how the noise follows from a budget."""
        return UDPNoisePlan(
            noise=self.noise,
            epsilon=epsilon,
            delta=delta,
            rounds=rounds,
            q=q,
            cohorts=cohorts,
            sampling_rate=self.sampling_rate,
            steps=self.steps,
            validation_share=validation_share,
            validations=validations,
        )

    def budget(self, client: str) -> tuple[float, float]:
        """Return epsilon and delta of a client."""
        epsilon, delta = (
            value[client] if isinstance(value, Mapping) else value
            for value in (self.epsilon, self.delta)
        )
        return epsilon, delta

    @property
    def own_budgets(self) -> bool:
        """Whether clients have budgets of their own."""
        return isinstance(self.epsilon, Mapping) or isinstance(self.delta, Mapping)

    @property
    def own_terms(self) -> bool:
        """Whether clients are asked for different noise."""
        return self.own_budgets or self.noise in ("gdp", "gdp_worst", "zcdp")

    @property
    def one_step(self) -> bool:
        """Whether the training at record level is one step with all records."""
        return self.local_epochs == 1 and self.batch_size is None

    def named(self) -> list[str]:
        """Return the clients that have a budget of their own, in order."""
        mappings = [v for v in (self.epsilon, self.delta) if isinstance(v, Mapping)]
        return sorted(set.intersection(*map(set, mappings))) if mappings else []

    def parties_of(self, honest: int) -> int:
        """Return how many clients share the noise of a sum with so many honest ones."""
        return honest if self.shared_noise else 0

    def lacking(self, clients: Collection[str]) -> dict[str, list[str]]:
        """Return the clients without a budget, by what they lack; nothing if all have one."""
        budgets = {"epsilon": self.epsilon, "delta": self.delta}
        lacking = {
            name: sorted(set(clients).difference(budget))
            for name, budget in budgets.items()
            if isinstance(budget, Mapping)
        }
        return {name: lack for name, lack in lacking.items() if lack}


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class UserLevel(PrivacyLevel):
    """Protects all data of a client, around any training.

    Parameters
    ----------
    epsilon, delta : float or dict, default 8.0 and 1e-5
        Budget of a client over all rounds, or that of each client by its name. With
        ``noise="paper"`` what the paper claims.
    clipping_norm : float, default 1.0
        L2 bound of the whole update.
    noise : str, default "gdp_fixed"
        How the noise follows from the budget: `flwr_privacy.udp.UDPNoisePlan`.
    shared_noise : bool, default False
        Whether the clients of a secure sum share the noise: the sum has as much of it as it needs,
        instead of each answer.
    grid_bits : int, optional
        The grid has at least ``2**grid_bits`` steps up to the bound of what is noised; by default
        18 (at record level 27), or as many as leave room for eight standard deviations of the noise
        (of a client with 16 records). Codes have 31 bits and a sign, noise included.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or two do not go together.

    Examples
    --------
    >>> UserLevel(epsilon=4.0, clipping_norm=0.5).named()
    []
    """

    # The training is the user's own: one release, whatever it does.
    unit = USER_UNIT
    learning_rate = 1.0
    sampling_rate = 1.0
    local_epochs = 1
    batch_size = None
    sensitivity_bound = "general"
    max_records = 0
    steps = 1


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class RecordLevel(PrivacyLevel):
    """Protects one record of a client; its training uses `train_per_record`.

    See `flwr_privacy.clients.torch.train_per_record`.

    Parameters
    ----------
    epsilon, delta, noise, shared_noise, grid_bits
        As in `UserLevel`.
    clipping_norm : float, default 0.5
        L2 bound of the gradient of a record.
    learning_rate : float
        Step size of the local training.
    sampling_rate : float, default 1.0
        Share of a client's records in a round, each drawn by itself and in secret (Poisson).
    local_epochs : int, default 1
        Passes over a client's records in a round.
    batch_size : int, optional
        Records of a step; by default all.
    sensitivity_bound : {"general", "convex", "unproven"}, default "general"
        How the noise follows from several steps, see `flwr_privacy.udp.sensitivity`. With
        ``unproven`` it is that of one full step, as the authors' code has it, and void.
    max_records : int, default 16384
        Most records of a client, with `shared_noise`.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or two do not go together.

    Examples
    --------
    >>> RecordLevel(learning_rate=0.1, local_epochs=2).one_step
    False
    """

    unit = RECORD_UNIT
    steps = 1  # noised ones: the noise comes once, after all of the training

    clipping_norm: float = 0.5
    learning_rate: float
    sampling_rate: float = 1.0
    local_epochs: int = 1
    batch_size: int | None = None
    sensitivity_bound: Literal["general", "convex", "unproven"] = "general"
    max_records: int = _MOST_RECORDS

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, minimum=math.ulp(0.0))
        check_integer("max_records", self.max_records, minimum=1, maximum=2**30)
        if self.batch_size is not None:
            check_integer("batch_size", self.batch_size, minimum=1)
        check_integer("local_epochs", self.local_epochs, minimum=1)
        check_choice("sensitivity_bound", self.sensitivity_bound, BOUNDS)
        super().__post_init__()
        plain = {
            "sampling_rate": 1,
            "local_epochs": 1,
            "batch_size": None,
            "sensitivity_bound": "general",
        }
        if self.shared_noise:
            check_usual(self, plain, "where noise is shared: all records in one step")
        else:
            check_usual(
                self, {"max_records": _MOST_RECORDS}, "without shared_noise: there is no limit"
            )


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class DPSGD(PrivacyLevel):
    """Protects one record of a client by noise in every step of the user's own training loop.

    The loop takes model, optimiser and loader from
    `flwr_privacy.clients.torch.private_training`, which needs the extra ``dp-sgd`` (Opacus).

    Parameters
    ----------
    epsilon, delta
        As in `UserLevel`.
    clipping_norm : float, default 1.0
        L2 bound of the gradient of a record, from 1e-6 to 1e6.
    sampling_rate : float
        Probability with which a record is in a batch, each by itself and in secret (Poisson). A
        batch has ``sampling_rate`` times the number of records on average.
    steps : int
        Steps of a local training. All of them are charged before the first batch, and a training
        takes exactly so many: one that ended early for a reason in its data would tell of them.
    noise : {"gdp_fixed", "none"}, default "gdp_fixed"
        The least noise that keeps all steps of all rounds within the budget, or none.
    grid_bits : int, default 27
        The grid of the noise has at least ``2**grid_bits`` steps up to the clipping norm.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed. `shared_noise` is not: the noise of other clients protects a
        single linear step, not those in which noise goes through an optimiser.

    Examples
    --------
    >>> DPSGD(epsilon=8.0, sampling_rate=0.02, steps=100).unit
    'record'
    """

    unit = RECORD_UNIT
    learning_rate = 1.0
    local_epochs = 1
    batch_size = None
    sensitivity_bound = "general"
    max_records = 0

    sampling_rate: float
    steps: int
    noise: Literal["gdp_fixed", "none"] = "gdp_fixed"

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, minimum=1, maximum=MOST_STEPS)
        check_choice("noise", self.noise, (FIXED, NONE))
        check_number(
            "clipping_norm", self.clipping_norm, minimum=SMALLEST_CLIP, maximum=LARGEST_CLIP
        )
        alone = "in DPSGD: the noise of other clients protects a single linear step (RecordLevel)"
        check_usual(self, {"shared_noise": False}, alone)
        check_number("sampling_rate", self.sampling_rate, minimum=math.ulp(0.0), maximum=1)
        super().__post_init__()

    def schedule(self, epsilon: float, delta: float, **planned: Any) -> UDPNoisePlan:
        """Return how the noise follows from a budget; without noise, samples change nothing."""
        if self.noise != NONE:
            return super().schedule(epsilon, delta, **planned)
        return UDPNoisePlan(noise=NONE, epsilon=epsilon, delta=delta, rounds=1, q=1.0)


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class ClientLosses:
    """Asks all clients for clipped and noised losses of the model after every round.

    With ``noise="paper"`` the losses have no noise, as printed.

    Parameters
    ----------
    share : float, default 0.1
        Share of a client's budget for the losses that it reports.
    loss_cap : float, default 4.0
        Bound of a record's loss that a client reports.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    share: float = 0.1
    loss_cap: float = 4.0

    def __post_init__(self) -> None:
        check_number("share", self.share, minimum=1e-6, maximum=0.99)
        check_number("loss_cap", self.loss_cap, minimum=SMALLEST_CAP, maximum=LARGEST_CAP)


class NoiseSchedule(ABC):
    """Base of the schedules: how the noise changes from round to round."""

    validation: ValidationLoss | ClientLosses | None

    @abstractmethod
    def pace(self, rounds: int) -> Pace:
        """Return the pace of a training."""


@dataclass(frozen=True, kw_only=True)
class _Validated(NoiseSchedule):
    validation: ValidationLoss | ClientLosses

    def __post_init__(self) -> None:
        told = callable(self.validation) and not isinstance(self.validation, type)
        if not (told or isinstance(self.validation, ClientLosses)):
            allowed = "a function to the loss of a model on public data, or ClientLosses(...)"
            raise InvalidParameterError("validation", self.validation, allowed)


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class Discounting(_Validated):
    """Discounts the rounds where the validation loss does not fall (algorithm 2).

    Parameters
    ----------
    validation : callable or ClientLosses
        Where the validation loss comes from: a function on the server, from the round and the model
        to its loss on public data (round 0 is the model to start from); or all clients.
    beta : float, default 0.9
        Discounting factor of the rounds to come, between 0 and 1.
    zeta : float, default 0.001
        Least improvement of the loss, at least 0.
    patience : int, default 1
        Rounds in a row without that improvement until the rounds are discounted.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> Discounting(validation=ClientLosses(share=0.2), beta=0.7).pace(10).planned
    10
    """

    beta: float = 0.9
    zeta: float = 0.001
    patience: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pace(1)

    def pace(self, rounds: int) -> Pace:
        """Return the pace of a training."""
        return Discounted(rounds, beta=self.beta, zeta=self.zeta, patience=self.patience)


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class LinearNoise(NoiseSchedule):
    """Noise that falls linearly from round to round (Lei): `flwr_privacy.udp.LinearDecay`.

    Parameters
    ----------
    end : float, default 0.5
        Noise at the end over that at the start.
    calibrated : bool, default False
        Whether it is spread over all rounds; otherwise the training ends with the budget.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    validation = None

    end: float = 0.5
    calibrated: bool = False

    def __post_init__(self) -> None:
        check_flag("calibrated", self.calibrated)
        self.pace(1)

    def pace(self, rounds: int) -> Pace:
        """Return the pace of a training."""
        return LinearDecay(rounds, end=self.end, calibrated=self.calibrated)


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class PlateauNoise(_Validated):
    """Noise that falls where the loss does not (Lei's code): `flwr_privacy.udp.PlateauDecay`.

    Parameters
    ----------
    validation : callable or ClientLosses
        As in `Discounting`.
    """

    def pace(self, rounds: int) -> Pace:
        """Return the pace of a training."""
        return PlateauDecay(rounds)
