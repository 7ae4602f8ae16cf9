"""Keeps a client's participations in correlated noise as few and as far apart as it was told first.

What rounds with correlated noise cost together holds only for clients that rest between two rounds.
So the node remembers in which rounds it took part, and what it was told of factor and rest; it
declines another factor, a round that is too early, and more rounds than that, whatever the server
says later.

A trusted server accounts for the rounds, and no ledger has them: `take_part` says before the
training that the client takes part. With a committee the client's own ledger has them: `intend`
notes the round before it is charged, and `participation` counts the noted rounds that were charged,
under the ledger's lock.
"""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flwr_privacy.errors import DeclinedError

if TYPE_CHECKING:  # the server has the limits, and no node store
    from flwr_privacy.privacy.ledger import LedgerView, Question

    from .node_store import NodeStore
    from .request import Request

__all__ = ["INDEPENDENT", "ParticipationLimit", "intend", "participation", "take_part"]

INDEPENDENT = "independent"
"""In place of a factor, where the noise of rounds is independent."""

_NOTE = "participations"
_CHARGED = "charged-participations"
_MOST_DECLINED = 100  # noted rounds that were not charged, beside those that may be

_OTHER_NOISE = "the experiment began with correlated noise of another factor, or with other limits"


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
    question, told = request.question, _told(limit)
    if limit.factor == INDEPENDENT and store.noted(question.experiment_id, _NOTE) is None:
        return

    def with_this(noted: str | None) -> str:
        first, last, rounds = json.loads(noted) if noted else (told, "", [])
        _check_told(first, question.server_round, limit)
        if last == request.digest:
            return json.dumps([first, last, rounds])
        if rounds and question.server_round < rounds[-1] + limit.separation:
            raise _too_early(question.server_round, rounds[-1], limit)
        if len(rounds) >= limit.most:
            raise _too_many(limit)
        return json.dumps([first, request.digest, [*rounds, question.server_round]])

    store.change_note(question.experiment_id, _NOTE, with_this)


def intend(store: "NodeStore", request: "Request", limit: ParticipationLimit | None) -> None:
    """Note, durably, that a round is about to be charged, and what was told of the limit.

    Without a limit it only checks that the experiment has begun without one.

    Raises
    ------
    DeclinedError
        If the limit that the client was told first is another one, or does not allow the round;
        then nothing is noted.
    LedgerError
        If it cannot be noted.
    """
    question = request.question
    noted = store.noted(question.experiment_id, _CHARGED)
    if limit is None:
        if noted is not None:
            raise DeclinedError(_OTHER_NOISE)
        return
    ledger = store.ledger.view()
    if noted is None and ledger.totals(question.experiment_id).count:
        raise DeclinedError(_OTHER_NOISE)
    if not ledger.charges_of(question):
        participation(store, ledger, request, limit)

    def with_this(noted: str | None) -> str:
        first, rounds = json.loads(noted) if noted else (_told(limit), [])
        _check_told(first, question.server_round, limit)
        this = [question.phase, question.server_round, question.request]
        if len(rounds) >= limit.most + _MOST_DECLINED:  # or a server lets the note grow
            rounds = [entry for entry in rounds if _charges(ledger, question, entry)]
        return json.dumps([first, rounds if this in rounds else [*rounds, this]])

    store.change_note(question.experiment_id, _CHARGED, with_this)


def participation(
    store: "NodeStore", ledger: "LedgerView", request: "Request", limit: ParticipationLimit
) -> int:
    """Return the number of a client's next participation, from 1; call it under the ledger's lock.

    Participations are charged in the order of their rounds. So what the k-th one adds to the joint
    sensitivity bounds what it costs, also where the noise of a later block is another one: within a
    block the members see to it that it stays the same.

    Raises
    ------
    DeclinedError
        If it is too early or one too many, or if the ledger has charges of the experiment that this
        client did not note: those of another client with the same data, or of a lost note.
    LedgerError
        If the ledger or the note cannot be read.
    """
    question = request.question
    _, noted = json.loads(store.noted(question.experiment_id, _CHARGED) or "[[], []]")
    made: list[int] = []
    count = 0
    for entry in noted:
        if charged := _charges(ledger, question, entry):
            made.append(entry[1])
            count += charged
    if count != ledger.totals(question.experiment_id).count:
        raise DeclinedError(
            "the ledger has charges of this experiment that this client has not noted: how far "
            "apart they are is not known"
        )
    last = max(made, default=None)
    if last is not None and question.server_round < last + limit.separation:
        raise _too_early(question.server_round, last, limit)
    if count >= limit.most:
        raise _too_many(limit)
    return count + 1


def _charges(ledger: "LedgerView", question: "Question", entry: list[Any]) -> int:
    """Return how many charges the ledger has of a noted round."""
    phase, server_round, number = entry
    name = replace(question, phase=phase, server_round=server_round, request=number)
    return len(ledger.charges_of(name))


def _told(limit: ParticipationLimit) -> list[object]:
    return [limit.factor, limit.rounds, limit.separation, limit.most]


def _check_told(first: list[object], server_round: int, limit: ParticipationLimit) -> None:
    if first != _told(limit):
        raise DeclinedError(_OTHER_NOISE)
    if server_round > limit.rounds:
        raise DeclinedError(
            f"round {server_round}: the correlated noise is for {limit.rounds} rounds"
        )


def _too_early(server_round: int, earlier: int, limit: ParticipationLimit) -> DeclinedError:
    return DeclinedError(
        f"round {server_round} is too early: the client took part in round {earlier}, and "
        f"correlated noise needs it to rest until round {earlier + limit.separation}"
    )


def _too_many(limit: ParticipationLimit) -> DeclinedError:
    return DeclinedError(
        f"the client took part in {limit.most} rounds, all that the correlated noise is for"
    )
