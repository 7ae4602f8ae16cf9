"""Where no run folder is given, a run leaves its card in a folder of its own."""

import json
import logging
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from apps import MODEL, message_app, record, run_strategy
from flwr.app import Context
from flwr.serverapp import ServerApp

from flwr_privacy.clients import FedAvgClient, UDPClient, as_mod
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.card import folder as card_folder
from flwr_privacy.privacy.card.folder import new_card_folder, newest_card
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.strategies import UDP, FedAvg, LoopOptions, RecordLevel, UserLevel

CARD = "privacy-card.json"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FLWR_PRIVACY_RUNS")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "flwr-privacy-runs"


def train(strategy: UDP, **options: Any) -> Any:
    return run_strategy(strategy, message_app([as_mod(UDPClient)]), num_rounds=2, **options)


def test_a_run_leaves_its_card_under_the_current_folder(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flwr.privacy")
    train(UDP(privacy=UserLevel(epsilon=4.0), fraction_train=0.5, loop=LoopOptions(seed=1)))
    (folder,) = (path for path in runs.iterdir() if path.is_dir())
    assert re.fullmatch(r"\d{8}-\d{6}-udp", folder.name)
    assert sorted(p.name for p in folder.iterdir()) == ["metrics.jsonl", "privacy-card.html", CARD]
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(runs.stat().st_mode) == 0o700
    assert (runs / ".gitignore").read_text().endswith("*\n")
    assert f"card: {folder / 'privacy-card.html'}" in caplog.messages
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2]
    card = PrivacyCard.from_json((folder / CARD).read_bytes())
    assert card.verify()["gdp"][1] == pytest.approx(4.0, rel=1e-6)
    told = card.described
    assert (told.arrays, told.values) == (len(MODEL), sum(array.size for array in MODEL.values()))
    assert set(told.versions) == {"python", "flwr-privacy", "flwr", "numpy"}
    assert told.settings == {
        "fraction_train": "0.5",
        "fraction_evaluate": "0.0",
        "loop": "LoopOptions(seed=1)",
        "privacy": "UserLevel(epsilon=4.0)",
    }


def test_two_runs_of_one_second_have_two_folders(runs: Path) -> None:
    folders = {new_card_folder("udp") for _ in range(5)}
    assert len(folders) == 5
    assert all(folder is not None and folder.parent == runs for folder in folders)


@pytest.mark.parametrize("value", ["", "none", " none "])
def test_cards_can_be_turned_off(
    value: str, runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flwr.privacy")
    monkeypatch.setenv("FLWR_PRIVACY_RUNS", value)
    train(UDP(privacy=UserLevel()))
    assert not runs.exists()
    assert not [text for text in caplog.messages if text.startswith(("card:", "next:"))]


def test_a_strategy_can_turn_its_card_off(runs: Path) -> None:
    train(UDP(privacy=UserLevel(), loop=LoopOptions(write_card=False)))
    assert not runs.exists()
    with pytest.raises(InvalidParameterError, match="write_card = False: expected true"):
        LoopOptions(write_card=False, run_dir=".")


def test_a_folder_that_cannot_be_written_is_told_before_anybody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLWR_PRIVACY_RUNS", str(tmp_path / "file" / "runs"))
    strategy = UDP(privacy=UserLevel())
    text = "FLWR_PRIVACY_RUNS = .*: expected a folder that can be written, for the privacy card"
    with pytest.raises(InvalidParameterError, match=text) as error:
        train(strategy)
    assert error.value.exit_code == 2
    assert strategy.releases == []


def test_each_training_of_a_strategy_has_a_card(runs: Path) -> None:
    strategy = UDP(privacy=UserLevel())
    train(strategy)
    train(strategy)
    assert len(list(runs.glob(f"*/{CARD}"))) == 2


class OwnStart(UDP):
    """A strategy whose rounds are those of Flower's loop."""

    def start(self, grid: Any, initial_arrays: Any, **options: Any) -> Any:
        arrays = initial_arrays
        for server_round in (1, 2):
            messages = self.configure_train(server_round, arrays, options["config"], grid)
            replies = grid.send_and_receive(messages)
            arrays = self.aggregate_train(server_round, replies)[0]
        return arrays


def test_a_start_of_the_users_own_leaves_a_card_too(runs: Path) -> None:
    from flwr.app import ConfigRecord

    strategy = OwnStart(privacy=UserLevel(epsilon=4.0), rounds=2)
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Any, context: Context) -> None:
        strategy.start(grid, record(), config=ConfigRecord())

    run_inline(server_app, message_app([as_mod(UDPClient)]), nodes=4)
    (path,) = runs.glob(f"*/{CARD}")
    card = PrivacyCard.from_json(path.read_bytes())
    assert {release.server_round for release in card.releases} == {1, 2}
    ((_, epsilon),) = card.verify().values()
    assert epsilon == pytest.approx(4.0, rel=1e-6)


def test_the_newest_card_is_found(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameterError, match=f"no card in the default place, {runs}"):
        newest_card()
    run_strategy(FedAvg(fraction_evaluate=0.0), num_rounds=1)
    train(UDP(privacy=RecordLevel(learning_rate=0.1, noise="none")))
    first, second = sorted(runs.glob(f"*/{CARD}"))
    os.utime(second, (1, 1))
    assert newest_card() == first
    os.utime(first, (0, 0))
    assert newest_card() == second
    elsewhere = runs.parent / "others" / "run" / CARD
    elsewhere.parent.mkdir(parents=True)
    elsewhere.touch()
    assert (newest_card(elsewhere.parent.parent), newest_card()) == (elsewhere, second)
    monkeypatch.setenv("FLWR_PRIVACY_RUNS", card_folder.NONE)
    with pytest.raises(InvalidParameterError, match="FLWR_PRIVACY_RUNS = 'none'"):
        newest_card()


def test_nothing_secret_and_no_data_is_among_the_settings(runs: Path, tmp_path: Path) -> None:
    strategy = FedAvg(
        fraction_evaluate=0.0,
        evaluate_metrics_aggr_fn=lambda contents, key: contents[0],
        loop=LoopOptions(name="hospital", experiment_id="e", on_round=print),
    )
    run_strategy(strategy, message_app([as_mod(FedAvgClient)]), num_rounds=1)
    card = PrivacyCard.from_json(newest_card().read_bytes())
    assert card.described.name == "hospital"
    assert card.described.settings == {
        "fraction_evaluate": "0.0",
        "evaluate_metrics_aggr_fn": "<lambda>",
        "loop": "LoopOptions(on_round=print)",
    }
    assert str(tmp_path) not in card.to_json()
