import hashlib

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from parties import EXPERIMENT, deal, join, new_parties, new_session, summed
from scipy.stats import chi2

from flwr_privacy.coding.packing import pack
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.secure_sum import Bounds, MaskedSum
from flwr_privacy.secure_sum.masked import MASKED, add_masks, values_of
from flwr_privacy.secure_sum.secrets import Derivation
from flwr_privacy.wire.channel import KeyPair
from flwr_privacy.wire.parts import PART

MODULI = [2, 5, 8, 13, 16, 17, 31, 33, 47, 64]
FALSE_ALARM = 1e-8  # of one chi-square test

seeds = st.binary(min_size=32, max_size=32)


def words_of(bits):
    return next(size for size in (1, 2, 4, 8) if bits <= 8 * size)


def mask(seed: bytes, bits: int, size: int) -> np.ndarray:
    return add_masks(np.zeros(size, np.uint64), bits, [(seed, 1)])


def keystream(seed: bytes, size: int) -> bytes:
    """Return the keystream block by block: AES-256 of 0, 1, 2, ... as 16 bytes, big-endian."""
    blocks = b"".join(counter.to_bytes(16, "big") for counter in range(-(-size // 16)))
    encryptor = Cipher(algorithms.AES256(seed), modes.ECB()).encryptor()
    return encryptor.update(blocks)[:size]


def assert_uniform(vector: np.ndarray, bits: int) -> None:
    """Chi-square tests of the highest and the lowest bits, up to 8 of them."""
    width = min(bits, 8)
    for part in (vector >> np.uint64(bits - width), vector & np.uint64(2**width - 1)):
        counts = np.bincount(part.astype(np.int64), minlength=2**width)
        expected = vector.size / 2**width
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert len(counts) == 2**width
        assert statistic < chi2.isf(FALSE_ALARM, 2**width - 1)


@pytest.mark.parametrize("bits", [2, 8, 9, 16, 20, 32, 33, 64])
@pytest.mark.parametrize("size", [70_001, 2 * PART + 70_001])
def test_a_mask_is_the_keystream_of_aes_in_counter_mode_cut_into_words(bits, size):
    # Over several blocks of the cipher's buffer, and several parts; both end within one.
    seed = hashlib.sha256(b"a seed").digest()
    words = np.frombuffer(keystream(seed, size * words_of(bits)), f"<u{words_of(bits)}")
    expected = words.astype(np.uint64) % np.uint64(2**bits) if bits < 64 else words
    np.testing.assert_array_equal(mask(seed, bits, size), expected)


@settings(deadline=None)
@given(
    st.integers(2, 64),
    st.integers(0, 300),
    st.lists(st.tuples(seeds, st.sampled_from([1, -1])), max_size=6),
)
def test_masks_add_up_as_integers_modulo_a_power_of_two(bits, size, masks):
    vector = np.random.default_rng(size).integers(2**64, size=size, dtype=np.uint64)
    vector &= np.uint64(2**bits - 1)
    expected = [int(value) for value in vector]
    for seed, sign in masks:
        stream = np.frombuffer(keystream(seed, size * words_of(bits)), f"<u{words_of(bits)}")
        expected = [total + sign * int(word) for total, word in zip(expected, stream, strict=True)]
    masked = add_masks(vector.copy(), bits, masks)
    assert masked.dtype == f"<u{words_of(bits)}"
    assert masked.tolist() == [value % 2**bits for value in expected]
    back = add_masks(masked, bits, [(seed, -sign) for seed, sign in masks])
    assert back is masked  # in place
    np.testing.assert_array_equal(back, vector)


@given(st.integers(2, 64), st.data())
def test_residues_are_read_as_numbers_around_zero(bits, data):
    numbers = data.draw(st.lists(st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1), max_size=20))
    residues = np.array([number % 2**bits for number in numbers], np.uint64)
    assert values_of(residues, bits).tolist() == numbers


@pytest.mark.parametrize("bits", MODULI)
def test_a_masked_constant_is_uniform(bits):
    # Fixed seed. A value of these bits that comes twice as often as it should would show.
    seed = hashlib.sha256(b"uniform %d" % bits).digest()
    constant = np.full(1 << 17, 2**bits - 3, np.uint64)
    assert_uniform(add_masks(constant, bits, [(seed, 1)]), bits)


@pytest.mark.parametrize("bits", [5, 16, 33])
def test_what_a_client_sends_of_a_constant_is_uniform(bits):
    # Fresh keys: 24 tests in all, so a false alarm in less than 1 of 10**6 runs.
    parties = new_parties(3)
    bounds = Bounds(cohort=3, code_limit=1, largest_weight=1, modulus_bits=bits)
    session = new_session(parties, threshold=2, bounds=bounds)
    deal(session, parties, parties)
    join(session, parties, parties)
    sent = [p.mask("first", np.full(1 << 16, 1, np.uint64), bits) for p in parties.values()]
    for vector in sent:
        assert_uniform(vector, bits)
    assert_uniform((sent[0] + sent[1]) & np.uint64(2**bits - 1), bits)  # the third mask is left


def accumulate(seed: bytes) -> int:
    return int(np.bitwise_xor.reduce(np.frombuffer(seed, "<u4")))


def test_regression_seeds_that_agree_in_32_bits_give_different_masks():
    # Flower folds a seed of 32 bytes by XOR into the 32 bits that its generator takes.
    seed = np.frombuffer(hashlib.sha256(b"accumulated").digest(), "<u4")
    original = mask(seed.tobytes(), 32, 10_000)
    for one, other in ((0, 1), (0, 7), (3, 4)):
        changed = seed.copy()
        changed[[one, other]] ^= np.uint32(0x5A5A0001)
        assert accumulate(changed.tobytes()) == accumulate(seed.tobytes())
        assert (mask(changed.tobytes(), 32, 10_000) != original).all()
    for byte in range(32):  # every bit of the seed counts; here one in each byte
        changed = bytearray(seed.tobytes())
        changed[byte] ^= 1 << byte % 8
        assert (mask(bytes(changed), 32, 1000) != original[:1000]).all()


def test_pairwise_masks_cancel_and_nothing_else_does():
    parties = new_parties(4)
    session = new_session(parties)
    deal(session, parties, parties)
    join(session, parties, parties)
    own = [party.state["sessions"]["first"]["seed"] for party in parties.values()]
    zeros = np.zeros(1000, np.uint64)
    sent = [party.mask("first", zeros, 20) for party in parties.values()]
    unmask = [(Derivation(EXPERIMENT, "first").self_seed(seed), -1) for seed in own]
    assert not add_masks(sum(sent, zeros), 20, unmask).any()
    # Without one of the vectors, or of the masks of their own, all is noise.
    for left in range(4):
        some = [i for i in range(4) if i != left]
        partly = add_masks(sum((sent[i] for i in some), zeros), 20, [unmask[i] for i in some])
        assert np.count_nonzero(partly) > 980  # 999 expected; fewer with probability below 1e-60
        whole = add_masks(sum(sent, zeros), 20, [unmask[i] for i in some])
        assert np.count_nonzero(whole) > 980


def test_both_ends_of_a_pair_have_one_mask_and_every_pair_and_session_its_own():
    keys = [KeyPair() for _ in range(3)]
    made = {}
    for experiment in ("one", "two"):
        for session in ("first", "second"):
            for i, j in ((0, 1), (0, 2), (1, 2)):
                derived = Derivation(experiment, session)
                here = derived.pair_seed(keys[i], keys[j].public, (f"c{i}", f"c{j}"))
                there = derived.pair_seed(keys[j], keys[i].public, (f"c{j}", f"c{i}"))
                assert here == there
                made[experiment, session, i, j] = here
    assert len(set(made.values())) == len(made) == 12
    # One key under two names: they have two masks.
    first = Derivation("one", "first")
    assert first.pair_seed(keys[0], keys[1].public, ("c0", "c9")) not in made.values()
    names = [(e, s) for e in ("one", "two") for s in ("first", "second")]
    own = {Derivation(*name).self_seed(bytes(32)) for name in names}
    assert len(own) == 4


def test_masks_are_fresh_in_every_round():
    parties = new_parties(3)
    vector = np.arange(2000, dtype=np.uint64)
    sent = []
    for server_round in (1, 2):
        session = new_session(
            parties, name=f"round {server_round}", server_round=server_round, threshold=2
        )
        deal(session, parties, parties)
        join(session, parties, parties)
        sent.append([party.mask(session.name, vector, 20) for party in parties.values()])
    for first, second in zip(*sent, strict=True):
        # Equal entries: 0.002 expected; more than 5 with probability below 1e-18.
        assert np.count_nonzero(first == second) <= 5
        assert np.count_nonzero(np.diff((first - second) & np.uint64(2**20 - 1)) == 0) <= 5


# The accumulator of masked vectors.


@settings(deadline=None)
@given(st.integers(2, 64), st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=8))
def test_a_sum_of_masked_vectors_is_the_same_in_any_grouping_and_after_a_restart(bits, firsts):
    vectors = [np.array([first % 2**bits, 1, 2**bits - 1], np.uint64) for first in firsts]
    parts = [MaskedSum(3, bits), MaskedSum(3, bits)]
    for i, vector in enumerate(vectors):
        parts[i % 2].accumulate(f"c{i}", {MASKED: pack(vector, bits)}, weight=1)
    parts[0] = MaskedSum(3, bits).from_state(*parts[0].state())
    parts[0].merge(parts[1])
    expected = [sum(int(v[k]) for v in vectors) % 2**bits for k in range(3)]
    assert [int(entry) % 2**bits for entry in parts[0].total] == expected
    assert parts[0].clients == {f"c{i}" for i in range(len(vectors))}
    assert parts[0].weight == len(vectors)


def test_a_vector_that_is_twice_there_or_of_another_kind_is_refused_and_leaves_no_trace():
    vector = np.array([1, 2, 3, 4, 5], np.uint64)
    total = summed({"c00": vector})
    fit = {MASKED: pack(vector, 13)}
    for client, arrays, reason in (
        ("c00", fit, "duplicate: client c00 is already in the mean"),
        ("c01", {MASKED: pack(vector[:4], 13)}, "shape"),
        ("c01", {MASKED: fit[MASKED].astype(np.int64)}, "dtype"),
        ("c01", {MASKED: fit[MASKED] | np.uint8(0x80)}, "malformed: bits after the last value"),
        ("c01", {"other": fit[MASKED]}, "names"),
    ):
        with pytest.raises(ReplyRefusedError, match=reason):
            total.accumulate(client, arrays, weight=1)
    with pytest.raises(ReplyRefusedError, match=r"duplicate: clients \['c00'\] are in both means"):
        total.merge(summed({"c00": vector}))
    for other in (MaskedSum(5, 14), MaskedSum(4, 13)):
        with pytest.raises(ReplyRefusedError, match="vectors of another kind"):
            total.merge(other)
    assert total.total.tolist() == [1, 2, 3, 4, 5]
    assert total.clients == {"c00"}
