"""Runs over their seeds: what is one line, its mean and its spread, the charts and the CSV."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from commands import Command

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.reports.comparison.comparison import as_csv, draw_charts
from flwr_privacy.simulations.reports.comparison.seeds import over_seeds
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings


def run_of(
    path: Path, accuracies: list[float | None], *, digest: str = "", status: str = "completed",
    **values: Any,
) -> RunFolder:  # fmt: skip
    """Make the folder of a run that came to these accuracies, at 1 MB and 2 s a round."""
    settings = Settings(clients=4).with_values(values)
    run = RunFolder.create(path, settings, engine="inline", nodes=4, task_digest=digest)
    for number, accuracy in enumerate(accuracies):
        server = {} if accuracy is None else {"accuracy": accuracy, "loss": 1 - accuracy}
        counted = {"bytes_up": 400_000, "bytes_down": 600_000, "seconds": 2.0 * number}
        scheme = {"epsilon": 1.5 * number} if settings.scheme == "udp" else {}
        run.append({"round": number, "rounds": 2, "server": server, "scheme": scheme, **counted})
    run.finish(status) if status in ("completed", "failed") else None
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[RunFolder]:
    udp = {"scheme": "udp", "strategy.unit": "user"}
    return [
        run_of(tmp_path / "b", [0.1, 0.5, 0.8], seed=1),
        run_of(tmp_path / "a", [0.1, 0.5, 0.6], seed=0),
        run_of(tmp_path / "c", [0.1, 0.3, 0.4], seed=5, **udp),
        run_of(tmp_path / "d", [0.1, 0.6, 1.0], seed=2),
    ]


def test_runs_that_differ_in_their_seed_are_one_line(runs: list[RunFolder]) -> None:
    plain, udp = over_seeds(runs)
    assert (plain.label, plain.seeds) == ("fedavg", [0, 1, 2])
    assert udp.seeds == [5]
    assert "udp" in udp.label
    assert "seed" not in udp.label
    mean, error = plain.last(lambda run: run.results.accuracy) or (0, 0)
    # (0.6, 0.8, 1.0): the standard deviation is 0.2, the standard error of three 0.2 / sqrt(3).
    assert mean == pytest.approx(0.8)
    assert error == pytest.approx(0.2 / math.sqrt(3))
    xs, ys, errors = plain.accuracies(lambda line: line["total_bytes"] / 1e6)
    assert xs == pytest.approx([1, 2, 3])
    assert ys == pytest.approx([0.1, 1.6 / 3, 0.8])
    assert errors == pytest.approx([0, 0.1 / 3, 0.2 / math.sqrt(3)])
    assert all(math.isnan(one) for one in udp.accuracies(lambda line: 0.0)[2])


def test_a_round_counts_only_if_all_runs_have_it(tmp_path: Path) -> None:
    short = run_of(tmp_path / "short", [0.1, 0.9], seed=0)
    gaps = run_of(tmp_path / "gaps", [0.3, None, 0.8], seed=1)
    (group,) = over_seeds([short, gaps])
    assert group.accuracies(lambda line: line["round"]) == ([0], [0.2], pytest.approx([0.1]))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"seed": 0}, "has the same settings and seed"),
        ({"seed": 1, "task": "digits-linear"}, "runs of one task, with the same data"),
        ({"seed": 1, "digest": "one-two"}, "runs of one task, with the same data"),
        ({"seed": 1, "status": "failed"}, "this one is failed"),
        ({"seed": 1, "status": "created"}, "this one is created"),
    ],
)
def test_runs_that_cannot_be_compared(tmp_path: Path, second: dict[str, Any], message: str) -> None:
    folders = [run_of(tmp_path / "a", [0.1, 0.2], seed=0), run_of(tmp_path / "b", [0.2], **second)]
    with pytest.raises(InvalidParameterError, match=message):
        over_seeds(folders)


def test_without_an_accuracy_there_is_nothing_to_draw(tmp_path: Path) -> None:
    groups = over_seeds([run_of(tmp_path / "a", [None, None])])
    with pytest.raises(InvalidParameterError, match="runs whose model was evaluated"):
        draw_charts(groups, tmp_path)


def test_the_csv_has_every_round_of_every_run(runs: list[RunFolder]) -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(over_seeds(runs)))))
    assert len(rows) == 12
    last = next(row for row in rows if row["run"] == "c" and row["round"] == "2")
    assert {key: last[key] for key in ("seed", "accuracy", "epsilon", "virtual_seconds")} == {
        "seed": "5",
        "accuracy": "0.4",
        "epsilon": "3.0",
        "virtual_seconds": "",
    }
    assert (last["bytes_up"], last["bytes_down"]) == ("1200000", "1800000")
    assert {row["line"] for row in rows if row["run"] in "abd"} == {"fedavg"}
    assert next(row for row in rows if row["run"] == "a")["epsilon"] == ""


def test_the_command(command: Command, runs: list[RunFolder], tmp_path: Path) -> None:
    del runs
    done = command("compare", "a", "b", "d", "c", "--out", "charts", "--csv", "rounds.csv")
    assert done.returncode == 0, done.stderr
    assert "0.8 ± 0.12" in done.stdout
    assert {path.name for path in (tmp_path / "charts").iterdir()} == {
        "accuracy-bytes.png",
        "accuracy-time.png",
    }
    # Numbers of clients, and so bytes, may be a secret of a sampled round.
    assert (tmp_path / "rounds.csv").stat().st_mode & 0o077 == 0
    done = command("compare", "a", "a")
    assert done.returncode == 2
    assert "has the same settings and seed" in done.stderr


def test_epsilons_are_drawn_together_where_they_mean_the_same(
    command: Command, tmp_path: Path
) -> None:
    common = ("run", "--engine", "inline", "--clients", "3", "--rounds", "1", "--scheme", "udp")
    for seed in ("0", "1"):
        done = command(*common, "--set", "unit=user", "--seed", seed, "--out", f"user{seed}")
        assert done.returncode == 0, done.stderr
    record = ("--set", "unit=record", "--set", "learning_rate=0.1", "--set", "local_epochs=1")
    done = command(*common, *record, "--test-seed", "1", "--out", "record")
    assert done.returncode == 0, done.stderr
    done = command("compare", "user0", "user1", "record", "--out", "charts")
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in (tmp_path / "charts").glob("accuracy-epsilon*")}
    assert drawn == {"accuracy-epsilon.png", "accuracy-epsilon-2.png"}
    assert json.loads((tmp_path / "record" / "summary.json").read_text())["test_seed"] == 1
