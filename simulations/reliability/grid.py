"""An inline engine that injects one fault: into a reply, a node, or the server."""

import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.errors import check_choice
from flwr_privacy.privacy import ledger
from flwr_privacy.simulations.engines.inline import Fault, InlineGrid
from flwr_privacy.simulations.engines.inline.faults import KINDS
from flwr_privacy.simulations.engines.inline.flower_internals import assign_message_id
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.message import RECORD

__all__ = ["FAULTS", "FaultyGrid", "Killed", "Strike", "header_of"]

FAULTS = {
    "lost request": "the request is lost, or the node is killed before it has it",
    "crash": "the node is killed while it answers; its files stay",
    "drop": "the reply is lost, or the node is killed as soon as it has sent it",
    "delay": "the reply takes a while, and is in time",
    "late": "the reply is ready only after the deadline",
    "reorder": "the reply comes after all others",
    "duplicate": "the reply comes twice",
    "stranger": "the reply comes from a node that does not exist",
    "stale": "the client's previous reply comes again in place of this one",
    "corrupt": "bytes of the reply are cut off",
    "nan": "a number of the reply is NaN",
    "infinity": "a number of the reply is infinite",
    "reshape": "an array of the reply has another size",
    "server killed": "the server is killed when all have replied, and resumes from its checkpoint",
    "restarted": "the node is restarted after its reply, at the same address",
    "moved": "the node is restarted after its reply, at another address",
    "node lost": "the node is restarted after its reply, without its files",
    "disk full": "the ledger cannot be written when the client answers (ENOSPC)",
    "clock ahead": "the node's clock is a year ahead when the client answers",
    "clock behind": "the node's clock is a year behind when the client answers",
}
"""Each fault happens once."""

_UNAVAILABLE = 5  # Flower's code for a node that is not available
_FULL = Path("/dev/full")  # a file on a disk without space
_SKEWS = {"clock ahead": timedelta(days=365), "clock behind": timedelta(days=-365)}


