"""Records in which round each client was last asked, so that those who waited longest are next."""

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Turns"]

_ROUNDS_KEPT = 2  # the draw of the next round may be made, and made again, before this one is over
_NEVER = (0, 0)


class Turns:
    """A queue of clients: who is asked goes to its end, in the order of the queue.

    Attributes
    ----------
    last : dict of str to (int, int)
        For each client that was asked the round of the last time, and its place among those of that
        round. The smaller, the longer a client has waited.

    Examples
    --------
    >>> turns = Turns()
    >>> turns.take(1, ["a", "b"])
    >>> turns.take(2, ["c", "b"])
    >>> turns.last
    {'a': (1, 0), 'b': (2, 1), 'c': (2, 0)}
    >>> turns.back_to(2)
    >>> turns.last
    {'a': (1, 0), 'b': (1, 1)}
    """

    def __init__(self) -> None:
        self.last: dict[str, tuple[int, int]] = {}
        self._earlier: dict[int, dict[str, tuple[int, int]]] = {}  # by round, what it replaced

    def place(self, client: str) -> tuple[int, int]:
        """Return the place of a client in the queue; who was never asked comes first."""
        return self.last.get(client, _NEVER)

    def back_to(self, server_round: int) -> None:
        """Take back the draws of this round and of later ones."""
        for later in sorted((r for r in self._earlier if r >= server_round), reverse=True):
            self.last |= self._earlier.pop(later)
        self.last = {client: turn for client, turn in self.last.items() if turn != _NEVER}

    def take(self, server_round: int, clients: Iterable[str]) -> None:
        """Record that clients are asked in a round."""
        # Whoever was ahead stays ahead: otherwise some would be asked more often than others.
        queued = sorted(clients, key=lambda client: (self.place(client), client))
        self._earlier[server_round] = {client: self.place(client) for client in queued}
        self.last |= {client: (server_round, place) for place, client in enumerate(queued)}
        kept = sorted(self._earlier)[-_ROUNDS_KEPT:]
        self._earlier = {r: self._earlier[r] for r in kept}

    def resting(self, server_round: int, separation: int) -> set[str]:
        """Return the clients that were asked less than some rounds ago."""
        return {c for c, (r, _) in self.last.items() if server_round - r < separation}

    def state(self) -> dict[str, Any]:
        """Return everything, as plain values."""
        return {
            "last": {client: list(turn) for client, turn in self.last.items()},
            "earlier": {
                str(r): {client: list(turn) for client, turn in replaced.items()}
                for r, replaced in self._earlier.items()
            },
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.last = _turns(state["last"])
        self._earlier = {int(r): _turns(replaced) for r, replaced in state["earlier"].items()}


def _turns(values: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    return {client: (int(r), int(place)) for client, (r, place) in values.items()}
