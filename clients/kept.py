"""Answers that are given once: charged, kept, and the same bytes to the same question again."""

from collections.abc import Callable, Sequence

from flwr_privacy.arrays import Arrays
from flwr_privacy.common_replies import Replies
from flwr_privacy.documents import dumps, loads
from flwr_privacy.errors import DeclinedError
from flwr_privacy.ledger import Entry, Question
from flwr_privacy.randomness import SecureRandom
from flwr_privacy.release import PlannedRelease
from flwr_privacy.replies import KeptReplies
from flwr_privacy.wire import METRICS, Fields

from .custody import Custody

__all__ = ["Answer", "keep", "kept_answer", "mark_insecure", "once"]

Answer = tuple[Arrays, Fields]
"""The arrays and the scheme's own fields of a reply."""


def once(
    release: PlannedRelease,
    asked: Fields,
    prepare: Callable[[], Callable[[SecureRandom], Answer]],
    *,
    setups: KeptReplies | None = None,
    single: bool = False,
) -> Answer:
    """Answer a question: with the kept answer, or with a new one that is charged and kept.

    Parameters
    ----------
    release : PlannedRelease
        What is asked for.
    asked : dict
        The terms as they came.
    prepare : callable
        Does everything but the noise; what it returns adds the noise.
    setups : KeptReplies, optional
        Where the answer is kept if there may be only one for the whole experiment: a lost one is
        not given again. By default it is kept with those of the rounds, of which the last one
        stays.
    single : bool, default False
        Whether a lost answer is not given again, as in `setups`: another one would be a release
        that somebody else's ledger has no charge for.

    Raises
    ------
    DeclinedError
        If the budget does not allow it, or the question was answered before with other terms.
    LedgerError
        If the node's files cannot be used.
    """
    custody, question = release.custody, release.question
    replies: Replies = custody.replies if setups is None else setups
    single = single or setups is not None
    entries = custody.ledger.entries()
    if (found := _charged_answer(replies, question, asked, entries, single=single)) is not None:
        return found
    release.check_affordable(entries)
    noised = prepare()
    with custody.ledger.locked() as book:
        # Another message with the same question may have been answered meanwhile.
        found = _charged_answer(replies, question, asked, book.entries, single=single)
        if found is not None:
            return found
        release.check_affordable(book.entries)
        book.charge(release.entry())
        out, own = noised(custody.random(question, "noise"))
        mark_insecure(custody, own)
        keep(replies, question, asked, (out, own))
    return out, own


def keep(replies: Replies, question: Question, asked: Fields, answer: Answer) -> None:
    """Keep an answer, with the terms that it is for."""
    out, own = answer
    state = dumps({"arrays": dict(out), "fields": own, "asked": asked})
    replies.keep(question, state)


def kept_answer(replies: Replies, question: Question, asked: Fields) -> Answer | None:
    """Return the kept answer to a question, if there is one.

    Raises
    ------
    DeclinedError
        If the same question was asked with other terms: the answer means something else then.
    """
    kept = replies.find(question)
    if kept is None:
        return None
    state = loads(kept)
    if state["asked"] != asked:
        raise DeclinedError(
            f"the question of round {question.server_round} was answered before, with other terms"
        )
    return state["arrays"], state["fields"]


def mark_insecure(custody: Custody, own: Fields) -> None:
    """Say in a reply that its noise is no secret, if it is none."""
    if custody.insecure_seed is not None:
        own[METRICS]["insecure-noise"] = 1.0


def _charged_answer(
    replies: Replies,
    question: Question,
    asked: Fields,
    entries: Sequence[Entry],
    *,
    single: bool,
) -> Answer | None:
    """Return the kept answer to a question; one that was never charged must not leave."""
    if all(entry.question != question for entry in entries):
        return None
    found = kept_answer(replies, question, asked)
    if found is None and single:
        raise DeclinedError(
            f"the {question.phase} of this experiment was answered before, and the answer is lost"
        )
    return found
