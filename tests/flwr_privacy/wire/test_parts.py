"""Work on the parts of a large array."""

import threading
from typing import Any

import numpy as np
import pytest

from flwr_privacy.coding.packing import pack, unpack
from flwr_privacy.secure_sum.masked import residues
from flwr_privacy.secure_sum.settings import Bounds
from flwr_privacy.wire.parts import PART, in_parts


@pytest.mark.parametrize("threads", ["1", "3", "", "many"])
@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 3 * PART])
def test_each_part_is_worked_on_once(
    threads: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    done = list[int]()
    in_parts(done.append, size)
    assert sorted(done) == list(range(0, size, PART))


def test_a_small_array_starts_no_thread_and_an_error_is_raised() -> None:
    names = list[str]()
    in_parts(lambda _: names.append(threading.current_thread().name), 5)
    assert names == [threading.current_thread().name]

    def fail(start: int) -> Any:
        if start:
            raise ValueError("the second part")

    with pytest.raises(ValueError, match="the second part"):
        in_parts(fail, 2 * PART)


@pytest.mark.parametrize("bits", [4, 20, 31])
def test_codes_of_several_parts_are_weighed_and_packed_as_in_one(bits: int) -> None:
    bounds = Bounds(cohort=2, code_limit=1, largest_weight=2, modulus_bits=bits)
    codes = np.random.default_rng(bits).integers(-1, 1, 2 * PART + 77, endpoint=True)
    vector = residues({"w": codes}, 2, bounds)
    expected = np.append(2 * codes, 2) % 2**bits
    np.testing.assert_array_equal(vector, expected)
    np.testing.assert_array_equal(unpack(pack(vector, bits), bits, vector.size), expected)
