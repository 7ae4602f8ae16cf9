"""The simulation of central DP trains as the strategy does, with the noise that it plans."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.app.server_app import app
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.research.central_dp.numpy_simulation import (
    accuracies,
    check,
    cohorts,
    plan_of,
    sum_noise,
)
from flwr_privacy.simulations.runner.complete_settings import settings_of
from flwr_privacy.simulations.settings.run_folder import RunFolder

POINT: dict[str, Any] = {
    "task": "digits-linear",
    "clients": 20,
    "per_round": 4,
    "trainings": 4,
    "noise": "server",
    "sampling": "balanced",
    "correlated": "none",
    "epsilon": 8.0,
    "delta": 1e-5,
    "clipping_norm": 0.5,
    "epochs": 2,
    "batch_size": 100,
    "learning_rate": 0.3,
}


@pytest.mark.parametrize("task", ["digits-linear", "digits-mlp"])
def test_it_trains_as_the_strategy_does(task: str, tmp_path: Path) -> None:
    """Everybody in each round, whole batches and next to no noise: nothing is left to chance."""
    point = {**POINT, "task": task, "per_round": 20, "trainings": 3, "epsilon": 1e6}
    own = ("noise", "sampling", "correlated", "epsilon", "delta", "clipping_norm")
    settings = settings_of(
        {
            "scheme": "central-dp",
            "task": task,
            "clients": 20,
            "rounds": 3,
            "training.epochs": 2,
            "training.batch_size": 100,
            "training.learning_rate": 0.3,
            "training.decay": 0.0,
            **{f"strategy.{name}": point[name] for name in own},
        }
    )
    folder = RunFolder.create(tmp_path / "r", settings, engine="inline", nodes=20, test_seed=0)
    (folder.path / "clients").mkdir()
    run_inline(
        app,
        "flwr_privacy.simulations.app.client_app:app",
        nodes=20,
        run_config=folder.app_config(resume=False, accept_lost_rounds=False),
        state=folder.path / "clients",
        insecure_seed=0,
    )
    trained = folder.rounds()[-1]["server"]
    (found,) = accuracies([point], 0, None)
    assert found["loss"] == pytest.approx(trained["loss"], rel=1e-4)
    assert found["accuracy"] == pytest.approx(trained["accuracy"], abs=0.01)


@pytest.mark.parametrize("correlated", ["none", "banded-mf", "blt"])
def test_the_models_have_the_error_that_the_plan_states(correlated: str) -> None:
    point = {**POINT, "correlated": correlated}
    noise = np.array(list(sum_noise(point, 20_000, np.random.default_rng(1))))
    error = np.sqrt((noise.cumsum(axis=0).astype(float) ** 2).mean() / ((len(noise) + 1) / 2))
    plan = plan_of(point)
    expected = plan.effective_multiplier * 2 * point["clipping_norm"]
    assert len(noise) == plan.rounds == 20
    assert error == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("noise", ["distributed", "each-client"])
def test_clients_that_add_the_noise_add_more(noise: str) -> None:
    point = {**POINT, "noise": noise, "threshold": 3, "colluders": 1}
    drawn = np.array(list(sum_noise(point, 20_000, np.random.default_rng(1))))
    independent = plan_of(POINT).noise_multiplier * 2 * POINT["clipping_norm"]
    # Of four shares two suffice; a client alone adds as much as a sum needs.
    more = {"distributed": np.sqrt(4 / 2), "each-client": np.sqrt(4)}[noise]
    assert drawn.std() == pytest.approx(independent * more, rel=0.02)


@pytest.mark.parametrize("sampling", ["fixed", "balanced", "poisson", "cyclic_poisson"])
def test_cohorts_are_those_of_their_name(sampling: str) -> None:
    point = {**POINT, "clients": 200, "per_round": 20, "trainings": 20, "sampling": sampling}
    drawn = list(cohorts(point, np.random.default_rng(0)))
    assert len(drawn) == plan_of(point).rounds == 200
    sizes = [len(cohort) for cohort in drawn]
    assert np.mean(sizes) == pytest.approx(20, abs=1.5)
    assert (len(set(sizes)) == 1) == (sampling in ("fixed", "balanced"))
    assert all(len(set(cohort)) == len(cohort) for cohort in drawn)
    counts = Counter(int(client) for cohort in drawn for client in cohort)
    if sampling == "balanced":
        assert set(counts.values()) == {20}
    if sampling == "cyclic_poisson":
        first, second = set(np.concatenate(drawn[::4])), set(np.concatenate(drawn[1::4]))
        assert not first & second


def test_of_several_clipping_norms_one_is_taken_that_other_seeds_prefer() -> None:
    one, other, both = accuracies(
        [{**POINT, "epsilon": 1e4, "clipping_norm": norm} for norm in (1e-3, 0.5, [1e-3, 0.5])],
        0,
        None,
    )
    assert both == other != one


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"epoch": 1}, "setting = 'epoch'"),
        ({"per_round": 3}, "per_round = 3: expected a divisor of 80"),
        ({"sampling": "fixed", "correlated": "banded-mf"}, "a client has to rest"),
        ({"clipping_norm": [0.1, -1.0]}, "clipping_norm = -1.0"),
    ],
)
def test_wrong_points_are_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        check({**POINT, **changed})
