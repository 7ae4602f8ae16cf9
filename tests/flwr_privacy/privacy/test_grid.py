import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.privacy.failures import FAILED_NAME
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid, GridMean, saturated

MOST_WEIGHT = 2**62 // CODE_LIMIT  # of all replies together


def exact(array) -> list[Fraction]:
    return [Fraction(float(value)) for value in np.asarray(array).reshape(-1)]


# -- The grid --------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-501, 501, 1.0, True, "0"])
def test_an_exponent_out_of_range_is_refused(exponent):
    with pytest.raises(InvalidParameterError, match=r"grid = .*an integer from -500 to 500"):
        CodeGrid(exponent)


@given(st.floats(1e-100, 1e100), st.integers(0, 30))
def test_the_coarsest_grid_with_so_many_steps_is_found(bound, bits):
    steps = Fraction(bound) / Fraction(CodeGrid.below(bound, bits=bits).step)
    assert 2**bits <= steps < 2 ** (bits + 1)


@pytest.mark.parametrize("exponent", [-500, -1, 0, 500])
def test_the_step_is_the_power_of_two_itself(exponent):
    assert Fraction(CodeGrid(exponent).step) == Fraction(2) ** exponent


vectors = arrays(np.float64, st.integers(0, 20), elements=st.floats(-1000, 1000))


@given(vectors, st.integers(-20, 12))
@example(np.array([0.999999, -0.999999, 1.0, -1.0, -0.0, 5e-324, -5e-324]), 0)
def test_values_are_truncated_towards_zero_exactly_so_that_no_norm_grows(vector, exponent):
    codes = CodeGrid(exponent).encode(vector)
    assert codes.dtype == np.int64
    step = Fraction(2) ** exponent
    assert codes.tolist() == [math.trunc(value / step) for value in exact(vector)]
    released = [step * code for code in codes.tolist()]
    assert sum(value**2 for value in released) <= sum(value**2 for value in exact(vector))


@given(st.data(), st.integers(1, 20), st.integers(-20, 12))
def test_two_vectors_come_apart_by_a_step_per_entry_at_most(data, size, exponent):
    one, other = (
        data.draw(arrays(np.float64, size, elements=st.floats(-1000, 1000))) for _ in range(2)
    )
    grid, step = CodeGrid(exponent), Fraction(2) ** exponent
    codes = (grid.encode(one) - grid.encode(other)).tolist()
    apart = [step * c - (a - b) for c, a, b in zip(codes, exact(one), exact(other), strict=True)]
    # In L2 by step * sqrt(d) at most, and so is the growth of their distance.
    assert sum(value**2 for value in apart) <= size * (2 * step) ** 2
    before = math.sqrt(sum((a - b) ** 2 for a, b in zip(exact(one), exact(other), strict=True)))
    after = math.sqrt(sum((step * code) ** 2 for code in codes))
    assert after <= before + float(step) * math.sqrt(size) * (1 + 1e-12) + 1e-12 * before


def test_they_come_nearly_as_far_apart_as_is_charged_for():
    grid, size = CodeGrid(-4), 100
    one, other = np.full(size, grid.step), np.full(size, grid.step * (1 - 1e-9))
    apart = np.linalg.norm(grid.step * (grid.encode(one) - grid.encode(other)))
    assert apart - np.linalg.norm(one - other) > 0.999 * grid.step * math.sqrt(size)


@pytest.mark.parametrize("exponent", [-500, -20, 0, 500])
def test_codes_reach_to_the_limit_and_not_beyond(exponent):
    grid = CodeGrid(exponent)
    ends = np.ldexp(np.array([CODE_LIMIT, -CODE_LIMIT], float), exponent)
    assert grid.encode(ends).tolist() == [CODE_LIMIT, -CODE_LIMIT]
    beyond = np.ldexp(float(CODE_LIMIT + 1), exponent)
    for vector in ([beyond], [-beyond, 0.0]):
        with pytest.raises(InvalidParameterError, match=f"grid = {exponent}: expected a step that"):
            grid.encode(np.array(vector))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_what_has_no_code_is_refused(value):
    with np.errstate(over="ignore"), pytest.raises(InvalidParameterError, match="grid = -500"):
        CodeGrid(-500).encode(np.array([0.0, value]))


