"""Draws the clients of a round, each by itself or a fixed number, and says who is charged."""

import os
from collections.abc import Callable, Iterable

from flwr.serverapp import Grid

from flwr_privacy.privacy.card import CardRelease
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
    seed : bytes, optional
        Seed of secret draws; by default a random one.

    Attributes
    ----------
    secret : bool
        As above.
    """

    def __init__(
        self, federation: Federation, *, alone: bool, secret: bool, seed: bytes | None = None
    ) -> None:
        self._federation = federation
        self._alone = alone
        self.secret = secret
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
    ) -> Assigned:
        """Draw the clients of a round's training.

        Parameters
        ----------
        messenger, grid, server_round, fraction, minimum, without
            As in `Messenger.sample`.
        public_seed : int or str
            The experiment's seed, for draws that are no secret.
        q : callable
            Returns the probability of a client that is drawn by itself.
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
        self._known.update(names_of(assigned))
        seed = self._seed if self.secret else str(public_seed).encode()
        return each_by_itself(assigned, q=q(), secret=seed, server_round=server_round)

    def charged(self, request_log: RequestLog) -> set[str]:
        """Return the charged clients: those asked, or all clients where participants are secret."""
        if not self.secret:
            return set(request_log.released())
        if self._federation.met:
            self._known.update(self._federation.clients())
        return set(self._known)

    def state(self) -> bytes:
        """Return the seed of secret draws, for the checkpoint; nothing if draws are no secret."""
        return self._seed if self.secret else b""

    def load(self, seed: bytes, releases: Iterable[CardRelease]) -> None:
        """Restore the seed that `state` returned, and the clients that were charged so far."""
        self._seed = seed or self._seed
        if self.secret:
            self._known = {client for release in releases for client in release.clients}
