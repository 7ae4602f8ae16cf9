"""The order in which the clients of an asynchronous vertical training answer (VAFL)."""

import heapq
from collections.abc import Iterable
from typing import Any

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.wire.message import TRAIN

__all__ = ["Arrivals"]


class Arrivals:
    """The simulated arrivals of the clients' answers, each with its next batch.

    Parameters
    ----------
    clients : iterable of str
        The clients; all begin at the same moment.
    delays : StragglerModel, optional
        The law of the times that clients take, with a ``finish_time``; by default all take 1.
    seed : int or str
        Root seed of the experiment.

    Attributes
    ----------
    gradients : dict of str to int
        How many gradients each client has got.

    Raises
    ------
    InvalidParameterError
        If the law has no ``finish_time``.

    Examples
    --------
    >>> arrivals = Arrivals(["a", "b"], None, seed=1)
    >>> arrivals.next(), arrivals.next()
    (('a', 1.0), ('b', 0.0))
    """

    def __init__(self, clients: Iterable[str], delays: Any, *, seed: int | str) -> None:
        self.gradients = dict.fromkeys(clients, 0)
        self._delays = delays
        self._seed = seed
        self._queue: list[tuple[float, int, str]] = []
        self._now = 0.0
        for client in self.gradients:
            self.await_answer(client, 0)

    def next(self) -> tuple[str, float]:
        """Return the client whose answer arrives next, and the time since the one before."""
        moment, _, client = heapq.heappop(self._queue)
        before, self._now = self._now, moment
        return client, moment - before

    def await_answer(self, client: str, server_round: int) -> None:
        """Begin to wait for the answer of a client that was sent a request in a round."""
        heapq.heappush(self._queue, (self._now + self._seconds(client), server_round, client))

    def _seconds(self, client: str) -> float:
        """Return the time that a client takes from a gradient to its next answer."""
        if self._delays is None:
            return 1.0
        finish = getattr(self._delays, "finish_time", None)
        if finish is None:
            allowed = "a law with finish_time, for vafl"
            raise InvalidParameterError("stragglers", self._delays, allowed)
        return float(
            finish(
                seed=self._seed,
                server_round=self.gradients[client] + 1,
                client_id=client,
                phase=TRAIN,
            )
        )
