"""`run --help` lists what there is, and the parameters of a scheme."""

from dataclasses import fields

import pytest
from commands import Command

from flwr_privacy.simulations.settings.flat_options import flat_keys
from flwr_privacy.simulations.settings.parameter_help import parameters_of
from flwr_privacy.simulations.settings.run_settings import PARTITIONS, Settings
from flwr_privacy.simulations.settings.schemes import SCHEMES
from flwr_privacy.simulations.tasks.tasks import TASKS
from flwr_privacy.simulations.tasks.vertical_tasks import VERTICAL_TASKS
from flwr_privacy.strategies import UDP, SchemeStrategy


@pytest.mark.parametrize("name", ["run", "deploy"])
def test_help_lists_everything_that_there_is(command: Command, name: str) -> None:
    done = command(name, "--help")
    assert done.returncode == 0
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert listed >= {*SCHEMES, *TASKS, *VERTICAL_TASKS, *PARTITIONS}


@pytest.mark.parametrize("name", SCHEMES)
def test_help_of_a_scheme_describes_every_parameter_that_is_its_own(
    command: Command, name: str
) -> None:
    chosen = SCHEMES[name]
    described = parameters_of(chosen.strategy)
    own = set(flat_keys(chosen.strategy)) - set(flat_keys(SchemeStrategy))
    assert {one.name for one in described} == own
    assert all(len(one.text) > 10 for one in described)
    assert not [one for one in described if one.text.startswith(("As in", "Those of"))]
    done = command("run", "--scheme", name, "--help")
    assert done.returncode == 0
    fixed = chosen.fixed(Settings(clients=2)).keys()
    for key in own - fixed - {entry.name for entry in fields(Settings)}:
        assert f"\n  {key} " in done.stdout


def test_defaults_are_those_of_the_classes() -> None:
    found = {(one.name, one.only): one.default for one in parameters_of(UDP)}
    assert found["clipping_norm", ("unit=user",)] == "1.0"
    assert found["clipping_norm", ("unit=record",)] == "0.5"
    assert found["epsilon", ("unit=user", "unit=record", "unit=dp-sgd")] == "8.0"
    assert found["unit", ()] == found["learning_rate", ("unit=record",)] == "required"
    assert found["beta", ("schedule=discounting",)] == "0.9"
    assert found["schedule", ()] == "None"


@pytest.mark.parametrize("way", [("--scheme", "udp"), ("--scheme=udp",), ("--set", "scheme=udp")])
def test_the_scheme_may_be_named_in_every_way(command: Command, way: tuple[str, ...]) -> None:
    assert "\n  local_epochs = 1  [with unit=record]\n" in command("run", "--help", *way).stdout


def test_help_of_a_scheme_that_there_is_not(command: Command) -> None:
    done = command("run", "--scheme", "upd", "--help")
    assert done.returncode == 2
    assert done.stderr.startswith("error: scheme = 'upd': expected one of ")
