"""Averages in which clients weigh as often as they were drawn, with or without replacement."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr.serverapp import Grid

from flwr_privacy.errors import InvalidParameterError, ProtocolError, check_number
from flwr_privacy.keywords import checked_keywords
from flwr_privacy.mspdq import outweighs
from flwr_privacy.privacy.averaging import LARGEST_WEIGHT
from flwr_privacy.secure_sum import NotOpenedError
from flwr_privacy.strategies.requests.messenger import Assigned
from flwr_privacy.wire.channel import derive
from flwr_privacy.wire.message import TRAIN

from .base import SchemeStrategy

__all__ = ["DrawnStrategy", "each_by_itself", "names_of"]


_MOST_DRAWINGS = 100  # until nobody outweighs all others, where only their sum is to be seen


def names_of(assigned: Assigned) -> list[str]:
    """Return the clients' names; an unknown client is called by its node's address."""
    return [client or f"node-{node}" for node, clients in assigned.items() for client in clients]


def each_by_itself(
    assigned: Assigned,
    *,
    q: float,
    secret: bytes,
    server_round: int,
    among: Callable[[str], bool] = lambda name: True,
) -> Assigned:
    """Draw each client independently; a round's draw is always the same.

    Parameters
    ----------
    assigned : Assigned
        The clients.
    q : float
        Probability with which each is drawn.
    secret : bytes
        What the draw follows from; as secret as the draw is to be.
    server_round : int
        The round.
    among : callable, optional
        Tells of a name whether it can be drawn in this round; by default each can.
    """

    def is_drawn(name: str) -> bool:
        if not among(name):
            return False
        place = derive(secret, "poisson sample", server_round, name)[:8]
        return int.from_bytes(place, "big") < q * 2.0**64

    drawn = {
        node: [client for client in clients if is_drawn(client or f"node-{node}")]
        for node, clients in assigned.items()
    }
    return {node: clients for node, clients in drawn.items() if clients}


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class DrawnStrategy(SchemeStrategy):
    """Base of the strategies that weigh a client by its draws, whatever weight it reports.

    Parameters
    ----------
    fraction_train, ..., loop, inner, secure_sum
        FedAvg's and those of `SchemeStrategy`. The clients are not asked to evaluate.
    replacement : bool, optional
        Whether clients are drawn with replacement; by default where a scheme is to be
        as in its paper. Then one that is drawn twice weighs twice, and
        the average is an unbiased estimate of that by shares (Lemma 1 of the MSP paper).
    shares : dict, optional
        Each client's share of the data, relative to the others', if it is public. With replacement
        a client is drawn in proportion to it; without, it is drawn like the others and weighs in
        proportion to it. By default all alike.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    replacement: bool | None = None
    shares: Mapping[str, float] | None = None

    metrics_phases: ClassVar[frozenset[str]] = frozenset()
    weight_key = "num-examples"  # in a secure sum: what the client was told to weigh

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fraction_evaluate = 0.0  # what clients say of their data would be one more upload
        for client, share in (self.shares or {}).items():
            if not check_number(f"shares[{client!r}]", share) > 0:
                raise InvalidParameterError("shares", {client: share}, "numbers above 0")
        self._replacement = bool(self.replacement)
        self._shares = None if self.shares is None else dict(self.shares)
        least, largest = (f(self._shares.values() if self._shares else [1]) for f in (min, max))
        if least * LARGEST_WEIGHT < largest:
            allowed = "numbers of which none is 2^53 times as large as another"
            raise InvalidParameterError("shares", self.shares, allowed)

    def setup(self, grid: Grid) -> None:
        """Check that every connected client has a share.

        Raises
        ------
        InvalidParameterError
            If a client has none. One that comes later without a share is not drawn.
        """
        if unknown := sorted(self._without_share()):
            raise InvalidParameterError("shares", unknown, "a share for each of these clients")

    def _without_share(self) -> set[str]:
        if self._shares is None:
            return set()
        return set(self.federation.clients()).difference(self._shares)

    def _build(self) -> None:
        super()._build()
        self._draws: dict[int, dict[str, int]] = {}  # by round

    def draws(self, server_round: int) -> dict[str, int]:
        """Return how often each client of a round was drawn."""
        return self._draws[server_round]

    def weights(self, server_round: int) -> dict[str, float]:
        """Return the weights of a round's clients: their draws, or shares if each is drawn once."""
        draws = self.draws(server_round)
        if self._shares is None or self._replacement:
            return dict(draws)
        largest = max(self._shares.values())
        return {client: self._shares[client] / largest for client in draws}

    def round_metrics(self, card: Any) -> dict[str, float]:
        """Return the number of draws of the round and of distinct clients; empty without draws."""
        if not self._current:
            return {}
        draws = self.draws(self._current)
        return {"draws": sum(draws.values()), "distinct": len(draws)}

    def _hides(self, draws: Mapping[str, int]) -> bool:
        """Tell whether a secure sum, if any, reveals no more of one client than of others."""
        if self.secure_sum is None:
            return True
        try:
            least = self.secure_sum.threshold_of(len(draws))
        except InvalidParameterError:  # so few clients were drawn
            return False
        return not outweighs(draws, least=least)

    _current = 0  # the round that has begun, if one has

    def drawn(self, grid: Grid, server_round: int) -> Assigned:
        """Draw the clients of a round, with or without replacement."""
        # Under a secure sum the clients of the next round are drawn before this one is over.
        self._draws = {r: d for r, d in self._draws.items() if r >= server_round - 1}
        needs_names = "replacement" if self._replacement else "shares"
        if (self._replacement or self._shares is not None) and not self.federation.met:
            raise ProtocolError(
                f"{needs_names}: works only where this strategy's own start runs the rounds"
            )
        if self._replacement:
            for attempt in range(_MOST_DRAWINGS):
                assigned, draws = self.messenger.draw(
                    grid,
                    server_round,
                    TRAIN,
                    fraction=self.fraction_train,
                    minimum=self.min_train_nodes,
                    shares=self._shares,
                    attempt=attempt,
                )
                if self._hides(draws):
                    break
            else:
                raise NotOpenedError(
                    f"there is no sum of round {server_round}: so many draws of so few clients "
                    "have one that may weigh more than all others"
                )
        else:
            assigned = self.messenger.sample(
                grid,
                server_round,
                TRAIN,
                fraction=self.fraction_train,
                minimum=self.min_train_nodes,
                without=self._without_share(),
            )
            draws = {client: 1 for clients in assigned.values() for client in clients}
        self._draws[server_round] = draws
        return assigned
