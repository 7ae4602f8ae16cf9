"""Carries out every release of a node: all answers about its data take these steps, in this order.

1. The node's policy, and whether it has stopped answering this experiment.
2. The mechanism's plan, and before the first charge of an experiment a rehearsal without data.
   Everything that can be refused is refused by now, and no data were read.
3. The charge: durable in the ledger, for this question alone, before the user's code runs.
4. The user's code. The ledger is not locked meanwhile.
5. What came of it, bounded; and the noise.
6. The reply cache: the first reply that is kept is the one that is sent, also when asked again.
7. The ledger: this charge is answered.

A crash at any step leaves a charge without a reply, never a reply without a charge. The same
question (its digest covers the arrays too) is answered from the cache, or on its charge if that was
not answered yet; every other question is another charge.

Guarantee. Adversary: a server that chooses questions, models and refusals to learn from. The app
that calls this code is not it: a node that runs whatever app the server sends has no guarantee
against the server, only against its messages (`flwr-privacy executor`). Covered:
whether and with which text a question is refused before the charge depends on the question, on the
node's configuration and on its ledger, not on data. What happens after the charge is covered by it:
where all data of a client are protected, training that fails counts as the zero update, and that it
failed is at most a noised coordinate of the answer (`flwr_privacy.privacy.failures`). Not covered:
how long an answer takes; whether the node is there (a process that is ended from within, too); and
where single records are protected, that training fails as a whole or ends before it reaches its
trainer: that is charged, told once with a fixed text, and ends the experiment for the node until
its operator acts.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flwr_privacy.errors import ProtocolError
from flwr_privacy.privacy.ledger import Question
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import EVALUATE, INSECURE, METRICS, TRAIN, Fields

from .charging import charge_for, check_chargeable, given_before, keep_once, settle
from .mechanism import (
    EXPERIMENT,
    Answer,
    Facts,
    Mechanism,
    NoFactsError,
    ProtocolStep,
    Release,
    ReleasePlan,
    Unprotected,
)
from .node_limits import check_limits
from .node_store import NodeRules, NodeStore
from .operator_checks import (
    check_members,
    check_policy,
    check_scheme,
    check_shares,
    check_simulated,
    check_summed,
    check_unaccounted,
    check_unprotected,
)
from .participation_limits import take_part
from .planned_release import PlannedRelease
from .request import DELIVERY, Request, question_of
from .update_log import log_clipped
from .users_code import check_frozen, check_going_on, refused_alike, run, stopped

__all__ = ["answer", "answer_step", "answer_unprotected", "check_step", "mark_insecure"]

logger = logging.getLogger("flwr.privacy")


def answer(
    store: NodeStore,
    request: Request,
    release: Release,
    *,
    seal: Callable[[Answer], Answer] = lambda made: made,
    sealed: bool = False,
) -> Answer:
    """Carry out a release.

    Parameters
    ----------
    store : NodeStore
        What the node keeps for the client.
    request : Request
        The question.
    release : Release
        What the client half makes of it.
    seal : callable, optional
        Makes of what the release came to what leaves the node. By default the same.
    sealed : bool, default False
        Whether what it comes to leaves the node sealed for a party that the node trusts: see
        `flwr_privacy.pipeline.sealed`.

    Raises
    ------
    DeclinedError
        If the node's policy, its limits or the budget do not allow it. Nothing is charged.
    InvalidParameterError, ProtocolError
        If the question is unfit. Nothing is charged.
    LedgerError
        If the node's files cannot be used.
    ChargedFailureError
        If the release was charged and there is no answer.
    """
    check_going_on(store, request.question.experiment_id)
    check_frozen(store, request.question.experiment_id, request.fields)
    # The charge is for the release, which several requests may lead to.
    if release.name is not None:
        request = replace(request, question=release.name)
    # A resumed round may send the same request in other bytes (sealed anew): it stays the same.
    if release.asked is not None:
        delivery = {key: request.fields[key] for key in DELIVERY & set(request.fields)}
        request = replace(request, fields={**release.asked, **delivery})
    mechanism, facts = release.mechanism, Facts()
    start = dict(request.arrays)  # each decoded once
    # Once without facts: what can be refused now is refused before the user's code runs.
    plan = mechanism.plan(start, facts)
    _admit(store, request, plan, sealed)
    if plan.charge is None:
        return seal(_unaccounted(store, request, release, plan, start))
    planned = PlannedRelease(store, request, plan)
    if release.facts is not None:
        check_chargeable(release, planned)  # before the user's code is called
        try:
            facts = _facts(store, request, release.facts)
        except NoFactsError as error:
            # A server that chooses settings could read from it what the user's code looks at.
            if store.simulated:
                raise
            try:
                charge_for(release, planned)
            finally:  # also where another question has taken what was left meanwhile
                failure = stopped(store, request.question.experiment_id, error)
            raise failure from None
        plan = mechanism.plan(start, facts)
        _admit(store, request, plan, sealed)
    _rehearse(release, planned)
    number, kept = charge_for(release, planned)
    if kept is not None:
        return seal(kept)
    if facts.records is not None:
        _note_facts(store, request, facts)
    measured = run(
        store,
        request.question.experiment_id,
        lambda: mechanism.measure(start, release.work(_sampler(store, request), facts)),
        lambda: mechanism.failed(start),
    )
    log_clipped(store, request, measured)
    made = _noised(store, request, mechanism, measured, plan)
    if plan.noise_follows:  # nothing is kept: it is sealed before its charge counts as answered
        return settle(release, planned, number, seal(made))
    return seal(settle(release, planned, number, made))


def check_step(store: NodeStore, request: Request, name: Question, plan: ReleasePlan) -> None:
    """Decline a step towards a release that the node would decline; nothing is charged.

    Parameters
    ----------
    store, request
        As of `answer`.
    name : Question
        The name of the release.
    plan : ReleasePlan
        What it will be.

    Raises
    ------
    DeclinedError
        As `answer`.
    """
    check_going_on(store, name.experiment_id)
    request = replace(request, question=name)
    _admit(store, request, plan, sealed=True)
    planned = PlannedRelease(store, request, plan)
    with store.ledger.locked() as locked:
        if not locked.charges_of(name):
            check_limits(store, locked)
            planned.check_affordable(locked)


def answer_unprotected(
    rules: NodeRules,
    release: Unprotected,
    scheme: str,
    phase: str,
    fields: Fields,
    guarantees_dp: bool,
) -> Answer:
    """Carry out a release that guarantees nothing, if the node's operator allows it.

    Raises
    ------
    DeclinedError
        If not.
    """
    if not fields.get("summed"):
        check_summed(rules)
    check_unaccounted(rules, scheme=scheme, guarantees_dp=guarantees_dp, sigma=release.sigma)
    return release.work(lambda purpose: rules.random(question_of(phase, fields), purpose))


def answer_step(
    store: NodeStore,
    step: ProtocolStep,
    scheme: str,
    phase: str,
    fields: Fields,
    guarantees_dp: bool,
) -> Answer:
    """Carry out one step of a protocol, if the node's operator allows it.

    Raises
    ------
    DeclinedError
        If not.
    LedgerError
        If the node's files cannot be used.
    """
    from .step_store import opened  # late: most nodes remember nothing between messages

    question = question_of(phase, fields)
    check_going_on(store, question.experiment_id)
    if step.of_data:
        check_unaccounted(store, scheme=scheme, guarantees_dp=guarantees_dp)
    else:
        check_scheme(store, scheme)
    if step.simulated_only:
        check_simulated(store, phase)
    with opened(store, scheme, question) as lent:
        clients = fields.get("summed", 0) if step.summed is None else step.summed(lent.state)
        if clients is not None:
            check_summed(store, clients)
        arrays, own = step.work(lent)
    if clients is not None or not step.of_data:
        mark_insecure(store, own)
    return arrays, own


def _unaccounted(
    store: NodeStore, request: Request, release: Release, plan: ReleasePlan, start: Arrays
) -> Answer:
    """Answer with a release whose cost cannot be stated; nothing is charged, not even a failure."""
    if release.keeps == EXPERIMENT:
        given = given_before(store, request, plan)
        if given is not None:
            return given
    if plan.limit is not None:
        take_part(store, request, plan.limit)
    mechanism = release.mechanism
    try:
        outcome = release.work(_sampler(store, request), Facts())
        made = _noised(store, request, mechanism, mechanism.measure(start, outcome), plan)
    except Exception as error:
        if store.simulated:
            raise
        raise refused_alike(store.client_id, error) from None
    return keep_once(store, request, plan, made) if release.keeps == EXPERIMENT else made


def _noised(
    store: NodeStore, request: Request, mechanism: Mechanism, measured: Any, plan: ReleasePlan
) -> Answer:
    arrays, own = mechanism.noise(measured, plan, store.random(request.question, "noise"))
    mark_insecure(store, own)
    return arrays, own


def mark_insecure(store: NodeStore, own: Fields) -> None:
    """Mark a reply whose noise comes from a seed, and so is not secret."""
    if store.insecure_seed is not None:
        own[METRICS][INSECURE] = 1.0


def _admit(store: NodeStore, request: Request, plan: ReleasePlan, sealed: bool) -> None:
    """Decline a release that the node's operator does not allow."""
    certain = 1.0
    fields = request.fields
    if plan.members:
        check_members(store, plan.members, plan.parties, fields)
    elif plan.parties:
        certain = check_shares(store, plan.parties, fields, noised=plan.needs_pins)
    elif not fields["summed"]:
        check_summed(store)
    if plan.noise_follows and not sealed:
        check_unprotected(store, scheme=request.scheme, guarantees_dp=request.guarantees_dp)
    # Whatever the codes are: which noised codes a sum takes would say something of them.
    if fields["summed"] and fields["code-limit"] < plan.largest_code:
        raise ProtocolError(
            f"the secure sum takes codes up to {fields['code-limit']}, the noise needs "
            f"{plan.largest_code}"
        )
    if plan.charge is None or not plan.proven:
        check_unaccounted(
            store,
            scheme=request.scheme,
            guarantees_dp=request.guarantees_dp,
            sigma=plan.sigma or 0.0,
            noised=plan.charge is not None,
        )
    if plan.charge is not None:
        check_policy(
            store,
            scheme=request.scheme,
            unit=plan.unit,
            noise_multiplier=plan.noise_multiplier * certain,
            neighbours=plan.charge.neighbours,
            sigma=None if plan.sigma is None else plan.sigma * certain,
        )


