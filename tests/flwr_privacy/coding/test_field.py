"""Products modulo a prime, uniform elements, and elements on the wire."""

import struct
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_privacy.coding import field as module
from flwr_privacy.coding.field import MERSENNE_31, PrimeField
from flwr_privacy.coding.primes import is_prime, largest_prime_below
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.privacy.randomness import SecureRandom

FIELD = PrimeField()
# The smallest; one product; the last below 2**23.5 and the next, of one and of two limbs; two.
# With 134223233, one term more in a sum would be too many for a float.
PRIMES = (3, 5, 97, 4194301, 11863279, 11863289, 16777213, 134223233, 2147483629, MERSENNE_31)


def draw(p: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([p, *shape, seed]).integers(0, p, shape)


def exact(A: np.ndarray, B: np.ndarray, p: int) -> np.ndarray:
    return (A.astype(object) @ B.astype(object) % p).astype(np.int64)


def extremes(field: PrimeField) -> list[int]:
    """Return elements whose limbs are the largest, of either sign, and odd and even ones."""
    h, w = (field.p - 1) // 2, field._radix
    centred = {h, h - 1, w // 2, w - w // 2, h // w * w, h // w * w - w // 2, h // w * w + w // 2}
    centred |= {(h // w - 1) * w + w // 2}
    return sorted({sign * x % field.p for x in centred for sign in (1, -1) if x <= h})


# Products


def test_F8_products_are_those_of_python_integers_for_random_elements():
    for p in PRIMES:
        A, B = draw(p, 7, 5000), draw(p, 5000, 6)
        assert np.array_equal(PrimeField(p).matmul(A, B), exact(A, B, p))


@pytest.mark.parametrize("p", [MERSENNE_31, 2147483629, 4194301, 11863279])
def test_F8_products_of_constant_matrices_are_exact(p):
    field = PrimeField(p)
    values = {v % p for v in (0, 1, p - 1, 2**30, 65535, 2**31 - 2 - 65536)}
    for a, b in product(values, values):
        got = field.matmul(np.full((3, 5000), a), np.full((5000, 2), b))
        assert (got == 5000 * a * b % p).all()


@pytest.mark.parametrize("p", PRIMES)
@pytest.mark.parametrize("extra", [0, 1])
def test_sums_of_the_largest_limbs_are_exact(p, extra):
    field = PrimeField(p)
    # As many terms as one sum takes, where all of them have the largest limbs, and one more.
    inner = min(field._length, 5000) + extra
    values = np.array(extremes(field))
    A = np.repeat(values[:, None], inner, axis=1)
    B = np.repeat(values[None, :], inner, axis=0)
    expected = (inner * np.outer(values.astype(object), values) % p).astype(np.int64)
    for left, right in product((A, field.prepare(A)), (B, field.prepare(B))):
        assert np.array_equal(field.matmul(left, right), expected)


@pytest.mark.parametrize("p", PRIMES)
def test_no_sum_of_products_leaves_what_a_float_holds(p):
    field = PrimeField(p)
    h, length = (p - 1) // 2, field._length
    limbs = field.prepare(np.array([[*extremes(field), 0, 1, p - 1]])).limbs
    largest = int(np.abs(limbs).max())
    carried = field._radix * (h + 2) if len(limbs) == 2 else 0
    assert length * largest * h + carried + 2 * p <= 2**53
    assert length >= 256


@pytest.mark.parametrize("p", PRIMES)
def test_an_operand_is_its_matrix_in_centred_limbs(p):
    field = PrimeField(p)
    matrix = np.concatenate([draw(p, 40, 50), np.full((1, 50), p // 2), np.full((1, 50), p - 1)])
    operand = field.prepare(matrix)
    assert operand.shape == matrix.shape
    assert len(operand.limbs) == (1 if p < 2**23.5 else 2)
    whole = operand.limbs[0] if p < 2**23.5 else operand.limbs[0] * field._radix + operand.limbs[1]
    assert np.abs(whole).max() <= (p - 1) // 2
    assert np.array_equal(whole.astype(np.int64) % p, matrix)
    assert "array" not in repr(operand)


@pytest.mark.parametrize("p", [97, 4194301, MERSENNE_31])
def test_products_are_those_of_galois(p):
    import galois

    element = galois.GF(p)
    A, B = draw(p, 5, 9), draw(p, 9, 4)
    expected = np.array(element(A) @ element(B)).astype(np.int64)
    assert np.array_equal(PrimeField(p).matmul(A, B), expected)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PRIMES),
    st.integers(0, 9),
    st.integers(0, 400),
    st.integers(0, 9),
    st.integers(0, 2**32),
)
def test_a_product_does_not_depend_on_which_factor_was_prepared(p, m, k, n, seed):
    field = PrimeField(p)
    A, B = draw(p, m, k, seed=seed), draw(p, k, n, seed=seed)
    expected = exact(A, B, p) if k else np.zeros((m, n), np.int64)
    for left, right in product((A, field.prepare(A)), (B, field.prepare(B))):
        got = field.matmul(left, right)
        assert got.dtype == np.int64
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("shape", [(3, 400, 500), (500, 400, 3), (300, 2, 300)])
def test_large_products_are_the_same_block_by_block(shape, monkeypatch):
    m, k, n = shape
    A, B = draw(MERSENNE_31, m, k), draw(MERSENNE_31, k, n)
    monkeypatch.setattr(module, "_BLOCK", 1 << 8)
    assert np.array_equal(FIELD.matmul(A, B), exact(A, B, MERSENNE_31))
    assert np.array_equal(FIELD.matmul(A, FIELD.prepare(B)), exact(A, B, MERSENNE_31))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_elements_of_any_integer_dtype_count_and_are_left_alone(dtype):
    A, B = draw(97, 4, 6).astype(dtype), draw(97, 3, 6).astype(dtype).T  # not contiguous
    before = A.copy(), B.copy()
    assert np.array_equal(PrimeField(97).matmul(A, B), exact(*before, 97))
    assert np.array_equal(A, before[0])
    assert np.array_equal(B, before[1])


@pytest.mark.parametrize(
    ("A", "B", "text"),
    [
        (
            np.zeros((2, 3), int),
            np.zeros((2, 2), int),
            "B = '2 rows': expected 3, as A has columns",
        ),
        (
            np.full((1, 1), 97),
            np.ones((1, 1), int),
            "elements = 'a value outside': expected integers from 0 to p - 1 = 96",
        ),
        (
            np.ones((1, 1), int),
            np.full((1, 1), -1),
            "elements = 'a value outside': expected integers from 0 to p - 1 = 96",
        ),
        (
            np.ones((1, 1)),
            np.ones((1, 1), int),
            "elements = 'an array of float64': expected integers",
        ),
        (
            np.ones(1, int),
            np.ones((1, 1), int),
            "A = 'an array of shape (1,)': expected two axes",
        ),
        (
            FIELD.prepare(np.ones((1, 1), int)),
            np.ones((1, 1), int),
            "A = 'an operand modulo 2147483647': expected one modulo p = 97",
        ),
    ],
)
def test_factors_that_do_not_fit_are_refused(A, B, text):
    with pytest.raises(InvalidParameterError) as error:
        PrimeField(97).matmul(A, B)
    assert str(error.value) == text


# Single elements


@pytest.mark.parametrize("p", PRIMES)
def test_any_integers_are_reduced(p):
    edges = [-(2**63), -(2**63) + 1, 2**63 - 1, -p - 1, -p, -1, 0, 1, p - 1, p, p + 1, 2 * p, p * p]
    values = np.concatenate([edges, np.random.default_rng(p).integers(-(2**63), 2**63 - 1, 10**4)])
    expected = [int(v) % p for v in values]
    assert PrimeField(p).reduce(values).tolist() == expected
    large = np.array([2**64 - 1, 2**63, 0, p], np.uint64)
    assert PrimeField(p).reduce(large).tolist() == [int(v) % p for v in large]
    narrow = np.array([-128, -1, 127], np.int8)
    assert PrimeField(p).reduce(narrow).tolist() == [v % p for v in (-128, -1, 127)]


def test_only_integers_are_reduced():
    with pytest.raises(InvalidParameterError, match="an array of float64': expected integers"):
        FIELD.reduce(np.array([0.5]))


def test_F10_signed_elements_lie_around_zero_and_a_large_sum_comes_back_wrapped():
    field = PrimeField(101)
    assert field.signed(np.array([49, 50, 51, 100])).tolist() == [49, 50, -50, -1]
    assert int(field.signed(field.reduce(np.array(60)))) == -41
    for p in PRIMES:
        half = (p - 1) // 2
        ends = np.array([0, half, half + 1, p - 1])
        assert PrimeField(p).signed(ends).tolist() == [0, half, -half, -1]


# Primes


def test_primes_are_those_of_the_sieve():
    sieve = np.ones(20_000, bool)
    sieve[:2] = False
    for i in range(2, 142):
        if sieve[i]:
            sieve[i * i :: i] = False
    assert [is_prime(n) for n in range(20_000)] == sieve.tolist()


@pytest.mark.parametrize(
    "composite",
    [
        2047,  # strong pseudoprimes to the first 1, 2, 3, 4, 9 and 12 primes
        1373653,
        25326001,
        3215031751,
        3825123056546413051,
        318665857834031151167461,
        561,
        -7,
        46337 * 46339,
    ],
)
def test_pseudoprimes_are_no_primes(composite):
    assert not is_prime(composite)


def test_primes_near_the_ends_are_known():
    assert largest_prime_below(2**31) == MERSENNE_31
    assert largest_prime_below(MERSENNE_31) == 2147483629
    assert largest_prime_below(2**24) == 16777213
    assert largest_prime_below(3) == 2
    assert is_prime(2**61 - 1)
    with pytest.raises(InvalidParameterError, match="n = 2: expected an integer of at least 3"):
        largest_prime_below(2)
    with pytest.raises(InvalidParameterError, match="expected an integer of at most"):
        is_prime(2**89 - 1)


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (91, "p = 91: expected a prime (the next below is 89)"),
        (2**31 - 3, "p = 2147483645: expected a prime (the next below is 2147483629)"),
        (2, "p = 2: expected an integer from 3 to 2147483647"),
        (2**31 + 11, "p = 2147483659: expected an integer from 3 to 2147483647"),
        (97.0, "p = 97.0: expected an integer from 3 to 2147483647"),
    ],
)
def test_a_field_of_another_size_is_refused(p: Any, text):
    with pytest.raises(InvalidParameterError) as error:
        PrimeField(p)
    assert str(error.value) == text


# Uniform elements


@pytest.mark.parametrize("p", [3, 5, 131, 251, 257])  # 131 and 257: about half is refused
def test_every_element_is_drawn_as_often(p):
    draws = 200_000
    elements = PrimeField(p).uniform(draws, SecureRandom.insecure(0, "field", p))
    counts = np.bincount(elements, minlength=p)
    assert counts.size == p
    statistic = float(((counts - draws / p) ** 2).sum() / (draws / p))
    # Chi-square with p - 1 degrees of freedom: five standard deviations above its mean.
    assert statistic < p - 1 + 5 * np.sqrt(2 * (p - 1))


@pytest.mark.parametrize("p", [4194301, 2**30 + 3, MERSENNE_31])
def test_the_mean_of_large_elements_and_each_bit_are_those_of_uniform_ones(p):
    draws = 400_000
    elements = PrimeField(p).uniform((draws // 4, 4), SecureRandom.insecure(0, "large", p))
    assert elements.shape == (draws // 4, 4)
    assert elements.dtype == np.int64
    assert elements.min() >= 0
    assert elements.max() < p
    # Five standard errors: p / sqrt(12) for one element, and the lowest bit's is 1/2.
    assert abs(elements.mean() - (p - 1) / 2) < 5 * p / np.sqrt(12 * draws)
    assert abs((elements & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(draws)
    assert abs((elements > p // 2).mean() - 0.5) < 5 * 0.5 / np.sqrt(draws)


def test_the_bits_are_those_of_the_given_source_and_not_reused():
    random = SecureRandom.insecure(1)
    words = np.empty(1000, np.uint32)
    SecureRandom.insecure(1).fill(words)
    first = FIELD.uniform(1000, random)
    assert np.array_equal(first, words & MERSENNE_31)
    assert not np.array_equal(FIELD.uniform(1000, random), first)
    assert FIELD.uniform((0, 3), random).shape == (0, 3)


def test_refused_words_are_drawn_again_until_all_are_elements():
    given = [[97, 1, 2, 127, 4, 5, 6, 128 + 7], [255, 97], [96, 100], [128 + 96]]

    class Dictated(SecureRandom):
        def fill(self, out: np.ndarray) -> None:
            out[:] = given.pop(0)

    elements = PrimeField(97).uniform((2, 4), Dictated())  # 7 bits of a word count
    assert elements.tolist() == [[96, 1, 2, 96], [4, 5, 6, 7]]
    assert not given


# The wire


def test_wide_elements_are_words_of_32_bits():
    elements = np.array([[0, 1], [2**31 - 2, 65536]])
    assert FIELD.bits == 32
    data = FIELD.to_bytes(elements)
    assert data == struct.pack("<4I", 0, 1, 2**31 - 2, 65536)
    assert FIELD.from_bytes(data, 4).tolist() == elements.reshape(-1).tolist()


@pytest.mark.parametrize(("p", "bits"), [(3, 2), (97, 7), (4194301, 22), (16777213, 24)])
def test_narrow_elements_are_packed_without_gaps(p, bits):
    field = PrimeField(p)
    elements = draw(p, 101)
    assert field.bits == bits
    stream = sum(int(v) << i * bits for i, v in enumerate(elements))
    data = field.to_bytes(elements)
    assert data == stream.to_bytes(-(-101 * bits // 8), "little")
    back = field.from_bytes(data, 101)
    assert back.dtype == np.int64
    assert np.array_equal(back, elements)


def test_a_prime_beyond_24_bits_has_32_on_the_wire():
    assert PrimeField(largest_prime_below(2**25)).bits == 32
    assert PrimeField(largest_prime_below(2**24)).bits == 24


@pytest.mark.parametrize("p", PRIMES)
@pytest.mark.parametrize("value", [-1, None, 2**32])
def test_what_is_no_element_is_not_written(p, value):
    with pytest.raises(InvalidParameterError) as error:
        PrimeField(p).to_bytes(np.array([0, p if value is None else value]))
    text = f"elements = 'a value outside': expected integers from 0 to p - 1 = {p - 1}"
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("p", "data", "size", "text"),
    [
        (MERSENNE_31, bytes(7), 2, "7 bytes: expected 8 for 2 elements of 32 bits"),
        (MERSENNE_31, bytes(9), 2, "9 bytes: expected 8 for 2 elements of 32 bits"),
        (
            MERSENNE_31,
            struct.pack("<I", 2**31 - 1),
            1,
            "a value that is no element of the field: expected 0 to 2147483646",
        ),
        (MERSENNE_31, b"\xff" * 4, 1, "a value that is no element of the field"),
        (97, bytes([97]), 1, "a value that is no element of the field: expected 0 to 96"),
        (97, bytes([128]), 1, "bits after the last value: expected 1 zeros"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(p, data, size, text):
    with pytest.raises(ProtocolError, match=text):
        PrimeField(p).from_bytes(data, size)
