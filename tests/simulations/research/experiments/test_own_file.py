"""An experiment of the user's own: a file by its path, with a task of theirs in it."""

import json
from pathlib import Path

import pytest
from commands import Command
from own_modules import OWN_TASK, own_folder, write_module

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.experiments.files import own_experiment

__all__ = ["own_folder"]

TEXT = """
[base]
clients = 4
rounds = 1

[[curve]]
label = "no noise"
scheme = "fedavg"
training.learning_rate = 0.5

[[curve]]
label = "noise"
scheme = "udp"
strategy.unit = "user"
"""


def test_it_is_trained_with_a_task_of_the_users(command: Command, own_folder: Path) -> None:
    module = write_module(own_folder, OWN_TASK.format(seed=0, outputs=2))
    task = f"{module}:income"
    (own_folder / "my.toml").write_text(TEXT.replace("[base]", f'[base]\ntask = "{task}"'))
    arguments = ("experiment", "my.toml", "--jobs", "1", "--seeds", "0")
    done = command(*arguments)
    assert done.returncode == 0, done.stderr
    assert "numbers: my/experiment.json" in done.stdout
    assert (own_folder / "my" / "figure.png").exists()
    numbers = json.loads((own_folder / "my" / "experiment.json").read_text())
    assert (numbers["title"], numbers["source"], numbers["size"]) == ("my", "my.toml", "as written")
    assert [curve["settings"]["task"] for curve in numbers["curves"]] == [task, task]
    # The runs are kept: of another task of the name they would be another experiment's.
    (own_folder / "my" / "noise-seed-0" / "task-digest.txt").write_text("one-other")
    done = command(*arguments)
    assert done.returncode == 2
    assert "noise-seed-0 was trained on another task of that name" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rounds = 1", "partition.alpha = 0.1", r"partition\.alpha = 0\.1: expected nothing"),
        ("strategy.unit", "partition.alpha = 0.1\nstrategy.unit", r"partition\.alpha = 0\.1"),
        ("[base]", "surprise = 1\n[base]", "surprise"),
        ("[base]", "[base", "TOML"),
        ("rounds = 1", "round = 1", "nearest: 'rounds'"),
    ],
)
def test_what_is_not_understood_or_has_no_effect(
    own_folder: Path, old: str, new: str, message: str
) -> None:
    path = own_folder / "my.toml"
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(InvalidParameterError, match=message):
        own_experiment(path, full=False)


def test_a_setting_of_all_curves_that_one_of_them_uses(own_folder: Path) -> None:
    path = own_folder / "my.toml"
    dirichlet = 'partition.kind = "dirichlet"\nstrategy.unit'
    alpha = TEXT.replace("rounds = 1", "partition.alpha = 0.1")
    path.write_text(alpha.replace("strategy.unit", dirichlet))
    assert own_experiment(path, full=False).base["partition"] == {"alpha": 0.1}
    with pytest.raises(InvalidParameterError, match=r"a table \[full\] in my.toml"):
        own_experiment(path, full=True)


def test_a_file_that_is_not_there(command: Command) -> None:
    done = command("experiment", "mine.toml")
    assert done.returncode == 2
    assert "experiment = 'mine.toml': expected a TOML file that exists" in done.stderr
