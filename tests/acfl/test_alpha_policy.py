"""What weighs the rounds of an ACFL training: its policies, and what they remember."""

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from flwr_privacy.acfl.weights import AlphaPolicy, Weights, stable_weights
from flwr_privacy.errors import InvalidParameterError


def close(value: float | tuple[float, ...], expected: Any, rel: float = 1e-12) -> bool:
    return value == pytest.approx(expected, rel=rel, abs=1e-14)


def weigh(policy: AlphaPolicy, t: int = 1, **changes: Any) -> Weights | None:
    usual = {"answered": 2, "devices": 4, "squares": 10.0, "energy": 3.0}
    return policy.weigh(t=t, **{**usual, **changes})


def test_policies_give_the_weights_of_their_formulas() -> None:
    bounds = {"gradient_bound": 3.0, "model_bound": 2.0}
    assert weigh(AlphaPolicy("estimated", straggler_rate=0.3)) == stable_weights(0.3, 5, 3)
    assert weigh(AlphaPolicy("bounds", straggler_rate=0.3, **bounds)) == stable_weights(0.3, 9, 3)
    horizon = AlphaPolicy("horizon", straggler_rate=0.3)
    assert [weigh(horizon, t=t) for t in (1, 7)] == [
        stable_weights(0.3, 5, 3),
        stable_weights(0.3, 5, 21),
    ]
    for alpha in (0, 0.5, 1):
        fixed = AlphaPolicy(alpha, straggler_rate=0.3)
        assert weigh(fixed) == (alpha, pytest.approx((1 - alpha) / 0.7))
    assert weigh(AlphaPolicy(0, straggler_rate=0)) == (0.0, 1.0)


@pytest.mark.parametrize("policy", ["estimated", "bounds", "horizon"])
def test_policies_count_the_noise_of_the_gradients(policy: str) -> None:
    bounds = {"gradient_bound": math.sqrt(5), "model_bound": 2.0}
    single = AlphaPolicy(policy, straggler_rate=0.3, **bounds)
    found = weigh(single, gradient_noise=0.5)
    assert found == pytest.approx(stable_weights(0.3, 5, 3, gradient_noise=0.5))
    assert found is not None
    assert close(found.coded + 0.7 * found.received, 1.0)


def test_squares_below_zero_count_as_none() -> None:
    policy = AlphaPolicy("estimated", straggler_rate=0.3)
    assert weigh(policy, squares=-4.0, gradient_noise=2.0) == stable_weights(
        0.3, 0.0, 3.0, gradient_noise=2.0
    )
    assert policy.beta2 == 0


@pytest.mark.parametrize("policy", ["estimated", "bounds", "horizon", 0.25])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_equal_rates_of_the_devices_are_one_rate(policy: str | float, noise: float) -> None:
    p, squares, N = 0.3, 10.0, 4
    options: dict[str, Any] = {"gradient_bound": 2.0, "model_bound": 1.0}
    one = AlphaPolicy(policy, straggler_rate=p, **options)
    each = AlphaPolicy(policy, straggler_rate=dict.fromkeys("abcd", p), **options)
    changes = {"answered": N, "gradient_noise": noise, "t": 3}
    expected = weigh(one, squares=squares, **changes)
    found = weigh(each, squares=p / (1 - p) * squares, **changes)
    assert expected is not None
    assert found is not None
    assert close(found.coded, expected.coded)
    assert close(found.received / (1 - p), expected.received)
    assert one.rate == p
    assert each.rate is None


def test_F11_a_round_without_an_answer_uses_the_last_estimate() -> None:
    policy = AlphaPolicy("estimated", straggler_rate=0.25)
    empty = {"answered": 0, "squares": 0.0}
    assert weigh(policy, 1, **empty) is None
    assert weigh(policy, 2) == stable_weights(0.25, 5.0, 3.0)
    assert weigh(policy, 3, energy=4.0, **empty) == stable_weights(0.25, 5.0, 4.0)
    assert policy.beta2 == 5.0


def test_F11_weights_that_need_no_estimate_are_there_without_an_answer() -> None:
    empty = {"answered": 0, "squares": 0.0}
    assert weigh(AlphaPolicy(0.5, straggler_rate=0.2), **empty) == (0.5, 0.625)
    bounds = AlphaPolicy("bounds", straggler_rate=0.2, gradient_bound=2, model_bound=1)
    assert weigh(bounds, **empty) == stable_weights(0.2, 4, 3)


@pytest.mark.parametrize(
    ("predictable", "expected", "mean"),
    [(False, [2.222222, 4.615385, 2.4, 5.777778], 3.753846), (True, None, 4.0)],
)
def test_F12_an_estimate_of_the_same_round_biases_the_gradient(
    predictable: bool, expected: list[float] | None, mean: float
) -> None:
    G, found = np.array([1.0, 3.0]), []
    for mask in itertools.product((0, 1), repeat=2):
        policy = AlphaPolicy("estimated", straggler_rate=0.5, predictable=predictable)
        policy.weigh(t=1, answered=2, devices=2, squares=10.0, energy=4.0)  # beta2 is 5
        came = np.array(mask)
        weights = policy.weigh(
            t=2, answered=sum(mask), devices=2, squares=float(came @ G**2), energy=4.0
        )
        assert weights is not None
        found.append(weights.coded * 4 + weights.received * float(came @ G))
    if expected is not None:
        assert found == pytest.approx(expected, abs=5e-7)
    assert np.mean(found) == pytest.approx(mean, abs=5e-7)


