"""An app developer's first day, as docs/drop-in.md says it: try an app, change it, run it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import Command

from flwr_privacy.simulations.engines.ray_engine import RayResources, RaySession

from .conftest import NODES, QUICKSTARTS, Apps

LEARNED = 0.6  # guessing gives 0.1


def accuracy(app: Path, apps: Apps) -> float:
    """Return what the model that an app has saved gets right of the server's test data."""
    task = apps.module(app, "message_app.task")
    net = task.Net()
    net.load_state_dict(torch.load(app / "final_model.pt", weights_only=True))
    return float(task.test(net, task.load_test_data())[1])


def copied(folder: Path) -> Path:
    """Copy a quickstart, as the page does."""
    return Path(shutil.copytree(QUICKSTARTS / "pytorch-message", folder / "pytorch-message"))


def test_the_first_private_run_succeeds(command: Command, apps: Apps, tmp_path: Path) -> None:
    app = copied(tmp_path)
    apps.run(app)
    assert accuracy(app, apps) > LEARNED  # the app as it is

    # What UDP would make of it is said before a round, with what helps.
    udp = command("check", "pytorch-message", "--scheme", "udp", "--clients", str(NODES))
    assert udp.returncode == 0, udp.stderr
    assert "expect chance accuracy; at least" in udp.stdout
    assert "- metrics of the clients' training (train_loss) do not leave the nodes" in udp.stdout

    summed = ("check", "pytorch-message", "--scheme", "fedavg", "--secure-sum")
    applied = command(*summed, "--apply")
    assert applied.returncode == 0, applied.stderr
    assert "applied: 2 files are changed" in applied.stdout
    assert "nothing to change" in command(*summed, "--no-run").stdout
    apps.run(app)
    assert accuracy(app, apps) > LEARNED  # and now the server has seen only sums

    # The other scheme is refused as long as this one is there, and no file changes.
    before = {path: path.read_bytes() for path in app.rglob("*.py")}
    refused = command("check", "pytorch-message", "--scheme", "udp", "--no-run", "--apply")
    assert refused.returncode == 8
    assert "already" in refused.stderr
    assert {path: path.read_bytes() for path in app.rglob("*.py")} == before


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RaySession]:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    monkeypatch.setenv("FLWR_PRIVACY_STATE", str(state))
    log = tmp_path / "engine.log"
    with RaySession(resources=RayResources(total_cpus=1), log_path=log) as started:
        yield started


@pytest.mark.ray
def test_the_changed_app_runs_with_flwr_run(
    session: RaySession, command: Command, apps: Apps, tmp_path: Path
) -> None:
    app = copied(tmp_path)
    applied = command("check", "pytorch-message", "--scheme", "mspdq", "--secure-sum", "--apply")
    assert applied.returncode == 0, applied.stderr
    model = {"model-path": str(app / "final_model.pt")}
    session.run(app, nodes=NODES, run_config=model, timeout=180)
    assert accuracy(app, apps) > LEARNED
