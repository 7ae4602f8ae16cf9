"""What a SuperLink has as a reply: a node writes every byte of it."""

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from apps import record
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid

from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies.requests import pulling
from flwr_privacy.strategies.requests.pulling import IMPOSTOR_CODE, MALFORMED_CODE, pull
from flwr_privacy.strategies.requests.superlink import MalformedReplyError, _head, checked

NODE, OTHER = 7, 8
LARGEST = 100_000
Objects = dict[str, bytes]


@pytest.fixture(autouse=True)
def as_server() -> Iterator[None]:
    with acting_as_server(1):
        yield


def request(node: int = NODE) -> Message:
    message = Message(RecordDict(), node, "train")
    message.metadata.__dict__.update({"_message_id": "asked", "_run_id": 1})
    return message


def content() -> RecordDict:
    arrays = record({"w": np.arange(6, dtype=np.float32), "b": np.zeros(2, np.float32)})
    return RecordDict(
        {"arrays": arrays, "own": ConfigRecord({"round": 1}), "metrics": MetricRecord({"n": 2})}
    )


def stored(message: Message) -> tuple[str, Objects]:
    """Return a message as a SuperLink keeps it."""
    objects = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
    return message.object_id, objects


def reply() -> tuple[str, Objects]:
    return stored(Message(content(), reply_to=request()))


def rewritten(kind: str, change: Callable[[bytes], bytes], head: str | None = None) -> Any:
    """A change to all objects of a kind: their body, or the name of their kind."""

    def apply(root: str, objects: Objects) -> tuple[str, Objects]:
        renamed: dict[str, str] = {}
        changed: Objects = {}
        for name, data in objects.items():  # parts come before those that name them
            prefix, _, body = data.partition(b"\x00")
            own, parts, _ = prefix.decode().split(" ")
            for old, new in renamed.items():
                parts, body = parts.replace(old, new), body.replace(old.encode(), new.encode())
            if own == kind:
                body, own = change(body), head or own
            data = f"{own} {parts} {len(body)}".encode() + b"\x00" + body
            renamed[name] = get_object_id(data)
            changed[renamed[name]] = data
        return renamed[root], changed

    return apply


def entry(**values: Any) -> Callable[[bytes], bytes]:
    return lambda body: json.dumps({**json.loads(body), **values}).encode()


MALFORMED: dict[str, Any] = {
    "a record of garbage": rewritten("ConfigRecord", lambda _: b"\xff" * 40),
    "metrics of garbage": rewritten("MetricRecord", lambda _: b"\x08\x96" * 9),
    "a message of garbage": rewritten("Message", lambda _: b"\xff" * 40),
    "an array that is not described": rewritten("Array", lambda _: b"[[[["),
    "an array described in depth": rewritten("Array", lambda _: b"[" * 4000),
    "an array without a shape": rewritten("Array", lambda _: b'{"arraychunk_ids": [0]}'),
    "a shape that is no list": rewritten("Array", entry(shape=3)),
    "a chunk that is not there": rewritten("Array", entry(arraychunk_ids=[5])),
    "a chunk counted from behind": rewritten("Array", entry(arraychunk_ids=[-1])),
    "no chunk": rewritten("Array", entry(arraychunk_ids=[])),
    "one chunk ten thousand times": rewritten("Array", entry(arraychunk_ids=[0] * 10_000)),
    "a long description": rewritten("Array", entry(dtype="x" * 9000)),
    "arrays under other names": rewritten("ArrayRecord", lambda _: b'{"w": "0"}'),
    "records under other names": rewritten("RecordDict", lambda _: b"{}"),
    "records that are a list": rewritten("RecordDict", lambda _: b"[1, 2]"),
    "a chunk for a record": rewritten("ConfigRecord", lambda body: body, "ArrayChunk"),
    "an array for a message": rewritten("Message", lambda body: body, "Array"),
    "a kind that nobody knows": rewritten("Array", lambda body: body, "Matrix"),
}


def lost(root: str, objects: Objects) -> tuple[str, Objects]:
    return root, dict(list(objects.items())[1:])


