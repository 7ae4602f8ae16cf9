"""What a SuperLink has as a reply: a node writes every byte of it."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from apps import record
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_object_id
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid import HttpGrid
from stored_replies import (
    NODE,
    OTHER,
    Objects,
    SuperLink,
    connected,
    content,
    many,
    reply,
    request,
    stored,
)

from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies.requests import pulling
from flwr_privacy.strategies.requests import superlink as superlink_module
from flwr_privacy.strategies.requests.pulling import (
    IMPOSTOR_CODE,
    MALFORMED_CODE,
    announced,
    let_go,
    pull,
)
from flwr_privacy.strategies.requests.superlink import Download, MalformedReplyError, _head

LARGEST = 100_000


@pytest.fixture(autouse=True)
def as_server() -> Iterator[None]:
    with acting_as_server(1):
        yield


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


def test_a_reply_comes_as_flower_would_build_it() -> None:
    superlink = SuperLink(*reply())
    (got,) = pull(connected(superlink), "asked", NODE, LARGEST)
    assert got.metadata.src_node_id == NODE
    assert got.metadata.message_id == superlink.root
    assert got.content == content()
    assert superlink.confirmed == [superlink.root]
    assert sorted(superlink.read) == sorted(superlink.objects)


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
        Download(root, LARGEST).go_on(objects.__getitem__)


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
    assert len(superlink.read) < 20


def test_many_small_objects_are_too_many() -> None:
    names = {f"a{i}": np.full(1, i, np.float32) for i in range(4000)}
    root, objects = stored(Message(RecordDict({"arrays": record(names)}), reply_to=request()))
    with pytest.raises(MalformedReplyError, match="more than"):
        Download(root, 10**7).go_on(objects.__getitem__)


def test_a_repeated_chunk_is_counted_as_often_as_it_is_named() -> None:
    zeros = record({"w": np.zeros(10_000, np.float32)})
    root, objects = stored(Message(RecordDict({"arrays": zeros}), reply_to=request()))
    twice = rewritten("Array", entry(arraychunk_ids=[0, 0]))
    Download(root, 60_000).go_on(objects.__getitem__)
    root, objects = twice(root, objects)
    Download(root, 90_000).go_on(objects.__getitem__)
    with pytest.raises(MalformedReplyError, match="it is 8"):
        Download(root, 60_000).go_on(objects.__getitem__)


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
    Download(root, 800_000).go_on(objects.__getitem__)
    often = RecordDict({str(i): note for i in range(10)})
    root, objects = stored(Message(often, reply_to=request()))
    assert sum(map(len, objects.values())) < 12_500
    with pytest.raises(MalformedReplyError, match="when it is built"):
        Download(root, 800_000).go_on(objects.__getitem__)


@pytest.mark.parametrize("body", [b"\n\x00" * 40_000, b"\n\x03\n\x01a" * 16_000])
@pytest.mark.parametrize("kind", ["ConfigRecord", "MetricRecord", "Message"])
def test_what_becomes_small_objects_of_python_counts_as_what_they_take(
    kind: str, body: bytes
) -> None:
    root, objects = rewritten(kind, lambda _: body)(*reply())
    assert sum(map(len, objects.values())) < LARGEST
    with pytest.raises(MalformedReplyError, match="counts as 64"):
        Download(root, LARGEST).go_on(objects.__getitem__)


def test_a_reply_that_is_never_uploaded_costs_one_call_whenever_it_is_looked_at() -> None:
    superlink = SuperLink(*many(500))
    grid = connected(superlink)
    superlink.missing = {next(iter(superlink.objects))}
    assert pull(grid, "asked", NODE, 10**7) == []
    before = len(superlink.read)
    for _ in range(20):
        assert pull(grid, "asked", NODE, 10**7) == []
    assert len(superlink.read) == before + 20


def test_however_slowly_a_reply_is_uploaded_an_object_is_downloaded_twice_at_most() -> None:
    superlink = SuperLink(*many(300))
    grid = connected(superlink)
    superlink.missing = set(superlink.objects)
    looks, got = 0, []
    while not got:
        looks += 1
        got = pull(grid, "asked", NODE, 10**7)
        superlink.missing.discard(superlink.read[-1])
    assert looks > len(superlink.objects)
    assert len(superlink.read) <= 2 * len(superlink.objects) + looks


class Clock:
    """A clock that every read object moves by a tenth of a second."""

    def __init__(self, superlink: SuperLink) -> None:
        self.monotonic = lambda: len(superlink.read) / 10


def test_a_long_download_goes_on_where_it_was_and_the_others_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    superlink = SuperLink(*many(40), other=many(40, 0.5), small=reply())
    monkeypatch.setattr(superlink_module, "time", Clock(superlink))
    grid, waiting, came, most = connected(superlink), ["asked", "other", "small"], [], 0
    for _ in range(100):
        for message in list(waiting):
            before = len(superlink.read)
            if pull(grid, message, NODE, 10**7):
                waiting.remove(message)
                came.append(message)
            most = max(most, len(superlink.read) - before)
            kept = [each for each in superlink_module._of(grid).waiting.values() if each.contents]
            assert len(kept) <= 1  # memory is that of one reply
    assert came == ["small", "asked", "other"]
    assert most <= 12  # a second, and the object at which it was over
    objects = len(superlink.objects)
    assert len(superlink.read) <= 3 * objects  # the other one is looked at, and then downloaded


def test_what_nobody_waits_for_is_forgotten() -> None:
    superlink = SuperLink(*many(5))
    grid = connected(superlink)
    superlink.missing = {superlink.root}
    assert pull(grid, "asked", NODE, 10**7) == []
    assert announced(grid, "asked")
    let_go(grid, ["asked"], for_good=False)
    assert announced(grid, "asked")
    let_go(grid, ["asked", "never"], for_good=True)
    assert not announced(grid, "asked")


def test_an_object_that_is_too_large_is_not_downloaded() -> None:
    def answer(asked: httpx.Request) -> httpx.Response:
        def body() -> Iterator[bytes]:
            raise AssertionError("it is downloaded")
            yield

        return httpx.Response(200, headers={"content-length": str(2**40)}, content=body())

    client = RuntimeHttpClient("http://link")
    client._client = httpx.Client(transport=httpx.MockTransport(answer))
    grid = HttpGrid(token="none")
    grid.__dict__["_client"] = client
    grid.set_run(Run.create_empty(1))
    (got,) = pull(grid, "asked", NODE, LARGEST)
    assert got.error.code == MALFORMED_CODE
    assert str(2**40) in got.error.reason
    assert client._client.event_hooks["response"] == []


@pytest.mark.parametrize("parts", ["," * 5000, f"{'a' * 64},{'a' * 64}"])
def test_a_head_of_commas_or_of_one_part_twice_is_refused(parts: str) -> None:
    head = f"RecordDict {parts} 2".encode() + b"\x00{}"
    with pytest.raises(MalformedReplyError, match=r"no head|part twice|stands for"):
        Download("root", 10**6).go_on({"root": head}.__getitem__)
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
