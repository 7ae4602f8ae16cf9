"""The delays of FedVS's experiments: expected waits, the readings of section 6.2, `HalfSlow`."""

import inspect
import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_privacy.coding.thresholds import recovery_threshold
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.fedvs.clock import transfer_seconds
from flwr_privacy.fedvs.delays import (
    HalfSlow,
    expected_order_statistic,
    expected_wait,
    mean_delays,
    sharing_factor,
)
from flwr_privacy.simulations.research.fedvs.paper.conventions import conventions
from flwr_privacy.stragglers import StragglerModel

NAMES = tuple("abcde")


def slow(**values: Any) -> HalfSlow:
    return HalfSlow(**{"clients": NAMES, "batch_size": 16, "K": 2, **values})


# -- Means --------------------------------------------------------------------------------------


def test_half_of_the_clients_are_slow_with_means_from_2_and_4_over_N_to_4() -> None:
    means = mean_delays(28)
    assert means[:14].tolist() == [0.1] * 14
    np.testing.assert_allclose(means[14:], [2 + 4 * i / 28 for i in range(1, 15)])
    assert means[-1] == 4.0


def test_of_an_odd_number_the_smaller_half_is_slow() -> None:
    assert (mean_delays(11) > 1).sum() == 5


def test_another_number_may_be_slow() -> None:
    assert (mean_delays(16, stragglers=10) > 1).sum() == 10
    assert not (mean_delays(4, stragglers=0) > 1).any()


# -- Order statistics ---------------------------------------------------------------------------


@pytest.mark.parametrize(("N", "mean"), [(1, 3.0), (7, 0.1), (40, 2.0)])
def test_waits_for_equal_clients_are_differences_of_harmonic_numbers(N: int, mean: float) -> None:
    for r in range(1, N + 1):
        expected = mean * sum(1 / i for i in range(N - r + 1, N + 1))
        assert expected_order_statistic([mean] * N, r) == pytest.approx(expected, rel=1e-9)


def latest(means: Sequence[float]) -> float:
    """Return the expected maximum by inclusion and exclusion."""
    rates = [1 / mean for mean in means]
    return sum(
        (-1) ** (size + 1) / sum(chosen)
        for size in range(1, len(rates) + 1)
        for chosen in combinations(rates, size)
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
def test_first_and_last_of_unequal_clients_have_closed_forms(means: list[float]) -> None:
    assert expected_order_statistic(means, len(means)) == pytest.approx(latest(means), rel=1e-8)
    first = 1 / sum(1 / mean for mean in means)
    assert expected_order_statistic(means, 1) == pytest.approx(first, rel=1e-8)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=9))
def test_the_waits_for_all_ranks_add_up_to_all_means(means: list[float]) -> None:
    waits = [expected_order_statistic(means, r) for r in range(1, len(means) + 1)]
    assert sum(waits) == pytest.approx(sum(means), rel=1e-8)
    assert waits == sorted(waits)


def test_a_wait_is_the_mean_of_draws() -> None:
    means = mean_delays(10)
    draws = np.sort(np.random.default_rng(0).exponential(means, (40_000, 10)), axis=1)
    for r in (3, 5, 7, 10):
        error = draws[:, r - 1].std() / math.sqrt(len(draws))
        assert abs(draws[:, r - 1].mean() - expected_wait(10, r)) < 4.5 * error


def wait(N: int, K: int, T: int = 1) -> float:
    return expected_wait(N, recovery_threshold(K, T))


def test_F19_expected_waits_of_28_clients() -> None:
    assert expected_wait(28, 28) == pytest.approx(10.307, abs=5e-4)
    assert expected_order_statistic([0.1] * 14, 14) == pytest.approx(0.325, abs=5e-4)
    expected = {1: 0.022, 3: 0.062, 6: 0.186, 7: 0.331, 10: 1.975, 13: 6.987}
    for K, seconds in expected.items():
        assert wait(28, K) == pytest.approx(seconds, abs=5e-4)
    for T, seconds in {1: 0.022, 2: 0.040, 4: 0.090, 6: 0.186, 8: 0.707, 13: 6.987}.items():
        assert wait(28, 1, T) == pytest.approx(seconds, abs=5e-4)


def test_F19_expected_waits_of_fewer_clients() -> None:
    assert [round(expected_wait(N, N), 3) for N in (6, 10, 11)] == [6.181, 7.438, 7.170]
    assert [round(wait(6, K), 3) for K in (1, 2)] == [0.168, 2.739]
    assert [round(wait(10, K), 3) for K in (1, 2, 3, 4)] == [0.074, 0.198, 1.408, 4.080]
    assert [round(wait(11, K), 3) for K in (1, 2, 3, 5)] == [0.059, 0.134, 0.646, 7.170]


