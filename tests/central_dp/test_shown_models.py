"""A trusted server shows one noised model of each round, however often it dies, and charges it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from apps import make, message_app, model_of, run_strategy
from conformance import Killed
from flwr.app import ArrayRecord

from flwr_privacy.clients import CentralDPClient, as_mod
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.card.folder import CARD
from flwr_privacy.strategies import CentralDP
from flwr_privacy.strategies.state.experiment import CHECKPOINT, Experiment

APP = message_app([as_mod(CentralDPClient)])
ROUNDS = 3


def train(folder: Path, show: Any = None, **options: Any) -> Any:
    """Train, or go on: the noise is a trusted server's, and no seed repeats it."""
    resume = (folder / CHECKPOINT).exists()
    options = {"noise": "server", "seed": 1, "experiment_id": "e", "run_dir": folder, **options}
    strategy = make(CentralDP, **options, resume=resume)
    return run_strategy(strategy, APP, num_rounds=ROUNDS, evaluate_fn=show)


def card(folder: Path) -> PrivacyCard:
    return PrivacyCard.from_json((folder / CARD).read_bytes())


def bytes_of(arrays: ArrayRecord) -> bytes:
    return b"".join(array.tobytes() for array in model_of(arrays).values())


class Audience:
    """Whoever sees the models; the server dies while it looks at those of round 2."""

    def __init__(self, folder: Path, deaths: int = 5) -> None:
        self.folder, self.deaths = folder, deaths
        self.seen: dict[int, list[bytes]] = {}

    def __call__(self, server_round: int, arrays: ArrayRecord) -> None:
        self.seen.setdefault(server_round, []).append(bytes_of(arrays))
        if server_round > 0:
            assert [r.server_round for r in card(self.folder).releases][-1] == server_round
        if server_round == 2 and len(self.seen[2]) <= self.deaths:
            raise Killed


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": "fixed"},
        {"sampling": "poisson"},
        {"sampling": "balanced", "correlated": "banded-mf"},
        {"sampling": "balanced", "correlated": "blt"},
        {"sampling": "balanced", "correlated": "tree"},
    ],
)
def test_five_deaths_in_a_round_show_one_model_of_it_for_one_release(
    options: dict[str, Any], tmp_path: Path
) -> None:
    audience = Audience(tmp_path)
    for _ in range(audience.deaths):
        with pytest.raises(Killed):
            train(tmp_path, audience, **options)
    result = train(tmp_path, audience, **options)
    assert [len(audience.seen[r]) for r in range(ROUNDS + 1)] == [1, 1, 6, 1]
    assert len(set(audience.seen[2])) == 1
    assert bytes_of(result.arrays) == audience.seen[ROUNDS][0]
    assert [r.server_round for r in card(tmp_path).releases] == [1, 2, 3]
    assert card(tmp_path).verify()
    assert [line["round"] for line in result.history] == [0, 1, 2, 3]


def test_a_process_that_ends_while_a_model_is_shown_leaves_that_model(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for attempt in range(2):
        command = [sys.executable, __file__, str(tmp_path), str(attempt)]
        ended = subprocess.run(command, capture_output=True, timeout=120, env=environment)
        assert ended.returncode == 9, ended.stderr[-2000:]
    seen = [(tmp_path / f"seen-{attempt}").read_bytes() for attempt in range(2)]
    assert seen[0] == seen[1]
    assert [r.server_round for r in card(tmp_path).releases] == [1, 2]


@pytest.mark.parametrize("correlated", [{}, {"sampling": "balanced", "correlated": "banded-mf"}])
def test_a_model_that_is_lost_before_its_checkpoint_was_shown_to_nobody(
    correlated: dict[str, Any], tmp_path: Path
) -> None:
    audience = Audience(tmp_path, deaths=0)

    def lost(*given: Any, **named: Any) -> None:
        raise Killed

    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Experiment, "end_training", lost)
            with pytest.raises(Killed):
                train(tmp_path, audience, **correlated)
    assert list(audience.seen) == [0]
    result = train(tmp_path, audience, **correlated)
    assert [len(audience.seen[r]) for r in range(ROUNDS + 1)] == [1, 1, 1, 1]
    assert bytes_of(result.arrays) == audience.seen[ROUNDS][0]
    assert [r.server_round for r in card(tmp_path).releases] == [1, 2, 3]


def test_what_is_called_after_a_round_sees_the_line_of_its_checkpoint(tmp_path: Path) -> None:
    """A death there ends the round: it is neither shown nor told of again."""
    audience, told = Audience(tmp_path, deaths=0), []

    def on_round(line: dict[str, Any]) -> None:
        told.append(line["round"])
        written = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(written[-1]) == line
        raise Killed

    for _ in range(ROUNDS + 1):
        with pytest.raises(Killed):
            train(tmp_path, audience, on_round=on_round)
    train(tmp_path, audience, on_round=on_round)
    assert told == [0, 1, 2, 3]
    assert [len(audience.seen[r]) for r in range(ROUNDS + 1)] == [1, 1, 1, 1]


def _die(folder: Path, attempt: str) -> None:
    def show(server_round: int, arrays: ArrayRecord) -> None:
        if server_round == 2:
            (folder / f"seen-{attempt}").write_bytes(bytes_of(arrays))
            os._exit(9)

    train(folder, show)


if __name__ == "__main__":
    _die(Path(sys.argv[1]), sys.argv[2])
