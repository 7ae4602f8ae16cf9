"""UDP on the server: the noise follows from a budget over the whole training.

The clients add the noise and keep the budget; the server plans it, adds up what they send, and
keeps the books that the privacy card shows.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from flwr.app import Message, MetricRecord

from flwr_privacy.accounting import Charge
from flwr_privacy.averaging import WeightedMean
from flwr_privacy.card import PrivacyCard
from flwr_privacy.errors import (
    CheckpointError,
    InvalidParameterError,
    ProtocolError,
    check_choice,
    check_integer,
    check_number,
)
from flwr_privacy.grid import CODE_LIMIT, Grid, GridMean
from flwr_privacy.guarantee import Guarantee
from flwr_privacy.secure_sum import Bounds
from flwr_privacy.udp import NOISES, RECORD_UNIT, USER_UNIT, Schedule, Terms
from flwr_privacy.updates import SMALLEST_NORM, released_names
from flwr_privacy.wire import TRAIN, Fields

from .base import SchemeStrategy

__all__ = ["UDP"]

_GRID_BITS = {RECORD_UNIT: 27, USER_UNIT: 18}
"""Steps of the grid up to the bound of an update, as a power of two, if noise leaves the room."""

_FEWEST_RECORDS = 16
"""Records of a client for whose noise the grid leaves room in a code, at record level."""


class UDP(SchemeStrategy):
    """Noise on the clients from a budget over the whole training (Wei et al., algorithm 1).

    Parameters
    ----------
    *arguments, **options
        FedAvg's and those of `SchemeStrategy`.
    epsilon, delta : float, default 8.0 and 1e-5
        Budget of a client over all rounds. With ``noise="paper"`` what the paper claims.
    unit : {"user", "record"}, default "user"
        What is protected: all data of a client, around any training; or one record, with
        `flwr_privacy.clients.torch.train_per_record` inside the training.
    clipping_norm : float, default 1.0
        L2 bound of the whole update (user level) or of the gradient of a record (record level).
    learning_rate : float, optional
        Step size of the one local step; needed at record level, and only there.
    sampling_rate : float, default 1.0
        Share of a client's records in a round, each drawn by itself and in secret (Poisson); at
        record level.
    noise : {"gdp_fixed", "paper"}, default "gdp_fixed"
        How the noise follows from the budget: `flwr_privacy.udp.Schedule`.
    rounds : int, optional
        Rounds over which the budget is spread; by default those of `start`. Needed where a
        `start` of your own runs the rounds.
    grid_bits : int, optional
        The grid has at least ``2**grid_bits`` steps up to the bound of an update; by default 18 at
        user level and 27 at record level, or as many as leave room for eight standard deviations of
        the noise (of a client with 16 records). Codes have 31 bits and a sign, noise included.
    keep_back : sequence of str, default ()
        Arrays of which nothing is released, beside integers and the statistics of normalisation
        layers, which never are. The model keeps the server's values of them.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Notes
    -----
    At user level every client weighs the same; at record level it weighs as many as its records,
    whose number is public. Clients send no losses and no metrics of the training, and are not asked
    to evaluate: `fraction_evaluate` has no effect.

    Guarantee
    ---------
    Adversary: an honest-but-curious server, and everybody who sees its messages. Each upload by
    itself is protected, whether it arrives in time or not. What binds a server that does not follow
    the protocol is the node's policy: see `flwr_privacy.clients.UDPClient`.
    Neighbours: at record level data of equal size that differ in one record; at user level any two
    data sets of one client.
    Covered: the uploads of the whole training, (epsilon, delta) per client, by Gaussian
    differential privacy over the releases that each client charges to its own ledger. A client
    declines what would exceed the budget of the experiment.
    Not covered: the number of a client's records (record level); whether and when it takes part,
    declines or fails; what the user's own code sends elsewhere; timing. With ``noise="paper"`` the
    budget that was asked for is missed where formula (10) is too small; the guarantee then has the
    true figure.

    Examples
    --------
    >>> from flwr_privacy.strategies import UDP
    >>> strategy = UDP(fraction_train=0.5, epsilon=8.0, delta=1e-5, clipping_norm=0.5)
    """

    scheme: ClassVar[str] = "udp"
    summable: ClassVar[bool] = True
    weight_key = "num-examples"  # the clients' own: 1, or the number of records

    def __init__(
        self,
        *arguments: Any,
        epsilon: float = 8.0,
        delta: float = 1e-5,
        unit: str = USER_UNIT,
        clipping_norm: float = 1.0,
        learning_rate: float | None = None,
        sampling_rate: float = 1.0,
        noise: str = "gdp_fixed",
        rounds: int | None = None,
        grid_bits: int | None = None,
        keep_back: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.fraction_evaluate = 0.0  # what clients say of their data is a release of its own
        if check_choice("unit", unit, _GRID_BITS) == RECORD_UNIT:
            if learning_rate is None:
                raise InvalidParameterError(
                    "learning_rate", learning_rate, "the step size, at record level"
                )
        elif learning_rate is not None:
            raise InvalidParameterError(
                "learning_rate", learning_rate, "nothing at user level: the user's training has it"
            )
        if rounds is not None:
            check_integer("rounds", rounds, minimum=1)
        if grid_bits is not None:
            check_integer("grid_bits", grid_bits, minimum=1, maximum=30)
        check_choice("noise", noise, NOISES)
        self._rounds = rounds
        self._grid_bits = grid_bits
        self._budget: dict[str, Any] = {
            "noise": noise,
            "epsilon": epsilon,
            "delta": delta,
            "sampling_rate": sampling_rate,
        }
        # What a client is asked depends on how many there are; what is not allowed is said now.
        self._terms_of: dict[str, Any] = {
            "unit": unit,
            "clipping_norm": clipping_norm,
            "learning_rate": 1.0 if learning_rate is None else learning_rate,
            "keep_back": tuple(keep_back),
        }
        self._plan(Schedule(**self._budget, rounds=rounds or 1, q=1.0))

    def _build(self) -> None:
        super()._build()
        self.schedule: Schedule | None = None
        self._insecure = False

    def question(self, server_round: int) -> Fields:
        """Return the terms of a round."""
        if self.schedule is None:
            rounds = self._rounds or self.planned_rounds
            if rounds is None:
                raise InvalidParameterError(
                    "rounds", rounds, "the rounds to spread the budget over, under your own start"
                )
            asked, population = self.federation.sample_size(
                fraction=self.fraction_train, minimum=self.min_train_nodes
            )
            self.schedule = Schedule(**self._budget, rounds=rounds, q=min(1.0, asked / population))
        self.terms = self._plan(self.schedule)
        return self.terms.write()

    def accumulator(self, phase: str) -> WeightedMean:
        """Return an empty sum of codes for a training."""
        if phase != TRAIN:
            return super().accumulator(phase)
        names = released_names(self._template, self.terms.keep_back)
        return GridMean(self._template, Grid(self.terms.grid), names)

    def bounds_of(self, clients: list[str], server_round: int) -> Bounds:
        """Return the bounds of the codes, noise included, and of the weights."""
        if self.secure_sum is None:
            raise ProtocolError("there is no secure sum")
        alike = self._terms_of["unit"] == USER_UNIT
        return self.secure_sum.bounds(
            len(clients), code_limit=CODE_LIMIT, largest_weight=1 if alike else None
        )

    def charge(self, phase: str) -> Charge | None:
        """Return the cost of a round."""
        return self.terms.charge() if phase == TRAIN else None

    def collect(
        self, phase: str, messages: Iterable[Message]
    ) -> tuple[WeightedMean | None, MetricRecord | None]:
        """Fold the replies of a phase; note what they say of their noise."""
        mean, metrics = super().collect(phase, messages)
        self._insecure |= mean is not None and "insecure-noise" in mean.metrics()
        return mean, metrics

    def round_metrics(self, card: PrivacyCard) -> dict[str, float]:
        """Return what the client that spent most has spent, and what it has left."""
        spent = card.guarantee.spent or 0.0
        cap = card.guarantee.epsilon or 0.0
        return {"epsilon": spent, "epsilon_left": max(0.0, cap - spent)}

    def guarantee(self) -> Guarantee:
        """Return the promise; before the first round with the budget as it was asked for."""
        record = self._terms_of["unit"] == RECORD_UNIT
        rounds = self._rounds or self.planned_rounds or 1
        schedule = self.schedule or Schedule(**self._budget, rounds=rounds, q=1.0)
        not_protected = [
            "whether and when a client takes part, declines or fails",
            "what the user's own code sends elsewhere, and timing",
            "anything from a server that does not follow the protocol, beyond the node's policy",
        ]
        not_protected += ["the number of a client's records"] if record else []
        kept = set(self._template) - set(
            released_names(self._template, self._terms_of["keep_back"]) if self._template else ()
        )
        if kept:
            not_protected.append(f"(not uploaded at all: {', '.join(sorted(kept))})")
        assumptions = [
            "each client keeps its own ledger and its noise secret",
            "nothing else leaves the client's training",
        ]
        if schedule.sampling_rate < 1:
            assumptions.append(
                "secret samples are charged for twice what a record adds: enough for a replaced "
                "record in every setting that was tried, and not proven"
            )
        void = "clients drew their noise from an insecure seed, for tests" if self._insecure else ""
        return Guarantee(
            scheme=self.scheme,
            protects="one record of a client" if record else "all data of a client",
            adversary="an honest-but-curious server that sees every upload",
            neighbours=(
                "one record of one client is replaced by another"
                if record
                else "the data of one client are replaced by any other"
            ),
            epsilon=schedule.cap,
            delta=self._budget["delta"],
            not_protected=tuple(not_protected),
            assumptions=tuple(assumptions),
            evidence=("tests/udp", "tests/flwr_privacy/accounting"),
            void=void,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule."""
        return {
            "schedule": None if self.schedule is None else asdict(self.schedule),
            "terms": {**self._terms_of, "keep_back": list(self._terms_of["keep_back"])},
            "insecure": self._insecure,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the schedule.

        Raises
        ------
        CheckpointError
            If it was made for another budget or another number of rounds.
        """
        self._insecure = state["insecure"]
        if state["schedule"] is None:
            return
        self.schedule = Schedule(**state["schedule"])
        theirs = {**state["schedule"], **state["terms"]}
        rounds = self._rounds or self.planned_rounds
        mine = {**self._budget, **self._terms_of, "rounds": rounds}
        for key, value in mine.items():
            value = list(value) if isinstance(value, tuple) else value
            if theirs[key] != value:
                raise CheckpointError(
                    f"the checkpoint was calibrated for {key} = {theirs[key]!r}, not {value!r}: "
                    "the noise of the rounds that are done cannot be changed"
                )

    def _plan(self, schedule: Schedule) -> Terms:
        """Return the terms that a schedule makes."""
        unit, norm = self._terms_of["unit"], self._terms_of["clipping_norm"]
        check_number("clipping_norm", norm, minimum=SMALLEST_NORM)
        bound = norm
        if unit == RECORD_UNIT:
            bound = norm * self._terms_of["learning_rate"] / schedule.sampling_rate
        return Terms(
            **self._terms_of,
            noise_multiplier=schedule.noise_multiplier,
            epsilon=schedule.cap,
            delta=schedule.delta,
            gap=schedule.gap,
            sampling_rate=schedule.sampling_rate,
            grid=Grid.below(bound, bits=self._bits(schedule.noise_multiplier)).exponent,
        )

    def _bits(self, noise_multiplier: float) -> int:
        """Return the steps of the grid up to the bound of an update, as a power of two."""
        if self._grid_bits is not None:
            return self._grid_bits
        unit = self._terms_of["unit"]
        spread = 2 * noise_multiplier / (_FEWEST_RECORDS if unit == RECORD_UNIT else 1)
        room = math.floor(math.log2(CODE_LIMIT / (1 + 8 * spread))) - 1
        return max(1, min(_GRID_BITS[unit], room))
