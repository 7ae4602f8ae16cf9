"""The files of docs/simulation.md: a task, an experiment and loggers of the user's own."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from commands import Command
from own_modules import own_folder

__all__ = ["own_folder"]

PAGE = Path(__file__).parents[2] / "docs" / "simulation.md"
RUN = ("run", "--engine", "inline", "--clients", "4", "--rounds", "1", "--out", "r")


@pytest.fixture(autouse=True)
def files(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files of the page, and the table that its task reads."""
    found = re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert [name for name, _ in found] == [
        "mytask.py",
        "my.toml",
        "mlflow_logger.py",
        "wandb_logger.py",
    ]
    for name, text in found:
        (own_folder / name).write_text(text)
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    draws = np.random.default_rng(0).normal(size=(1000, 6))
    table = np.column_stack([draws, draws[:, 0] > 0])
    header = "a,b,c,d,e,f,income"
    np.savetxt(own_folder / "income.csv", table, delimiter=",", header=header, comments="")
    return own_folder


def test_the_task_is_trained(command: Command) -> None:
    done = command(*RUN, "--task", "mytask:income", "--scheme", "udp", "--set", "unit=user")
    assert done.returncode == 0, done.stderr
    assert "data: 4 clients, 200 records of 2 classes each" in done.stdout


def test_the_experiment_is_trained(command: Command, files: Path) -> None:
    done = command("experiment", "my.toml", "--seeds", "0", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert (files / "my" / "experiment.json").exists()


Call = tuple[str, Any]


def mlflow_of(calls: list[Call]) -> ModuleType:
    """Return a module with the functions of MLflow 3.17, as far as the page calls them."""

    def start_run(
        run_id: str | None = None,
        experiment_id: str | None = None,
        run_name: str | None = None,
        nested: bool = False,
        parent_run_id: str | None = None,
        tags: dict[str, Any] | None = None,
        description: str | None = None,
        log_system_metrics: bool | None = None,
    ) -> None:
        calls.append(("start", run_name))

    def log_metrics(
        metrics: dict[str, float],
        step: int | None = None,
        synchronous: bool | None = None,
        run_id: str | None = None,
        timestamp: int | None = None,
        model_id: str | None = None,
        dataset: Any = None,
    ) -> None:
        calls.append(("log", (step, dict(metrics))))

    def end_run(status: str = "FINISHED") -> None:
        calls.append(("end", status))

    module: Any = ModuleType("mlflow")
    module.start_run, module.log_metrics, module.end_run = start_run, log_metrics, end_run
    return module  # type: ignore[no-any-return]


def wandb_of(calls: list[Call]) -> ModuleType:
    """Return a module with the functions of wandb 0.31, as far as the page calls them."""

    class Run:
        def log(
            self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
        ) -> None:
            assert type(data) is dict
            calls.append(("log", (step, data)))

        def finish(self, exit_code: int | None = None) -> None:
            calls.append(("end", "FINISHED"))

    def init(
        *, entity: str | None = None, project: str | None = None, name: str | None = None
    ) -> Run:
        assert project == "my-federation"
        calls.append(("start", name))
        return Run()

    module: Any = ModuleType("wandb")
    module.init = init
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "option", "module_of"),
    [
        ("mlflow", "mlflow_logger:MLflowLogger", mlflow_of),
        ("wandb", "wandb_logger:WandbLogger", wandb_of),
    ],
)
def test_the_loggers_get_the_rounds(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    option: str,
    module_of: Any,
) -> None:
    calls: list[Call] = []
    monkeypatch.setitem(sys.modules, name, module_of(calls))
    done = command(*RUN, "--log", option)
    assert done.returncode == 0, done.stderr
    assert [kind for kind, _ in calls] == ["start", "log", "log", "end"]
    assert calls[0][1] == "r"
    assert [value[0] for kind, value in calls if kind == "log"] == [0, 1]
    assert calls[2][1][1]["server/accuracy"] > 0
