"""A researcher's first day, as README.md and docs/simulation.md say it: run, compare, verify."""

import json
from pathlib import Path

from commands import Command

RUN = ("run", "--engine", "inline", "--task", "digits-linear", "--clients", "10", "--rounds", "3")


def test_runs_a_comparison_and_a_check(command: Command, tmp_path: Path) -> None:
    # A typing error costs nothing: the nearest name, exit code 2, and no folder.
    wrong = command(*RUN, "--scheme", "udp", "--set", "epsilom=8", "--out", "runs/wrong")
    assert wrong.returncode == 2
    assert "nearest: 'epsilon'" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert not (tmp_path / "runs" / "wrong").exists()

    for name, more in (
        ("even", ()),
        ("skewed", ("--partition", "labels")),
        ("udp", ("--scheme", "udp", "--set", "unit=record", "--set", "epsilon=8")),
    ):
        done = command(*RUN, *more, "--out", f"runs/{name}")
        assert done.returncode == 0, done.stderr
        folder = tmp_path / "runs" / name
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        assert [line["round"] for line in lines] == [0, 1, 2, 3]
        assert (folder / "model.npz").is_file()

    verified = command("verify", "runs/udp")
    assert verified.returncode == 0, verified.stderr
    assert "30 charged, 30 answered" in verified.stdout
    assert "consistent; the clients are simulated" in verified.stdout

    compared = command("report", "runs/even", "runs/skewed", "runs/udp", "--out", "runs/report")
    assert compared.returncode == 0, compared.stderr
    report = Path(compared.stdout.partition("report: ")[2].strip())
    assert "<html" in (tmp_path / report).read_text()

    # What a budget means before anything is trained.
    budget = ("--unit", "record", "--epsilon", "8", "--rounds", "20", "--records", "1200")
    calibrated = command("calibrate", *budget)
    assert calibrated.returncode == 0, calibrated.stderr
    assert "8" in calibrated.stdout


def test_a_card_that_was_changed_is_not_verified(command: Command, tmp_path: Path) -> None:
    private = ("--scheme", "central-dp", "--set", "noise=server")
    assert command(*RUN, *private, "--out", "runs/dp").returncode == 0
    card = tmp_path / "runs" / "dp" / "privacy-card.json"
    values = json.loads(card.read_text())
    values["epsilon"] = {name: value / 2 for name, value in values["epsilon"].items()}
    card.write_text(json.dumps(values))
    assert command("verify", "runs/dp").returncode == 27
