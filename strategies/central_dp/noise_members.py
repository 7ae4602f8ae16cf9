"""Chooses the members of a noise committee, and says in which round they begin new streams."""

import logging
from collections.abc import Collection
from typing import Any

from flwr_privacy.central_dp.terms import MEMBER
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.secure_sum import NotOpenedError
from flwr_privacy.strategies.requests.federation import Federation

__all__ = ["NoiseMembers"]

logger = logging.getLogger("flwr.privacy")


class NoiseMembers:
    """The members of one training's noise committee.

    The rounds from one beginning of streams to the next are a block. All members take part in all
    rounds of a block; after a round without a sum, or with other members, a new one begins.

    Parameters
    ----------
    federation : Federation
        Who is there, and who says that it is a member.
    size : int
        Number of members; 0: there is no committee.

    Attributes
    ----------
    names : list of str
        The members of the next sum, sorted; empty before `choose`.
    """

    def __init__(self, federation: Federation, size: int) -> None:
        self._federation = federation
        self._size = size
        self.names: list[str] = []
        self._block = 0
        self._last = 0  # the last round whose noise was asked for
        self._in_block: list[str] = []

    def choose(self) -> list[str]:
        """Choose the members of the next sum: those of the last one, as long as they are there.

        Raises
        ------
        InvalidParameterError
            If there are too few nodes that can be members before anybody was chosen.
        NotOpenedError
            If there are too few later.
        """
        there = self._federation.clients()
        said = [c for c in there if self._federation.introductions.get(c, {}).get(MEMBER) is True]
        pool = said or there  # simulated clients have no operator who says so
        ordered = [name for name in self.names if name in pool]
        ordered += [name for name in pool if name not in ordered]
        if len(ordered) < self._size:
            text = f"{len(ordered)} nodes can be members of the noise committee"
            if not self.names:
                allowed = f"at most the {text}"
                raise InvalidParameterError("committee.members", self._size, allowed)
            raise NotOpenedError(f"{text}, and {self._size} are needed")
        chosen = sorted(ordered[: self._size])
        if chosen != self.names and self._size:
            logger.info("the noise committee: %s", ", ".join(chosen))
        self.names = chosen
        return chosen

    def others(self, clients: Collection[str]) -> int:
        """Return how many of some clients are no members."""
        return len(set(clients).difference(self.names))

    def block_of(self, server_round: int) -> int | None:
        """Return the round in which the streams of a round began, which is asked for now.

        None where there is no committee.

        Parameters
        ----------
        server_round : int
            The round.
        """
        if not self._size:
            return None
        goes_on = self._block and self._last == server_round - 1 and self._in_block == self.names
        if not goes_on:
            self._block, self._in_block = server_round, list(self.names)
            logger.info("the noise committee begins new streams in round %d", server_round)
        self._last = server_round
        return self._block

    def end_block(self) -> None:
        """Begin new streams in the next round: a sum was not opened."""
        self._block = 0

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs; it begins new streams."""
        return {"members": list(self.names)}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.names = list(state.get("members", []))
