"""`flwr-privacy run --scheme udp`: what a user sees of discounting, and that the cap holds."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flwr_privacy.simulations.cli import app

BUDGET = ("--set", "epsilon=2", "--set", "delta=1e-3")


@pytest.mark.parametrize(
    "options", [("schedule=discounting",), ("schedule=discounting", "validation=clients")]
)
def test_discounting_prints_its_history_and_keeps_to_the_cap(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    out = tmp_path / "run"
    command = [
        "run",
        "--scheme",
        "udp",
        "--set",
        "unit=record",
        "--engine",
        "inline",
        "--clients",
        "10",
    ]
    command += ["--rounds", "30", "--out", str(out), *BUDGET]
    for option in options:
        command += ["--set", option]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    planned = [30, *(line["scheme"]["T"] for line in lines[1:])]
    assert planned == sorted(planned, reverse=True)
    assert len(lines) - 1 < 30  # noise makes some round worse
    assert planned[-1] <= len(lines) - 1
    (history,) = (line for line in done.output.splitlines() if line.startswith("rounds planned"))
    told = [int(part.split()[0]) for part in history.removeprefix("rounds planned: ").split(", ")]
    assert told == sorted(set(planned), reverse=True)
    assert all(line["scheme"]["epsilon"] <= 2 for line in lines[1:])
    verified = CliRunner().invoke(app, ["verify", str(out)])
    assert verified.exit_code == 0, verified.output