def test_F19_waits_grow_with_K_and_with_T_and_depend_on_their_sum_alone() -> None:
    by_K, by_T = (
        [wait(28, *pair) for pair in pairs]
        for pairs in ([(K, 1) for K in range(1, 14)], [(1, T) for T in range(1, 14)])
    )
    assert by_K == by_T == sorted(by_K)
    assert len(set(by_K)) == 13


# -- The readings -------------------------------------------------------------------------------

# N, K, batch size; factor and seconds of the share phase by (log_base, batch); upload; wait
READINGS = {
    "FashionMNIST": (28, 6, 256, {
        ("2", "coded"): (0.542, 5.59), ("e", "coded"): (0.260, 2.68),
        ("2", "real"): (0.090, 0.93), ("e", "real"): (0.043, 0.45),
    }, 0.19, 10.31),
    "Parkinson": (10, 2, 16, {
        ("2", "coded"): (1.379, 10.25), ("e", "coded"): (0.663, 4.92),
        ("2", "real"): (0.690, 5.13), ("e", "real"): (0.331, 2.46),
    }, 0.20, 7.44),
    "Credit card": (11, 2, 32, {
        ("2", "coded"): (0.748, 5.37), ("e", "coded"): (0.359, 2.58),
        ("2", "real"): (0.374, 2.68), ("e", "real"): (0.180, 1.29),
    }, 0.13, 7.17),
    "HandWritten": (6, 1, 32, {
        ("2", "coded"): (0.209, 1.29), ("e", "coded"): (0.100, 0.62),
        ("2", "real"): (0.209, 1.29), ("e", "real"): (0.100, 0.62),
    }, 0.17, 6.18),
    "Caltech-7": (6, 1, 8, {
        ("2", "coded"): (0.835, 5.17), ("e", "coded"): (0.401, 2.48),
        ("2", "real"): (0.835, 5.17), ("e", "real"): (0.401, 2.48),
    }, 0.17, 6.18),
}  # fmt: skip


@pytest.mark.parametrize("name", READINGS)
def test_F20_all_readings_of_section_6_2(name: str) -> None:
    N, K, batch_size, expected, upload, wait = READINGS[name]
    found = conventions(N, K, 1, batch_size)
    assert {(one.log_base, one.batch) for one in found} == set(expected)
    for one in found:
        factor, share = expected[one.log_base, one.batch]
        assert one.factor == pytest.approx(factor, abs=6e-4)
        assert one.share == pytest.approx(share, abs=1.5e-2)  # from a factor of three digits
        assert (one.upload, one.wait) == pytest.approx((upload, wait), abs=5e-3)
        assert one.speedup == one.wait / (one.share + one.upload)


def test_F20_a_round_is_slower_than_waiting_for_all_under_the_literal_reading() -> None:
    by_reading = {(one.log_base, one.batch): one.speedup for one in conventions(10, 2, 1, 16)}
    assert by_reading["2", "coded"] < 0.75
    assert min(speedup for key, speedup in by_reading.items() if key != ("2", "coded")) > 1
    best = max(one.speedup for one in conventions(28, 6, 1, 256))
    assert 16 < best < 17


def test_the_share_phase_is_the_wait_for_all_times_the_factor() -> None:
    means = sharing_factor(10, 8, log_base="2") * mean_delays(10)
    found = {(one.log_base, one.batch): one.share for one in conventions(10, 1, 1, 8)}
    assert found["2", "real"] == pytest.approx(expected_order_statistic(means, 10))


def test_a_code_that_needs_more_clients_than_there_are_has_no_conventions() -> None:
    with pytest.raises(InvalidParameterError, match=r"N = 10: .* at least 11"):
        conventions(10, 5, 1, 16)


def test_300_megabits_are_37_500_000_bytes_a_second() -> None:
    assert transfer_seconds(37_500_000) == 1
    assert transfer_seconds(1000, 8) == 1e-3


# -- HalfSlow -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["finish_time", "race"])
def test_it_can_stand_where_a_straggler_model_stands(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (HalfSlow, StragglerModel))
    assert ours == theirs


def times(delays: HalfSlow, client: str, phase: str, rounds: int = 4000) -> np.ndarray[Any, Any]:
    return np.array(
        [
            delays.finish_time(seed=3, server_round=t, client_id=client, phase=phase)
            for t in range(1, rounds + 1)
        ]
    )


@pytest.mark.parametrize("client", ["a", "e"])
def test_uploads_are_exponential_with_the_clients_mean(client: str) -> None:
    found = times(slow(), client, "train")
    mean = {"a": 0.1, "e": 2 + 4 * 2 / 5}[client]
    assert abs(found.mean() - mean) < 4.5 * mean / math.sqrt(len(found))
    for t in (0.5, 1.0, 2.0):  # the distribution function
        share = (found <= t * mean).mean()
        p = 1 - math.exp(-t)
        assert abs(share - p) < 4.5 * math.sqrt(p * (1 - p) / len(found))