def test_saturated_codes_are_int32_and_clipped_at_the_limit():
    codes = np.array([0, -5, CODE_LIMIT, CODE_LIMIT + 1, -CODE_LIMIT - 1, 2**62, -(2**62)])
    out = saturated(codes)
    assert out.dtype == np.int32
    limit = CODE_LIMIT
    assert out.tolist() == [0, -5, limit, limit, -limit, limit, -limit]


# -- The mean --------------------------------------------------------------------------------

START = {
    "n": np.array(7),
    "w": np.array([[1.0, -2.0], [0.5, 1e9]]),
    "s": np.array(0.25, np.float64),
}
NAMES = ["s", "w"]
GRID = CodeGrid(-7)


def reply(seed: int, limit: int = CODE_LIMIT) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    return {
        "w": draws.integers(-limit, limit, (2, 2), np.int32, endpoint=True),
        "s": np.array(draws.integers(-limit, limit, None, np.int32, endpoint=True)),
    }


def empty() -> GridMean:
    return GridMean(START, GRID, NAMES)


def sums(mean: GridMean) -> dict[str, list[int]]:
    return {name: array.reshape(-1).tolist() for name, array in mean.state()[0].items()}


replies = st.lists(
    st.tuples(st.integers(0, 2**32), st.integers(0, 10**7)), min_size=1, max_size=8
).filter(lambda entries: any(weight for _, weight in entries))


@given(replies, st.randoms(), st.booleans())
@settings(max_examples=60)
def test_the_sums_are_exact_and_the_mean_is_the_same_bits_in_any_order_and_grouping(
    entries, random, by_state
):
    named = [(str(i), seed, weight) for i, (seed, weight) in enumerate(entries)]
    whole = empty()
    for client, seed, weight in named:
        whole.accumulate(client, reply(seed), weight=weight)
    for name in NAMES:
        expected = np.zeros(START[name].size, object)
        for _, seed, weight in named:
            codes = reply(seed)[name].reshape(-1).tolist()
            expected += np.array([weight * code for code in codes], object)
        assert sums(whole)[name] == expected.tolist()

    random.shuffle(named)
    cut = random.randint(0, len(named))
    parts = []
    for group in (named[:cut], named[cut:]):
        part = empty()
        for client, seed, weight in group:
            part.accumulate(client, reply(seed), weight=weight)
        parts.append(empty().from_state(*part.state()) if by_state else part)
    parts[0].merge(parts[1])
    assert parts[0].weight == whole.weight
    assert parts[0].clients == whole.clients
    for name, array in whole.finish().items():
        assert parts[0].finish()[name].tobytes() == array.tobytes()


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1, max_size=6))
def test_the_mean_is_the_start_plus_the_exact_mean_rounded_once_to_float64(entries):
    mean = empty()
    for client, (seed, weight) in enumerate(entries):
        mean.accumulate(str(client), reply(seed, limit=2**20), weight=weight)
    result, total = mean.finish(), sum(weight for _, weight in entries)
    for name in NAMES:
        for i, start in enumerate(START[name].reshape(-1)):
            codes = sum(w * int(reply(s, limit=2**20)[name].flat[i]) for s, w in entries)
            update = float(Fraction(codes, total)) * GRID.step
            assert np.asarray(result[name]).reshape(-1)[i] == start + update


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0, 4)])
def test_weights_keep_their_dtype_and_shape(dtype, shape):
    start = {"w": np.ones(shape, dtype)}
    mean = GridMean(start, CodeGrid(-1), ["w"])
    mean.accumulate("a", {"w": np.ones(shape, np.int32)}, weight=2)
    result = np.asarray(mean.finish()["w"])
    assert result.dtype == start["w"].dtype
    assert result.shape == shape
    assert (result == 1.5).all()


