"""Draws the clients of a round as a scheme asks for it, and says who is charged."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from flwr.serverapp import Grid

from flwr_privacy.privacy.card import CardRelease
from flwr_privacy.privacy.cohorts import BALANCED, drawn_alone
from flwr_privacy.strategies.loop.draws import each_by_itself, names_of
from flwr_privacy.strategies.requests.federation import Federation
from flwr_privacy.strategies.requests.messenger import Assigned, Messenger
from flwr_privacy.strategies.requests.request_log import RequestLog
from flwr_privacy.wire.identity import derive_seed
from flwr_privacy.wire.message import TRAIN

from .turns import Turns

__all__ = ["Participants"]


class Participants:
    """The clients that take part in the rounds of one training.

    Parameters
    ----------
    federation : Federation
        Who is there.
    cohorts : {"fixed", "balanced", "poisson", "cyclic_poisson"}
        How a cohort is drawn: see `flwr_privacy.privacy.cohorts`.
    secret : bool
        Whether it is a secret who takes part: then everybody who may have been drawn is charged.
    seed : bytes, optional
        Seed of secret draws; by default a random one.

    Attributes
    ----------
    secret : bool
        As above.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        cohorts: str,
        secret: bool,
        seed: bytes | None = None,
    ) -> None:
        self._federation = federation
        self._cohorts = cohorts
        self.secret = secret
        self._turns = Turns()
        self._known: set[str] = set()  # who was ever there, where everybody is charged
        self._seed = os.urandom(32) if seed is None else seed

    def drawn(
        self,
        messenger: Messenger,
        grid: Grid,
        server_round: int,
        *,
        fraction: float,
        minimum: int,
        without: set[str],
        public_seed: int | str,
        q: Callable[[], float],
        separation: Callable[[], int] = lambda: 1,
    ) -> Assigned:
        """Draw the clients of a round's training.

        Parameters
        ----------
        messenger, grid, server_round, fraction, minimum, without
            As in `Messenger.sample`.
        public_seed : int or str
            The experiment's seed, for draws that are no secret.
        q : callable
            Returns the fraction of the clients that is asked in a round.
        separation : callable, optional
            Returns how many rounds after a client's turn it may have the next, even if nobody else
            is there; of groups that take turns, how many there are. By default 1.
        """
        if fraction == 0:
            return {}
        if drawn_alone(self._cohorts):
            everybody = messenger.sample(
                grid, server_round, TRAIN, fraction=1.0, minimum=0, without=without
            )
            self._known.update(names_of(everybody))
            seed = self._seed if self.secret else str(public_seed).encode()
            groups = separation()
            return each_by_itself(
                everybody,
                q=min(1.0, q() * groups),
                secret=seed,
                server_round=server_round,
                among=lambda client: self._may_be_drawn(client, server_round, groups),
            )
        turns = None
        if self._cohorts == BALANCED:
            messenger.wait(grid)
            self._turns.back_to(server_round)
            turns = self._turns.last
            without = without | self._turns.resting(server_round, separation())
        assigned = messenger.sample(
            grid,
            server_round,
            TRAIN,
            fraction=fraction,
            minimum=minimum,
            without=without,
            turns=turns,
        )
        if turns is not None:
            self._turns.take(server_round, names_of(assigned))
        return assigned

    def charged(self, request_log: RequestLog, *, groups: int = 1) -> set[str]:
        """Return the charged clients: those asked, or who may have been where that is a secret.

        Parameters
        ----------
        request_log : RequestLog
            What became of the request.
        groups : int, default 1
            Number of groups that take turns; in an evaluation there are none.
        """
        if not self.secret:
            return set(request_log.released())
        if self._federation.met:
            self._known.update(self._federation.clients())
        server_round = request_log.header.server_round
        return {c for c in self._known if self._may_be_drawn(c, server_round, groups)}

    def _may_be_drawn(self, client: str, server_round: int, groups: int) -> bool:
        """Tell whether it is the turn of a client's group; the groups are no secret."""
        if groups == 1:
            return True
        return derive_seed(0, "group", client) % groups == server_round % groups

    def state(self) -> dict[str, Any]:
        """Return the seed of secret draws, if draws are secret, and who was asked when."""
        return {"seed": self._seed if self.secret else b"", "turns": self._turns.state()}

    def load(self, state: dict[str, Any], releases: Iterable[CardRelease]) -> None:
        """Restore what `state` returned, and the clients that were charged so far."""
        self._seed = state["seed"] or self._seed
        self._turns.load(state["turns"])
        if self.secret:
            self._known = {client for release in releases for client in release.clients}
