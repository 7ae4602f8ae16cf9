"""What a round's exchanges came to: bytes, what became of the answers, virtual seconds."""

import logging
from collections import Counter
from typing import Any

from flwr.app import Message

from flwr_privacy.wire import EVALUATE, HELLO, TRAIN, payload_bytes

from .round import Round

__all__ = ["Tally"]

logger = logging.getLogger("flwr.privacy")

_SIZES = ("bytes_down", "bytes_up", "wire_bytes_down", "wire_bytes_up")


class Tally:
    """The counts of a round."""

    def __init__(self) -> None:
        self._books: list[Round] = []  # not counted yet: their answers may still come
        self._late_answers = self._late_bytes = 0
        self._sizes: Counter[str] = Counter()
        self._fates: dict[str, Any] = {}
        self._seconds = 0.0

    def add(self, *books: Round) -> None:
        """Have exchanges counted."""
        self._books.extend(books)

    def add_late(self, book: Round, reply: Message) -> None:
        """Count an answer that came after its exchange."""
        if not reply.has_error():
            self._late_bytes += payload_bytes(reply.content)
            self._late_answers += book.header.phase == TRAIN

    def close(self) -> tuple[dict[str, Any], float]:
        """Return the counts and the virtual seconds since the last call.

        Bytes are those of all exchanges, fates those of the last training.
        """
        self._count()
        if "late" in self._fates:
            self._fates["late"] += self._late_answers
            self._late_answers = 0
        for key in ("bytes_up", "wire_bytes_up"):
            self._sizes[key] += self._late_bytes
        self._late_bytes = 0
        sizes = {key: self._sizes[key] for key in (*_SIZES, "exchanges")}
        counts, seconds = {**self._fates, **sizes}, self._seconds
        self._sizes, self._fates, self._seconds = Counter(), {}, 0.0
        return counts, seconds

    def state(self) -> dict[str, Any]:
        """Return the counts of the round so far, for a checkpoint."""
        self._count()
        return {
            "tallied_seconds": self._seconds,
            "sizes": dict(self._sizes),
            "fates": dict(self._fates),
            "late": [self._late_answers, self._late_bytes],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned, before anything is asked."""
        self._seconds = state["tallied_seconds"]
        self._sizes, self._fates = Counter(state["sizes"]), dict(state["fates"])
        self._late_answers, self._late_bytes = state["late"]

    def _count(self) -> None:
        """Add the exchanges to the counts."""
        for book in self._books:
            _say_who_is_missing(book)
            if book.header.phase == TRAIN:
                self._fates |= book.counts()
            elif book.header.phase == EVALUATE:
                self._fates["evaluated"] = book.folded
            self._sizes.update({key: getattr(book, key) for key in _SIZES})
            self._sizes["exchanges"] += book.header.phase != HELLO
            self._seconds += book.virtual_seconds
        # The nodes are greeted all at once.
        self._sizes["exchanges"] += any(book.header.phase == HELLO for book in self._books)
        self._books = []


def _say_who_is_missing(book: Round) -> None:
    """Log who did not answer a question for whose answer was waited."""
    if book.header.phase == HELLO or (book.quorum is not None and book.folded >= book.quorum):
        return
    asked = {client for clients in book.asked.values() for client in clients}
    if missing := sorted(asked.difference(book.answered)):
        logger.warning(
            "round %d: no answer in phase '%s' that could be used: clients %s",
            *(book.header.server_round, book.header.phase, missing),
        )
