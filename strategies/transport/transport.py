"""Interface between rounds and the way answers travel: one by one, or as a secure sum.

A strategy has one transport and asks it in every exchange: whom to ask, what a question says beside
the scheme's own, what the answers are added up in, and what that comes to. `Plain` is below;
`flwr_privacy.strategies.transport.summed.Summed` is the other one.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flwr.app import RecordDict
from flwr.serverapp import Grid

from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.messenger import Assigned
from flwr_privacy.strategies.requests.request_log import RequestLog

__all__ = ["Draw", "Plain", "Transport"]

Draw = Callable[[Grid, int], Assigned]
"""Draws the clients of a round."""


class Transport(Protocol):
    """Carries the answers of one training to the server."""

    @property
    def cohort(self) -> int:
        """Number of clients whose sum the server may see; 1 where it sees each answer."""

    def prepare(self, grid: Grid, server_round: int) -> None:
        """Prepare the clients of a round to answer.

        Raises
        ------
        NotOpenedError
            If too few can. The round is over then, and another one may follow.
        """

    def clients(self, grid: Grid, server_round: int) -> Assigned:
        """Return the clients to ask in a prepared round."""

    def quorum(self, quorum: int | None) -> int | None:
        """Return the number of answers that end an exchange, if the user has set a quorum."""

    def question(
        self, phase: str, content: RecordDict, own: Mapping[str, RecordDict]
    ) -> tuple[RecordDict, Mapping[str, RecordDict]]:
        """Return a request's content for all and for each client, with the transport's fields."""

    def accumulator(self, phase: str, empty: WeightedMean) -> WeightedMean:
        """Return the accumulator for the answers; `empty` is the scheme's own."""

    def opened(
        self, heard: WeightedMean, request_log: RequestLog, instruction: Instruction
    ) -> WeightedMean:
        """Return the scheme's accumulator with the answers; an empty one if they are lost."""

    def go_on(self) -> None:
        """Move to the next answer of the same clients in the same round.

        Raises
        ------
        NotOpenedError
            If one of them cannot give it. The round is over then.
        """

    def metrics(self) -> dict[str, float]:
        """Return the numbers of a round, for the history."""

    def extend_guarantee(self, guarantee: Guarantee) -> Guarantee:
        """Add to a scheme's guarantee what the transport hides."""

    def state(self) -> dict[str, Any]:
        """Return the state that a resume needs."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""


class Plain:
    """The transport without a secure sum: the server sees every answer.

    Parameters
    ----------
    draw : callable
        Draws the clients of a round.
    """

    cohort = 1

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def prepare(self, grid: Grid, server_round: int) -> None:
        """Do nothing: every client can answer."""

    def clients(self, grid: Grid, server_round: int) -> Assigned:
        """Return the drawn clients."""
        return self._draw(grid, server_round)

    def quorum(self, quorum: int | None) -> int | None:
        """Return the user's quorum."""
        return quorum

    def question(
        self, phase: str, content: RecordDict, own: Mapping[str, RecordDict]
    ) -> tuple[RecordDict, Mapping[str, RecordDict]]:
        """Return the content unchanged."""
        return content, own

    def accumulator(self, phase: str, empty: WeightedMean) -> WeightedMean:
        """Return the scheme's own accumulator."""
        return empty

    def opened(
        self, heard: WeightedMean, request_log: RequestLog, instruction: Instruction
    ) -> WeightedMean:
        """Return the received answers."""
        return heard

    def go_on(self) -> None:
        """Do nothing."""

    def metrics(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    def extend_guarantee(self, guarantee: Guarantee) -> Guarantee:
        """Return the guarantee unchanged."""
        return guarantee

    def state(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""