def test_small_updates_of_small_floats_are_not_lost_in_their_precision():
    """The sum is made in float64, so float16 rounds once and not per reply."""
    mean = GridMean({"w": np.zeros(1, np.float16)}, CodeGrid(-20), ["w"])
    for client in range(3):
        mean.accumulate(str(client), {"w": np.array([client], np.int32)}, weight=1)
    assert mean.finish()["w"] == np.float16(2.0**-20)


@pytest.mark.parametrize(
    "kept",
    [
        np.array(3),
        np.array([True, False]),
        np.arange(4, dtype=np.uint8).reshape(2, 2),
        np.array(math.nan, np.float16),
        np.array([math.inf, -0.0, 5e-324]),
        np.zeros((0, 3), np.float32),
        np.array(2.5),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_what_is_kept_back_comes_back_as_it_was_and_as_a_copy(kept):
    start = {"before": kept, "w": np.zeros(2, np.float32), "after": kept}
    mean = GridMean(start, CodeGrid(0), ["w"])
    mean.accumulate("a", {"w": np.array([1, 2], np.int32)}, weight=1)
    result = mean.finish()
    assert list(result) == list(start)
    for name in ("before", "after"):
        assert result[name].dtype == kept.dtype
        assert result[name].shape == kept.shape
        assert result[name].tobytes() == kept.tobytes()
        assert not np.shares_memory(result[name], kept)


def test_the_model_it_starts_from_is_not_changed():
    start = {"w": np.zeros(2, np.float32)}
    mean = GridMean(start, CodeGrid(0), ["w"])
    mean.accumulate("a", {"w": np.array([1, 2], np.int32)}, weight=1)
    for _ in range(2):
        assert mean.finish()["w"].tolist() == [1, 2]
    assert start["w"].tolist() == [0, 0]


def test_the_largest_codes_with_the_largest_weights_do_not_overflow():
    mean = empty()
    codes = {name: np.full(START[name].shape, CODE_LIMIT, np.int32) for name in NAMES}
    half = MOST_WEIGHT // 2
    mean.accumulate("a", codes, weight=half)
    mean.accumulate("b", {name: -array for name, array in codes.items()}, weight=half)
    assert sums(mean) == {"s": [0], "w": [0] * 4}
    mean = empty()
    for client in "ab":
        mean.accumulate(client, codes, weight=half)
    assert sums(mean)["s"] == [2 * half * CODE_LIMIT]
    assert 2 * half * CODE_LIMIT < 2**63
    with pytest.raises(ReplyRefusedError, match="the sum could leave 64 bits") as refusal:
        mean.accumulate("c", codes, weight=MOST_WEIGHT)
    assert refusal.value.reason == "range"
    assert sums(mean)["s"] == [2 * half * CODE_LIMIT]
    assert mean.clients == {"a", "b"}


@pytest.mark.parametrize(
    "weight", [0.5, -1, -1.0, math.nan, math.inf, 2.0**53, 1e300, MOST_WEIGHT + 2]
)
def test_a_weight_that_is_no_whole_number_or_too_large_is_refused(weight):
    mean = empty()
    with pytest.raises(ReplyRefusedError) as refusal:
        mean.accumulate("a", reply(1), weight=weight)
    assert refusal.value.reason in ("weight", "range")
    assert mean.clients == set()
    assert mean.weight == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"w": np.zeros((2, 2), np.float32)}, "dtype"),
        ({"w": np.zeros((2, 2))}, "dtype"),
        ({"w": np.full((2, 2), 2**31)}, "range"),
        ({"w": np.full((2, 2), -(2**40))}, "range"),
        ({"w": np.full((2, 2), 2**63, np.uint64)}, "range"),
        ({"w": np.zeros(4, np.int32)}, "shape"),
        ({"s": np.zeros(1, np.int32)}, "shape"),
        ({"n": np.array(7)}, "names"),
    ],
)
def test_codes_that_are_none_are_refused_and_leave_no_trace(change, reason):
    mean = empty()
    mean.accumulate("a", reply(1), weight=3)
    before = sums(mean)
    with pytest.raises(ReplyRefusedError) as refusal:
        mean.accumulate("b", {**reply(2), **change}, weight=1)
    assert refusal.value.reason == reason
    assert sums(mean) == before
    assert (mean.weight, mean.clients) == (3, {"a"})


