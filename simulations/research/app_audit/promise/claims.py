"""What an app promises: by its privacy card, by Flower's mechanisms, or as somebody says."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr_privacy.accounting import REPLACE_ONE, ZERO_OUT
from flwr_privacy.accounting.gaussian import check_delta, epsilon_of, mu_of
from flwr_privacy.errors import InvalidParameterError, check_choice, check_number
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.card.folder import CARD

from ..transcript import CARDS, Transcript

__all__ = ["STATED", "Claim", "Mechanism", "claims_of", "mechanisms_of", "read_claim"]

UNITS, VIEWS, PERIODS = ("user", "record"), ("server", "model"), ("training", "round")
NEIGHBOURS = (ZERO_OUT, REPLACE_ONE)

STATED = "--claims"
"""Source of a claim that no part of the app makes."""

_DELTA = 1e-5  # where a mechanism states a noise multiplier alone


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of differential privacy.

    Parameters
    ----------
    epsilon, delta : float
        What is claimed.
    unit : {"user", "record"}, default "user"
        What is protected.
    view : {"server", "model"}, default "server"
        From whom: who sees all that leaves the nodes, or the models that are sent out.
    per : {"training", "round"}, default "training"
        What it is the epsilon of.
    neighbours : {"zero_out", "replace_one"}, optional
        Whether a user's update, or a record, is replaced by nothing or by any other. By default
        that of the app's mechanism for users, and else ``zero_out``. For users what holds for the
        other holds for it.
    mu : float, optional
        Of Gaussian noise, where the claim is about that: it says more than (epsilon, delta).
    source : str, default "--claims"
        Who says so.
    """

    epsilon: float
    delta: float
    unit: str = "user"
    view: str = "server"
    per: str = "training"
    neighbours: str | None = None
    mu: float | None = None
    source: str = STATED

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon, minimum=0)
        check_delta(self.delta)
        for name, allowed in (("unit", UNITS), ("view", VIEWS), ("per", PERIODS)):
            check_choice(name, getattr(self, name), allowed)
        if self.neighbours is not None:
            check_choice("neighbours", self.neighbours, NEIGHBOURS)

    def __str__(self) -> str:
        return f"({self.epsilon:.4g}, {self.delta:g}) per {self.unit} and {self.per}"

    def over(self, rounds: int) -> "Claim":
        """Return what it says of some rounds together."""
        if self.per == "training" or rounds <= 1:
            return self
        if self.mu is not None:
            mu = self.mu * math.sqrt(rounds)
            return replace(self, per="training", mu=mu, epsilon=epsilon_of(mu, self.delta))
        delta = min(self.delta * rounds, 1 - 1e-9)
        return replace(self, per="training", epsilon=self.epsilon * rounds, delta=delta)


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """What the parameters of one of Flower's mechanisms give.

    Parameters
    ----------
    name : str
        Its class.
    view : {"server", "model"}
        Who sees what it releases.
    neighbours : {"zero_out", "replace_one"}
        Which neighbours its noise is for.
    mu : float
        Of a round, as Gaussian noise; infinite without noise.
    stated, delta : float
        Epsilon that it states, of a round, NaN where it states none; delta.
    """

    name: str
    view: str
    neighbours: str
    mu: float
    stated: float
    delta: float

    def epsilon(self, rounds: int, delta: float | None = None) -> float:
        """Return the epsilon of some rounds, by the curve of Gaussian noise."""
        return epsilon_of(self.mu * math.sqrt(rounds), self.delta if delta is None else delta)


def mechanisms_of(as_is: Transcript, *, weight: float = 1.0) -> list[Mechanism]:
    """Return Flower's mechanisms that an app made.

    Parameters
    ----------
    as_is : Transcript
        Of a run.
    weight : float, default 1.0
        Largest weight of a client over the mean weight: Flower's wrappers add noise for equal ones.
    """
    found = [
        _local(one) if one["local"] else _central(one, weight) for one in as_is.about["declared"]
    ]
    return list(dict.fromkeys(found))


def claims_of(as_is: Transcript, *, rounds: int, weight: float = 1.0) -> list[Claim]:
    """Return what an app claims.

    Parameters
    ----------
    as_is, weight
        As in `mechanisms_of`.
    rounds : int
        Rounds that were run.
    """
    claims = [claim for card in _cards(as_is.folder) if (claim := _of_card(card)) is not None]
    for one in mechanisms_of(as_is, weight=weight):
        if math.isinf(one.mu):
            continue
        ours = "" if not math.isnan(one.stated) else ": epsilon is ours, from its noise multiplier"
        claims.append(
            Claim(
                epsilon=one.epsilon(rounds),
                delta=one.delta,
                view=one.view,
                neighbours=one.neighbours,
                mu=one.mu * math.sqrt(rounds),
                source=f"{one.name}'s parameters over {rounds} rounds{ours}",
            )
        )
    claims += [
        Claim(
            epsilon=one["epsilon"], delta=one["delta"], view="model", source="Flower's accountant"
        )
        for one in as_is.about["declared"]
        if "epsilon" in one
    ]
    return list(dict.fromkeys(claims))


