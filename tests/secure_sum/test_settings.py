import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_privacy.coding.packing import pack
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.grid import CODE_LIMIT
from flwr_privacy.secure_sum import Bounds, MaskedSum, SecureSum
from flwr_privacy.secure_sum.masked import MASKED, residues, values_of

# The modulus.


def exact_bounds(cohort: int, code_limit: int, largest_weight: int) -> Bounds:
    """Return bounds with the smallest modulus that is allowed."""
    bits = Bounds.bits_needed(cohort, code_limit=code_limit, largest_weight=largest_weight)
    return Bounds(
        cohort=cohort, code_limit=code_limit, largest_weight=largest_weight, modulus_bits=bits
    )


def summed(codes: list[int], weights: list[int], bounds: Bounds) -> list[int]:
    """Sum vectors of one code and the weight, as the server does it, without masks."""
    total = MaskedSum(2, bounds.modulus_bits)
    for i, (code, weight) in enumerate(zip(codes, weights, strict=True)):
        vector = residues({"w": np.array([code])}, weight, bounds)
        total.accumulate(str(i), {MASKED: pack(vector, bounds.modulus_bits)}, weight=1)
    return values_of(total.total, bounds.modulus_bits).tolist()


@pytest.mark.parametrize("cohort", [2, 3, 4])
@pytest.mark.parametrize("code_limit", [1, 2, 3])
@pytest.mark.parametrize("largest_weight", [1, 2, 3])
def test_the_modulus_is_the_smallest_for_all_vectors_by_enumeration(
    cohort, code_limit, largest_weight
):
    # All products of a code and a weight, in every combination of clients.
    products = {
        code * weight
        for code in range(-code_limit, code_limit + 1)
        for weight in range(largest_weight + 1)
    }
    sums = {sum(some) for some in itertools.combinations_with_replacement(products, cohort)}
    weights = {
        sum(some)
        for some in itertools.combinations_with_replacement(range(largest_weight + 1), cohort)
    }
    needed = next(
        bits
        for bits in itertools.count(2)
        if all((s + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) == s for s in sums | weights)
    )
    parameters = {"code_limit": code_limit, "largest_weight": largest_weight}
    assert Bounds.bits_needed(cohort, **parameters) == needed
    bounds = Bounds(cohort=cohort, modulus_bits=needed, **parameters)
    for codes in itertools.product((-code_limit, 0, code_limit), repeat=cohort):
        heaviest = [largest_weight] * cohort
        expected = [sum(codes) * largest_weight, largest_weight * cohort]
        assert summed(list(codes), heaviest, bounds) == expected
    # Every sum is told from every other, and is read as itself.
    every = sorted(sums)
    residue = np.array([s % 2**needed for s in every], np.uint64)
    assert values_of(residue, needed).tolist() == every
    less = np.array([s % 2 ** (needed - 1) for s in every], np.uint64)
    assert values_of(less, needed - 1).tolist() != every
    with (
        pytest.raises(
            InvalidParameterError,
            match=f"modulus_bits = {needed - 1}: expected at least {needed} for",
        )
        if needed > 3
        else pytest.raises(InvalidParameterError, match="modulus_bits")
    ):
        Bounds(cohort=cohort, modulus_bits=needed - 1, **parameters)


def test_a_known_sum_of_the_weights_costs_its_logarithm_in_bits():
    for bits, total in itertools.product(range(2, 17), range(2, 201)):
        limit = 2 ** (bits - 1) - 1
        bounds = SecureSum().bounds(
            50, code_limit=limit, largest_weight=min(total, 20), total_weight=total
        )
        assert bounds.modulus_bits <= bits + (total - 1).bit_length()
        assert limit * total <= 2 ** (bounds.modulus_bits - 1) - 1
        assert bounds.modulus_bits == 2 or limit * total > 2 ** (bounds.modulus_bits - 2) - 1


def test_the_sum_does_not_wrap_where_one_client_has_most_of_a_known_weight():
    bounds = SecureSum().bounds(3, code_limit=7, largest_weight=6, total_weight=8)
    assert bounds.modulus_bits == 4 + 3
    for weights in ([6, 2, 0], [6, 1, 1], [0, 2, 6]):
        assert summed([7] * 3, weights, bounds) == [56, 8]
        assert summed([-7] * 3, weights, bounds) == [-56, 8]
    with pytest.raises(InvalidParameterError, match=r"largest_weight = 6"):
        residues({"w": np.zeros(1, np.int64)}, 7, bounds)


