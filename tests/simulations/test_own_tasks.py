"""A task of the user's on the command line: run, resumed, reported, refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from flwr.app import Context, Message, RecordDict
from own_modules import OWN_TASK, own_folder, write_module

from flwr_privacy.clients.node.context_store import SIMULATED
from flwr_privacy.errors import CheckpointError, InvalidParameterError
from flwr_privacy.simulations.app import client_app
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.tasks import lookup

__all__ = ["own_folder"]

pytestmark = pytest.mark.usefixtures("own_folder")

RUN = ("run", "--engine", "inline", "--clients", "4", "--rounds", "2")


def task_in(folder: Path, *, seed: int = 0, outputs: int = 2) -> str:
    return f"{write_module(folder, OWN_TASK.format(seed=seed, outputs=outputs))}:income"


def test_it_is_trained_reported_and_resumed(command: Command, own_folder: Path) -> None:
    name = task_in(own_folder)
    done = command(*RUN, "--task", name, "--scheme", "udp", "--set", "unit=user")
    assert done.returncode == 0, done.stderr
    assert "data: 4 clients, 37 to 38 records of 2 classes each" in done.stdout
    path = own_folder / "runs" / f"udp-{name.replace(':', '-')}-1"
    assert done.stdout.endswith(f"run: {path.relative_to(own_folder)}\n")
    run = RunFolder.open(path)
    assert run.settings.task == name
    assert 0 <= run.rounds()[-1]["server"]["accuracy"] <= 1
    assert run.task_digest_path.stat().st_mode & 0o077 == 0
    done = command("report", str(path))
    assert done.returncode == 0, done.stderr
    report = (path / "report.json").read_text()
    assert name in report
    # A digest of all data would tell whoever has all but one record of the last one.
    assert not any(part in report for part in run.task_digest.split("-"))
    run.finish("interrupted")
    done = command("run", "--resume", str(path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [("other data", "other data. Restore"), ("other model", "other model. Restore")],
)
def test_another_task_of_that_name_is_not_gone_on_with(
    command: Command, own_folder: Path, change: str, message: str
) -> None:
    done = command(*RUN, "--task", task_in(own_folder), "--out", "r")
    assert done.returncode == 0, done.stderr
    run = RunFolder.open(own_folder / "r")
    run.finish("interrupted")
    other = task_in(own_folder, **({"seed": 1} if "data" in change else {"outputs": 3}))
    text = run.settings_path.read_text()
    run.settings_path.write_text(text.replace(run.settings.task, other))
    rounds = run.metrics_path.read_text()
    done = command("run", "--resume", "r")
    assert done.returncode == 5
    assert message in done.stderr
    assert run.metrics_path.read_text() == rounds
    summary = json.loads(run.summary_path.read_text())
    assert summary["status"] == "failed"


def test_without_test_records_nothing_is_evaluated(command: Command, own_folder: Path) -> None:
    text = OWN_TASK.format(seed=0, outputs=2).replace(", test=test", "")
    done = command(*RUN, "--task", f"{write_module(own_folder, text)}:income", "--out", "r")
    assert done.returncode == 0, done.stderr
    assert "accuracy" not in done.stdout
    assert not any(line.get("server") for line in RunFolder.open(own_folder / "r").rounds())


def test_it_is_refused_before_there_is_a_folder(command: Command, own_folder: Path) -> None:
    done = command(*RUN, "--task", task_in(own_folder, outputs=1))
    assert done.returncode == 2
    assert "labels = 1: expected classes below 1" in done.stderr
    done = command(*RUN, "--task", "no_such_module:income")
    assert done.returncode == 2
    assert f"there is no 'no_such_module' in {own_folder}" in done.stderr
    done = command(*RUN, "--task", task_in(own_folder), "--download")
    assert done.returncode == 2
    assert "brings its own data" in done.stderr
    assert not (own_folder / "runs").exists()


def test_a_report_runs_no_code_of_the_task(
    command: Command, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = task_in(own_folder)
    assert command(*RUN, "--task", name, "--out", "r").returncode == 0
    module = name.partition(":")[0]
    monkeypatch.delitem(sys.modules, module)
    lookup._called.cache_clear()
    assert command("report", "r").returncode == 0
    assert module not in sys.modules


@pytest.mark.ray
def test_it_is_trained_on_ray_by_two_workers(command: Command, own_folder: Path) -> None:
    ray = ("run", "--clients", "4", "--rounds", "2", "--workers", "2", "--out", "r")
    done = command(*ray, "--task", task_in(own_folder), "--log", "tensorboard:events")
    assert done.returncode == 0, done.stderr
    assert [*(own_folder / "events" / "r").iterdir()]
    assert RunFolder.open(own_folder / "r").rounds()[-1]["server"]["accuracy"] > 0.5


@pytest.mark.long
def test_it_is_trained_inline_by_two_workers(command: Command, own_folder: Path) -> None:
    done = command(*RUN, "--workers", "2", "--out", "r", "--task", task_in(own_folder))
    assert done.returncode == 0, done.stderr
    assert RunFolder.open(own_folder / "r").rounds()[-1]["server"]["accuracy"] > 0.5


@pytest.mark.parametrize("allowed", [None, "other:task", "itself"])
def test_a_server_cannot_name_what_a_deployed_node_imports(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, allowed: str | None
) -> None:
    """The run configuration comes from the server, and an import executes what it names."""
    name = task_in(own_folder)
    module = name.partition(":")[0]
    monkeypatch.syspath_prepend(str(own_folder))
    if allowed is not None:
        monkeypatch.setenv(lookup.ALLOWED_VARIABLE, name if allowed == "itself" else allowed)
    run_config: dict[str, Any] = {"settings": Settings(task=name).to_toml(), "run-dir": ""}
    with acting_as_server(1):
        message = Message(RecordDict(), dst_node_id=1, message_type="train")

    def asked(node_config: dict[str, Any]) -> None:
        context = Context(1, 1, node_config, RecordDict(), run_config)
        client_app.scheme_mod(message, context, lambda message, _: message)

    if allowed != "itself":
        with pytest.raises(InvalidParameterError, match=r"task = .*FLWR_PRIVACY_ALLOWED_TASK"):
            asked({"partition-id": 0, "num-partitions": 2})
        assert module not in sys.modules
    run_config["task-digest"] = "0-0"  # so that it is imported, and found to be another
    with pytest.raises(CheckpointError, match="not the one with which the run has begun"):
        asked({SIMULATED: allowed != "itself"})
