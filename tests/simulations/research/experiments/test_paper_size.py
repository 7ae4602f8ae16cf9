"""The estimate of what an experiment takes at the paper's size."""

import pytest

from flwr_privacy.simulations.research.experiments import paper_size
from flwr_privacy.simulations.research.experiments.files import experiment


def test_the_hours_are_those_of_all_rounds_of_all_trainings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def seconds(chosen, point, rounds, data_root):  # a start of 10 s, and 3 s a round
        asked.append((point["rounds"], rounds))
        return 10 + 3 * rounds

    monkeypatch.setattr(paper_size, "_seconds", seconds)
    chosen = experiment("m2fdp/figure5-digits")  # 8 curves of 200 rounds
    hours = paper_size.simulated_hours(chosen, seeds=2)
    assert hours == pytest.approx(2 * 8 * (10 + 3 * 200) / 3600)
    assert asked == [(200, 1)] + 8 * [(200, 1), (200, 2)]


def test_a_training_is_timed_with_the_noise_of_all_of_its_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = experiment("m2fdp/figure5-digits-equal")
    found = []

    class Timed:
        @staticmethod
        def of(points, seed, data_root):
            found.extend(points)

    monkeypatch.setitem(paper_size.FUNCTIONS, "m2fdp", Timed)
    point = {**chosen.base, "rounds": 100, "round": 50}
    assert paper_size._seconds(chosen, point, 1, None) >= 0
    (short,) = found
    assert (short["rounds"], short["round"]) == (1, 1)
    assert short["epsilon"] == pytest.approx(chosen.base["epsilon"] / 10)