def test_narrow_integers_are_codes_too():
    mean = GridMean({"w": np.zeros(2)}, CodeGrid(0), ["w"])
    mean.accumulate("a", {"w": np.array([1, -3], np.int8)}, weight=1)
    mean.accumulate("b", {"w": np.array([3, 5], np.int64)}, weight=1)
    assert mean.finish()["w"].tolist() == [2, 1]


def test_a_reply_that_is_a_view_is_not_written_into():
    codes = {name: array.copy() for name, array in reply(3).items()}
    for array in codes.values():
        array.setflags(write=False)
    mean = empty()
    mean.accumulate("a", codes, weight=5)
    mean.accumulate("b", codes, weight=5)
    assert sums(mean)["s"] == [10 * int(codes["s"])]


def test_a_client_counts_once_in_folds_and_in_merges():
    mean, other = empty(), empty()
    mean.accumulate("a", reply(1), weight=1)
    with pytest.raises(ReplyRefusedError, match="duplicate"):
        mean.accumulate("a", reply(2), weight=1)
    other.accumulate("a", reply(2), weight=1)
    before = sums(mean)
    with pytest.raises(ReplyRefusedError, match=r"clients \['a'\] are in both"):
        mean.merge(other)
    assert sums(mean) == before


def test_without_weight_there_is_no_mean():
    mean = empty()
    mean.accumulate("a", reply(1), weight=0)
    with pytest.raises(ZeroDivisionError, match="weights of all replies are zero"):
        mean.finish()
    mean.accumulate("b", reply(2), weight=2)
    alone = empty()
    alone.accumulate("b", reply(2), weight=7)
    for name, array in alone.finish().items():
        assert mean.finish()[name].tobytes() == array.tobytes()


# -- States of nodes that played several clients ----------------------------------------------


def state(weight: float = 3) -> tuple[dict[str, np.ndarray], dict]:
    mean = empty()
    mean.accumulate("a", reply(1), weight=weight, metrics={"sigma": 2.0})
    mean.accumulate("b", reply(2), weight=weight)
    return mean.state()


def test_a_state_survives_with_its_metrics_and_can_go_on():
    mean = empty().from_state(*state())
    assert mean.clients == {"a", "b"}
    assert mean.weight == 6
    assert mean.metrics() == {"sigma": 2.0}
    mean.accumulate("c", reply(3), weight=1)
    whole = empty()
    for client, seed, weight in (("a", 1, 3), ("b", 2, 3), ("c", 3, 1)):
        whole.accumulate(client, reply(seed), weight=weight)
    assert sums(mean) == sums(whole)
    assert mean.finish()["n"] == START["n"]


def test_the_state_of_nobody_is_empty():
    arrays_, fields = empty().state()
    assert arrays_ == {}
    mean = empty().from_state(arrays_, fields)
    assert (mean.weight, mean.clients) == (0, set())
    assert all(array.dtype == np.int64 for array in state()[0].values())


_NO_METRICS = {
    key: [] for key in ("metric-keys", "metric-weights", "metric-lengths", "metric-sums")
}


