"""Draws the clients of a round of UDP, and says who is charged for it."""

import os
from collections.abc import Callable

from flwr.serverapp import Grid

from flwr_privacy.strategies.loop.draws import each_by_itself, names_of
from flwr_privacy.strategies.requests.federation import Federation
from flwr_privacy.strategies.requests.messenger import Assigned, Messenger
from flwr_privacy.strategies.requests.request_log import RequestLog
from flwr_privacy.wire.message import TRAIN

__all__ = ["Participants"]


class Participants:
    """The clients that take part in the rounds of one training.

    Parameters
    ----------
    federation : Federation
        Who is there.
    alone : bool
        Whether each client is drawn by itself (Poisson sampling).
    secret : bool
        Whether it is a secret who takes part: then everybody is charged for every round.

    Attributes
    ----------
    known : set of str
        Clients that were ever there, if everybody is charged.
    seed : bytes
        Seed of secret draws.
    """

    def __init__(self, federation: Federation, *, alone: bool, secret: bool) -> None:
        self._federation = federation
        self._alone = alone
        self.secret = secret
        self.known: set[str] = set()
        self.seed = os.urandom(32)

    def drawn(
        self,
        messenger: Messenger,
        grid: Grid,
        server_round: int,
        *,
        fraction: float,
        minimum: int,
        without: set[str],
        seed: int | str,
        q: Callable[[], float],
    ) -> Assigned:
        """Draw the clients of a round's training.

        Parameters
        ----------
        messenger, grid, server_round, fraction, minimum, without
            As in `Messenger.sample`.
        seed : int or str
            The experiment's, for draws that are no secret.
        q : callable
            Returns the chance of a client that is drawn by itself.
        """
        if fraction == 0:
            return {}
        assigned = messenger.sample(
            grid,
            server_round,
            TRAIN,
            fraction=1.0 if self._alone else fraction,
            minimum=0 if self._alone else minimum,
            without=without,
        )
        if not self._alone:
            return assigned
        self.known.update(names_of(assigned))
        own = self.seed if self.secret else str(seed).encode()
        return each_by_itself(assigned, q=q(), secret=own, server_round=server_round)

    def charged(self, request_log: RequestLog) -> set[str]:
        """Return who is charged: whoever was asked, or where participants are secret everybody."""
        if not self.secret:
            return set(request_log.released())
        if self._federation.met:
            self.known.update(self._federation.clients())
        return set(self.known)
