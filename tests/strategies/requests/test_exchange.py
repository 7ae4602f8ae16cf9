"""One exchange with a SuperLink: what is late, what is asked again, what garbage counts."""

from collections.abc import Iterator
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from stored_replies import NODE, OTHER, SuperLink, connected, many, request, stored

from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies.requests import exchange as exchange_module
from flwr_privacy.strategies.requests.addressing import messages_of
from flwr_privacy.strategies.requests.exchange import exchange, persistent_exchange
from flwr_privacy.strategies.requests.pulling import MALFORMED_CODE
from flwr_privacy.strategies.requests.request_log import RequestLog
from flwr_privacy.strategies.requests.tally import Tally
from flwr_privacy.wire import payload
from flwr_privacy.wire.message import RECORD, REFUSED_PEERS_CODE, Header

HEADER = Header(scheme="s", experiment_id="e", phase="train", server_round=1)


@pytest.fixture(autouse=True)
def as_server() -> Iterator[None]:
    with acting_as_server(1):
        yield


def answer(node: int = NODE, **changed: Any) -> RecordDict:
    header = Header(**{**vars(HEADER), "client_id": f"c{node}", **changed})
    return RecordDict({RECORD: ConfigRecord(header.write())})


def said(content: RecordDict | Error, node: int = NODE) -> Message:
    return Message(content, reply_to=request(node))


def log() -> RequestLog:
    return RequestLog(HEADER, {NODE: [f"c{NODE}"], OTHER: [f"c{OTHER}"]})


def sending(superlink: SuperLink, *names: str) -> Any:
    """Return a grid that gives its messages these ids, one after the other."""
    grid, left = connected(superlink), list(names)

    def push(messages: list[Message]) -> list[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = left.pop(0)
        return [message.metadata.message_id for message in messages]

    grid.__dict__["push_messages"] = push
    return grid


def clock() -> Any:
    return exchange_module.time


def ask(*nodes: int) -> list[Message]:
    return [Message(RecordDict(), node, "train") for node in nodes]


def test_at_the_deadline_the_others_are_looked_at_once_more() -> None:
    superlink = SuperLink(*many(3), other=stored(said(answer(OTHER), OTHER)))
    pull_messages = superlink.PullMessages

    def slow(asked: Any) -> Any:  # the first reply takes the time of all
        clock().sleep(100.0 if asked.message_ids[0] == "asked" else 0.0)
        return pull_messages(asked)

    superlink.PullMessages = slow  # type: ignore[method-assign]
    grid = sending(superlink, "asked", "other")
    got = list(exchange(grid, ask(NODE, OTHER), largest=10**6, deadline=10.0))
    assert [reply.metadata.src_node_id for reply in got] == [NODE, OTHER]


class Slow(SuperLink):
    """One that has the first reply as a whole only after some time."""

    def __init__(self, seconds: float, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.seconds = seconds

    def PullObject(self, asked: Any) -> Any:
        self.missing = {self.root} if clock().monotonic() < self.seconds else set()
        return super().PullObject(asked)


def test_what_came_since_the_last_look_before_the_deadline_is_taken() -> None:
    superlink = Slow(9.999, *stored(said(answer())))
    grid = sending(superlink, "asked")
    assert len(list(exchange(grid, ask(NODE), largest=10**6, deadline=10.0))) == 1


@pytest.mark.parametrize("again", ["nothing", "a refusal"])
def test_a_first_answer_on_its_way_is_waited_for_when_its_node_was_asked_again(again: str) -> None:
    refused = stored(said(Error(1001, "I had my one attempt")))
    more = {} if again == "nothing" else {"copy": refused}
    superlink = Slow(60.0, *stored(said(answer())), **more)
    grid, book = sending(superlink, "asked", "copy"), log()
    left: dict[str, int] = {}
    messages = persistent_exchange(
        grid,
        ask(NODE),
        again=True,
        logs=lambda _: book,
        largest=10**6,
        deadline=50.0,
        left_open=left,
    )
    (reply,) = book.replies(messages)
    assert reply.clients == ["c7"]
    assert left == ({"copy": NODE} if again == "nothing" else {})


def test_who_has_answered_in_time_is_not_late_with_the_other_answer() -> None:
    book, tally = log(), Tally()
    list(book.replies([said(answer())]))
    assert not tally.add_late(book, said(answer()))
    assert tally.add_late(book, said(answer(OTHER), OTHER))
    assert book.refused == {"duplicate": 1}


def test_garbage_counts_when_it_comes_late() -> None:
    book, tally = log(), Tally()
    for late in (
        said(RecordDict()),
        said(answer(server_round=2)),
        said(answer(client_id="c8")),
        said(Error(MALFORMED_CODE, "it cannot be read")),
        said(Error(1001, "I released nothing")),
        said(Error(3, "gone")),
    ):
        assert not tally.add_late(book, late)
    next_round = log()
    tally.add(next_round)
    counts, _ = tally.close()
    assert (counts["refused"], counts["late"]) == (
        {"another round": 1, "malformed": 2, "unknown client": 1},
        0,
    )
    assert book.newest_garbage() == {NODE: 4}
    assert book.newest_garbage() == {}
    assert tally.add_late(book, said(answer()))


def test_nobody_but_its_node_can_tell_the_id_of_a_message() -> None:
    """An id is a hash of the message, of which other nodes know all but its group."""

    def asked() -> list[Message]:
        return messages_of(
            log(), answer(), own={}, groups={}, of_group={}, clients=0, weighted_by="n"
        )

    messages = [*asked(), *asked()]
    groups = {message.metadata.group_id for message in messages}
    assert len(groups) == len(messages)
    assert all(group.startswith("1-") and len(group) == 2 + 32 for group in groups)
    first, *_ = messages
    alike = Message(first.content, first.metadata.dst_node_id, "train", ttl=first.metadata.ttl)
    alike.metadata.__dict__.update(vars(first.metadata))
    assert alike.object_id == first.object_id
    alike.metadata.__dict__["_group_id"] = messages[1].metadata.group_id
    assert alike.object_id != first.object_id


def test_a_reply_that_does_not_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(self: ConfigRecord) -> bytes:
        raise MemoryError

    book, came = log(), said(answer())
    monkeypatch.setattr(payload, "_SIZES", {})  # else the size of such a record is known
    monkeypatch.setattr(ConfigRecord, "deflate", too_much)
    assert list(book.replies([came])) == []
    assert book.refused == {"malformed": 1}


@pytest.mark.parametrize(("text", "most"), [("ab " * 2**22, 2**15), ("", 0)])
def test_the_names_that_a_client_refuses_take_bounded_memory(text: str, most: int) -> None:
    request_log = log()
    replies = iter([said(Error(REFUSED_PEERS_CODE, text))])
    assert list(request_log.replies(replies)) == []
    assert request_log.refused == {"error": 1}
    assert len(request_log.refused_peers[f"c{NODE}"]) <= most