class SuperLink:
    """The part of a SuperLink that a server's grid talks to."""

    def __init__(self, root: str, objects: Objects) -> None:
        self.root, self.objects = root, objects
        self.status: int | None = None
        self.announced = self.read = 0
        self.missing: set[str] = set()
        self.confirmed: list[str] = []

    def PullMessages(self, asked: Any) -> Any:
        if self.status is not None:
            response = httpx.Response(self.status, request=httpx.Request("POST", "http://link"))
            response.raise_for_status()
        self.announced += 1
        if self.announced > 1:  # it says so once
            return SimpleNamespace(messages_list=[])
        metadata = SimpleNamespace(message_id=self.root, reply_to_message_id=asked.message_ids[0])
        return SimpleNamespace(messages_list=[SimpleNamespace(metadata=metadata)])

    def PullObject(self, asked: Any) -> Any:
        self.read += 1
        found = self.objects.get(asked.object_id)
        there = found is not None and asked.object_id not in self.missing
        return SimpleNamespace(
            object_found=found is not None,
            object_available=there,
            object_content=found if there else b"",
        )

    def ConfirmMessageReceived(self, asked: Any) -> None:
        self.confirmed.append(asked.message_object_id)


def connected(superlink: SuperLink) -> HttpGrid:
    grid = HttpGrid(token="none")
    grid.__dict__["_client"] = superlink
    grid.set_run(Run.create_empty(1))
    return grid


def test_a_reply_comes_as_flower_would_build_it() -> None:
    superlink = SuperLink(*reply())
    (got,) = pull(connected(superlink), "asked", NODE, LARGEST)
    assert got.metadata.src_node_id == NODE
    assert got.metadata.message_id == superlink.root
    assert got.content == content()
    assert superlink.confirmed == [superlink.root]
    assert superlink.read == len(superlink.objects)


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_reply_in_another_form_is_one_of_a_named_node(change: Any) -> None:
    superlink = SuperLink(*change(*reply()))
    (got,) = pull(connected(superlink), "asked", NODE, LARGEST)
    assert (got.error.code, got.metadata.src_node_id) == (MALFORMED_CODE, NODE)
    assert superlink.confirmed == [superlink.root]  # it does not stay there until the run ends


@pytest.mark.parametrize("name", ["a chunk for a record", "an array for a message"])
def test_an_object_of_another_kind_is_refused_before_anything_is_built(name: str) -> None:
    root, objects = MALFORMED[name](*reply())
    with pytest.raises(MalformedReplyError, match="stands for"):
        checked(objects.__getitem__, root, LARGEST)


def test_a_reply_whose_objects_are_gone_is_no_answer_and_nobodys_fault() -> None:
    superlink = SuperLink(*lost(*reply()))
    (got,) = pull(connected(superlink), "asked", NODE, LARGEST)
    assert (got.error.code, got.metadata.src_node_id) == (3, NODE)
    assert superlink.confirmed == [superlink.root]


def test_what_has_not_arrived_is_not_waited_for() -> None:
    superlink = SuperLink(*reply())
    grid = connected(superlink)
    superlink.missing = {next(iter(superlink.objects))}
    assert pull(grid, "asked", NODE, LARGEST) == []
    assert pull(grid, "asked", NODE, LARGEST) == []
    superlink.missing = set()
    (got,) = pull(grid, "asked", NODE, LARGEST)
    assert got.content == content()
    assert superlink.confirmed == [superlink.root]
    assert pull(grid, "asked", NODE, LARGEST) == []


def test_no_more_is_downloaded_than_a_reply_may_have() -> None:
    arrays = record({f"a{i}": np.full(1000, i, np.float32) for i in range(30)})
    superlink = SuperLink(*stored(Message(RecordDict({"arrays": arrays}), reply_to=request())))
    (got,) = pull(connected(superlink), "asked", NODE, 20_000)
    assert got.error.code == MALFORMED_CODE
    assert "more than the 20000 bytes" in got.error.reason
    assert superlink.read < 20


def test_many_small_objects_are_too_many() -> None:
    names = {f"a{i}": np.full(1, i, np.float32) for i in range(4000)}
    root, objects = stored(Message(RecordDict({"arrays": record(names)}), reply_to=request()))
    with pytest.raises(MalformedReplyError, match="more than"):
        checked(objects.__getitem__, root, 10**7)


