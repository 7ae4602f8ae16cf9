"""Whether clients of a node are trained together: who says so, and what becomes of a run."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_privacy.clients.node.node_settings import STACK_VARIABLE, stack_mode
from flwr_privacy.clients.torch.gradient_descent.descent import Descent
from flwr_privacy.errors import InvalidParameterError, NothingTrainedError
from flwr_privacy.simulations.engines.ray_engine import RayResources
from flwr_privacy.simulations.runner.jobs import Engine, carry_out
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.tasks import tasks


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the clients whose trainings were done together."""
    counts: list[int] = []
    genuine = Descent.together

    def counted(job: Descent, jobs: Any) -> Any:
        counts.append(len(jobs))
        return genuine(job, jobs)

    monkeypatch.setattr(Descent, "together", counted)
    return counts


def run(path: Path, stack: str | None, **settings: Any) -> tuple[dict[str, Any], list[Any]]:
    """Run six clients in this process, three rounds; return the model and the history."""
    folder = RunFolder.create(
        path, Settings(clients=6, rounds=3, **settings), engine="inline", nodes=1
    )
    carry_out([folder], Engine(name="inline", workers=1, stack=stack))
    with np.load(folder.model_path) as archive:
        return dict(archive), folder.rounds()[1:]


def test_a_run_is_the_same_up_to_rounding(tmp_path: Path, stacked: list[int]) -> None:
    alone, _ = run(tmp_path / "alone", "no")
    assert stacked == []
    together, history = run(tmp_path / "together", "yes")
    assert stacked == [6, 6, 6]
    assert [line["accumulated"] for line in history] == [6, 6, 6]
    for name, array in alone.items():
        np.testing.assert_allclose(together[name], array, rtol=1e-5, atol=1e-6)


def test_the_environment_says_it_where_the_run_does_not(
    tmp_path: Path, stacked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STACK_VARIABLE, "yes")
    run(tmp_path / "environment", None)
    assert stacked == [6, 6, 6]
    stacked.clear()
    run(tmp_path / "run", "no")
    assert stacked == []


def test_a_client_that_fails_leaves_the_others_to_train_together(
    tmp_path: Path, stacked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = tasks.train_client

    def failing(task: Any, settings: Any, arrays: Any, client: int, *rest: Any, **more: Any) -> Any:
        trained = genuine(task, settings, arrays, client, *rest, **more)
        if client == 2:
            raise OSError("no data")
        return trained

    monkeypatch.setattr(tasks, "train_client", failing)
    _, history = run(tmp_path / "run", "yes")
    assert stacked == [6, 6, 6]
    assert [line["refused"] for line in history] == [{"error": 1}] * 3
    assert [line["accumulated"] for line in history] == [5, 5, 5]


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="stack = 'fast': expected one of"):
        stack_mode({"stack-clients": "fast"})
    with pytest.raises(InvalidParameterError, match="--stack = 'fast'"):
        Engine(stack="fast", workers=2)


def test_a_cluster_that_runs_has_its_own_environment() -> None:
    where = RayResources(ray_address="127.0.0.1:6379")
    with pytest.raises(InvalidParameterError, match="--stack = 'yes': expected none with ray_addr"):
        Engine(stack="yes", workers=2, resources=where)


def test_without_greenlet_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "greenlet", None)
    monkeypatch.delitem(sys.modules, "flwr_privacy.clients.node.side_by_side", raising=False)
    with pytest.raises(NothingTrainedError):
        run(tmp_path / "run", "yes")
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "pip install 'flwr-privacy[simulation]'" in log
