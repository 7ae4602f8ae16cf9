"""What an experiment takes at the paper's size, estimated from a few rounds of it."""

from dataclasses import replace
from pathlib import Path

import pytest
from experiment_files import STEPS

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.experiments.files import experiment, read
from flwr_privacy.simulations.research.machine_hours import estimate


def test_all_rounds_of_all_runs_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "steps.toml"
    path.write_text(STEPS)
    timed: dict[str, float] = {}
    found = estimate(read(path, "papers/steps"), seeds=[0, 1, 2], timed=timed)
    # Two curves of 5 rounds for each seed.
    assert (found.runs, found.rounds) == (6, 30)
    assert 0 < found.seconds < 60
    assert found.hours == pytest.approx(30 * found.seconds / 3600)
    # 5 rounds of 2 and of 4 passes, in place of 3 rounds of 1 pass each.
    assert found.times == pytest.approx((5 * 2 + 5 * 4) / (3 + 3))
    assert "6 runs, 30 rounds" in str(found)
    assert "160 times" in str(replace(found, times=163.0))
    assert [*timed.values()] == [found.seconds]
    again = estimate(read(path, "papers/steps"), seeds=[0], timed=timed)
    assert (again.seconds, again.rounds) == (found.seconds, 10)


def test_a_function_has_no_rounds_to_time() -> None:
    with pytest.raises(InvalidParameterError, match="experiment = 'udp/figure2': expected one"):
        estimate(experiment("udp/figure2"))