def test_a_repeated_chunk_is_counted_as_often_as_it_is_named() -> None:
    zeros = record({"w": np.zeros(10_000, np.float32)})
    root, objects = stored(Message(RecordDict({"arrays": zeros}), reply_to=request()))
    twice = rewritten("Array", entry(arraychunk_ids=[0, 0]))
    checked(objects.__getitem__, root, 60_000)
    root, objects = twice(root, objects)
    checked(objects.__getitem__, root, 90_000)
    with pytest.raises(MalformedReplyError, match="it is 8"):
        checked(objects.__getitem__, root, 60_000)


@pytest.mark.parametrize("fails", [False, True])
def test_a_node_cannot_speak_for_another(fails: bool) -> None:
    said = Error(1001, "I released nothing") if fails else content()
    superlink = SuperLink(*stored(Message(said, reply_to=request(OTHER))))
    (got,) = pull(connected(superlink), "asked", NODE, LARGEST)
    assert got.metadata.src_node_id == NODE
    assert got.error.code == (1001 if fails else IMPOSTOR_CODE)


def test_a_superlink_that_fails_for_a_moment_is_asked_again_and_nobody_is_blamed() -> None:
    superlink = SuperLink(*reply())
    grid = connected(superlink)
    superlink.status = 500
    assert pull(grid, "asked", NODE, LARGEST) == []
    superlink.status = None
    (got,) = pull(grid, "asked", NODE, LARGEST)
    assert got.content == content()


def test_a_record_counts_as_often_as_it_has_a_name() -> None:
    note = ConfigRecord({"text": b"x" * 10_000})
    once = RecordDict({"0": note})
    root, objects = stored(Message(once, reply_to=request()))
    checked(objects.__getitem__, root, 50_000)
    often = RecordDict({str(i): note for i in range(10)})
    root, objects = stored(Message(often, reply_to=request()))
    assert sum(map(len, objects.values())) < 50_000
    with pytest.raises(MalformedReplyError, match="when it is built"):
        checked(objects.__getitem__, root, 50_000)


@pytest.mark.parametrize("parts", ["," * 5000, f"{'a' * 64},{'a' * 64}"])
def test_a_head_of_commas_or_of_one_part_twice_is_refused(parts: str) -> None:
    head = f"RecordDict {parts} 2".encode() + b"\x00{}"
    with pytest.raises(MalformedReplyError, match=r"no head|part twice|stands for"):
        checked({"root": head}.__getitem__, "root", 10**6)
    with pytest.raises(MalformedReplyError, match=r"no head|part twice"):
        _head(head)


def test_a_grid_of_the_users_own_is_called() -> None:
    class Own(HttpGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            return [Message(content(), reply_to=request())]

    (got,) = pull(Own(token="none"), "asked", NODE, LARGEST)
    assert got.content == content()


@pytest.mark.parametrize("status", [401, 403, 503])
def test_a_superlink_that_refuses_the_server_is_no_nodes_fault(status: int) -> None:
    superlink = SuperLink(*reply())
    superlink.status = status
    with pytest.raises(httpx.HTTPStatusError):
        pull(connected(superlink), "asked", NODE, LARGEST)


def test_a_network_that_fails_is_no_nodes_fault() -> None:
    grid = connected(SuperLink(*reply()))

    def unplugged(ids: Any) -> Any:
        raise ConnectionError("unplugged")

    grid.__dict__["pull_messages"] = unplugged
    with pytest.raises(ConnectionError):
        pull(grid, "asked", NODE, LARGEST)


def test_where_flower_changed_a_reply_is_guarded_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sys

    name = "flwr_privacy.strategies.requests.superlink"
    monkeypatch.delattr(sys.modules["flwr_privacy.strategies.requests"], "superlink")
    monkeypatch.setitem(sys.modules, name, None)
    pulling._superlink.cache_clear()
    try:
        grid = connected(SuperLink(*reply()))
        (got,) = pull(grid, "asked", NODE, LARGEST)
    finally:
        pulling._superlink.cache_clear()
    assert got.error.code == MALFORMED_CODE  # Flower wants more of a SuperLink than this one has
    assert "this release of Flower keeps replies otherwise" in caplog.text
