"""Loggers of rounds: what they are given, in a strategy and on the command line."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from own_modules import own_folder, write_module

from flwr_privacy.errors import EngineError, InvalidParameterError
from flwr_privacy.simulations.app.client_app import app as client_app
from flwr_privacy.simulations.app.server_app import initial_arrays
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.simulations.engines.inline.grid import InlineGrid
from flwr_privacy.simulations.runner.loggers import LoggedRounds, logger_maker
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.strategies import FedAvg, LoopOptions, RoundLogger
from flwr_privacy.strategies.options.round_logger import numbers_of

__all__ = ["own_folder"]

RUN = ("run", "--engine", "inline", "--clients", "3", "--rounds", "2", "--out", "r")
KEY = "key-of-a-dashboard"


class Recording:
    """A logger with a secret of its own, which the run must not write anywhere."""

    def __init__(self, *, failing: int | None = None) -> None:
        self.key = KEY
        self.rounds: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self._failing = failing

    def __repr__(self) -> str:
        return f"Recording({self.key})"

    def log(self, server_round: int, metrics: Mapping[str, float]) -> None:
        if server_round == self._failing:
            raise ConnectionError("the dashboard does not answer")
        self.rounds.append((server_round, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


def train(loop: LoopOptions) -> None:
    settings = Settings(clients=3)
    config = {"settings": settings.to_toml(), "run-dir": "", "resume": False}
    grid = InlineGrid(client_app, 3, run_config=config)
    try:
        with acting_as_server(grid.run_id):
            FedAvg(fraction_evaluate=0.0, loop=loop).start(
                grid, initial_arrays(settings), num_rounds=2
            )
    finally:
        grid.close()


def test_a_strategy_gives_its_logger_what_the_metrics_file_has(tmp_path: Path) -> None:
    logger = Recording()
    train(LoopOptions(run_dir=tmp_path, logger=logger))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [number for number, _ in logger.rounds] == [0, 1, 2]
    assert [numbers_of(line) for line in lines] == [metrics for _, metrics in logger.rounds]
    assert logger.rounds[-1][1]["bytes_up"] > 0
    assert logger.closed == 1
    for path in tmp_path.rglob("*"):  # nor is the logger on the card
        assert not path.is_file() or KEY.encode() not in path.read_bytes()


def test_a_logger_is_closed_where_the_training_fails(tmp_path: Path) -> None:
    logger = Recording(failing=1)
    with pytest.raises(ConnectionError):
        train(LoopOptions(run_dir=tmp_path, logger=logger))
    assert logger.closed == 1
    # The round is whole: its checkpoint was written before.
    lines = [json.loads(line)["round"] for line in (tmp_path / "metrics.jsonl").open()]
    assert lines == [0, 1]
    again = Recording()
    train(LoopOptions(run_dir=tmp_path, logger=again, resume=True))
    assert [number for number, _ in again.rounds] == [2]


def test_only_finite_numbers_are_logged() -> None:
    line = {
        "round": 4,
        "rounds": 9,
        "skipped": False,
        "forecast": "text",
        "server": {"loss": None, "accuracy": 0.5},
        "scheme": {"epsilon": 2, "widths": [1, 2], "inner": {"x": 1.5, "y": math.inf}},
    }
    assert numbers_of(line) == {
        "rounds": 9,
        "server/accuracy": 0.5,
        "scheme/epsilon": 2,
        "scheme/inner/x": 1.5,
    }


def test_what_is_no_logger() -> None:
    assert isinstance(Recording(), RoundLogger)
    with pytest.raises(InvalidParameterError, match=r"logger = 'int': .*log and close"):
        LoopOptions(logger=3)  # type: ignore[arg-type]


OWN = """
class Own:
    def __init__(self, run):
        self.file = open(f"{run}.log", "w")

    def log(self, server_round, metrics):
        if server_round == FAILS:
            raise ConnectionError("no dashboard")
        self.file.write(f"{server_round} {sorted(metrics)}\\n")

    def close(self):
        self.file.write("closed")
        self.file.close()


