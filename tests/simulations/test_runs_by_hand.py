"""Runs that `flwr run` starts: their folders say how they ended, with no command of ours."""

from pathlib import Path

import pytest
from commands import Command

from flwr_privacy.simulations.app import server_app
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.runner.jobs import CLIENT_APP
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings


def start(path: Path, *, resume: bool = False) -> RunFolder:
    """Start the app as docs/deployment.md does by hand."""
    if resume:
        run = RunFolder.open(path)
    else:
        run = RunFolder.create(path, Settings(clients=2, rounds=2), engine="deployed", nodes=2)
    config = {
        "settings": run.settings_path.read_text(encoding="utf-8"),
        "run-dir": str(run.path),
        "resume": resume,
    }
    run_inline(server_app.app, CLIENT_APP, nodes=2, run_config=config)
    return run


def test_a_finished_run_and_a_crashed_one_are_told_apart(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = start(tmp_path / "finished")
    assert finished.summary["status"] == "completed"
    evaluate = server_app.tasks.evaluate_server
    calls: list[int] = []

    def crash(*given: object) -> dict[str, float]:
        calls.append(len(calls))
        if len(calls) == 3:  # before training, after round 1, after round 2
            raise RuntimeError("the test records are gone")
        return evaluate(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(server_app.tasks, "evaluate_server", crash)
    with pytest.raises(RuntimeError):
        start(tmp_path / "crashed")
    crashed = RunFolder.open(tmp_path / "crashed").summary
    assert (crashed["status"], crashed["error"]) == (
        "failed",
        "RuntimeError: the test records are gone",
    )
    assert command("report", "finished", "crashed", "--out", "both").returncode == 0
    page = (tmp_path / "both" / "report.html").read_text()
    assert '<span class="completed">' in page
    assert '<span class="failed">' in page
    done = command("deploy", "--resume", "finished")
    assert done.returncode == 2
    assert "a run that is not complete" in done.stderr
    assert start(tmp_path / "crashed", resume=True).summary["status"] == "completed"


def test_a_run_whose_disk_lost_the_last_checkpoint(command: Command, tmp_path: Path) -> None:
    done = command("run", *("--engine", "inline", "--clients", "2", "--rounds", "1", "--out", "r"))
    assert done.returncode == 0, done.stderr
    run = RunFolder.open(tmp_path / "r")
    older = run.checkpoint_path.read_bytes()
    longer = run.settings_path.read_text().replace("rounds = 1\n", "rounds = 4\n")
    run.settings_path.write_text(longer.replace("rounds = 4", "rounds = 3"))
    run.finish("interrupted")
    assert command("run", "--resume", "r").returncode == 0
    run.settings_path.write_text(longer)
    run.checkpoint_path.write_bytes(older)
    run.finish("interrupted")
    done = command("run", "--resume", "r")
    assert done.returncode == 5, done.stderr
    assert "shows rounds 2 to 3, which it lacks" in done.stderr
    assert "--accept-lost-rounds" in done.stderr
    assert run.summary["status"] == "failed"
    run.checkpoint_path.unlink()
    done = command("run", "--resume", "r")
    assert "shows that round 3 is over" in done.stderr
    run.checkpoint_path.write_bytes(older)
    done = command("run", "--resume", "r", "--accept-lost-rounds")
    assert done.returncode == 0, done.stderr
    assert [(line["round"], "lost" in line) for line in run.rounds()] == [
        *((0, False), (1, False), (2, True), (3, True), (4, False))
    ]
