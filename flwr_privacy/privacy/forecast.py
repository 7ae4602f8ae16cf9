"""Says before a training whether its model can learn through the noise.

The noise of all rounds together is compared with the longest way that the model can go: in R rounds
independent noise has an L2 norm of about ``sqrt(R) sigma sqrt(d)`` in d weights, and clipped
updates move a model by at most R times their bound C. The ratio ``sigma sqrt(d) / (C sqrt(R))``
does not depend on the learning rate, on C, or, where a budget is spread over the rounds, on R.

The limits are measured and not proven: docs/drop-in.md has the trainings on both sides of them. The
mean of many records' gradients is much shorter than its bound, so at record level less noise drowns
it.
"""

import math
from dataclasses import dataclass

from flwr_privacy.errors import check_integer, check_number

__all__ = ["LIMITS", "Forecast"]

LIMITS = {"update": (1.0, 3.0), "record": (0.15, 1.0)}
"""Up to the first ratio a model learns; above the second it is as good as guessing."""

_ROUNDING = 1e-9  # relative, of a ratio


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The noise of a training beside the way that its model can go.

    Parameters
    ----------
    ratio : float
        Standard deviation of the noise in a weight of a round's mean, over the bound of that
        mean's L2 norm. Where every record adds to the bound, for one record of each client.
    weights : int
        Number of weights that get noise, d.
    clients : int
        Clients in a round.
    rounds : int
        Rounds of the training, R.
    own_noise : bool
        Whether each client adds all noise by itself: with n times as many clients the ratio falls
        by the square root of n, else by n.
    per_record : bool, default False
        Whether the ratio falls with the number of records of a client, which the server does not
        know.
    remedies : tuple of str
        What would help besides more clients, as options of the strategy.
    what : str, default "noise"
        What the noise is called, if there is more to say.

    Examples
    --------
    >>> forecast = Forecast(ratio=0.5, weights=650, clients=8, rounds=10, own_noise=True)
    >>> round(forecast.total, 2)
    4.03
    >>> print(forecast.text())
    forecast: over the training the noise in 650 weights is 4 times as long as all clipped updates \
of 8 clients a round can be: expect chance accuracy; at least 130 clients a round would work
    """

    ratio: float
    weights: int
    clients: int
    rounds: int
    own_noise: bool
    per_record: bool = False
    remedies: tuple[str, ...] = ()
    what: str = "noise"

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, minimum=0)
        for name in ("weights", "clients", "rounds"):
            check_integer(name, getattr(self, name), minimum=1)

    @property
    def total(self) -> float:
        """The ratio for all rounds and weights."""
        return self.ratio * math.sqrt(self.weights / self.rounds)

    @property
    def learns(self) -> float:
        """How many times too large the ratio is for a model that learns; up to 1 it does."""
        return self.total / LIMITS["record" if self.per_record else "update"][0]

    @property
    def warns(self) -> bool:
        """Whether the model cannot be expected to learn; never where that is up to the records."""
        return not self.per_record and self.learns > 1 + _ROUNDING

    def text(self) -> str:
        """Return the comparison, the verdict, and what would help, as one line."""
        who = f"{self.clients} {'client' if self.clients == 1 else 'clients'} a round"
        if self.per_record:
            learns, chance = (max(1, _up(self.total / limit)) for limit in LIMITS["record"])
            return (
                f"forecast: with {who} the model of {self.weights} weights can learn where a "
                f"client has at least {learns:,} records; below {chance:,} expect chance accuracy"
            )
        compared = (
            f"forecast: over the training the {self.what} in {self.weights} weights is "
            f"{self.total:.2g} times as long as all clipped updates of {who} can be"
        )
        if not self.warns:
            return f"{compared}: the model can learn"
        chance = self.total > LIMITS["update"][1]
        verdict = "chance accuracy" if chance else "far less accuracy than without noise"
        more = _up(self.clients * (self.learns**2 if self.own_noise else self.learns))
        may = f"; {' or '.join(self.remedies)} may help" if self.remedies else ""
        return f"{compared}: expect {verdict}; at least {more:,} clients a round would work{may}"


def _up(number: float) -> int:
    """Return the next whole number, that of a number which is one up to rounding."""
    return math.ceil(number * (1 - _ROUNDING))
