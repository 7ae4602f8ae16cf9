"""The virtual clock of the numpy simulation of FedVS and its rivals."""

from typing import Any

import pytest
from vertical_simulation import NO_TIME, curve, setting, small

from flwr_privacy.fedvs.clock import transfer_seconds
from flwr_privacy.fedvs.costs import cost_model


@pytest.mark.parametrize(
    ("method", "quorum"), [("wait", 10), ("masked", 10), ("wait-dp", 10), ("fedvs", 5)]
)
def test_a_round_takes_what_the_delays_say(method: str, quorum: int) -> None:
    data, own = small(10), setting(method=method, **NO_TIME)
    found = curve(data, own, rounds=5, watch=[1, 2, 3, 4, 5])
    delays = own.delays(10, seed=1)
    now = shared = 0.0
    for t in range(1, 6):
        if method == "fedvs":
            shared += delays.race(delays.clients, seed=1, server_round=t, phase="weights")[1]
        now += delays.race(delays.clients, seed=1, server_round=t, phase="train", quorum=quorum)[1]
        assert found.share_seconds[t - 1] == pytest.approx(shared)
        assert found.seconds[t - 1] == pytest.approx(now + shared)


def test_ignoring_waits_for_the_fast_clients_alone() -> None:
    own = setting(method="ignore", **NO_TIME)
    found = curve(small(10), own, rounds=3)
    delays = own.delays(10, seed=1)
    expected = sum(
        delays.race(delays.fast, seed=1, server_round=t, phase="train")[1] for t in (1, 2, 3)
    )
    assert found.seconds[-1] == pytest.approx(expected)
    assert len(delays.fast) == 5


@pytest.mark.parametrize(("slow", "last"), [("first", {"0", "1"}), ("last", {"3", "4"})])
def test_the_slow_clients_can_be_the_first_or_last_ones(slow: str, last: set[str]) -> None:
    assert set(setting(method="wait", slow=slow).delays(5, seed=0).clients[3:]) == last


def test_who_is_slow_is_drawn_from_the_seed() -> None:
    own = setting(method="wait")
    found = {own.delays(8, seed=seed).fast for seed in range(6)}
    assert len(found) > 1
    assert own.delays(8, seed=3) == own.delays(8, seed=3)


def test_without_delays_a_round_takes_its_messages_and_products() -> None:
    own = setting(delay_scale=0.0, K=2, bandwidth_mbps=1.0, speed=1e6)
    found = curve(small(10), own, rounds=2, watch=[1, 2])
    widths = [2 * (1 + n % 3) for n in range(10)]
    # Ten rows in a batch: five coded ones for two segments. Three clients deal zero masks.
    costs = cost_model(N=10, K=2, T=1, rows=41, widths=widths, h=5, b=5)
    shares = [
        transfer_seconds(9 * (size + mask * costs.mask_bytes), 1.0)
        + (macs + mask * costs.mask_macs) / 1e6
        for size, macs, mask in zip(
            costs.weights_bytes, costs.weights_macs, [1] * 3 + [0] * 7, strict=True
        )
    ]
    received = sum(costs.weights_bytes) - (4 * 2 * 5 + 28) + 3 * costs.mask_bytes
    sharing = max(shares) + transfer_seconds(received, 1.0)
    upload = costs.answer_macs / 1e6 + transfer_seconds(costs.answer_bytes, 1.0)
    back = transfer_seconds(4 * 10 * 5, 1.0) + 10 * 6 * 5 / 1e6
    assert found.share_seconds[0] == pytest.approx(sharing)
    assert found.seconds[1] - found.seconds[0] == pytest.approx(sharing + upload + back)


def seconds_of_a_round(**values: Any) -> float:
    found = curve(small(28), setting(**values), rounds=25, watch=[1, 25])
    return float(found.seconds[1] - found.seconds[0]) / 24


def test_F20_small_K_is_fast_where_delays_dominate_and_large_K_where_products_do() -> None:
    delayed = [seconds_of_a_round(K=K, batch_size=60) for K in (1, 6, 13)]
    assert delayed == sorted(delayed)
    computed = [
        seconds_of_a_round(K=K, batch_size=60, delay_scale=0.0, speed=1e4) for K in (1, 6, 13)
    ]
    assert computed == sorted(computed, reverse=True)
    assert computed[0] > 2 * computed[2]


def test_F20_larger_T_is_never_faster() -> None:
    found = [seconds_of_a_round(K=1, T=T) for T in (1, 6, 13)]
    assert found == sorted(found)
    assert found[2] > found[0]


def test_F20_a_round_is_shorter_than_waiting_for_all_where_little_time_is_for_sharing() -> None:
    wait = seconds_of_a_round(method="wait", batch_size=60)
    short = seconds_of_a_round(batch_size=60, batch="real")
    long = seconds_of_a_round(batch_size=60, K=13, log_base="2")
    assert short < wait < long
