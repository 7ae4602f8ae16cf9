"""How many clients train, pooled over the rounds: false alarms, and failures that are noticed."""

import math

import numpy as np
import pytest

from flwr_privacy.privacy import trained_count
from flwr_privacy.privacy.trained_count import FALSE_ALARM, TrainedCount, margin, noticed


def test_a_training_in_which_enough_train_is_seldom_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly as many as have to: alarms over all rounds, to five standard errors."""
    monkeypatch.setattr(trained_count, "FALSE_ALARM", 0.2)
    draws, trials, alarms = np.random.default_rng(1), 2000, 0
    for _ in range(trials):
        count = TrainedCount()
        for server_round, noise in enumerate(draws.normal(0, 7.0, 60), start=1):
            count.add(server_round, answers=20, failed=5 + noise, sigma=7.0, quorum=15)
            alarms += count.too_few
            if count.too_few:
                break
    assert alarms / trials <= 0.2 + 5 * math.sqrt(0.2 * 0.8 / trials)
    assert alarms > 0  # the bound is no idle one


def test_as_many_as_have_to_are_enough_where_nothing_is_uncertain() -> None:
    count = TrainedCount()
    count.add(1, answers=20, failed=5.0, sigma=0.0, quorum=15)
    assert not count.too_few
    count.add(2, answers=20, failed=6.0, sigma=0.0, quorum=15)
    assert count.too_few


def test_what_may_go_wrong_adds_up_to_the_bound_over_any_number_of_rounds() -> None:
    rare = [math.exp(-(margin(r) ** 2) / 2) for r in range(1, 20_000)]
    assert 0.9999 * FALSE_ALARM < sum(rare) < FALSE_ALARM


@pytest.mark.parametrize(("sigma", "quorum"), [(40.0, None), (25.0, 20), (1.0, None)])
def test_a_failure_of_all_is_noticed_about_when_it_is_said(sigma: float, quorum: int) -> None:
    text, in_time = noticed(20, sigma, quorum, 3)
    rounds = int(text.split("after about ")[1].split()[0])
    assert in_time == (rounds <= 3)
    draws, after = np.random.default_rng(2), []
    for _ in range(200):
        count, server_round = TrainedCount(), 0
        while not count.too_few:
            server_round += 1
            failed = 20 + draws.normal(0, sigma)
            count.add(server_round, answers=20, failed=failed, sigma=sigma, quorum=quorum)
        after.append(server_round)
    assert 0.7 * rounds <= np.median(after) <= max(1, 1.2 * rounds)


def test_the_state_is_taken_up_and_a_run_that_was_ended_begins_anew() -> None:
    count = TrainedCount()
    count.add(1, answers=20, failed=4.5, sigma=2.0, quorum=None)
    assert TrainedCount.from_state(count.state()) == count
    assert count.numbers(1) == {"trained": 15.5, "trained_sigma": 2.0}
    assert count.numbers(2) == {}
    assert not count.too_few
    count.add(2, answers=200, failed=190.0, sigma=2.0, quorum=None)
    assert count.too_few
    assert count.text() == (
        "of 220 answers in 2 rounds about 26 came of a training that worked (standard deviation "
        "3), and at least 110 have to"
    )
    assert TrainedCount.from_state(count.state()) == count
    count.told = True
    assert TrainedCount.from_state(count.state()) == TrainedCount(tests=2)
