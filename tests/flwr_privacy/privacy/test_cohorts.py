"""How often each way to draw a cohort lets a client take part."""

import numpy as np
import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.cohorts import (
    BALANCED,
    CYCLIC_POISSON,
    FIXED,
    POISSON,
    drawn_alone,
    participations,
    planned_participations,
    rest,
)


def test_random_sets_need_more_room_than_turns() -> None:
    assert planned_participations(FIXED, rounds=100, q=0.1) == participations(100, 0.1) == 18
    assert planned_participations(POISSON, rounds=100, q=0.1) == 18
    assert planned_participations(BALANCED, rounds=100, q=0.1) == 10
    assert [rest(q) for q in (0.1, 1 / 3, 0.4, 1.0)] == [10, 3, 2, 1]
    assert planned_participations(CYCLIC_POISSON, rounds=101, q=0.1, groups=4) == 26
    for cohorts in (FIXED, BALANCED, POISSON):
        assert planned_participations(cohorts, rounds=30, q=1.0) == 30


def test_random_sets_stay_below_the_quantile() -> None:
    generator = np.random.default_rng(0)
    counts = generator.binomial(100, 0.1, size=100_000)
    most = participations(100, 0.1)
    assert np.mean(counts <= most) >= 0.99 > np.mean(counts <= most - 1)


def test_bad_values_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="cohorts = 'all'"):
        planned_participations("all", rounds=1, q=1.0)
    with pytest.raises(InvalidParameterError, match=r"q = 0\.0"):
        participations(1, 0.0)
    assert [drawn_alone(c) for c in (FIXED, BALANCED, POISSON, CYCLIC_POISSON)] == [
        *(False, False),
        *(True, True),
    ]