def test_a_known_weight_that_cannot_be_reached_costs_nothing():
    limits = {"code_limit": 7, "largest_weight": 2}
    assert SecureSum().bounds(3, total_weight=100, **limits).modulus_bits == (
        SecureSum().bounds(3, **limits).modulus_bits
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"total_weight": 5}, "total_weight = 5: expected an integer from 6 to 2147483649"),
        ({"total_weight": -1}, "total_weight = -1: expected an integer from 6"),
        ({"total_weight": True}, "total_weight = True: expected an integer"),
        ({"total_weight": 2**40}, "total_weight = 1099511627776: expected an integer from 6 to"),
        (
            {"modulus_bits": 6},
            "modulus_bits = 6: expected at least 7 for 3 clients with codes up to 7 and weights up "
            "to 6, 8 in all",
        ),
    ],
)
def test_known_weights_that_cannot_be_are_refused(change, text):
    fit = {"cohort": 3, "code_limit": 7, "largest_weight": 6, "total_weight": 8, "modulus_bits": 7}
    Bounds(**fit)
    with pytest.raises(InvalidParameterError, match=re.escape(text)):
        Bounds(**{**fit, **change})


def test_a_known_weight_leaves_room_for_cohorts_whose_largest_weights_would_not_fit():
    limits = {"code_limit": 1, "largest_weight": 2**31}
    with pytest.raises(InvalidParameterError, match="largest_weight = 2147483648: expected at mos"):
        SecureSum().bounds(3, **limits)
    assert SecureSum().bounds(3, total_weight=2**31, **limits).modulus_bits == 33


@given(st.integers(2, 10**6), st.integers(1, CODE_LIMIT), st.integers(1, 2**31))
def test_bits_needed_is_exact(cohort, code_limit, largest_weight):
    largest = cohort * code_limit * largest_weight
    bits = Bounds.bits_needed(cohort, code_limit=code_limit, largest_weight=largest_weight)
    assert largest <= 2 ** (bits - 1) - 1
    assert largest > 2 ** (bits - 2) - 1


@pytest.mark.parametrize("cohort", [2, 3, 5, 100])
def test_regression_codes_are_around_zero_for_any_number_of_clients(cohort):
    # Fed-BioMed #898: an offset that assumed two parties.
    bounds = exact_bounds(cohort, 2**15 - 1, 1)
    for codes in (
        [2**15 - 1] * cohort,
        [1 - 2**15] * cohort,
        [0] * cohort,
        [2**15 - 1] * (cohort - 1) + [1 - 2**15],
    ):
        assert summed(codes, [1] * cohort, bounds) == [sum(codes), cohort]


def test_regression_the_modulus_grows_with_the_number_of_clients():
    # Fed-BioMed #1089, #1210: sums that overflowed when there were more clients.
    settings = SecureSum(modulus_bits=23)
    limits = {"code_limit": 2**15 - 1, "largest_weight": 1}
    for cohort in (2, 100, 127, 128):
        bounds = settings.bounds(cohort, **limits)
        assert bounds.modulus_bits == 23
        assert summed([2**15 - 1] * cohort, [1] * cohort, bounds)[0] == cohort * (2**15 - 1)
        assert summed([1 - 2**15] * cohort, [1] * cohort, bounds)[0] == cohort * (1 - 2**15)
    for cohort, bits in ((129, 24), (256, 24), (257, 25), (1000, 26)):
        assert SecureSum().bounds(cohort, **limits).modulus_bits == bits
        text = (
            rf"secure_sum\.modulus_bits = 23: expected at least {bits} for {cohort} clients with "
            "codes up to 32767 and weights up to 1"
        )
        with pytest.raises(InvalidParameterError, match=text):
            settings.bounds(cohort, **limits)


