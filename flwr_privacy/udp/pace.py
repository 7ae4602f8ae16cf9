"""Schedules the noise over the rounds and the end of a training: discounting, Lei's decays.

A pace is public: it follows from its parameters and from the validation losses, and it is the same
for all clients. Its `Pace.factor` is the noise of a round over that of a training in which all
rounds have the same. A round costs ``1 / factor**2`` of the T0 such units that the budget has, and
none of the paces here spends more than T0, whatever the losses are.

Source of the discounting: Wei et al., algorithm 2 and theorem 4; of the decays: Yu, Liu, Pu,
Gursoy, Truex, "Differentially private model publishing for deep learning", IEEE S&P 2019, which
Wei et al. compare with under the name of a co-author, without its parameters.
"""

import math
from abc import ABC, abstractmethod
from fractions import Fraction
from typing import Any

from flwr_privacy.errors import CheckpointError, InvalidParameterError, check_integer, check_number

__all__ = [
    "Discounted",
    "LinearDecay",
    "Pace",
    "PlateauDecay",
    "Uniform",
    "discount_T",
]

_PLATEAU_STEP = 0.8
_ROUNDING = 1e-12  # relative; what float64 may move a sum over rounds


def discount_T(T: int, t: int, beta: float) -> int:
    """Return the discounted number of rounds: ``floor(beta * (T - t)) + t``, exactly.

    Parameters
    ----------
    T : int
        Rounds planned.
    t : int
        Index of the round that was done last, from 0; less than `T`.
    beta : float
        Discounting factor, between 0 and 1; taken as the decimal number that it prints as.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Notes
    -----
    Algorithm 2. In floating point, 0.7 times 90 is less than 63.

    Examples
    --------
    >>> discount_T(200, 9, 0.9), discount_T(90, 0, 0.7), discount_T(10, 9, 0.9)
    (180, 63, 9)
    """
    check_integer("t", t, minimum=0)
    check_integer("T", T, minimum=t + 1)
    return t + math.floor(Fraction(str(_check_beta(beta))) * (T - t))


