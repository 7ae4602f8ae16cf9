"""Keeps a client's participations in correlated noise as few and as far apart as it was told first.

With correlated noise the trusted server accounts for all rounds together, and no ledger has them.
What they cost holds only for clients that rest between two rounds. So the node remembers in which
rounds it took part, and what it was told of factor and rest; it declines another factor, a round
that is too early, and more rounds than that, whatever the server says later.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flwr_privacy.errors import DeclinedError

if TYPE_CHECKING:  # the server has the limits, and no node store
    from .node_store import NodeStore
    from .request import Request

__all__ = ["INDEPENDENT", "ParticipationLimit", "take_part"]

INDEPENDENT = "independent"
"""In place of a factor, where the noise of rounds is independent."""

_NOTE = "participations"


@dataclass(frozen=True)
class ParticipationLimit:
    """What the cost of rounds with noise by a trusted server holds for.

    Parameters
    ----------
    factor : str
        Digest of the factor; `INDEPENDENT` where the noise of a round is not correlated with that
        of others: then there is no limit, and nothing is recorded.
    rounds : int
        Number of rounds.
    separation : int
        Least number of rounds from one participation to the next.
    most : int
        Largest number of participations.
    """

    factor: str
    rounds: int
    separation: int
    most: int


def take_part(store: "NodeStore", request: "Request", limit: ParticipationLimit) -> None:
    """Record a participation, durably, before the training begins.

    The same request of the same round is no other participation.

    Raises
    ------
    DeclinedError
        If the limit that the client was told first is another one, or does not allow the round.
    LedgerError
        If it cannot be recorded.
    """
    question = request.question
    told = [limit.factor, limit.rounds, limit.separation, limit.most]
    if limit.factor == INDEPENDENT and store.noted(question.experiment_id, _NOTE) is None:
        return

    def with_this(noted: str | None) -> str:
        first, last, rounds = json.loads(noted) if noted else (told, "", [])
        if first != told:
            raise DeclinedError(
                "the experiment began with correlated noise of another factor, or with other limits"
            )
        if question.server_round > limit.rounds:
            raise DeclinedError(
                f"round {question.server_round}: the correlated noise is for {limit.rounds} rounds"
            )
        if last == request.digest:
            return json.dumps([first, last, rounds])
        if rounds and question.server_round < rounds[-1] + limit.separation:
            raise DeclinedError(
                f"round {question.server_round} is too early: the client took part in round "
                f"{rounds[-1]}, and correlated noise needs it to rest until round "
                f"{rounds[-1] + limit.separation}"
            )
        if len(rounds) >= limit.most:
            raise DeclinedError(
                f"the client took part in {limit.most} rounds, all that the correlated noise is for"
            )
        return json.dumps([first, request.digest, [*rounds, question.server_round]])

    store.change_note(question.experiment_id, _NOTE, with_this)
