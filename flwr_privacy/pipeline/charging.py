"""Charges a release before its work, and keeps the reply that the charge is for.

A crash between two steps leaves a charge without a reply, never a reply without a charge.
"""

from collections.abc import Sequence
from dataclasses import replace

from flwr_privacy.errors import ChargedFailureError, DeclinedError
from flwr_privacy.privacy.ledger import Entry, Question
from flwr_privacy.wire.documents import dumps, loads

from .mechanism import EXPERIMENT, Answer, Release, ReleasePlan
from .node_limits import check_limits
from .node_store import NodeStore
from .participation_limits import intend
from .planned_release import PlannedRelease
from .request import Request
from .shared_reply_cache import Replies

__all__ = [
    "charge_for",
    "check_chargeable",
    "given_before",
    "keep_once",
    "settle",
]


def check_chargeable(release: Release, planned: PlannedRelease) -> None:
    """Decline what could not be charged, before the user's code is called.

    Where it is called and what it came to could not be charged, whether it failed would be told for
    nothing.

    Raises
    ------
    DeclinedError
        If the node's limits, its policy or the budget do not allow another release, or another
        question has got the one of its kind.
    """
    ledger, asked = planned.store.ledger.view(), planned.entry()
    charged = [ledger.entry(number).digest for number in ledger.charges_of(asked.question)]
    if asked.digest in charged:
        return
    if charged and release.single:
        raise _other_terms(asked.question)
    check_limits(planned.store, ledger)
    planned.check_affordable(ledger)


def charge_for(release: Release, planned: PlannedRelease) -> tuple[int, Answer | None]:
    """Charge a release, unless this request has an unanswered charge or a cached reply.

    Returns
    -------
    number : int
        Which charge of the ledger the answer is for.
    kept : Answer or None
        The reply to this question, if there is one.

    Raises
    ------
    DeclinedError
        If it cannot be charged, or had its one attempt.
    """
    store, request, plan = planned.store, planned.request, planned.plan
    question, (cache, key) = request.question, _cache(release, planned)
    if plan.charge is not None:
        intend(store, request, plan.limit)
    # Check and charge under one lock: two processes must not both see room for the last release.
    with store.ledger.locked() as locked:
        charged = locked.charges_of(question)
        mine = [n for n in charged if locked.entry(n).digest == request.digest]
        if plan.once:
            if charged:
                raise DeclinedError(
                    f"the question of round {question.server_round} was answered before, in a "
                    "secure sum of its own: a second sum over the same round could give the "
                    "answer away"
                )
        # The parent adds the noise, once for all answers of a period: they share one charge.
        elif charged and plan.noise_follows:
            _check_alike(planned.entry(), list(map(locked.entry, charged)))
            return charged[-1], None
        elif mine:
            number = mine[-1]
            if (kept := cache.find(question, key)) is not None:
                locked.answer(number)  # whoever kept it may have been killed before it sent it
                return number, _read(kept)
            if not locked.is_answered(number):
                return number, None
            # It was answered, and the reply is forgotten: a second one is a second release.
            if release.single:
                raise DeclinedError(
                    f"the {question.phase} of this experiment was answered before, and the answer "
                    "is lost"
                )
        elif charged and release.single:
            raise _other_terms(question)
        check_limits(store, locked)
        planned = planned.numbered(locked)
        planned.check_affordable(locked)
        return locked.charge(planned.entry()), None


def settle(release: Release, planned: PlannedRelease, number: int, made: Answer) -> Answer:
    """Cache the reply of a charge and mark the charge as answered; return the reply to send.

    Raises
    ------
    ChargedFailureError
        If another process has answered meanwhile, and its reply is forgotten.
    """
    request, (cache, key) = planned.request, _cache(release, planned)
    with planned.store.ledger.locked() as locked:
        if planned.plan.noise_follows:  # the answers of a period share one charge; none is kept
            locked.answer(number)
            return made
        # Another process answered on this charge while the user's code ran: its reply counts.
        if locked.is_answered(number):
            if (kept := cache.find(request.question, key)) is not None:
                return _read(kept)
            raise ChargedFailureError(
                "charged, and there is no answer: its round was over before it was ready"
            )
        if not planned.plan.once:
            reply = _reply(request, made)
            kept = cache.keep(request.question, reply, key)
            made = made if kept is reply else _read(kept)  # the first one that was kept is sent
        locked.answer(number)
    return made


def _check_alike(asked: Entry, charged: Sequence[Entry]) -> None:
    """Decline to answer on an earlier charge that was for another kind of release."""
    for entry in charged:
        if replace(asked, time=entry.time) != entry:
            raise DeclinedError("the same period was asked about with other noise")


def _cache(release: Release, planned: PlannedRelease) -> tuple[Replies, str]:
    """Return the reply cache of a release, and the key of its reply."""
    if release.keeps == EXPERIMENT:
        return planned.store.setups, ""  # one for all requests, so that another one is found out
    return planned.store.replies, planned.request.digest


def _reply(request: Request, made: Answer) -> bytes:
    arrays, own = made
    return dumps({"arrays": dict(arrays), "fields": own, "digest": request.digest})


def given_before(store: NodeStore, request: Request, plan: ReleasePlan) -> Answer | None:
    """Return the reply to a release that is not charged and is given once for an experiment.

    Raises
    ------
    DeclinedError
        As `keep_once`.
    """
    kept = store.setups.find(request.question)
    return None if kept is None else _given(request, plan, kept)


def keep_once(store: NodeStore, request: Request, plan: ReleasePlan, made: Answer) -> Answer:
    """Cache such a reply; return the reply to send.

    Raises
    ------
    DeclinedError
        If another process was faster, with a secure sum's answer or one to another question.
    """
    reply = _reply(request, ({}, made[1]) if plan.once else made)
    kept = store.setups.keep(request.question, reply)
    return made if kept is reply else _given(request, plan, kept)


def _given(request: Request, plan: ReleasePlan, kept: bytes) -> Answer:
    """Return the one reply that an experiment has got of its kind.

    Raises
    ------
    DeclinedError
        If it went into a secure sum, or was to another question: it means something else then.
    """
    question = request.question
    if plan.once:
        raise DeclinedError(
            f"the {question.phase} of this experiment was answered before, in a secure sum of its "
            "own"
        )
    if loads(kept)["digest"] != request.digest:
        raise _other_terms(question)
    return _read(kept)


def _other_terms(question: Question) -> DeclinedError:
    return DeclinedError(
        f"the {question.phase} of this experiment was answered before, with other terms"
    )


def _read(kept: bytes) -> Answer:
    state = loads(kept)
    return state["arrays"], state["fields"]
