"""A server that is killed in the middle of a round, and what the clients still answer."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from apps import message_app, record, run_strategy, same
from conformance import Killed
from flwr.app import Message
from grid_tap import tapped

from flwr_privacy.clients import SecureSumClient, as_mod
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.secure_sum.messages import OPEN
from flwr_privacy.strategies import FedAvg, LoopOptions
from flwr_privacy.strategies.state.experiment import Experiment
from flwr_privacy.wire.message import RECORD


def trained(folder: Path | None, *, resume: bool = False, state: Path | None = None, **start: Any):
    strategy = FedAvg(
        loop=LoopOptions(seed=3, experiment_id="e", run_dir=folder, resume=resume, deadline=2.0),
        secure_sum=SecureSum(value_range=100.0),
    )
    app = message_app([as_mod(SecureSumClient)])
    return run_strategy(strategy, app, arrays=record(), state=state, **start)


def folders(path: Path) -> dict[str, Path]:
    for name in ("folder", "state"):
        (path / name).mkdir()
    return {"folder": path / "folder", "state": path / "state"}


def killed_when_asked_to_open(message: Message) -> None:
    if OPEN in message.content and message.content[RECORD]["round"] == 2:
        raise Killed


def test_a_round_that_was_not_opened_is_done_again(tmp_path: Path) -> None:
    kept = folders(tmp_path)
    with pytest.raises(Killed):
        trained(**kept, before=tapped(killed_when_asked_to_open))
    resumed = trained(**kept, resume=True)
    assert same(resumed.arrays, trained(None).arrays)
    assert [line["scheme"]["sum_opened"] for line in resumed.history] == [0, 4, 4, 4]


def test_a_client_that_comes_back_with_another_key_costs_one_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By intent, or as its node has lost its folder; the others know the key that it had."""
    kept = folders(tmp_path)
    with pytest.raises(Killed):
        trained(**kept, before=tapped(killed_when_asked_to_open))
    shutil.rmtree(tmp_path / "state" / "1.secure-sum")
    resumed = trained(**kept, resume=True)
    assert [line["scheme"]["sum_opened"] for line in resumed.history] == [0, 4, 0, 3]
    assert "the key of client 1 is another than before" in caplog.text
    assert "client 1 (node" in caplog.text


def test_a_round_that_was_opened_is_not_opened_again(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sum over other survivors, with the same vectors, would give somebody's away."""
    end_round = Experiment.end_round

    def dying(self: Experiment, line: dict[str, Any], *given: Any, **named: Any) -> None:
        if line["round"] == 2:
            raise Killed
        end_round(self, line, *given, **named)

    kept = folders(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "end_round", dying)
        with pytest.raises(Killed):
            trained(**kept)
    with caplog.at_level("WARNING", "flwr.privacy"):
        resumed = trained(**kept, resume=True)
    assert [line.get("skipped") for line in resumed.history] == [None, False, True, False]
    assert "round 2 does not follow round 2, whose sum this client has opened" in caplog.text
    assert same(resumed.arrays, trained(None, num_rounds=2).arrays)


def test_a_round_that_was_opened_is_not_lost_while_its_model_is_evaluated(tmp_path: Path) -> None:
    def kill(server_round: int, arrays: Any) -> None:
        if server_round == 2:
            raise Killed

    kept = folders(tmp_path)
    with pytest.raises(Killed):
        trained(**kept, evaluate_fn=kill)
    resumed = trained(**kept, resume=True)
    assert [line.get("skipped") for line in resumed.history] == [None, False, False, False]
    assert [line["scheme"]["sum_opened"] for line in resumed.history] == [0, 4, 4, 4]
    assert same(resumed.arrays, trained(None).arrays)
