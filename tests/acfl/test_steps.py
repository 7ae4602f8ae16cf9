"""Step sizes."""

import math
from typing import Any

import pytest

from flwr_privacy.acfl.steps import StepSize
from flwr_privacy.errors import InvalidParameterError


def test_the_schedules() -> None:
    rounds = (1, 2, 10, 1000)
    assert [StepSize(0.5).at(t) for t in rounds] == [0.5] * 4
    assert [StepSize(1e-4, "inverse").at(t) for t in rounds] == [1e-4 / t for t in rounds]
    shifted = StepSize(3, "shifted", shift=200)
    assert [shifted.at(t) for t in rounds] == [3 / (1 + t / 200) for t in rounds]
    # 1 / (lambda (t + 3)), for lambda = 2
    het = StepSize(1 / 6, "shifted", shift=3)
    assert [het.at(t) for t in rounds] == pytest.approx([1 / (2 * (t + 3)) for t in rounds])


@pytest.mark.parametrize("schedule", ["constant", "inverse", "shifted"])
@pytest.mark.parametrize("t", [0, -1, 1.0, True])
def test_rounds_count_from_one(schedule: str, t: Any) -> None:
    with pytest.raises(InvalidParameterError, match="t = "):
        StepSize(1.0, schedule, shift=5).at(t)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0.0,), "learning_rate"),
        ((-1.0,), "learning_rate"),
        ((math.inf,), "learning_rate"),
        ((1.0, "linear"), "schedule"),
        ((1.0, "shifted"), "shift"),
        ((1.0, "shifted", -3.0), "shift"),
    ],
)
def test_what_is_no_schedule_is_refused(arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name} = "):
        StepSize(*arguments)