def read_claim(text: str) -> Claim:
    """Read a claim as the command line has it.

    Parameters
    ----------
    text : str
        As ``epsilon=1,delta=1e-5,unit=user,view=model,per=training,neighbours=replace_one``;
        epsilon and delta are needed.

    Raises
    ------
    InvalidParameterError
        If it says something else.

    Examples
    --------
    >>> print(read_claim("epsilon=1, delta=1e-5, view=model"))
    (1, 1e-05) per user and training
    """
    names = ("epsilon", "delta", "unit", "view", "per", "neighbours")
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in names or name in values:
            allowed = f"'name=value' with commas between, each name once, of {', '.join(names)}"
            raise InvalidParameterError("claims", part.strip(), allowed)
        values[name] = value
    for name in ("epsilon", "delta"):
        if name not in values:
            raise InvalidParameterError("claims", text, f"{name}=NUMBER in it")
        try:
            values[name] = float(values[name])
        except ValueError as error:
            raise InvalidParameterError(name, values[name], "a number") from error
    return Claim(**values)


def _local(one: Mapping[str, Any]) -> Mechanism:
    """Return what LocalDpMod does: its own formula for the noise, and what that noise gives.

    The formula, sigma = sensitivity sqrt(2 ln(1.25 / delta)) / epsilon, is proven up to epsilon 1
    (Dwork & Roth, *The algorithmic foundations of differential privacy*, 2014, theorem A.1).
    """
    numbers = one["numbers"]
    clip, sensitivity = numbers["clipping_norm"], numbers["sensitivity"]
    epsilon, delta = numbers["epsilon"], numbers["delta"]
    noise = 0.0 if not 0 < delta < 1 or epsilon == 0 else math.sqrt(2 * math.log(1.25 / delta))
    sigma = sensitivity * noise / epsilon if epsilon else math.inf
    replaced = sensitivity >= 2 * clip
    moved = 2 * clip if replaced else clip
    return Mechanism(
        name=one["name"],
        view="server",
        neighbours=REPLACE_ONE if replaced else ZERO_OUT,
        mu=moved / sigma if sigma else math.inf,
        stated=epsilon,
        delta=delta if 0 < delta < 1 else _DELTA,
    )


def _central(one: Mapping[str, Any], weight: float) -> Mechanism:
    """Return what a wrapper does, which adds noise to the mean of clipped updates.

    With adaptive clipping the noisy count of clipped updates is a release too (Andrew, Thakkar,
    McMahan & Ramaswamy, *Differentially private learning with adaptive clipping*, NeurIPS 2021).
    """
    numbers = one["numbers"]
    square = _inverse(numbers["noise_multiplier"], weight) ** 2
    if "clipped_count_stddev" in numbers:
        square += _inverse(2 * numbers["clipped_count_stddev"], 1.0) ** 2
    return Mechanism(
        name=one["name"],
        view="model",
        neighbours=ZERO_OUT,
        mu=math.sqrt(square),
        stated=math.nan,
        delta=one.get("delta", _DELTA),
    )


def _inverse(noise: float, reach: float) -> float:
    return reach / noise if noise else math.inf


def _cards(folder: Path) -> list[PrivacyCard]:
    return [
        PrivacyCard.from_json(path.read_bytes())
        for path in sorted((folder / CARDS).glob(f"*/{CARD}"))
    ]


def _of_card(card: PrivacyCard) -> Claim | None:
    """Return the claim of a card; None where it promises no epsilon."""
    guarantee = card.guarantee
    if guarantee.delta is None or not card.stated:
        return None
    relation = card.relation()
    name = min(card.stated, key=lambda one: card.stated[one])
    epsilon = card.stated[name]
    if not epsilon or math.isinf(epsilon):
        return None
    return Claim(
        epsilon=epsilon,
        delta=guarantee.delta,
        unit="record" if "record" in guarantee.protects else "user",
        view="server" if "server" in guarantee.adversary else "model",
        neighbours=REPLACE_ONE if relation == REPLACE_ONE else ZERO_OUT,
        mu=mu_of(epsilon, guarantee.delta) if "gdp" in card.stated else None,
        source=f"the privacy card of {guarantee.scheme}",
    )