class Killed(BaseException):
    """Raised in place of a killed server process."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """Where a fault happens: to a request of a phase in a round to one client.

    Parameters
    ----------
    fault : str
        A key of `FAULTS`.
    phase : str
        The phase.
    server_round : int
        The round.
    client : str
        The client; the server is killed when all have answered the request that it is asked.
    nth : int, default 1
        Which of the phase's requests to that client in the round.
    seconds : float, default 0.02
        How long a reply is delayed; one that is late comes half as long again after the deadline.
    """

    fault: str
    phase: str
    server_round: int
    client: str
    nth: int = 1
    seconds: float = 0.02

    def __post_init__(self) -> None:
        check_choice("fault", self.fault, FAULTS)


class FaultyGrid(InlineGrid):
    """The inline engine with one fault.

    A lost message is told at once, as a SuperLink tells of a message whose time is over.

    Parameters
    ----------
    client_app, nodes, state, insecure_seed
        As those of `InlineGrid`.
    strike : Strike, optional
        The fault.

    Attributes
    ----------
    struck : bool
        Whether the fault has happened.
    empty : bool
        Whether there was nothing to damage, or no file to write.
    asked : list
        Phase and round of each request, in order.
    """

    def __init__(
        self,
        client_app: ClientApp,
        nodes: Sequence[Mapping[str, Any]],
        *,
        state: Path,
        insecure_seed: int,
        strike: Strike | None = None,
        forgotten: Callable[[str], None] = lambda client: None,
    ) -> None:
        # A previous reply is kept only where one is to come again.
        again = (Fault(kind="stale"),) if strike is None or strike.fault == "stale" else ()
        super().__init__(client_app, nodes, faults=again, state=state, insecure_seed=insecure_seed)
        self.asked: list[tuple[str, int]] = []
        self._state, self._forgotten = state, forgotten
        self.aim(strike)
        self._unreachable: dict[str, Message] = {}
        self._held: dict[str, tuple[float, list[Message]]] = {}

    def aim(self, strike: Strike | None) -> None:
        """Inject this fault from now on, in place of one that has not happened yet."""
        kind = strike.fault if strike is not None else ""
        self.struck, self.empty = False, False
        self._strike = strike
        self._injected = (
            Fault(kind=kind, seconds=strike.seconds) if strike and kind in KINDS else None
        )
        self._meant = 0  # requests to the client so far
        self._striking = False  # whether the message that is pushed is hit
        self._hit = ""  # the message that was hit
        self._deadly: tuple[str, int, int] | None = None  # the request after which the server dies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take requests; those that are lost are told of when their replies are pulled."""
        ids: list[str] = []
        for message in messages:
            self.asked.append(header_of(message)[:2])
            strikes = self._strikes(message)
            if strikes and self._kind == "server killed":
                self._deadly, strikes = header_of(message), False
            self.struck |= strikes
            gone = message.metadata.dst_node_id not in self._contexts
            if gone or (strikes and self._kind == "lost request"):
                assign_message_id(message, uuid.uuid4().hex)
                self._unreachable[message.metadata.message_id] = message
                ids.append(message.metadata.message_id)
            else:
                self._striking = strikes
                ids.extend(super().push_messages([message]))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return a reply that is there, if there is one."""
        wanted = list(message_ids)
        for message_id in wanted:
            if (request := self._unreachable.pop(message_id, None)) is not None:
                return [_unavailable(request)]
            if message_id in self._held and self._held[message_id][0] <= time.monotonic():
                return self._held.pop(message_id)[1]
        replies = list(super().pull_messages(wanted))
        if self._deadly is not None and self._deadly in map(header_of, replies):
            self._kill()
        return replies

    @property
    def _kind(self) -> str:
        return "" if self._strike is None else self._strike.fault

    def _strikes(self, request: Message) -> bool:
        """Tell whether the fault happens to a request to one client."""
        strike = self._strike
        context = self._contexts.get(request.metadata.dst_node_id)
        if (
            strike is None
            or context is None
            or header_of(request)[:2] != (strike.phase, strike.server_round)
            or client_id_from(context.node_config) != strike.client
        ):
            return False
        self._meant += 1
        return self._meant == strike.nth

    def _fault(self, request: Message) -> Fault | None:
        if self._striking:
            self._hit, self._striking = request.metadata.message_id, False
        return self._injected if request.metadata.message_id == self._hit else None

    def _answer(self, message_id: str) -> list[Message]:
        if message_id != self._hit or self._strike is None:
            return super()._answer(message_id)
        request = self._requests[message_id]
        node = request.metadata.dst_node_id
        with ExitStack() as around:
            if self._kind == "disk full":
                around.enter_context(_full(self._state / f"{self._strike.client}.ledger"))
            if self._kind in _SKEWS:
                around.enter_context(_skewed(_SKEWS[self._kind]))
            replies = super()._answer(message_id)
        if self._kind in ("corrupt", "nan", "infinity", "reshape"):
            self.empty = not (_has_arrays(replies[0]) or _damaged(self._kind, replies[0]))
        elif self._kind == "late":
            self._held[message_id] = time.monotonic() + 1.5 * self._strike.seconds, replies
            return []
        elif self._kind == "restarted":
            self._contexts[node].state = RecordDict()
        elif self._kind in ("moved", "node lost"):
            self._move(node)
        return replies or [_unavailable(request)]

    def _move(self, node: int) -> None:
        """Have a node restarted at another address; what it kept in files may be lost."""
        old = self._contexts.pop(node)
        self._previous.pop(node, None)
        if self._kind == "node lost" and self._strike is not None:
            for path in sorted(self._state.rglob(f"{self._strike.client}.*"), reverse=True):
                _remove(path)
            self._forgotten(self._strike.client)
        self._contexts[node + 1] = Context(
            run_id=old.run_id,
            node_id=node + 1,
            node_config=old.node_config,
            state=RecordDict(),
            run_config=old.run_config,
        )

    def _kill(self) -> None:
        """Kill the server when the replies to a request begin to come; everybody answers."""
        for message_id in [i for i, q in self._requests.items() if header_of(q) == self._deadly]:
            super()._answer(message_id)
        self.struck, self._deadly = True, None
        raise Killed


def header_of(message: Message) -> tuple[str, int, int]:
    """Return phase, round and number of a request or its reply; ("", -1, -1) if it has none."""
    record = message.content[RECORD] if message.has_content() else None
    if not isinstance(record, ConfigRecord):
        return "", -1, -1
    return str(record["phase"]), int(str(record["round"])), int(str(record["request"]))


def _unavailable(request: Message) -> Message:
    return Message(Error(_UNAVAILABLE, "the message is lost"), reply_to=request)


def _has_arrays(reply: Message) -> bool:
    if reply.has_error():
        return False
    return any(record for record in reply.content.values() if isinstance(record, ArrayRecord))


def _damaged(kind: str, reply: Message) -> bool:
    """Damage a value of a reply without arrays; tell whether it has one of that kind."""
    if reply.has_error():
        return False
    content: dict[str, Any] = {}
    for name, record in reply.content.items():
        of_its_kind: Any = type(record)
        content[name] = of_its_kind(dict(record))
    values = [
        (_size(value), name, key)
        for name, record in content.items()
        if isinstance(record, ConfigRecord | MetricRecord)
        for key, value in record.items()
        if isinstance(value, float if kind in ("nan", "infinity") else bytes | str)
    ]
    if not values or kind == "reshape":
        return False
    _, name, key = max(values)
    value = content[name][key]
    cut = {"nan": float("nan"), "infinity": float("inf")}
    content[name][key] = cut[kind] if kind in cut else value[: len(value) // 2]
    reply.content = RecordDict(content)
    return True


def _size(value: Any) -> tuple[bool, int]:
    # Sealed and packed bytes rather than names.
    return isinstance(value, bytes), len(value) if isinstance(value, bytes | str) else 0


def _remove(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            _remove(inner)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _full(path: Path) -> Iterator[None]:
    """Have what is written beside a file go to a disk without space."""
    beside = path.with_name(path.name + ".new")
    beside.symlink_to(_FULL)
    try:
        yield
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def _skewed(by: timedelta) -> Iterator[None]:
    """Set the clock from which Flower and the ledger take the time."""

    class Skewed(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Skewed":
            return cls.fromtimestamp((datetime.now(tz) + by).timestamp(), tz)

    places: list[tuple[Any, str, Any]] = [(ledger, "datetime", Skewed)]
    flowers = sys.modules[Message.__module__]
    if (now := getattr(flowers, "now", None)) is not None:
        places.append((flowers, "now", lambda: now() + by))
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, skewed in places:
        setattr(module, name, skewed)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
