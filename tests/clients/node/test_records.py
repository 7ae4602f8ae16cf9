"""Arrays in records that need not be encoded."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from flwr_privacy.clients.node import records
from flwr_privacy.clients.node.records import LocalArray, RecordArrays, decoded, to_record
from flwr_privacy.wire.arrays import array_digest, digest_of
from flwr_privacy.wire.payload import payload_bytes

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(3),
    np.zeros((0, 4), np.int8),
]


@pytest.mark.parametrize("values", ARRAYS)
def test_a_local_array_is_for_everybody_what_flowers_would_be(values: np.ndarray) -> None:
    theirs, local = Array(values), LocalArray(values)
    assert (local.dtype, local.shape, local.stype) == (theirs.dtype, theirs.shape, theirs.stype)
    assert local.encoded_size == len(theirs.data)
    assert local.data == theirs.data
    np.testing.assert_array_equal(local.numpy(), theirs.numpy())
    for sent in (pickle.loads(pickle.dumps(local)), copy.deepcopy(local)):
        assert type(sent) is Array
        assert sent == theirs


def test_who_reads_it_cannot_change_it_for_others() -> None:
    record = to_record({"w": np.zeros(3)}, local=True)
    record["w"].numpy()[:] = 1
    with pytest.raises(ValueError, match="read-only"):
        RecordArrays(record)["w"][:] = 1
    np.testing.assert_array_equal(RecordArrays(record)["w"], np.zeros(3))


def test_its_bytes_count_without_being_made() -> None:
    arrays = {"w": np.zeros((50, 20), np.float32), "b": np.array(1.5)}
    local, theirs = to_record(arrays, local=True), to_record(arrays)
    assert payload_bytes({"arrays": local}) == payload_bytes({"arrays": theirs})
    assert all(array.__dict__["encoded"] is None for array in local.values())


def test_a_message_is_decoded_once_and_what_cannot_be_stays_as_it_is() -> None:
    broken = Array(dtype="float32", shape=(2,), stype="numpy.ndarray", data=b"no npy")
    other = Array(dtype="float32", shape=(2,), stype="torch.Tensor", data=Array(np.zeros(2)).data)
    good = Array(np.ones(2))
    record = ArrayRecord()
    record["good"], record["broken"], record["other"] = good, broken, other
    content = decoded(RecordDict({"arrays": record, "config": ConfigRecord({"a": 1})}))
    arrays = content["arrays"]
    assert isinstance(arrays["good"], LocalArray)
    assert arrays["good"].data is good.data  # the bytes that came, not others like them
    assert arrays["broken"] is broken
    assert arrays["other"] is other
    with pytest.raises(ValueError, match="no npy document"):
        RecordArrays(arrays)["broken"]


def test_a_copy_of_a_record_has_the_same_arrays_and_entries_of_its_own() -> None:
    record = to_record({"w": np.zeros(3)}, local=True)
    twin = record.copy()
    assert twin["w"] is record["w"]
    twin["w"] = Array(np.ones(3))
    np.testing.assert_array_equal(record["w"].numpy(), np.zeros(3))


@pytest.mark.parametrize("read", [lambda content: content, decoded], ids=["sent", "decoded"])
def test_a_model_is_hashed_once_for_all_who_have_it(
    read: Callable[[RecordDict], RecordDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = to_record({"w": np.arange(3.0)})
    content = read(RecordDict({"arrays": model}))
    twins = [RecordArrays(content["arrays"].copy()) for _ in range(2)]
    assert twins[0].digest("w") == array_digest(np.arange(3.0))
    monkeypatch.setattr(records, "array_digest", lambda _: pytest.fail("hashed again"))
    assert digest_of(twins[1], "w") == twins[0].digest("w")


def test_other_values_have_another_digest() -> None:
    record = to_record({"w": np.zeros(3)})
    arrays = RecordArrays(record)
    before = arrays.digest("w")
    record["w"].data = Array(np.ones(3)).data
    assert arrays.digest("w") == array_digest(np.ones(3)) != before
    record["w"] = Array(np.zeros(3))
    assert arrays.digest("w") == before
    values = np.zeros(3)
    local = RecordArrays(to_record({"w": values}, local=True))
    assert len(local.record["w"].data) > 0  # it is encoded now
    assert local.digest("w") == before
    values[0] = 1.0  # nobody should, and still
    assert local.digest("w") == digest_of({"w": values}, "w") != before
