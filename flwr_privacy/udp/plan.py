"""What a server asks of its clients in each round: from budgets and pace to terms and grid."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flwr_privacy.errors import CheckpointError, InvalidParameterError, check_integer, check_number
from flwr_privacy.grid import CODE_LIMIT, Grid
from flwr_privacy.updates import SMALLEST_NORM

from .formulas import mu_star
from .loss import LARGEST_CAP, SMALLEST_CAP, LossTerms
from .pace import Pace, pace_of
from .schedule import NONE, Schedule
from .sensitivity import RECORD_UNIT, USER_UNIT, sensitivity
from .terms import Terms

__all__ = ["Plan", "Wish"]

_GRID_BITS = {RECORD_UNIT: 27, USER_UNIT: 18}
"""Steps of the grid up to the bound of what is noised, as a power of two, if noise leaves room."""

_FEWEST_RECORDS, _MANY_RECORDS = 16, 1024
"""Records of the clients for whose noise the grid leaves room in a code, at record level."""

_NOISE_REACH = 8  # standard deviations of noise for which codes have room
_SHARE_REACH = 12  # the same, of a share of noise
_TOO_MUCH = 1.01  # times a budget's mu

Budget = float | Mapping[str, float]
"""A number for all clients, or one for each by its name."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a training is to be like; parameters are those of `flwr_privacy.strategies.UDP`.

    Parameters
    ----------
    epsilon, delta, noise, sampling_rate, unit, clipping_norm, learning_rate, keep_back, grid_bits
        As there; `learning_rate` is 1 at user level.
    epochs, batch_size, bound
        ``local_epochs``, ``batch_size`` (0: all records) and ``sensitivity_bound``.
    validation_share : float
        Share of the budget for losses, 0 where none are noised.
    loss_cap : float
        Bound of a loss.
    shared : bool
        Whether the clients of a secure sum share the noise.
    max_records : int
        Most records of a client then.
    crd, beta, zeta, patience, lei, lei_end
        As there.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    epsilon: Budget
    delta: Budget
    noise: str
    sampling_rate: float
    unit: str
    clipping_norm: float
    learning_rate: float
    epochs: int
    batch_size: int
    bound: str
    keep_back: list[str] = field(default_factory=list)
    grid_bits: int | None = None
    validation_share: float = 0.0
    loss_cap: float = 4.0
    shared: bool = False
    max_records: int = 2**14
    crd: bool = False
    beta: float = 0.9
    zeta: float = 0.001
    patience: int = 1
    lei: str | None = None
    lei_end: float = 0.5

    def __post_init__(self) -> None:
        check_number("clipping_norm", self.clipping_norm, minimum=SMALLEST_NORM)
        check_number("learning_rate", self.learning_rate, minimum=math.ulp(0.0))
        check_integer("max_records", self.max_records, minimum=1, maximum=2**30)
        if self.grid_bits is not None:
            check_integer("grid_bits", self.grid_bits, minimum=1, maximum=30)
        check_number("loss_cap", self.loss_cap, minimum=SMALLEST_CAP, maximum=LARGEST_CAP)
        if self.own_budgets and not self.named():
            raise InvalidParameterError(
                "epsilon", self.epsilon, "budgets of the same clients as delta's, one at least"
            )
        if self.shared and self.noise == NONE:
            raise InvalidParameterError("shared_noise", True, "false where there is no noise")
        if self.shared:
            self._check_one_step("where noise is shared: all records in one step")
        if self.unit == USER_UNIT:
            self._check_one_step("at user level: the training is the user's own")
        if self.validation_share and self.sampling_rate != 1:
            allowed = "1 with v_source='clients': samples and losses have no common account"
            raise InvalidParameterError("sampling_rate", self.sampling_rate, allowed)
        # What is asked depends on how many clients there are; what is not allowed is said now.
        trial = Plan(self, rounds=1, q=1.0)
        for client in self.named() or [""]:
            trial.schedule(client)
        trial.plain_terms(self.parties_of(2), noise_multiplier=1.0)

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
        return self.epochs == 1 and not self.batch_size

    def named(self) -> list[str]:
        """Return the clients that have a budget of their own, in order."""
        mappings = [v for v in (self.epsilon, self.delta) if isinstance(v, Mapping)]
        return sorted(set.intersection(*map(set, mappings))) if mappings else []

    def parties_of(self, honest: int) -> int:
        """Return how many clients share the noise of a sum with so many honest ones."""
        return honest if self.shared else 0

    def lacking(self, clients: Collection[str]) -> dict[str, list[str]]:
        """Return the clients without a budget, by what they lack; nothing if all have one."""
        budgets = {"epsilon": self.epsilon, "delta": self.delta}
        lacking = {
            name: sorted(set(clients).difference(budget))
            for name, budget in budgets.items()
            if isinstance(budget, Mapping)
        }
        return {name: lack for name, lack in lacking.items() if lack}

    def _check_one_step(self, why: str) -> None:
        plain = {
            "sampling_rate": (self.sampling_rate, 1),
            "local_epochs": (self.epochs, 1),
            "batch_size": (self.batch_size or None, None),
            "sensitivity_bound": (self.bound, "general"),
        }
        for name, (value, usual) in plain.items():
            if value != usual:
                raise InvalidParameterError(name, value, f"{usual!r} {why}")

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        values = asdict(self)
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}


