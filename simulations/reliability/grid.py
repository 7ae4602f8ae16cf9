"""An inline engine that injects chosen faults: into a reply, a node, or the server."""

import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.errors import check_choice
from flwr_privacy.privacy.ledger import entries, ledger
from flwr_privacy.simulations.engines.inline import Fault, InlineGrid
from flwr_privacy.simulations.engines.inline.faults import KINDS
from flwr_privacy.simulations.engines.inline.flower_internals import assign_message_id
from flwr_privacy.wire.files import append
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.message import RECORD

from .witness import AnswerKey

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
    again : bool, default False
        Whether it also happens when the server sends the same request again.
    seconds : float, default 0.02
        How long a reply is delayed; one that is late comes half as long again after the deadline.
    """

    fault: str
    phase: str
    server_round: int
    client: str
    nth: int = 1
    again: bool = False
    seconds: float = 0.02

    def __post_init__(self) -> None:
        check_choice("fault", self.fault, FAULTS)


@dataclass(kw_only=True)
class _Aim:
    """A fault that is to happen, and what became of it."""

    strike: Strike
    seen: int = 0  # requests of that phase and round to the client so far
    number: int = -1  # of the request that was hit
    hit: str = ""  # the message that was hit
    deadly: tuple[str, int, int] | None = None  # the request after which the server dies
    struck: bool = False
    empty: bool = False
    injected: Fault | None = field(init=False)

    def __post_init__(self) -> None:
        kind = self.strike.fault
        self.injected = Fault(kind=kind, seconds=self.strike.seconds) if kind in KINDS else None


class FaultyGrid(InlineGrid):
    """The inline engine with chosen faults.

    A lost message is told at once, as a SuperLink tells of a message whose time is over.

    Parameters
    ----------
    client_app, nodes, state, insecure_seed
        As those of `InlineGrid`.
    strikes : sequence of Strike, optional
        The faults; no two hit one request.

    Attributes
    ----------
    asked : list
        Client, phase, round and number of each request, in order.
    """

    def __init__(
        self,
        client_app: ClientApp,
        nodes: Sequence[Mapping[str, Any]],
        *,
        state: Path,
        insecure_seed: int,
        strikes: Sequence[Strike] = (),
        forgotten: Callable[[str], None] = lambda client: None,
    ) -> None:
        # A previous reply is kept only where one is to come again.
        stale = not strikes or any(strike.fault == "stale" for strike in strikes)
        again = (Fault(kind="stale"),) if stale else ()
        super().__init__(client_app, nodes, faults=again, state=state, insecure_seed=insecure_seed)
        self.asked: list[AnswerKey] = []
        self._state, self._forgotten = state, forgotten
        self.aim(*strikes)
        self._unreachable: dict[str, Message] = {}
        self._held: dict[str, tuple[float, list[Message]]] = {}

    def aim(self, *strikes: Strike) -> None:
        """Inject these faults from now on, in place of those that have not happened yet."""
        self._aims = [_Aim(strike=strike) for strike in strikes]
        self._striking: _Aim | None = None  # what hits the message that is pushed

    @property
    def struck(self) -> list[Strike]:
        """The faults that have happened, with those that had nothing to damage."""
        return [aim.strike for aim in self._aims if aim.struck]

    @property
    def empty(self) -> list[Strike]:
        """The faults that had nothing to damage."""
        return [aim.strike for aim in self._aims if aim.empty]

    @property
    def to_come(self) -> list[Strike]:
        """The faults that have not happened."""
        return [aim.strike for aim in self._aims if not aim.struck]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take requests; those that are lost are told of when their replies are pulled."""
        ids: list[str] = []
        for message in messages:
            aim = self._aim_at(message)
            if aim is not None and aim.strike.fault == "server killed":
                aim.deadly, aim = header_of(message), None
            if aim is not None:
                aim.struck = True
            gone = message.metadata.dst_node_id not in self._contexts
            if gone or (aim is not None and aim.strike.fault == "lost request"):
                assign_message_id(message, uuid.uuid4().hex)
                self._unreachable[message.metadata.message_id] = message
                ids.append(message.metadata.message_id)
            else:
                self._striking = aim
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
        headers = set(map(header_of, replies))
        for aim in self._aims:
            if aim.deadly in headers:
                self._kill(aim)
        return replies

    def _aim_at(self, request: Message) -> _Aim | None:
        """Note a request and return the fault that happens to it, if there is one."""
        context = self._contexts.get(request.metadata.dst_node_id)
        if context is None:
            return None
        phase, server_round, number = header_of(request)
        client = client_id_from(context.node_config)
        self.asked.append((client, phase, server_round, number))
        found = None
        for aim in self._aims:
            strike = aim.strike
            if (strike.client, strike.phase, strike.server_round) == (client, phase, server_round):
                aim.seen += 1
                if aim.seen == strike.nth:
                    aim.number = number
                if aim.seen == strike.nth or (strike.again and number == aim.number):
                    found = aim
        return found

    def _hitting(self, message_id: str) -> _Aim | None:
        return next((aim for aim in self._aims if aim.hit == message_id), None)

    def _fault(self, request: Message) -> Fault | None:
        if self._striking is not None:
            self._striking.hit, self._striking = request.metadata.message_id, None
        aim = self._hitting(request.metadata.message_id)
        return aim.injected if aim is not None else None

    def _answer(self, message_id: str) -> list[Message]:
        aim = self._hitting(message_id)
        if aim is None:
            return super()._answer(message_id)
        kind, client = aim.strike.fault, aim.strike.client
        request = self._requests[message_id]
        node = request.metadata.dst_node_id
        with ExitStack() as around:
            if kind == "disk full":
                around.enter_context(_full(self._state / f"{client}.ledger"))
            if kind in _SKEWS:
                around.enter_context(_skewed(_SKEWS[kind]))
            replies = super()._answer(message_id)
        if kind in ("corrupt", "nan", "infinity", "reshape"):
            aim.empty = not (_has_arrays(replies[0]) or _damaged(kind, replies[0]))
        elif kind == "late":
            self._held[message_id] = time.monotonic() + 1.5 * aim.strike.seconds, replies
            return []
        elif kind == "restarted":
            self._contexts[node].state = RecordDict()
        elif kind in ("moved", "node lost"):
            self._move(node, lost=client if kind == "node lost" else None)
        return replies or [_unavailable(request)]

    def _move(self, node: int, *, lost: str | None) -> None:
        """Restart a node at another address; the files of a client may be lost."""
        old = self._contexts.pop(node)
        self._previous.pop(node, None)
        if lost is not None:
            for path in sorted(self._state.rglob(f"{lost}.*"), reverse=True):
                _remove(path)
            self._forgotten(lost)
        self._contexts[node + 1] = Context(
            run_id=old.run_id,
            node_id=node + 1,
            node_config=old.node_config,
            state=RecordDict(),
            run_config=old.run_config,
        )

    def _kill(self, aim: _Aim) -> None:
        """Kill the server when the replies to a request begin to come; everybody answers."""
        for message_id in [i for i, q in self._requests.items() if header_of(q) == aim.deadly]:
            self._answer(message_id)
        aim.struck = True
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
    """Have what is written to a ledger go to a disk without space."""

    def write(target: Path, descriptor: int, content: bytes, **own: Any) -> None:
        if target != path.resolve():
            return append(target, descriptor, content, **own)
        with _FULL.open("wb", buffering=0) as full:
            full.write(content)

    with patch.object(ledger, "append", write):
        yield


@contextmanager
def _skewed(by: timedelta) -> Iterator[None]:
    """Set the clock from which Flower and the ledger take the time."""

    class Skewed(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Skewed":
            return cls.fromtimestamp((datetime.now(tz) + by).timestamp(), tz)

    places: list[tuple[Any, str, Any]] = [(entries, "datetime", Skewed)]
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
