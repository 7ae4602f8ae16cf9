"""How like a model's pictures are to its digits, as the experiment of figure 3 has it."""

from typing import Any

import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.udp.learned_digits import check, likenesses

POINT = {
    **{"task": "digits-mlp", "clients": 2, "records": 100, "rounds": 8, "learning_rate": 2.0},
    **{"noise": "none", "epsilon": 4.0, "delta": 1e-3},
}


def test_noise_makes_pictures_less_like_the_digits() -> None:
    noised = {**POINT, "noise": "paper"}
    points = [POINT, {**POINT, "epsilon": 1.0}, noised, {**noised, "epsilon": 0.01}]
    plain, same, some, drowned = (point["value"] for point in likenesses(points, 0, None))
    assert plain == same > 0.5
    assert plain > max(some, drowned)
    assert abs(drowned) < 0.3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"noise": "papers"}, "noise = 'papers'"),
        ({"task": "digits-mpl"}, "digits-mpl"),
        ({"rounds": 0}, "rounds = 0"),
        ({"learning_rate": 0.0}, "learning_rate = 0.0"),
        ({"noise": "paper", "epsilon": 0.0}, "epsilon = 0.0"),
        ({"epochs": 1}, "the keys task, clients"),
    ],
)
def test_a_point_that_cannot_be_trained_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        check({**POINT, **change})


def test_more_records_than_there_are_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="records = 1000"):
        likenesses([{**POINT, "records": 1000}], 0, None)
