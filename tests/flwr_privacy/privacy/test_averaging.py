import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flwr_privacy.privacy.averaging import ReplyRefusedError, WeightedMean

TEMPLATE = {"w": np.zeros((2, 3), np.float32), "count": np.array(0), "flag": np.array([True])}


def reply(seed: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    return {
        "w": draws.normal(size=(2, 3)).astype(np.float32),
        "count": np.array(draws.integers(100)),
        "flag": np.array([bool(draws.integers(2))]),
    }


finite = arrays(
    np.float32, (2, 3), elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
)


@given(st.lists(st.tuples(finite, st.integers(1, 10**6)), min_size=1, max_size=8), st.randoms())
def test_mean_is_the_exact_mean_in_any_order_and_grouping(replies, random):
    template = {"w": np.zeros((2, 3), np.float32)}
    named = [(str(i), array, weight) for i, (array, weight) in enumerate(replies)]
    random.shuffle(named)
    cut = random.randint(0, len(named))
    parts = [WeightedMean(template), WeightedMean(template)]
    for part, group in zip(parts, (named[:cut], named[cut:]), strict=True):
        for client, array, weight in group:
            part.accumulate(client, {"w": array}, weight=weight)
    parts[0].merge(parts[1])
    total = sum(weight for _, _, weight in named)
    exact = np.array(
        [
            math.fsum(float(array.flat[i]) * weight for _, array, weight in named) / total
            for i in range(6)
        ]
    ).reshape(2, 3)
    scale = max(float(np.abs(array).max()) for _, array, _ in named)
    # One rounding to float32; sums that cancel keep float64's error of their largest term.
    np.testing.assert_allclose(parts[0].finish()["w"], exact, rtol=1.2e-7, atol=scale * 1e-14)


def test_dtypes_and_shapes_are_those_of_the_template():
    mean = WeightedMean(TEMPLATE)
    mean.accumulate("a", reply(1), weight=1)
    mean.accumulate("b", reply(2), weight=2)
    result = mean.finish()
    for name, like in TEMPLATE.items():
        assert result[name].dtype == like.dtype
        assert result[name].shape == like.shape
    expected = (reply(1)["count"] + 2 * reply(2)["count"]) / 3
    assert result["count"] == np.rint(expected)


@pytest.mark.parametrize(
    ("change", "weight", "reason"),
    [
        ({"w": np.full((2, 3), np.nan, np.float32)}, 1.0, "not finite"),
        ({"w": np.full((2, 3), -np.inf, np.float32)}, 1.0, "not finite"),
        ({"w": np.zeros((3, 2), np.float32)}, 1.0, "shape"),
        ({"w": np.zeros((2, 3), np.complex64)}, 1.0, "dtype"),
        ({"extra": np.zeros(1)}, 1.0, "names"),
        ({}, math.nan, "weight"),
        ({}, -1.0, "weight"),
    ],
)
def test_an_unfit_reply_is_refused_and_leaves_no_trace(change, weight, reason):
    mean, untouched = WeightedMean(TEMPLATE), WeightedMean(TEMPLATE)
    for target in (mean, untouched):
        target.accumulate("a", reply(1), weight=3, metrics={"loss": 1.0})
    with pytest.raises(ReplyRefusedError) as refusal:
        mean.accumulate("b", {**reply(2), **change}, weight=weight, metrics={"loss": 9.0})
    assert refusal.value.reason == reason
    assert mean.clients == {"a"}
    assert mean.metrics() == untouched.metrics()
    for name, array in untouched.finish().items():
        np.testing.assert_array_equal(mean.finish()[name], array)


def test_a_client_counts_once():
    mean = WeightedMean(TEMPLATE)
    mean.accumulate("a", reply(1), weight=1)
    with pytest.raises(ReplyRefusedError, match="duplicate"):
        mean.accumulate("a", reply(2), weight=1)
    with pytest.raises(ReplyRefusedError, match=r"clients \['a'\] are in both"):
        mean.merge(mean)


def test_state_round_trip_and_metrics():
    mean = WeightedMean(TEMPLATE)
    mean.accumulate("a", reply(1), weight=1, metrics={"loss": 2.0, "each": [1, 2], "one": [5]})
    mean.accumulate("b", reply(2), weight=3, metrics={"loss": math.nan, "each": [3, 6], "one": [5]})
    arrays_, fields = mean.state()
    copy = WeightedMean(TEMPLATE).from_state(arrays_, fields)
    assert copy.clients == {"a", "b"}
    # The NaN is left out of the mean of its own metric only.
    assert copy.metrics() == {"loss": 2.0, "each": [2.5, 5.0], "one": [5.0]}
    for name, array in mean.finish().items():
        np.testing.assert_array_equal(copy.finish()[name], array)


@pytest.mark.parametrize(("dtype", "largest"), [(np.int32, 2**31 - 1), (np.int64, 2**63 - 1024)])
def test_the_largest_integers_do_not_turn_over(dtype, largest):
    """Between 2**63 - 1024 and 2**63, which int64 does not hold, float64 has no number."""
    mean = WeightedMean({"n": np.zeros(1, dtype)})
    mean.accumulate("a", {"n": np.array([np.iinfo(dtype).max], dtype)}, weight=1)
    assert mean.finish()["n"].tolist() == [largest]


def test_a_single_float64_whose_sum_could_overflow_is_refused():
    mean = WeightedMean({"w": np.zeros(1)})
    with pytest.raises(ReplyRefusedError, match=r"range: array 'w' has values beyond 2\*\*900"):
        mean.accumulate("a", {"w": np.array([-(2.0**901)])}, weight=1)


def test_state_that_does_not_fit_is_refused():
    mean = WeightedMean(TEMPLATE)
    mean.accumulate("a", reply(1), weight=1)
    arrays_, fields = mean.state()
    with pytest.raises(ReplyRefusedError, match="not finite"):
        WeightedMean(TEMPLATE).from_state({**arrays_, "w": arrays_["w"] * np.nan}, fields)
    with pytest.raises(ReplyRefusedError, match="names"):
        WeightedMean(TEMPLATE).from_state({"w": arrays_["w"]}, fields)


def test_zero_weight_has_no_mean():
    mean = WeightedMean(TEMPLATE)
    mean.accumulate("a", reply(1), weight=0)
    with pytest.raises(ZeroDivisionError, match="weights of all replies are zero"):
        mean.finish()