@pytest.mark.parametrize(("weight", "bits"), [(1, 33), (2**16, 49), (2**30, 63)])
def test_regression_products_of_the_largest_codes_and_weights_do_not_overflow(weight, bits):
    # FedML: int64 overflow. Two clients with the largest of both take 63 bits.
    bounds = exact_bounds(2, CODE_LIMIT, weight)
    assert bounds.modulus_bits == bits
    for dtype in (np.int32, np.int64):
        for code in (CODE_LIMIT, -CODE_LIMIT):
            vector = residues({"w": np.array([code, 0, 1], dtype)}, weight, bounds)
            assert vector.dtype == np.uint64
            expected = [code * weight % 2**bits, 0, weight, weight]
            assert vector.tolist() == expected
            assert summed([code, code], [weight, weight], bounds) == [2 * code * weight, 2 * weight]


@pytest.mark.parametrize("code", [1235, -1235, 8641, -8641, 2**31 - 1, -(2**31), 2**62, -(2**63)])
def test_regression_a_value_outside_is_refused_and_neither_clipped_nor_wrapped(code):
    # Flower #4982: values beyond the clipping range were clipped without a word.
    bounds = exact_bounds(3, 1234, 4)
    arrays = {"a": np.zeros((2, 2), np.int64), "b": np.array([5, code, -7])}
    with pytest.raises(InvalidParameterError) as refusal:
        residues(arrays, 4, bounds)
    assert str(refusal.value) == (
        "b = 'a value outside': expected codes from -1234 to 1234"
    )  # and not the value, which is private
    arrays["b"][1] = 1234 if code > 0 else -1234
    expected = [0, 0, 0, 0, 20, 4 * int(arrays["b"][1]), -28, 4]
    assert values_of(residues(arrays, 4, bounds), bounds.modulus_bits).tolist() == expected


@pytest.mark.parametrize("weight", [-1, 5, 987654321, 2**70, True, 2.0, np.int64(2)])
def test_a_weight_outside_is_refused_without_being_told(weight):
    bounds = exact_bounds(3, 1234, 4)
    with pytest.raises(InvalidParameterError) as refusal:
        residues({"w": np.zeros(2, np.int64)}, weight, bounds)
    assert str(refusal.value) == (
        "weight = 'a value outside': expected a whole number from 0 to largest_weight = 4"
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint64, np.bool_])
def test_only_codes_are_summed(dtype):
    with pytest.raises(InvalidParameterError, match=r"w = .*: expected codes on a grid"):
        residues({"w": np.zeros(2, dtype)}, 1, exact_bounds(2, 5, 1))


def test_weights_of_nobody_and_no_arrays():
    bounds = exact_bounds(2, 5, 3)
    assert residues({"w": np.array([5, -5])}, 0, bounds).tolist() == [0, 0, 0]
    assert residues({"w": np.zeros((0, 3), np.int32)}, 3, bounds).tolist() == [3]
    assert residues({}, 2, bounds).tolist() == [2]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cohort": 1}, "cohort = 1: expected an integer from 2"),
        ({"code_limit": 0}, "code_limit = 0: expected an integer from 1"),
        ({"code_limit": 2**31}, "code_limit = 2147483648: expected an integer from 1"),
        ({"largest_weight": 0}, "largest_weight = 0: expected an integer from 1"),
        ({"largest_weight": 2**31 + 1}, "largest_weight = 2147483649: expected an integer from 1"),
        ({"modulus_bits": 65}, "modulus_bits = 65: expected an integer from 2 to 64"),
        ({"modulus_bits": 12}, "secure_sum.modulus_bits = 12: expected at least 13 for 5 clients"),
        ({"modulus_bits": True}, "modulus_bits = True: expected an integer"),
    ],
)
def test_bounds_that_cannot_be_are_refused(change, text):
    fit = {"cohort": 5, "code_limit": 100, "largest_weight": 8, "modulus_bits": 13}
    Bounds(**fit)
    with pytest.raises(InvalidParameterError, match=text):
        Bounds(**{**fit, **change})


