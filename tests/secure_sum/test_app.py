"""The app under a secure sum with a fifth of the clients dropping out, on both engines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_privacy.secure_sum import SecureSum, Session
from flwr_privacy.simulations.runner.jobs import Engine, carry_out
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings, TrainingSettings
from flwr_privacy.simulations.tasks import tasks
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.identity import derive_seed

SETTINGS = Settings(
    clients=12,
    rounds=2,
    seed=4,  # with which no round has too few left
    deadline=5.0,
    training=TrainingSettings(batch_size=16, learning_rate=0.3),
    stragglers=StragglerModel(slow_fraction=0.2),
    secure_sum=SecureSum(bits=16, value_range=2.0),
)


def plain_sum(settings: Settings, survivors: list[str], secure_sum: SecureSum) -> np.ndarray:
    """Train the survivors of the first round and add up their codes in the clear."""
    task = tasks.task(settings.task)
    start = tasks.initial_arrays(task, settings.seed)
    total: Any = 0
    for client in survivors:
        trained: Arrays
        trained, examples, _ = tasks.train_client(
            task,
            settings,
            start,
            int(client),
            settings.clients,
            seed=derive_seed(settings.seed, "train", client, 1),
        )
        codes = [
            np.rint((trained[name].astype(np.float64) - start[name]) / secure_sum.grid.step)
            for name in sorted(start)
        ]
        vector = np.concatenate([code.reshape(-1) for code in codes]).astype(np.int64) * examples
        total += np.append(vector, examples)
    return total


@pytest.mark.ray
@pytest.mark.usefixtures("one_ray_session")
def test_a_fifth_drops_out_and_the_sum_is_that_of_the_others_on_both_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[np.ndarray, list[str]]] = []
    real = Session.open

    def listening(self: Session, total: Any, survivors: Any, asked: Any) -> Any:
        values = real(self, total, survivors, asked)
        opened.append((values, list(survivors)))
        return values

    monkeypatch.setattr(Session, "open", listening)
    runs = {
        name: RunFolder.create(tmp_path / name, SETTINGS, engine=engine, nodes=nodes)
        for name, engine, nodes in (
            ("inline", "inline", 12),
            ("ray", "ray", 12),
            ("cohorts", "ray", 2),
        )
    }
    for run in runs.values():
        carry_out([run], Engine(name=run.summary["engine"]))
    values, survivors = opened[0]
    assert 7 <= len(survivors) < 12
    np.testing.assert_array_equal(values, plain_sum(SETTINGS, survivors, SETTINGS.secure_sum))
    models = {}
    for where, run in runs.items():
        with np.load(run.model_path) as archive:
            models[where] = dict(archive)
        assert [line["skipped"] for line in run.rounds()[1:]] == [False, False]
    for name, array in models["inline"].items():
        np.testing.assert_array_equal(models["ray"][name], array)
        np.testing.assert_array_equal(models["cohorts"][name], array)
    schemes = [[line["scheme"] for line in run.rounds()[1:]] for run in runs.values()]
    assert schemes[0] == schemes[1] == schemes[2]


@pytest.mark.ray
@pytest.mark.usefixtures("one_ray_session")
def test_central_dp_runs_in_cohorts_on_ray_with_a_fifth_dropping_out(tmp_path: Path) -> None:
    settings = Settings.from_toml(SETTINGS.to_toml()).with_values(
        {"scheme": "central-dp", "secure_sum": True}
    )
    run = RunFolder.create(tmp_path / "run", settings, engine="ray", nodes=2)
    carry_out([run], Engine(name="ray"))
    lines = run.rounds()[1:]
    assert all(7 <= line["scheme"]["sum_opened"] <= 12 for line in lines)
    assert any(line["late"] for line in lines)
    assert not any(line["skipped"] for line in lines)
    assert lines[-1]["scheme"]["epsilon"] == pytest.approx(8.0, rel=1e-3)