def test_a_predictable_policy_looks_back_one_round() -> None:
    policy = AlphaPolicy("estimated", straggler_rate=0.25, predictable=True)
    assert weigh(policy, 1, answered=0, squares=0.0) is None
    assert weigh(policy, 2, squares=10.0) == stable_weights(0.25, 5.0, 3.0)  # has only its own
    assert weigh(policy, 3, squares=30.0) == stable_weights(0.25, 5.0, 3.0)
    assert weigh(policy, 4, answered=0, squares=0.0) == stable_weights(0.25, 15.0, 3.0)
    assert weigh(policy, 5, squares=2.0) == stable_weights(0.25, 15.0, 3.0)


def test_an_unknown_rate_is_estimated_from_all_rounds() -> None:
    policy = AlphaPolicy("estimated", straggler_rate=None)
    assert policy.rate is None
    for t, (answered, rate) in enumerate([(4, 0.0), (2, 0.25), (3, 0.25), (0, 7 / 16)], start=1):
        found = weigh(policy, t, answered=answered, squares=5.0 * answered)
        assert policy.rate == pytest.approx(rate)
        assert found == pytest.approx(stable_weights(rate, 5.0, 3.0))


def test_an_unknown_rate_leaves_one_device_at_least() -> None:
    policy = AlphaPolicy(0.5, straggler_rate=None)
    assert weigh(policy, answered=0, squares=0.0) == (0.5, 2.0)
    assert policy.rate == 0.75
    alone = AlphaPolicy(0.5, straggler_rate=None)
    assert weigh(alone, devices=1, answered=0, squares=0.0) == (0.5, 0.5)


def test_a_predictable_rate_is_that_of_the_rounds_before() -> None:
    policy = AlphaPolicy("estimated", straggler_rate=None, predictable=True)
    rates = []
    for t, answered in enumerate((2, 4, 0), start=1):
        weigh(policy, t, answered=answered, squares=5.0 * answered)
        rates.append(policy.rate)
    assert rates == [0.5, 0.5, 0.25]


@pytest.mark.parametrize("predictable", [False, True])
@pytest.mark.parametrize("rate", [None, 0.25, {"a": 0.1, "b": 0.4, "c": 0.4, "d": 0.0}])
def test_a_policy_goes_on_from_its_state(
    rate: float | Mapping[str, float] | None, predictable: bool
) -> None:
    def fresh() -> AlphaPolicy:
        return AlphaPolicy("estimated", straggler_rate=rate, predictable=predictable)

    whole, first = fresh(), fresh()
    rounds = [(2, 9.0), (0, 0.0), (3, 4.0), (0, 0.0), (4, 1.0)]
    for t, (answered, squares) in enumerate(rounds[:2], start=1):
        for policy in (whole, first):
            weigh(policy, t, answered=answered, squares=squares)
    second = fresh()
    second.load(json.loads(json.dumps(first.state())))
    assert second.rate == whole.rate
    assert second.beta2 == whole.beta2
    for t, (answered, squares) in enumerate(rounds[2:], start=3):
        expected = weigh(whole, t, answered=answered, squares=squares)
        assert weigh(second, t, answered=answered, squares=squares) == expected


@pytest.mark.parametrize(
    ("policy", "changes", "name"),
    [
        ("adaptive", {}, "alpha"),
        (1.1, {}, "alpha"),
        (-0.1, {}, "alpha"),
        (True, {}, "alpha"),
        (None, {}, "alpha"),
        ("estimated", {"straggler_rate": 1.0}, "straggler_rate"),
        ("estimated", {"straggler_rate": -0.1}, "straggler_rate"),
        ("estimated", {"straggler_rate": {"a": 0.5, "b": 1.0}}, "straggler_rate"),
        ("estimated", {"straggler_rate": {}}, "straggler_rate"),
        ("bounds", {}, "gradient_bound"),
        ("bounds", {"gradient_bound": 1.0}, "model_bound"),
        ("bounds", {"gradient_bound": 0.0, "model_bound": 1.0}, "gradient_bound"),
        ("estimated", {"model_bound": -1.0}, "model_bound"),
    ],
)
def test_what_is_no_policy_is_refused(policy: Any, changes: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name} = "):
        AlphaPolicy(policy, **{"straggler_rate": 0.2, **changes})


@pytest.mark.parametrize(
    "changes",
    [{"t": 0}, {"answered": 5}, {"answered": -1}, {"devices": 0}, {"energy": -1.0}],
)
def test_a_round_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError):
        weigh(AlphaPolicy("estimated", straggler_rate=0.2), **changes)
