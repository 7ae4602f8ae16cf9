"""FedVS on Flower's Ray engine: two workers play all clients, half of which straggle."""

from pathlib import Path

import numpy as np
import pytest

from flwr_privacy.simulations.runner.jobs import Engine, carry_out
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings


@pytest.mark.ray
def test_on_ray_it_learns_from_the_answers_that_suffice(
    tmp_path: Path, one_ray_session: None
) -> None:
    settings = Settings(
        scheme="fedvs",
        task="digits-rows",
        clients=8,
        rounds=60,
        strategy={
            "delays": True,
            "learning_rate": 0.3,
            "client_learning_rate": 7.5,
            "evaluate_every": 60,
        },
    )
    run = RunFolder.create(tmp_path / "run", settings, engine="ray", nodes=2)
    carry_out([run], Engine(name="ray"))
    lines = run.rounds()[1:]
    assert not any(line["skipped"] for line in lines)
    assert {line["scheme"]["threshold"] for line in lines} == {3}
    assert {line["scheme"]["dealers"] for line in lines} == {8}
    # The race for the first three of eight is over long before the last of them.
    seconds = np.array([line["scheme"]["seconds_upload"] for line in lines])
    assert (seconds > 0).all()
    assert seconds.mean() < 0.5
    # Guessing costs log 10 = 2.30. The weights are drawn anew in each run: 1.97 on average here,
    # with a deviation of 0.07.
    assert lines[-1]["server"]["loss"] < 2.25
    states = list((tmp_path / "run" / "clients").glob("*.fedvs"))
    assert len(states) == 8