def _rehearse(release: Release, planned: PlannedRelease) -> None:
    """Try the user's code on generated records before the first charge of an experiment.

    Raises
    ------
    ProtocolError
        If it fails. Nothing is charged. The node's log has why; simulated clients say it too.
    """
    if release.rehearsal is None:
        return
    store, experiment = planned.store, planned.request.question.experiment_id
    if store.ledger.head(experiment).count:
        return
    check_chargeable(release, planned)  # before the user's code is called
    try:
        release.rehearsal()
    # Whatever the user's code raises; what a node's own code says stays there.
    except Exception as error:
        logger.error("client %s: the rehearsal fails", store.client_id, exc_info=error)
        text = "the training fails on generated records; nothing was charged"
        if store.simulated:
            raise ProtocolError(f"{text}: {error}") from error
        raise ProtocolError(f"{text}; the log of the node says how") from None


def _facts(store: NodeStore, request: Request, facts: Callable[[], Facts]) -> Facts:
    """Return the facts noted for this experiment, or else what the node says now."""
    noted = store.noted(request.question.experiment_id, _facts_note(request))
    if noted is None:
        return facts()
    records, *columns = map(int, noted.split())
    return Facts(records=records, columns=tuple(columns))


def _note_facts(store: NodeStore, request: Request, facts: Facts) -> None:
    experiment, name = request.question.experiment_id, _facts_note(request)
    if store.noted(experiment, name) is None:
        store.note(experiment, name, " ".join(map(str, [facts.records, *facts.columns])))


def _facts_note(request: Request) -> str:
    # A training and an evaluation have different records.
    return f"{EVALUATE if request.question.phase == EVALUATE else TRAIN}.facts"


def _sampler(store: NodeStore, request: Request) -> SecureRandom:
    return store.random(request.question, "sample")
