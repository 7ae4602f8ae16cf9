"""How the answers of clients come to the server: in the open, or as a sum that hides them.

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
    """What carries the answers of one training."""

    @property
    def cohort(self) -> int:
        """Of how many clients a sum may be that the server sees; 1 where it sees each answer."""

    def prepare(self, grid: Grid, server_round: int) -> None:
        """See to it that the clients of a round can answer.

        Raises
        ------
        NotOpenedError
            If too few can. The round is over then, and another one may follow.
        """

    def clients(self, grid: Grid, server_round: int) -> Assigned:
        """Return who is asked in a round that was prepared."""

    def quorum(self, quorum: int | None) -> int | None:
        """Return after how many answers an exchange ends, if the user wants it to end there."""

    def question(
        self, phase: str, content: RecordDict, own: Mapping[str, RecordDict]
    ) -> tuple[RecordDict, Mapping[str, RecordDict]]:
        """Return what a question says to all and to each client alone, with what the way needs."""

    def accumulator(self, phase: str, empty: WeightedMean) -> WeightedMean:
        """Return what the answers are added up in; `empty` is the scheme's own accumulator."""

    def opened(
        self, heard: WeightedMean, request_log: RequestLog, instruction: Instruction
    ) -> WeightedMean:
        """Return the scheme's accumulator with what was heard; an empty one if that is lost."""

    def go_on(self) -> None:
        """Go on to the next answer of the same clients in the same round.

        Raises
        ------
        NotOpenedError
            If one of them cannot give it. The round is over then.
        """

    def metrics(self) -> dict[str, float]:
        """Return the numbers of a round, for the history."""

    def extend_guarantee(self, guarantee: Guarantee) -> Guarantee:
        """Return a scheme's promise with what the way of the answers adds to it."""

    def state(self) -> dict[str, Any]:
        """Return what a resume needs."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned."""


class Plain:
    """Answers that the server sees one by one.

    Parameters
    ----------
    draw : callable
        Draws the clients of a round.
    """

    cohort = 1

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def prepare(self, grid: Grid, server_round: int) -> None:
        """Do nothing: whoever is asked can answer."""

    def clients(self, grid: Grid, server_round: int) -> Assigned:
        """Return who is drawn."""
        return self._draw(grid, server_round)

    def quorum(self, quorum: int | None) -> int | None:
        """Return the user's quorum."""
        return quorum

    def question(
        self, phase: str, content: RecordDict, own: Mapping[str, RecordDict]
    ) -> tuple[RecordDict, Mapping[str, RecordDict]]:
        """Return the question as it is."""
        return content, own

    def accumulator(self, phase: str, empty: WeightedMean) -> WeightedMean:
        """Return the scheme's own accumulator."""
        return empty

    def opened(
        self, heard: WeightedMean, request_log: RequestLog, instruction: Instruction
    ) -> WeightedMean:
        """Return what was heard."""
        return heard

    def go_on(self) -> None:
        """Do nothing."""

    def metrics(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    def extend_guarantee(self, guarantee: Guarantee) -> Guarantee:
        """Return the promise as it is."""
        return guarantee

    def state(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up nothing."""