@pytest.mark.parametrize(
    ("values", "rows", "log"),
    [
        ({}, 8, math.log),
        ({"batch": "real"}, 16, math.log),
        ({"log_base": "2"}, 8, math.log2),
        ({"log_base": "2", "batch": "real"}, 16, math.log2),
    ],
)
def test_sharing_takes_a_part_of_the_clients_own_mean(
    values: dict[str, Any], rows: int, log: Any
) -> None:
    delays = slow(**values)
    for client in NAMES:
        expected = log(5) ** 2 / rows * delays.mean_of(client)
        assert delays.mean_of(client, phase="weights") == pytest.approx(expected)


def test_draws_for_sharing_have_that_mean() -> None:
    delays = slow()
    found = times(delays, "d", "weights")
    mean = delays.mean_of("d", phase="weights")
    assert abs(found.mean() - mean) < 4.5 * mean / math.sqrt(len(found))


def test_clients_can_take_seconds_of_their_own() -> None:
    own = dict(zip(NAMES, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))
    delays = slow(scale=0.0, upload_seconds=own)
    for client, seconds in own.items():
        assert (times(delays, client, "train", 3) == seconds).all()
        assert not times(delays, client, "weights", 3).any()


def test_all_other_phases_take_no_time() -> None:
    delays = slow(share_seconds=1.0, upload_seconds=2.0)
    for phase in ("enrol", "code", "predict"):
        assert not times(delays, "e", phase, rounds=5).any()


def test_delays_are_drawn_anew_in_every_round_for_every_client_and_phase() -> None:
    delays = slow()
    drawn = {
        delays.finish_time(seed=seed, server_round=t, client_id=client, phase=phase, request=k)
        for seed in (0, 1)
        for t in (1, 2)
        for client in NAMES
        for phase in ("weights", "train")
        for k in (0, 1)
    }
    assert len(drawn) == 2 * 2 * 5 * 2 * 2


def test_the_stragglers_stay_the_same() -> None:
    delays = slow(clients=("z", "y", "x", "w"))
    assert delays.fast == ("z", "y")
    assert [delays.mean_of(name) > 1 for name in "zyxw"] == [False, False, True, True]
    assert times(delays, "w", "train", 300).mean() > 10 * times(delays, "z", "train", 300).mean()


def test_the_fixed_seconds_are_added_and_the_scale_is_for_delays_alone() -> None:
    plain, longer = slow(), slow(share_seconds=3.0, upload_seconds=5.0, scale=2.0)
    for phase, more in (("weights", 3.0), ("train", 5.0)):
        expected = 2 * times(plain, "c", phase, 3) + more
        np.testing.assert_allclose(times(longer, "c", phase, 3), expected)
    assert (times(slow(scale=0.0, upload_seconds=0.5), "e", "train", 3) == 0.5).all()


def test_a_race_ends_with_its_quorum_or_deadline() -> None:
    delays = slow()
    asked = {
        name: delays.finish_time(seed=7, server_round=2, client_id=name, phase="train")
        for name in NAMES
    }
    ranked = sorted(asked, key=asked.__getitem__)

    def race(**values: Any) -> tuple[set[str], float]:
        return delays.race(NAMES, seed=7, server_round=2, phase="train", **values)

    assert race() == (set(), asked[ranked[-1]])
    assert race(quorum=3) == (set(ranked[3:]), asked[ranked[2]])
    middle = (asked[ranked[1]] + asked[ranked[2]]) / 2
    assert race(deadline=middle) == (set(ranked[2:]), middle)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"clients": ()}, "delays.clients"),
        ({"clients": ("a", "a")}, "names that differ"),
        ({"clients": ("a b",)}, "delays.clients"),
        ({"stragglers": 6}, "stragglers = 6"),
        ({"K": 0}, "delays.K"),
        ({"batch_size": 0}, "delays.batch_size"),
        ({"batch": "all"}, "delays.batch"),
        ({"log_base": "10"}, "delays.log_base"),
        ({"share_seconds": -1.0}, "delays.share_seconds"),
        ({"upload_seconds": dict.fromkeys(NAMES, -1.0)}, "delays.upload_seconds"),
        ({"upload_seconds": {"a": 1.0}}, "a number for every client"),
        ({"bandwidth_mbps": 0.0}, "delays.bandwidth_mbps"),
        ({"speed": 0.0}, "delays.speed"),
        ({"scale": math.nan}, "delays.scale"),
    ],
)
def test_a_bad_parameter_is_named(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        slow(**values)


def test_an_unknown_client_has_no_delay() -> None:
    with pytest.raises(InvalidParameterError, match="client = 'q'"):
        slow().finish_time(seed=0, server_round=1, client_id="q", phase="train")


@pytest.mark.parametrize("means", [[], [1.0, 0.0], [-1.0], [math.inf], [[1.0]]])
def test_means_are_positive_numbers(means: list[Any]) -> None:
    with pytest.raises(InvalidParameterError, match="positive numbers"):
        expected_order_statistic(means, 1)
