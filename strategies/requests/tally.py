"""Counts a round's exchanges: bytes, outcomes of the replies, virtual seconds."""

import logging
from collections import Counter
from typing import Any

from flwr.app import Message

from flwr_privacy.wire.message import EVALUATE, HELLO, TRAIN

from .request_log import RequestLog

__all__ = ["Tally"]

logger = logging.getLogger("flwr.privacy")

_SIZES = ("bytes_down", "bytes_up", "wire_bytes_down", "wire_bytes_up")


class Tally:
    """The counts of a round."""

    def __init__(self) -> None:
        self._logs: list[RequestLog] = []  # not counted yet: their answers may still come
        self._late_answers = self._late_bytes = 0
        self._sizes: Counter[str] = Counter()
        self._fates: dict[str, Any] = {}
        self._seconds = 0.0

    def add(self, *logs: RequestLog) -> None:
        """Register exchanges to be counted."""
        self._logs.extend(logs)

    def add_late(self, request_log: RequestLog, reply: Message) -> bool:
        """Count what came after its exchange; return whether it is an answer."""
        size = request_log.read_late(reply)
        self._late_bytes += size or 0
        self._late_answers += size is not None and request_log.header.phase == TRAIN
        return size is not None

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
        """Restore what `state` returned; call it before the first request."""
        self._seconds = state["tallied_seconds"]
        self._sizes, self._fates = Counter(state["sizes"]), dict(state["fates"])
        self._late_answers, self._late_bytes = state["late"]

    def _count(self) -> None:
        """Add the exchanges to the counts."""
        for request_log in self._logs:
            _say_who_is_missing(request_log)
            if request_log.header.phase == TRAIN:
                self._fates |= request_log.counts()
            elif request_log.header.phase == EVALUATE:
                self._fates["evaluated"] = request_log.accumulated
            self._sizes.update({key: getattr(request_log, key) for key in _SIZES})
            self._sizes["exchanges"] += request_log.header.phase != HELLO
            self._seconds += request_log.virtual_seconds
        # The nodes are greeted all at once.
        self._sizes["exchanges"] += any(
            request_log.header.phase == HELLO for request_log in self._logs
        )
        self._logs = []


def _say_who_is_missing(request_log: RequestLog) -> None:
    """Log the clients that did not answer although the server waited for them."""
    if request_log.header.phase == HELLO or (
        request_log.quorum is not None and request_log.accumulated >= request_log.quorum
    ):
        return
    asked = {client for clients in request_log.asked.values() for client in clients}
    if missing := sorted(asked.difference(request_log.answered)):
        logger.warning(
            "round %d: no answer in phase '%s' that could be used: clients %s",
            *(request_log.header.server_round, request_log.header.phase, missing),
        )
