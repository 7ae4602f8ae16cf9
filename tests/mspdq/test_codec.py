import numpy as np
import pytest
from mixing_rounds import learning_round, terms_of
from parties import deal, join, new_parties, new_session, reveal

from flwr_privacy.coding.packing import pack, packed_bytes, unpack
from flwr_privacy.coding.quantize import CodeSum, Knobs
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.mspdq import (
    Codec,
    DecodedSum,
    Intervals,
    Mixing,
    SubStates,
    UniformSplit,
    centred,
    decode_start,
    encode_start,
)
from flwr_privacy.mspdq.codec import uncentred
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.secure_sum import Bounds, MaskedSum
from flwr_privacy.secure_sum.masked import MASKED, residues
from flwr_privacy.simulations.research.mspdq.theory import sum_bits


class Uniforms:
    """Random bits by which a value is rounded up if and only if its variate is below."""

    def __init__(self, *uniforms: float) -> None:
        self._left = list(uniforms)

    def fill(self, out: np.ndarray) -> None:
        out[:] = [int((1 - self._left.pop(0)) * 2**15) << 1 for _ in range(out.size)]


def problem(clients: int = 6, size: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Return models, and one vector that is the start of all."""
    draws = np.random.default_rng(13)
    models = draws.normal(size=(clients, size))
    return models, models.mean(axis=0) + draws.normal(size=size)


@pytest.mark.parametrize("bits", [1, 4, 6, 8, 11, 16])
@pytest.mark.parametrize("rule", ["paper", "fixed", "linf", "self"])
def test_F11_both_ends_have_the_same_bits_for_ever(bits, rule):
    size, levels, random = 1001, 2**bits, SecureRandom.insecure(11)
    draws = np.random.default_rng(11)
    codes, ends = encode_start(draws.normal(size=size), levels, random)
    assert [float(np.float32(end)) for end in ends] == list(ends)
    client = Codec(decode_start(codes, ends, levels), levels)
    server = Codec(
        decode_start(unpack(pack(codes, bits), bits, size).astype(codes.dtype), ends, levels),
        levels,
    )
    np.testing.assert_array_equal(client.value, server.value)
    for k in range(30):
        visible = client.value + draws.normal(size=size) / (k + 1)
        width = float(2 * np.abs(visible - client.value).max()) if rule == "self" else 0.7 / (k + 1)
        codes, _ = client.encode(visible, width, random)
        assert codes.max() < levels
        packed = pack(codes, bits)
        assert packed.nbytes == packed_bytes(size, bits) == -(-bits * size // 8)
        server.decode(unpack(packed, bits, size), width)
        np.testing.assert_array_equal(client.value.view(np.uint64), server.value.view(np.uint64))


def test_F12_two_steps_of_two_clients():
    models, start = np.array([[1.0], [3.0]]), np.array([[2.0], [2.0]])
    states = SubStates.split(models, start, weight=1)
    np.testing.assert_array_equal(states.hidden[:, 0], [0.0, 4.0])
    codecs = [Codec(row, 8) for row in start]
    server = DecodedSum(start.sum(axis=0), 2)
    expected = [
        ((1.8, 2.2), (0.2, 3.8), (0.2, 0.7), (2, 5), (1.785714, 2.214286)),
        ((1.827143, 2.172857), (0.28, 3.72), (0.6, 0.1), (4, 3), (1.821429, 2.178571)),
    ]
    for k, (visible, hidden, uniforms, codes, values) in enumerate(expected):
        gain = 0.1 / (k + 1)
        heard = np.stack([codec.value for codec in codecs])
        states.step(server.average, heard, kappa=0.5, gain=gain, weight=1)
        np.testing.assert_allclose(states.visible[:, 0], visible, atol=1e-6)
        np.testing.assert_allclose(states.hidden[:, 0], hidden, atol=1e-6)
        knobs = Knobs(width=10 * gain, levels=8)
        assert knobs.step == pytest.approx((1 / 7, 0.0714286)[k], abs=1e-6)
        for i, codec in enumerate(codecs):
            got, saturated = codec.encode(states.visible[i], knobs.width, Uniforms(uniforms[i]))
            assert (got.tolist(), saturated) == ([codes[i]], 0)
            assert codec.value[0] == pytest.approx(values[i], abs=1e-6)
            server.add(got, knobs, draws=1)
        assert server.average[0] == pytest.approx(2.0, abs=1e-12)
        assert (states.visible + states.hidden).sum() == pytest.approx(8, rel=1e-12)


def test_F13_only_the_last_rounding_error_is_in_the_model():
    models, start = problem()
    mixing, intervals = (
        Mixing(gamma=0.25, coupling="harmonic", rounds=12),
        Intervals(rule="fixed", pi=120.0),
    )
    terms = terms_of(mixing, levels=16, start="global", interval="fixed")
    results, means = [], []
    for seed in range(400):
        random = SecureRandom.insecure(seed, "F13")
        seen = learning_round(terms, models, random, start=start, intervals=intervals)
        assert seen.saturated == 0
        results.append(seen.averages[-1])
        means.append(seen.visible.mean(axis=0))
    assert np.ptp(means, axis=0).max() < 1e-12
    mean = models.mean(axis=0)
    expected = mean + mixing.residual * (start - mean)
    np.testing.assert_allclose(means[0], expected, atol=1e-12)
    errors = np.array(results) - expected
    # Each coordinate's mean over 400 runs, in standard errors: beyond 4.5 once in 3,600 times.
    standard = errors.std(axis=0) / np.sqrt(len(errors))
    assert np.abs(errors.mean(axis=0) / standard).max() < 4.5
    bound = 40 * 120**2 * (0.25 / 12) ** 2 / (4 * 6 * 15**2)
    assert bound == pytest.approx(0.0463, abs=1e-4)
    # A value's share p of the way is about uniform, and p (1 - p) is 1/6 on average, of 1/4.
    measured = (errors**2).sum(axis=1).mean()
    assert 0.6 * bound < measured < 0.75 * bound


@pytest.mark.parametrize("multiplicities", [(1, 1, 1, 1), (3, 1, 5, 2)])
@pytest.mark.parametrize("levels", [5, 16, 256])
def test_the_sum_of_the_codes_is_all_that_the_server_needs(levels, multiplicities):
    size, draws, bits = 333, sum(multiplicities), (levels - 1).bit_length()
    random, values = SecureRandom.insecure(7), np.random.default_rng(7)
    start = values.normal(size=size)
    codecs = [Codec(start, levels) for _ in multiplicities]
    server = DecodedSum(draws * start, draws)
    modulus_bits = sum_bits(levels, draws)
    assert modulus_bits <= bits + int(np.ceil(np.log2(draws)))
    for k in range(8):
        knobs = Knobs(width=3.0 / (k + 1), levels=levels)
        masked, plain = np.zeros(size, np.uint64), CodeSum(size=size, levels=levels, weights=draws)
        masks = [random.uint64(size) for _ in codecs]
        for i, (codec, weight) in enumerate(zip(codecs, multiplicities, strict=True)):
            codes, _ = codec.encode(codec.value + values.normal(size=size), knobs.width, random)
            plain.add(pack(codes, bits), weight=weight)
            # Under a secure sum: masks that cancel in the sum, modulo the least power of 2.
            masked += codes * np.uint64(weight) + masks[i] - masks[i - 1]
        opened = masked & np.uint64(2**modulus_bits - 1)
        np.testing.assert_array_equal(opened, plain.total)
        server.add(opened, knobs, draws=draws)
        exact = np.average([codec.value for codec in codecs], axis=0, weights=multiplicities)
        np.testing.assert_allclose(server.average, exact, atol=1e-13)


def test_a_step_under_the_secure_sum_of_this_project():
    parties, size, levels = new_parties(5), 50, 256
    multiplicities = dict(zip(parties, (3, 1, 1, 2, 1), strict=True))
    bounds = Bounds(cohort=5, code_limit=levels // 2, largest_weight=3, modulus_bits=12)
    session = new_session(parties, bounds=bounds)
    deal(session, parties, parties)
    join(session, parties, parties)
    values, random = np.random.default_rng(8), SecureRandom.insecure(8)
    start, knobs = values.normal(size=size), Knobs(width=4.0, levels=levels)
    server, total = DecodedSum(8 * start, 8), MaskedSum(size + 1, bounds.modulus_bits)
    decoded = []
    for client, weight in multiplicities.items():
        codec = Codec(start, levels)
        codes, _ = codec.encode(start + values.normal(size=size), knobs.width, random)
        decoded.append(codec.value)
        vector = residues({"codes": centred(codes, levels)}, weight, bounds)
        masked = parties[client].mask(session.name, vector, bounds.modulus_bits)
        total.accumulate(client, {MASKED: pack(masked, bounds.modulus_bits)}, weight=1)
    reveal(session, parties, list(parties), parties)
    opened = session.open(total.total, list(parties))
    assert opened[-1] == 8  # the draws
    server.add(uncentred(opened[:-1], levels, draws=8), knobs, draws=8)
    exact = np.average(decoded, axis=0, weights=list(multiplicities.values()))
    np.testing.assert_allclose(server.average, exact, atol=1e-13)


def test_a_start_is_unbiased_and_within_a_step():
    vector = np.random.default_rng(0).normal(size=50)
    random = SecureRandom.insecure(0)
    decoded = []
    for _ in range(2000):
        codes, ends = encode_start(vector, 16, random)
        decoded.append(decode_start(codes, ends, 16))
    step = (ends[1] - ends[0]) / 15
    assert np.abs(np.array(decoded) - vector).max() <= step * (1 + 1e-4)
    assert np.abs(np.mean(decoded, axis=0) - vector).max() < 4.5 * step / 2 / np.sqrt(2000)


def test_a_start_of_equal_values_is_exact():
    for value in (0.0, 0.25, -3.0):
        codes, ends = encode_start(np.full(4, value), 8, SecureRandom())
        np.testing.assert_array_equal(decode_start(codes, ends, 8), np.full(4, value))


@pytest.mark.parametrize("split", [UniformSplit(), UniformSplit(eps_s=0.0)])
def test_the_snapped_start_keeps_the_sum_rule(split):
    models, _ = problem()
    random = SecureRandom.insecure(1)
    start = decode_start(*encode_start(split.visible(models[0], random), 16, random), 16)
    states = SubStates.split(models[0], start, weight=1)
    np.testing.assert_allclose(states.visible + states.hidden, 2 * models[0], atol=1e-14)
    states.step(start, start, kappa=0.5, gain=0.1, weight=1)
    assert (start != states.visible).all()  # the states go on, and the start stays as it was


@pytest.mark.parametrize(
    ("codes", "width", "text"),
    [
        (np.zeros(2, np.uint8), 1.0, r"codes = \(2,\): expected the shape \(3,\)"),
        (np.zeros(4, np.uint8), 1.0, r"codes = \(4,\)"),
        (np.full(3, 8, np.uint8), 1.0, "numbers from 0 to 7"),
        (np.zeros(3, np.uint8), -1.0, r"width = -1\.0"),
        (np.zeros(3, np.uint8), float("nan"), "width = nan"),
        (np.zeros(3, np.uint8), float("inf"), "width = inf"),
    ],
)
def test_messages_that_are_none_leave_the_value_as_it_is(codes, width, text):
    codec = Codec(np.arange(3.0), 8)
    with pytest.raises(InvalidParameterError, match=text):
        codec.decode(codes, width)
    np.testing.assert_array_equal(codec.value, np.arange(3.0))


def test_starts_that_are_none_are_refused():
    for ends in ((1.0, 0.0), (0.0, float("nan")), (0.0, float("inf"))):
        with pytest.raises(InvalidParameterError, match="width"):
            decode_start(np.zeros(1, np.uint8), ends, 8)
    with pytest.raises(InvalidParameterError, match="that float32 can hold"):
        encode_start(np.array([np.nan]), 8, SecureRandom())


def test_sums_that_no_draws_can_have_are_refused():
    server, knobs = DecodedSum(np.zeros(2), 3), Knobs(width=1.0, levels=8)
    with pytest.raises(InvalidParameterError, match="sums over 2 draws"):
        server.add(np.array([15, 0], np.uint64), knobs, draws=2)
    with pytest.raises(InvalidParameterError, match=r"codes = \(1,\)"):
        server.add(np.zeros(1, np.uint64), knobs, draws=3)
    with pytest.raises(InvalidParameterError, match="a sum below"):
        uncentred(np.array([-9]), 8, draws=2)
    with pytest.raises(InvalidParameterError, match="draws = 4"):
        server.add(np.zeros(2, np.uint64), knobs, draws=4)
    with pytest.raises(InvalidParameterError, match="draws = 0"):
        DecodedSum(np.zeros(2), 0)
    np.testing.assert_array_equal(server.average, np.zeros(2))