# What the user gives.


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"threshold": 1}, "secure_sum.threshold = 1: expected an integer of at least 2"),
        ({"threshold": 2.5}, "secure_sum.threshold = 2.5: expected an integer of at least 2"),
        ({"threshold": True}, "secure_sum.threshold = True: expected an integer"),
        ({"colluders": -1}, "secure_sum.colluders = -1: expected an integer of at least 0"),
        (
            {"threshold": 3, "colluders": 3},
            "secure_sum.threshold = 3: expected more than colluders = 3: they could open every "
            "vector by themselves",
        ),
        ({"threshold": 3, "colluders": 4}, "threshold = 3: expected more than colluders = 4"),
        (
            {"value_range": 0.0},
            "secure_sum.value_range = 0.0: expected a finite number from 1e-100",
        ),
        (
            {"value_range": 1.5e100},
            "secure_sum.value_range = 1.5e+100: expected a finite number from",
        ),
        ({"value_range": float("nan")}, "secure_sum.value_range = nan: expected a finite number"),
        ({"bits": 1}, "secure_sum.bits = 1: expected an integer from 2 to 31"),
        ({"bits": 32}, "secure_sum.bits = 32: expected an integer from 2 to 31"),
        ({"largest_weight": 0}, "secure_sum.largest_weight = 0: expected an integer from 1"),
        ({"modulus_bits": 1}, "secure_sum.modulus_bits = 1: expected an integer from 2 to 64"),
        ({"modulus_bits": 65}, "secure_sum.modulus_bits = 65: expected an integer from 2 to 64"),
        ({"neighbours": 0}, "secure_sum.neighbours = 0: expected an integer from 2 to 254"),
        ({"neighbours": 255}, "secure_sum.neighbours = 255: expected an integer from 2 to 254"),
        ({"neighbours": 7}, "secure_sum.neighbours = 7: expected even"),
    ],
)
def test_settings_that_cannot_be_are_refused(parameters, text):
    with pytest.raises(InvalidParameterError) as refusal:
        SecureSum(**parameters)
    assert text in str(refusal.value)


@pytest.mark.parametrize(
    ("parameters", "cohort", "text"),
    [
        ({}, 1, "cohort = 1: expected at least 2 clients: the sum over one client is its vector"),
        (
            {"threshold": 6},
            5,
            "secure_sum.threshold = 6: expected at most the 5 clients of a cohort",
        ),
        ({"colluders": 3}, 5, "secure_sum.threshold = 3: expected more than colluders = 3"),
        ({"colluders": 51}, 100, "secure_sum.threshold = 51: expected more than colluders = 51"),
        (
            {"modulus_bits": 38},
            5,
            "secure_sum.modulus_bits = 38: expected at least 39 for 5 clients with codes up to "
            "524288 and weights up to 65536",
        ),
        (
            {"bits": 31, "largest_weight": 2**31},
            3,
            "secure_sum.largest_weight = 2147483648: expected at most 715827883 for 3 clients",
        ),
    ],
)
def test_settings_that_do_not_fit_a_cohort_are_refused(parameters, cohort, text):
    settings = SecureSum(**parameters)
    with pytest.raises(InvalidParameterError) as refusal:
        settings.bounds(cohort)
    assert text in str(refusal.value)


def test_a_threshold_is_a_majority_and_beyond_all_colluders_in_every_cohort():
    for cohort in range(2, 300):
        settings = SecureSum()
        threshold, colluders = settings.threshold_of(cohort), settings.colluders_of(cohort)
        assert cohort < 2 * threshold <= cohort + 2  # just more than half
        assert 5 * colluders <= cohort < 5 * (colluders + 1)
        assert colluders < threshold
        allowed = []
        for given_threshold in range(2, min(cohort, 40) + 3):
            try:
                allowed.append(SecureSum(threshold=given_threshold).threshold_of(cohort))
            except InvalidParameterError:
                assert given_threshold > cohort
                continue
            assert allowed[-1] == max(threshold, given_threshold)


@given(st.floats(1e-100, 1e100), st.integers(2, 31))
def test_the_grid_is_the_finest_that_covers_the_range(value_range, bits):
    settings = SecureSum(value_range=value_range, bits=bits)
    assert 1 <= settings.code_limit <= 2 ** (bits - 1)
    assert round(value_range / settings.grid.step) <= settings.code_limit
    finer = value_range / (settings.grid.step / 2)
    assert finer > 2 ** (bits - 1)


def test_a_scheme_may_have_bounds_of_its_own():
    bounds = SecureSum().bounds(10, code_limit=7, largest_weight=1)
    assert bounds == exact_bounds(10, 7, 1)
    assert bounds.modulus_bits == 8
    assert SecureSum(modulus_bits=64).bounds(10, code_limit=7).modulus_bits == 64