class Plan:
    """The rounds of one training.

    Parameters
    ----------
    wish : Wish
        What it is to be like.
    rounds : int
        Rounds over which the budget is spread at first.
    q : float
        Fraction of the clients that is asked in a round.

    Attributes
    ----------
    pace : Pace
        How the noise goes over the rounds.
    T_history : list of int
        Rounds planned, before the first round and after each.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    def __init__(self, wish: Wish, *, rounds: int, q: float) -> None:
        self.wish = wish
        self.q = q
        self.pace: Pace = pace_of(
            rounds,
            crd=wish.crd,
            beta=wish.beta,
            zeta=wish.zeta,
            patience=wish.patience,
            lei=wish.lei,
            lei_end=wish.lei_end,
        )
        self.T_history = [self.pace.planned]
        self._schedules: dict[tuple[float, float], Schedule] = {}

    def settle(self, loss: float | None) -> None:
        """Note that a round is over, and how good its model is."""
        self.pace.after(loss)
        self.T_history.append(self.pace.planned)

    def schedule(self, client: str) -> Schedule:
        """Return a client's schedule; clients with one budget share it."""
        epsilon, delta = (
            value[client] if isinstance(value, Mapping) else value
            for value in (self.wish.epsilon, self.wish.delta)
        )
        return self._schedule(epsilon, delta)

    def weakest(self) -> Schedule:
        """Return the schedule of a budget that covers every client's."""
        schedules = [self.schedule(client) for client in self.wish.named() or [""]]
        return self._schedule(max(s.epsilon for s in schedules), max(s.delta for s in schedules))

    def terms(
        self, clients: Collection[str], spent: Mapping[str, float], *, honest: int
    ) -> tuple[Terms, dict[str, Terms]]:
        """Return what all clients are asked, and what those who have terms of their own are.

        Parameters
        ----------
        clients : collection of str
            The clients, where they have terms of their own.
        spent : Mapping of str to float
            What each of them has spent so far; see `Schedule.multiplier`.
        honest : int
            How many honest clients are at least in a secure sum, where there is one.
        """
        own = list(clients) if self.wish.own_terms else []
        multipliers = {c: self._multiplier(c, spent.get(c, 0.0)) for c in own or [""]}
        noisiest = max(multipliers, key=lambda client: multipliers[client])
        # One grid for all, with room for the largest noise.
        shared = self.plain_terms(
            self.wish.parties_of(honest), noise_multiplier=multipliers[noisiest], client=noisiest
        )
        return shared, {c: self.own_terms(shared, c, spent.get(c, 0.0)) for c in own}

    def own_terms(self, shared: Terms, client: str, spent: float) -> Terms:
        """Return the terms of a client that has its own, from those that all share."""
        schedule = self.schedule(client)
        return replace(
            shared,
            noise_multiplier=self._multiplier(client, spent),
            epsilon=float(schedule.cap),
            delta=float(schedule.delta),
            gap=float(schedule.gap),
        )

    def plain_terms(self, parties: int, *, noise_multiplier: float, client: str = "") -> Terms:
        """Return the terms of one budget and noise, with a grid that leaves room for them."""
        wish = self.wish
        schedule = self.schedule(client or next(iter(wish.named()), ""))
        terms = Terms(
            unit=wish.unit,
            noise_multiplier=0.0 if wish.noise == NONE else noise_multiplier,
            epsilon=float(schedule.cap),
            delta=float(schedule.delta),
            gap=float(schedule.gap),
            clipping_norm=float(wish.clipping_norm),
            grid=0,
            learning_rate=float(wish.learning_rate),
            sampling_rate=float(wish.sampling_rate),
            epochs=wish.epochs,
            batch_size=wish.batch_size,
            bound=wish.bound,
            max_records=wish.max_records if parties and wish.unit == RECORD_UNIT else 0,
            parties=parties,
            keep_back=list(wish.keep_back),
        )
        return replace(terms, grid=self._grid(terms).exponent)

    def loss_terms(self, client: str = "") -> LossTerms:
        """Return what a client's loss is asked for."""
        schedule = self.schedule(client or next(iter(self.wish.named()), ""))
        return LossTerms(
            unit=self.wish.unit,
            cap=float(self.wish.loss_cap),
            noise_multiplier=schedule.validation_multiplier,
            epsilon=float(schedule.cap),
            delta=float(schedule.delta),
            gap=float(schedule.gap),
        )

    def state(self) -> dict[str, Any]:
        """Return what a resumed training needs."""
        return {
            "wish": self.wish.to_dict(),
            "rounds": self.pace.rounds,
            "q": self.q,
            "pace": self.pace.state(),
            "T_history": list(self.T_history),
        }

    @classmethod
    def load(cls, state: Mapping[str, Any], wish: Wish, *, rounds: int) -> "Plan":
        """Return the plan of a training that is resumed.

        Raises
        ------
        CheckpointError
            If it was made for another wish or another number of rounds.
        """
        theirs = {**state["wish"], "rounds": state["rounds"]}
        for key, value in {**wish.to_dict(), "rounds": rounds}.items():
            if theirs.get(key) != value:
                raise CheckpointError(
                    f"the checkpoint was calibrated for {key} = {theirs.get(key)!r}, not {value!r}:"
                    " the noise of the rounds that are done cannot be changed"
                )
        plan = cls(wish, rounds=rounds, q=state["q"])
        plan.pace.load(state["pace"])
        plan.T_history = list(state["T_history"])
        return plan

    def _schedule(self, epsilon: float, delta: float) -> Schedule:
        if (epsilon, delta) not in self._schedules:
            self._schedules[epsilon, delta] = Schedule(
                noise=self.wish.noise,
                epsilon=epsilon,
                delta=delta,
                rounds=self.pace.rounds,
                q=self.q,
                sampling_rate=self.wish.sampling_rate,
                validation_share=self.wish.validation_share,
            )
        return self._schedules[epsilon, delta]

    def _multiplier(self, client: str, spent: float) -> float:
        """Return a client's noise over the sensitivity in the next round."""
        schedule = self.schedule(client)
        if not schedule.spends:
            return schedule.noise_multiplier * self.pace.factor
        z = None
        if client:
            z = schedule.multiplier(self.pace.planned - self.pace.done, spent)
            if z is None:  # with nothing left, what is more than a whole budget: it declines
                z = 1 / (_TOO_MUCH * mu_star(schedule.epsilon, schedule.delta))
        return schedule.noise_multiplier if z is None else z

    def _grid(self, terms: Terms) -> Grid:
        if terms.parties:
            reach = terms.reach(terms.max_records)
            sigma = terms.noise_multiplier * terms.shared_sensitivity() / math.sqrt(terms.parties)
            spread, most = _SHARE_REACH * sigma / reach, 30
        else:
            reach = terms.reach(_MANY_RECORDS)
            sigma = terms.noise_multiplier * _largest_sensitivity(terms)
            spread, most = _NOISE_REACH * sigma / reach, _GRID_BITS[terms.unit]
        room = math.floor(math.log2(CODE_LIMIT / (1 + spread))) - 1
        return Grid.below(reach, bits=self.wish.grid_bits or max(1, min(most, room)))


def _largest_sensitivity(terms: Terms) -> float:
    """Return the sensitivity of the clients for whose noise the grid leaves room."""
    if terms.unit == USER_UNIT:
        return sensitivity(USER_UNIT, clipping_norm=terms.clipping_norm)
    return max(
        sensitivity(
            RECORD_UNIT,
            clipping_norm=terms.clipping_norm,
            learning_rate=terms.learning_rate,
            records=max(count, terms.batch_size),
            sampling_rate=terms.sampling_rate,
            epochs=terms.epochs,
            batch_size=terms.batch_size or None,
            bound=terms.bound,
        )
        for count in (_FEWEST_RECORDS, _MANY_RECORDS)
    )