class Pace(ABC):
    """The same noise in all rounds; base of the others.

    Parameters
    ----------
    rounds : int
        Rounds planned at first, T0.

    Attributes
    ----------
    done : int
        Rounds that are done.
    planned : int
        Rounds planned, T.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = self.planned = check_integer("rounds", rounds, minimum=1)
        self.done = 0

    @property
    def over(self) -> bool:
        """Whether the training ends."""
        return self.done >= self.planned

    @property
    @abstractmethod
    def factor(self) -> float:
        """Noise of the next round over that of a training with the same noise in all rounds."""

    def after(self, loss: float | None) -> None:
        """Record that a round is done.

        Parameters
        ----------
        loss : float or None
            Validation loss of the model that it led to; None if it is not known.
        """
        self.done += 1

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed training needs."""
        return dict(vars(self))

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned.

        Raises
        ------
        CheckpointError
            If it is of another pace.
        """
        mine = {key: vars(self)[key] for key in self._fixed}
        theirs = {key: state.get(key) for key in mine}
        if mine != theirs or state.keys() != vars(self).keys():
            raise CheckpointError(f"the checkpoint was made with {theirs}, not {mine}")
        vars(self).update(state)

    _fixed: tuple[str, ...] = ("rounds",)


class Uniform(Pace):
    """The same noise in all rounds (algorithm 1)."""

    @property
    def factor(self) -> float:
        """1."""
        return 1.0


class Discounted(Pace):
    """Communication-rounds discounting (CRD, algorithm 2).

    Where the validation loss falls by less than `zeta`, the rounds that are left are discounted by
    `beta` and the budget that is left is spread over them.

    Parameters
    ----------
    rounds : int
        Rounds planned at first, T0. They never grow: choose it generously.
    beta : float, default 0.9
        Discounting factor, between 0 and 1.
    zeta : float, default 0.001
        Least improvement of the loss, at least 0.
    patience : int, default 1
        Rounds in a row without that improvement until the rounds are discounted. The paper has 1.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Notes
    -----
    If the last round but one triggers, one round's share of the budget is never spent.

    Examples
    --------
    >>> pace = Discounted(200)
    >>> for loss in [1.0 - 0.01 * t for t in range(9)] + [2.0]:
    ...     pace.after(loss)
    >>> pace.planned, round(6.570652 * pace.factor, 6)
    (180, 6.215215)
    """

    def __init__(
        self, rounds: int, *, beta: float = 0.9, zeta: float = 0.001, patience: int = 1
    ) -> None:
        super().__init__(rounds)
        self.beta = _check_beta(beta)
        self.zeta = check_number("zeta", zeta, minimum=0)
        self.patience = check_integer("patience", patience, minimum=1)
        self.loss = math.inf
        self._waited = 0
        self._square = 1.0

    _fixed = ("rounds", "beta", "zeta", "patience")

    @property
    def factor(self) -> float:
        """``sqrt(m_t / T0)``."""
        return math.sqrt(self._square)

    def begin(self, loss: float) -> None:
        """Record the loss of the first model; without it the first round discounts nothing."""
        self.loss = loss

    def after(self, loss: float | None) -> None:
        """Record that a round is done; discount those that remain if the loss fell too little."""
        if loss is None:  # nothing was learned of the model: nothing to compare
            self.done += 1
            return
        # A loss that is no number is no improvement.
        self._waited = 0 if self.loss - loss >= self.zeta else self._waited + 1
        if not math.isnan(loss):
            self.loss = loss
        before = self.planned
        if self._waited >= self.patience:
            self.planned = discount_T(before, self.done, self.beta)
            self._waited = 0
        self.done += 1
        if self.planned != before and not self.over:
            self._square *= (self.planned - self.done) / (before - self.done)


class LinearDecay(Pace):
    """Noise that falls linearly from round to round (Lei, polynomial decay of order 1).

    Parameters
    ----------
    rounds : int
        Rounds T0 after which the noise would have reached its end.
    end : float, default 0.5
        Noise at the end over that at the start, from 0 to 1; 1 keeps it as it is.
    calibrated : bool, default False
        Whether all rounds are done, with the noise that this allows; otherwise the first one has
        the noise of a training without decay, and the training ends when the budget is spent.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> [LinearDecay(200, end=end).planned for end in (0.0, 0.25, 0.5, 0.75, 1.0)]
    [100, 114, 133, 160, 200]
    >>> round(LinearDecay(200, end=0.5, calibrated=True).factor, 4)
    1.4116
    """

    def __init__(self, rounds: int, *, end: float = 0.5, calibrated: bool = False) -> None:
        super().__init__(rounds)
        self.end = check_number("end", end, minimum=0, maximum=1)
        costs = [self._share(t) ** -2 for t in range(rounds)]
        self.first = math.sqrt(math.fsum(costs) / rounds) if calibrated else 1.0
        if not calibrated:
            affordable, spent = 0, 0.0
            while affordable < rounds:
                spent += costs[affordable]
                if spent > rounds * (1 + _ROUNDING):
                    break
                affordable += 1
            self.planned = affordable

    _fixed = ("rounds", "end", "first")

    @property
    def factor(self) -> float:
        """``first * (1 - (1 - end) t / T0)``."""
        return self.first * self._share(self.done)

    def _share(self, t: int) -> float:
        return 1 - (1 - self.end) * t / self.rounds


class PlateauDecay(Pace):
    """Noise that falls by a fifth whenever the loss does not fall, until the budget is spent.

    Parameters
    ----------
    rounds : int
        Rounds T0 of a training without decay, with whose noise it starts; it never does more.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Notes
    -----
    The rule of the first version of the authors' code, there with the clients' training losses; the
    text describes `LinearDecay`.

    Examples
    --------
    >>> pace = PlateauDecay(10)
    >>> for loss in (3.0, 2.0, 2.5):
    ...     pace.after(loss)
    >>> pace.factor, pace.over
    (0.8, False)
    """

    def __init__(self, rounds: int) -> None:
        super().__init__(rounds)
        self.loss = math.inf
        self._factor = 1.0
        self._spent = 0.0

    @property
    def factor(self) -> float:
        """0.8 to the number of rounds so far in which the loss did not fall."""
        return self._factor

    def after(self, loss: float | None) -> None:
        """Record that a round is done; lower the noise if the loss did not fall."""
        self.done += 1
        self._spent += self._factor**-2
        if loss is not None:
            self._factor *= 1.0 if loss < self.loss else _PLATEAU_STEP
            self.loss = loss
        if self._spent + self._factor**-2 > self.rounds * (1 + _ROUNDING):
            self.planned = self.done


def _check_beta(beta: float) -> float:
    if not 0 < check_number("beta", beta) < 1:
        raise InvalidParameterError("beta", beta, "a number between 0 and 1, neither of them")
    return beta
