import copy
import hashlib
import os
import pickle

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from flwr_privacy.privacy.randomness import SecureRandom


def test_the_stream_is_the_encrypted_counter():
    tag, seed, purpose = b"flwr-privacy insecure stream", b"int:7", b"str:noise"
    key = hashlib.sha256(
        tag + len(seed).to_bytes(8, "big") + seed + len(purpose).to_bytes(8, "big") + purpose
    ).digest()
    counters = b"".join(i.to_bytes(16, "big") for i in range(10_000))
    expected = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(counters)
    words = SecureRandom.insecure(7, "noise").uint64(20_000)
    assert words.tobytes() == expected


def test_the_stream_does_not_depend_on_how_it_is_cut():
    whole = SecureRandom.insecure(1).uint64(30_000)
    random = SecureRandom.insecure(1)
    pieces = [random.uint64(size) for size in (0, 1, 8191, 8192, 8193, 5423)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    octets = np.empty(21, np.uint8)
    random = SecureRandom.insecure(1)
    random.fill(octets)
    assert octets.tobytes() == whole.tobytes()[:21]
    assert random.bits(24) == int.from_bytes(whole.tobytes()[21:24], "big")


@pytest.mark.parametrize("count", [1, 7, 8, 13, 64, 200])
def test_bits_are_all_used_and_no_more(count):
    random = SecureRandom.insecure(2, count)
    draws = [random.bits(count) for _ in range(1000)]
    assert min(draws) >= 0
    assert max(draws) < 2**count
    for bit in range(count):
        # Binomial(1000, 1/2): five standard errors are 79.
        assert abs(sum(draw >> bit & 1 for draw in draws) - 500) < 79


def test_no_bits_are_zero():
    assert SecureRandom().bits(0) == 0


parts = st.lists(st.text() | st.integers(), max_size=3)


@given(st.integers(), parts, parts)
def test_different_purposes_have_different_streams(seed, one, other):
    streams = [SecureRandom.insecure(seed, *purpose).bits(128) for purpose in (one, other)]
    assert (streams[0] == streams[1]) == (one == other)


def test_a_number_and_its_text_are_different_purposes():
    assert SecureRandom.insecure(0, 1).bits(128) != SecureRandom.insecure(0, "1").bits(128)


def test_secure_streams_differ_and_say_so():
    streams = [SecureRandom() for _ in range(50)]
    assert all(stream.secure for stream in streams)
    assert len({stream.bits(128) for stream in streams}) == 50
    assert not SecureRandom.insecure(0).secure


def test_the_key_is_in_no_attribute_and_no_text(monkeypatch):
    key = bytes(range(32))
    monkeypatch.setattr(os, "urandom", lambda size: key[:size])
    stream = SecureRandom()
    assert repr(stream) == "<SecureRandom secure=True>"
    assert key not in vars(stream).values()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stream_cannot_be_duplicated(duplicate):
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        duplicate(SecureRandom.insecure(0))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_cannot_go_on_with_the_stream():
    random = SecureRandom()
    child = os.fork()
    if child == 0:
        try:
            random.bits(8)
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert random.uint64(1).size == 1


def test_an_array_with_gaps_is_refused():
    with pytest.raises(TypeError, match="contiguous"):
        SecureRandom().fill(np.zeros(8, np.uint64)[::2])