@pytest.mark.parametrize(
    ("arrays_", "fields", "reason"),
    [
        ({"w": np.zeros((2, 2))}, {}, "dtype"),
        ({"w": np.full((2, 2), np.nan)}, {}, "dtype"),
        ({"w": np.full((2, 2), 2**63, np.uint64)}, {}, "range"),
        ({"w": np.full((2, 2), 6 * 2**31 + 2**10)}, {}, "range"),
        ({"w": np.full((2, 2), -(2**63))}, {}, "range"),
        ({"w": np.full((2, 2), 2**63 - 1)}, {}, "range"),
        ({"w": np.zeros(4, np.int64)}, {}, "shape"),
        ({"x": np.zeros(4, np.int64)}, {}, "names"),
        ({}, {"weight": 0.5, "metric-weights": [0.5]}, "weight"),
        ({}, {"weight": -6.0, **_NO_METRICS}, "weight"),
        ({}, {"weight": math.nan}, "malformed"),
        ({}, {"weight": math.inf}, "malformed"),
        ({}, {"weight": "6"}, "malformed"),
        ({}, {"weight": None}, "malformed"),
        ({}, {"weight": 2.0**40}, "range"),
        ({}, {"weight": 1e308}, "range"),
        ({}, {"clients": []}, "malformed"),
        ({}, {"clients": "ab"}, "malformed"),
        ({}, {"clients": [1, 2]}, "malformed"),
        ({}, {"metric-weights": [9.0]}, "malformed"),
        ({}, {"metric-lengths": [-2]}, "malformed"),
        ({}, {"metric-sums": [1.0, 2.0]}, "malformed"),
    ],
)
def test_a_hostile_state_is_refused(arrays_, fields, reason):
    good_arrays, good_fields = state()
    with pytest.raises(ReplyRefusedError) as refusal:
        empty().from_state({**good_arrays, **arrays_}, {**good_fields, **fields})
    assert refusal.value.reason == reason


def test_the_rows_above_start_from_a_good_state():
    empty().from_state(*state())


def test_a_state_with_a_missing_array_is_refused():
    arrays_, fields = state()
    del arrays_["s"]
    with pytest.raises(ReplyRefusedError, match="names"):
        empty().from_state(arrays_, fields)


def test_sums_that_fit_their_weights_one_by_one_are_refused_where_they_would_overflow_together():
    codes = {name: np.full(START[name].shape, CODE_LIMIT, np.int32) for name in NAMES}
    nodes = []
    for client in "ab":
        node = empty()
        node.accumulate(client, codes, weight=MOST_WEIGHT)
        nodes.append(empty().from_state(*node.state()))
    mean = empty()
    mean.merge(nodes[0])
    before = sums(mean)
    with pytest.raises(ReplyRefusedError, match="could leave 64 bits"):
        mean.merge(nodes[1])
    assert sums(mean) == before
    assert mean.clients == {"a"}


def test_the_largest_sum_a_state_may_claim_stays_within_64_bits():
    """A sum is checked against its weight with a little room; the room must not overflow."""
    weight = MOST_WEIGHT
    largest = int(weight * 2**31 * (1 + 1e-9))
    for sign in (1, -1):
        arrays_ = {name: np.full(START[name].shape, sign * largest) for name in NAMES}
        fields = {"weight": float(weight), "clients": ["a"]}
        mean = empty()
        mean.merge(mean.from_state(arrays_, fields))
        assert sums(mean)["s"] == [sign * largest]
        assert np.isfinite(mean.finish()["w"]).all()


def test_a_sum_over_another_model_is_not_merged():
    other = GridMean({"w": np.zeros(3)}, GRID, ["w"])
    other.accumulate("z", {"w": np.zeros(3, np.int32)}, weight=1)
    with pytest.raises(ReplyRefusedError, match="different templates"):
        empty().merge(other)


def test_failures_are_counted_beside_the_model_and_are_no_part_of_it() -> None:
    mean = GridMean({"w": np.zeros(1)}, GRID, ["w"], failed_code=8)
    assert mean.failed == 0
    for client, code in enumerate((8, 0, -4)):
        codes = {"w": np.zeros(1, np.int32), FAILED_NAME: np.array([code], np.int32)}
        mean.accumulate(str(client), codes, weight=1)
    assert mean.failed == 0.5
    assert list(mean.finish()) == ["w"]
    plain = GridMean({FAILED_NAME: np.zeros(1)}, CodeGrid(0), [FAILED_NAME])  # a model's own name
    plain.accumulate("a", {FAILED_NAME: np.array([3], np.int32)}, weight=1)
    assert plain.finish()[FAILED_NAME] == 3
    assert plain.failed == 0
