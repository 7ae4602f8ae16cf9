"""What was asked in a round that broke off is charged once, whoever is asked again."""

from pathlib import Path
from typing import Any

import pytest
from apps import record

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import CheckpointError
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.strategies import LoopOptions
from flwr_privacy.strategies.state.experiment import Experiment

ONE, OTHER = (
    Charge(neighbours="replace_one", noise_multiplier=1.0),
    Charge(neighbours="replace_one", noise_multiplier=2.0, sampling=0.5),
)


def experiment(folder: Path, *, resume: bool = False) -> Experiment:
    made = Experiment("udp", LoopOptions(seed=1, experiment_id="e", run_dir=folder, resume=resume))
    made.begin(record())
    return made


def end_round(made: Experiment, server_round: int) -> None:
    promise = Guarantee(scheme="udp", protects="nothing", adversary="nobody")
    card = PrivacyCard(experiment_id="e", guarantee=promise, releases=[])
    line: dict[str, Any] = {"round": server_round, "seconds": 0.0}
    made.end_round(line, record(), card=card)


def end_training(made: Experiment, server_round: int) -> None:
    promise = Guarantee(scheme="udp", protects="nothing", adversary="nobody")
    card = PrivacyCard(experiment_id="e", guarantee=promise, releases=[])
    line: dict[str, Any] = {"round": server_round, "seconds": 0.0}
    made.end_training(line, record(), card=card)


def broken(folder: Path) -> Experiment:
    """Return an experiment that goes on after it was killed in round 2."""
    first = experiment(folder)
    end_round(first, 1)
    first.asked.note("e", {"train 2 0": {"a": ONE, "b": OTHER}})
    first.asked.note("e", {"evaluate 2 0": {"a": OTHER}})
    return experiment(folder, resume=True)


def test_what_is_asked_again_is_with_those_who_were_asked_before(tmp_path: Path) -> None:
    resumed = broken(tmp_path)
    assert resumed.asked.before("train 2 0") == {"a", "b"}
    assert resumed.asked.before("train 2 0") == set()
    assert resumed.asked.broken_off() == {"evaluate 2 0": {"a": OTHER}}
    assert resumed.asked.broken_off() == {}


def test_what_is_not_asked_again_is_left_with_what_it_cost(tmp_path: Path) -> None:
    assert broken(tmp_path).asked.broken_off() == {
        "train 2 0": {"a": ONE, "b": OTHER},
        "evaluate 2 0": {"a": OTHER},
    }


def test_a_run_that_breaks_off_twice_forgets_nothing(tmp_path: Path) -> None:
    broken(tmp_path).asked.note("e", {"train 2 0": {"c": ONE}})
    again = experiment(tmp_path, resume=True)
    assert again.asked.before("train 2 0") == {"a", "b", "c"}
    assert set(again.asked.broken_off()) == {"evaluate 2 0"}


def test_a_round_that_ends_leaves_nothing(tmp_path: Path) -> None:
    resumed = broken(tmp_path)
    end_round(resumed, 2)
    assert experiment(tmp_path, resume=True).asked.broken_off() == {}


def test_a_damaged_note_is_refused(tmp_path: Path) -> None:
    broken(tmp_path)
    for damaged in ('{"experiment_id": "e", "asked": {"train 2 0": ["a"]}}', "{}", "[", "[]"):
        (tmp_path / "asked.json").write_text(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            experiment(tmp_path, resume=True)


def test_what_was_asked_before_the_first_checkpoint_counts_when_it_begins_again(
    tmp_path: Path,
) -> None:
    experiment(tmp_path).asked.note("e", {"setup 0 0": {"a": ONE}})
    assert experiment(tmp_path).asked.broken_off() == {"setup 0 0": {"a": ONE}}
    other = Experiment("udp", LoopOptions(seed=1, experiment_id="f", run_dir=tmp_path))
    other.begin(record())
    assert other.asked.broken_off() == {}


def test_a_note_stays_until_the_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = broken(tmp_path)

    def full(*_: Any, **options: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("flwr_privacy.strategies.state.experiment.checkpoint.save", full)
        with pytest.raises(OSError, match="no space"):
            end_round(resumed, 2)
    assert set(experiment(tmp_path, resume=True).asked.broken_off()) == {
        "train 2 0",
        "evaluate 2 0",
    }


def test_a_note_of_a_round_that_has_its_checkpoint_is_charged_there_alone(tmp_path: Path) -> None:
    resumed = broken(tmp_path)
    note = (tmp_path / "asked.json").read_bytes()
    end_round(resumed, 2)
    (tmp_path / "asked.json").write_bytes(note)  # as if the process had ended before it was removed
    assert experiment(tmp_path, resume=True).asked.broken_off() == {}


def test_a_note_of_a_training_that_has_its_checkpoint_is_charged_there_alone(
    tmp_path: Path,
) -> None:
    """What is asked about its model is noted from then on, and not forgotten."""
    first = experiment(tmp_path)
    end_round(first, 1)
    first.asked.note("e", {"train 2 0": {"a": ONE}})
    note = (tmp_path / "asked.json").read_bytes()
    end_training(first, 2)
    assert experiment(tmp_path, resume=True).asked.broken_off() == {}
    (tmp_path / "asked.json").write_bytes(note)  # as if the process had ended before it was removed
    resumed = experiment(tmp_path, resume=True)
    assert resumed.asked.broken_off() == {}
    resumed.asked.note("e", {"evaluate 2 0": {"a": OTHER}})
    again = experiment(tmp_path, resume=True)
    assert again.asked.broken_off() == {"evaluate 2 0": {"a": OTHER}}
    end_round(again, 2)
    assert experiment(tmp_path, resume=True).asked.broken_off() == {}
