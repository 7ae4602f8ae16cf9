"""What a member of a zone seals may be anything: it is an upload, or an error that names it."""

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_device import terms

from flwr_privacy.errors import ProtocolError
from flwr_privacy.m2fdp.messages import packed, unpacked
from flwr_privacy.m2fdp.sensitivity import Reach
from flwr_privacy.m2fdp.zone_average import Upload
from flwr_privacy.wire.documents import dumps, loads

ASKED = terms(noised=False, sealed=True, siblings=["a", "b"])
REACH = Reach(anchor=0, shared=0.25, nearer=((1, 0.5),), own=1.0)
SENT = packed(Upload(np.array([3, -4]), REACH, 0.125), ASKED)


def changed(**entries: Any) -> bytes:
    return dumps({**loads(SENT), **entries})


def test_an_upload_is_what_was_packed() -> None:
    upload = unpacked(SENT, ASKED, sender="a")
    assert (upload.codes.tolist(), upload.codes.dtype) == ([3, -4], np.int64)
    assert (upload.reach, upload.floor, upload.wide) == (REACH, 0.125, False)


GARBAGE: dict[str, tuple[bytes, str]] = {
    "no document": (b"garbage", "something else than an upload"),
    "nothing": (dumps({}), "something else than an upload"),
    "a reach without an end": (changed(own=float("inf")), "something else than an upload: own"),
    "a negative reach": (changed(shared=-1.0), "something else than an upload: shared"),
    "a reach in words": (changed(nearer=[["1", 0.5]]), "something else than an upload: nearer"),
    "half a reach": (changed(nearer=[[1]]), "something else than an upload"),
    "no floor": (changed(floor=None), "something else than an upload: floor"),
    # max(nan, 5.0) is nan: the floors of all others would be gone.
    "a floor that is no number": (changed(floor=float("nan")), "an upload: floor = nan"),
    "codes in words": (changed(codes="codes"), "codes of <U5"),
    "fractions": (changed(codes=np.array([0.5, 1.0])), "codes of float64"),
    "a matrix": (changed(codes=np.zeros((2, 2), np.int32)), r"shape \(2, 2\)"),
    "ragged codes": (changed(codes=[[1], [2, 3]]), "something else than an upload"),
    "a code that sums have no room for": (changed(codes=np.array([2**40 + 1])), r"beyond 2\*\*40"),
    "the least code": (changed(codes=np.array([0, -(2**63)])), r"beyond 2\*\*40"),
    "another noise": (changed(agreed=["user", 9.0]), "was asked for another noise"),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_refused_by_the_name_of_its_sender(what: str) -> None:
    content, text = GARBAGE[what]
    with pytest.raises(ProtocolError, match=f"^'a' .*{text}"):
        unpacked(content, ASKED, sender="a")


@given(st.binary(max_size=50), st.integers(0, len(SENT)))
def test_no_bytes_raise_another_error(changes: bytes, place: int) -> None:
    with contextlib.suppress(ProtocolError):
        unpacked(SENT[:place] + changes + SENT[place + len(changes) :], ASKED, sender="a")
