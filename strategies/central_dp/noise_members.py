"""Chooses the members of a noise committee, and says in which round they begin new streams."""

import logging
from collections.abc import Collection
from typing import Any

from flwr_privacy.central_dp.options import NoiseCommittee
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
    committee : NoiseCommittee, optional
        Number of members, and from which nodes they are chosen; None: there is no committee.

    Attributes
    ----------
    names : list of str
        The members of the next sum, sorted; empty before `choose`.
    """

    def __init__(self, federation: Federation, committee: NoiseCommittee | None) -> None:
        self._federation = federation
        self._size = 0 if committee is None else committee.members
        self._named = None if committee is None else committee.names
        self.names: list[str] = []
        self._order: list[str] = []  # all that can be members, those that come first in the sums
        self._reserved: set[str] = set()  # who does not train
        self._block: int | None = None
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
        said = self._federation.introductions
        pool = [name for name in there if said.get(name, {}).get(MEMBER) is True]
        if self._named is not None:
            pool = [name for name in there if name in self._named]
        simulated = not pool and self._named is None  # no operator says who is a member
        pool = there if simulated else pool
        ordered = [name for name in self._order if name in pool]
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
        self.names, self._order = chosen, ordered
        self._reserved = set(chosen if simulated else pool)
        return chosen

    def replace(self, members: Collection[str]) -> None:
        """Prefer others to some members, without whom a sum was not opened, from now on."""
        self._order.sort(key=lambda name: name in members)

    def others(self, clients: Collection[str]) -> int:
        """Return how many of some clients train."""
        return len(set(clients).difference(self.reserved))

    @property
    def reserved(self) -> set[str]:
        """All who do not train: the members, and those that can take their places."""
        return self._reserved.union(self.names)

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
        self._block = None

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs; it begins new streams."""
        return {"members": list(self.names), "order": list(self._order)}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.names = list(state.get("members", []))
        self._order = list(state.get("order", self.names))
