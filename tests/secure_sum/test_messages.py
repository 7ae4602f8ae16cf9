import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.secure_sum import Bounds, Invitation, Joined
from flwr_privacy.secure_sum.messages import Dealt, Opening, Revealed
from flwr_privacy.wire.fields import read, write

texts = st.text(min_size=1, max_size=20)
names = st.lists(texts, max_size=4)
octets = st.binary(max_size=40)
several = st.lists(octets, max_size=4)
numbers = st.integers(-(2**63), 2**63 - 1)

MESSAGES = st.one_of(
    st.builds(Opening, session=texts, survivors=names),
    st.builds(Revealed, keys=several, seeds=several),
    st.builds(
        Invitation,
        session=texts,
        server_round=numbers,
        step=numbers,
        threshold=numbers,
        roster=names,
        keys=several,
        signatures=several,
        needed=names,
    ),
    st.builds(Dealt, mask_key=octets, commitment=octets, digests=several, sealed=several),
    st.builds(
        Joined,
        session=texts,
        threshold=st.integers(0, 2**31),
        dealers=names,
        mask_keys=several,
        sealed=several,
    ),
    st.builds(
        Bounds,
        cohort=st.integers(2, 1000),
        code_limit=st.integers(1, 2**20),
        largest_weight=st.integers(1, 2**20),
        modulus_bits=st.integers(52, 64),
        total_weight=st.just(0) | st.integers(2**20, 2**31),
    ),
)

ONE_OF_EACH = [
    Opening(session="s", survivors=["a", "b"]),
    Revealed(keys=[b"k"], seeds=[b"s", b""]),
    Invitation(
        session="s",
        server_round=1,
        step=0,
        threshold=2,
        roster=["a"],
        keys=[b"k"],
        signatures=[b""],
        needed=["a"],
    ),
    Dealt(mask_key=b"m", commitment=b"c", digests=[b"d"], sealed=[b"", b"s"]),
    Joined(session="s", threshold=1, dealers=["a"], mask_keys=[b"m"], sealed=[b""]),
    Bounds(cohort=5, code_limit=100, largest_weight=8, modulus_bits=13),
]

ENTRIES = [
    (message, field.name.replace("_", "-"))
    for message in ONE_OF_EACH
    for field in dataclasses.fields(message)
]


@given(MESSAGES)
def test_a_message_comes_back_as_it_was_written(message):
    record = write(message)
    assert read(type(message), record) == message
    # Entries for somebody else do not matter.
    assert read(type(message), {**record, "other": 1}) == message
    # A record has what Flower takes: no empty texts or lists, one type in a list.
    for value in record.values():
        assert type(value) in (str, int, bytes, list)
        assert value not in ("", [])
        if type(value) is list:
            assert {type(item) for item in value} in ({str}, {bytes})


def test_names_on_the_wire_have_dashes():
    assert list(write(ONE_OF_EACH[2])) == [
        "session",
        "server-round",
        "step",
        "threshold",
        "roster",
        "keys",
        "signatures",
        "needed",
    ]


WRONG = {
    str: [None, b"s", 1, ["s"], True],
    int: [None, True, False, 1.0, "1", b"1", [1], np.int64(1)],
    bytes: [None, "k", bytearray(b"k"), memoryview(b"k"), 1, [b"k"]],
    list: ["ab", b"ab", ("a", "b"), (b"a", b"b"), 1, {"a": 1}, {"a"}],
}
WRONG_ITEMS = [1, 1.0, True, None, ["a"], [b"a"], ("a",), {"a": 1}]


@pytest.mark.parametrize(("message", "entry"), ENTRIES)
def test_an_entry_of_another_type_is_refused(message, entry):
    record = write(message)
    value = record[entry]
    wrong = WRONG[type(value)]
    if type(value) is list:
        other = "a" if type(value[0]) is bytes else b"a"
        wrong = [*wrong, *([item] for item in [*WRONG_ITEMS, other])]
        wrong += [[*value, item] for item in [*WRONG_ITEMS, other]]
    kind = type(message).__name__
    for replacement in wrong:
        with pytest.raises(ProtocolError, match=f"the entry '{entry}' of {kind} is no "):
            read(type(message), {**record, entry: replacement})


@pytest.mark.parametrize(("message", "entry"), ENTRIES)
def test_a_missing_entry_is_an_empty_list_or_refused(message, entry):
    record = write(message)
    value = record.pop(entry)
    if type(value) is list:
        empty = dataclasses.replace(message, **{entry.replace("-", "_"): []})
        assert read(type(message), record) == empty
    else:
        with pytest.raises(ProtocolError, match=f"the entry '{entry}' of"):
            read(type(message), record)


def test_bounds_that_do_not_hold_a_sum_are_refused_by_whoever_reads_them():
    record = {**write(ONE_OF_EACH[-1]), "modulus-bits": 12}
    with pytest.raises(InvalidParameterError, match="modulus_bits = 12: expected at least 13"):
        read(Bounds, record)