def nothing(run):
    return None
"""


def test_the_command_line_takes_a_logger_of_the_users(command: Command, own_folder: Path) -> None:
    module = write_module(own_folder, OWN.replace("FAILS", "None"))
    done = command(*RUN, "--log", f"{module}:Own")
    assert done.returncode == 0, done.stderr
    logged = (own_folder / "r.log").read_text().splitlines()
    assert [line.partition(" ")[0] for line in logged] == ["0", "1", "2", "closed"]
    assert "'server/accuracy'" in logged[0]


def test_a_logger_that_raises_does_not_spoil_the_run(command: Command, own_folder: Path) -> None:
    module = write_module(own_folder, OWN.replace("FAILS", "1"))
    done = command(*RUN, "--log", f"{module}:Own")
    assert done.returncode == EngineError.exit_code
    assert "raised ConnectionError: no dashboard; the last round that it has is 0" in done.stderr
    assert json.loads((own_folder / "r" / "summary.json").read_text())["status"] == "completed"
    assert (own_folder / "r.log").read_text().endswith("closed")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("tensorboard", "--log = 'tensorboard': expected tensorboard:DIR"),
        ("tensorboard:", "--log = 'tensorboard:': expected tensorboard:DIR"),
        ("wandb", "--log = 'wandb': expected tensorboard:DIR"),
        ("no_such_module:logger", "there is no 'no_such_module'"),
    ],
)
def test_a_logger_that_there_is_not(command: Command, option: str, message: str) -> None:
    done = command(*RUN, "--log", option)
    assert done.returncode == 2
    assert message in done.stderr
    assert not Path("r").exists()


def test_a_function_that_makes_no_logger(own_folder: Path) -> None:
    module = write_module(own_folder, OWN.replace("FAILS", "None"))
    make = logger_maker(f"{module}:nothing")
    with pytest.raises(InvalidParameterError, match=r"log and close \(not None\)"):
        make("run")


def test_a_round_is_logged_once(own_folder: Path) -> None:
    module = write_module(own_folder, OWN.replace("FAILS", "None"))
    logged = LoggedRounds(f"{module}:Own", "run")
    logged.open()
    for number in (0, 1, 0, 1, 2):  # a resumed run writes its earlier rounds again
        logged.log({"round": number, "x": 1.0})
    logged.close()
    logged.check()
    assert (own_folder / "run.log").read_text() == "0 ['x']\n1 ['x']\n2 ['x']\nclosed"


def test_a_logger_is_made_and_called_in_one_thread(command: Command, own_folder: Path) -> None:
    text = OWN.replace("FAILS", "None").replace(
        "self.file.write(f", "assert self.thread == get_ident(); self.file.write(f"
    )
    text = text.replace("    def log", "        self.thread = get_ident()\n\n    def log")
    module = write_module(own_folder, f"from threading import get_ident\n{text}")
    done = command(*RUN, "--log", f"{module}:Own")
    assert done.returncode == 0, done.stderr


def test_a_logger_that_cannot_be_made_stops_the_run(command: Command, own_folder: Path) -> None:
    module = write_module(own_folder, OWN.replace("FAILS", "None"))
    done = command(*RUN, "--log", f"{module}:nothing")
    assert done.returncode == 2
    assert "log and close (not None)" in done.stderr
    assert not (own_folder / "r" / "model.npz").exists()


def test_tensorboard_has_the_rounds(command: Command, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = command(*RUN, "--log", "tensorboard:events")
    assert done.returncode == 0, done.stderr
    events: Any = EventAccumulator(str(tmp_path / "events" / "r"))
    events.Reload()
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").open()]
    found = [(event.step, event.value) for event in events.Scalars("server/accuracy")]
    assert found == [(line["round"], pytest.approx(line["server"]["accuracy"])) for line in lines]


def test_tensorboard_that_is_not_installed(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    done = command(*RUN, "--log", "tensorboard:events")
    assert done.returncode == EngineError.exit_code
    assert "pip install 'flwr-privacy[tensorboard]'" in done.stderr
    assert not Path("r").exists()
