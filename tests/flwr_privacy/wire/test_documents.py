import contextlib
import io
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from flwr_privacy.wire.documents import dumps, loads

DTYPES = [np.float16, np.float32, np.float64, np.int8, np.uint16, np.int64, np.bool_, ">f4"]

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays(dtype, array_shapes(min_dims=0, min_side=0, max_side=3))
    )
)
# Among them the marks of the module itself.
keys = st.text(max_size=5) | st.sampled_from(["__array__", "__bytes__", "__dict__", "document"])
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
)


def same(one, other) -> bool:
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        return one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@given(st.dictionaries(keys, values, max_size=4))
def test_what_was_written_is_read(state):
    assert same(state, loads(dumps(state)))


def test_tuples_become_lists_and_numbers_of_numpy_become_pythons():
    state = {"t": (1, (2,)), "f": np.float32(0.5), "i": np.int16(3), "b": np.bool_(True)}
    restored = loads(dumps(state))
    assert restored == {"t": [1, [2]], "f": 0.5, "i": 3, "b": True}
    assert [type(value) for value in restored.values()] == [list, float, int, bool]


def test_numbers_that_are_not_finite_survive():
    restored = loads(dumps({"nan": math.nan, "inf": [math.inf, -math.inf]}))
    assert math.isnan(restored["nan"])
    assert restored["inf"] == [math.inf, -math.inf]


def test_memory_order_does_not_matter_and_single_numbers_stay_arrays():
    columns = np.asfortranarray(np.arange(6).reshape(2, 3))
    restored = loads(dumps({"w": columns, "n": np.array(7)}))
    np.testing.assert_array_equal(restored["w"], columns)
    assert isinstance(restored["n"], np.ndarray)
    assert restored["n"].shape == ()


def test_names_of_the_archive_are_free_for_a_state():
    state = {"document": np.ones(1), "array0": [np.zeros(2), b"array1"], "file": "document"}
    assert same(state, loads(dumps(state)))


def test_one_array_may_be_there_twice():
    array = np.arange(3)
    restored = loads(dumps({"a": array, "b": [array]}))
    restored["a"][0] = 9
    assert restored["b"][0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "state",
    [{1: "x"}, {"a": {None: 1}}, {"a": {1, 2}}, {"a": object()}, {"a": 1j}, {"a": [bytearray(2)]}],
)
def test_what_is_no_state_is_refused(state):
    with pytest.raises(TypeError):
        dumps(state)


@pytest.mark.parametrize("array", [np.array([object()]), np.zeros(2, "i4,f8"), np.array(["a"])])
def test_an_array_of_something_else_than_numbers_is_refused_alike(array):
    with pytest.raises(TypeError):
        dumps({"a": array})


MAGIC = b"flwr-privacy arrays\n"


def with_head(head: object) -> bytes:
    return MAGIC + json.dumps(head).encode("ascii") + b"\n" + bytes(64)


NO_STATES = {
    "nothing": b"",
    "no JSON": b"{",
    "no mapping": b"[]",
    "no text": b"{\xff",
    "deep": b'{"a":' + b"[" * 100_000,
    "no head": MAGIC,
    "no arrays": with_head({}),
    "a list": with_head([]),
    "unknown array": with_head({"document": {"a": {"__array__": "b"}}, "arrays": []}),
    "no name": with_head({"document": {"a": {"__array__": []}}, "arrays": []}),
    "no bytes": with_head({"document": {"a": {"__bytes__": 1}}, "arrays": []}),
    **{
        f"an array of {dtype} and shape {shape}": with_head(
            {"document": {"a": {"__array__": "b"}}, "arrays": [["b", dtype, shape]]}
        )
        for dtype, shape in [
            ("|O", [1]),
            ("i4,O", [1]),
            ("M8[s]", [1]),
            ("none", [1]),
            (3, [1]),
            ("<i8", [9]),
            ("<i8", [-2]),
            ("a,,b", [1]),
            ("<i8", [2**62, 2**62]),
            ("<i8", [10**400]),
            ("<i8", "x"),
        ]
    },
}


@pytest.mark.parametrize("what", NO_STATES)
def test_bytes_that_are_no_state_are_refused(what):
    """An array of objects above all: NumPy would take the sender's bytes for addresses."""
    with pytest.raises(ValueError, match="the bytes "):
        loads(NO_STATES[what])


def test_python_objects_are_never_loaded():
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("an object was loaded",))

    archive = io.BytesIO()
    np.savez(archive, array0=np.array([Trap()], object))
    for data in (archive.getvalue(), pickle.dumps(Trap())):
        with pytest.raises(ValueError, match="the bytes are no encoded state"):
            loads(data)
    objects = dumps({"a": np.ones(1)}).replace(b'"<f8"', b'"|O"')
    with pytest.raises(ValueError, match="the bytes are no encoded state"):
        loads(objects)


@given(st.data())
def test_a_state_with_changed_bytes_is_read_or_refused(data):
    whole = bytearray(dumps({"w": np.arange(3), "n": {"k": b"k", "list": [1, 2.5, None]}}))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        assert isinstance(loads(bytes(whole)), dict)


@pytest.mark.parametrize("name", ["__array__", "__bytes__", "__dict__"])
@pytest.mark.parametrize("value", [np.ones(2), "array0", b"00", {}, {"__array__": {}}])
def test_a_state_may_have_any_names(name, value):
    state = {"model": {name: value}}
    assert same(state, loads(dumps(state)))
