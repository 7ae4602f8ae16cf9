"""The error of images that iDLG finds, as the experiment of figure 6 (a) and (b) has it."""

from typing import Any

import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.mspdq.inversion import check, errors

BASE = {"task": "digits-lenet", "clients": 2, "images": 1, "view": "message", "round": 1}
FEDAVG = {**BASE, "scheme": "fedavg"}
MSP = {**BASE, "scheme": "msp", "eps_s": 0.3, "mixing_rounds": 2}
JOPEQ = {**BASE, "scheme": "jopeq", "epsilon": 1.0, "bits": 4}


def test_one_upload_of_msp_hides_an_image_that_all_messages_give_away() -> None:
    points = [FEDAVG, MSP, {**MSP, "view": "messages"}, {**JOPEQ, "epsilon": 1e-3}]
    plain, one, all_of_them, noised = (point["value"] for point in errors(points, 0, None))
    assert plain < 1e-3
    assert all_of_them < 1e-3
    assert one > 0.05
    assert noised > 0.05


def test_a_later_round_is_attacked_after_the_earlier_ones() -> None:
    first, second = errors([FEDAVG, {**FEDAVG, "round": 2}], 0, None)
    assert first["value"] != second["value"]
    assert errors([FEDAVG], 0, None) == [first]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scheme": "mps"}, "scheme = 'mps'"),
        ({"view": "messages"}, "view = 'messages'"),
        ({"task": "digits"}, "task = 'digits'"),
        ({"images": 3}, "images = 3"),
        ({"round": 0}, "round = 0"),
        ({"epsilons": 1.0}, "epsilons"),
    ],
)
def test_a_point_that_cannot_be_attacked_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        check({**JOPEQ, **change})


def test_a_missing_key_is_named() -> None:
    with pytest.raises(InvalidParameterError, match="it with images"):
        check({key: value for key, value in JOPEQ.items() if key != "images"})
