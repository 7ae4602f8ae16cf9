"""Tasks by their names: built-in, installed, and functions of the user's."""

import sys
from pathlib import Path
from typing import Any

import pytest
from own_modules import OWN_TASK, own_folder, write_module

from flwr_privacy.errors import CheckpointError, DataError, InvalidParameterError
from flwr_privacy.simulations.settings.own_code import search_current_folder
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.tasks import tasks
from flwr_privacy.simulations.tasks.lookup import (
    check_own_task,
    check_same_task,
    installed_tasks,
    task,
    task_digest,
)

__all__ = ["own_folder"]

TASK = OWN_TASK.format(seed=0, outputs=2)


@pytest.fixture(autouse=True)
def here(own_folder: Path) -> Path:
    search_current_folder()
    return own_folder


def test_a_function_of_the_current_folder(here: Path) -> None:
    name = f"{write_module(here, TASK)}:income"
    found = task(name)
    assert (found.name, found.description) == (name, "Income by four columns.")
    assert task(name) is found  # its function is called once
    check_own_task(found, None)
    settings = Settings(task=name, clients=5)
    assert tasks.task_of(settings) is found
    assert str(tasks.check_data(settings)) == "5 clients, 30 records of 2 classes each"


def test_a_module_in_a_package(here: Path) -> None:
    (here / "own_package").mkdir()
    (here / "own_package" / "__init__.py").touch()
    (here / "own_package" / "tables.py").write_text(TASK)
    assert task("own_package.tables:income").name == "own_package.tables:income"


BROKEN = "class Strange(Exception): pass\n{}\ndef one():\n    {}\n"


@pytest.mark.parametrize(
    ("top", "body", "function", "error", "message"),
    [
        ("", "return 3", "one", InvalidParameterError, r"returns a .*Task \(it returns int\)"),
        ("", "pass", "one", InvalidParameterError, "it returns None"),
        ("", "pass", "two", InvalidParameterError, r"a function of own_module.*; it has Strange"),
        ("two = 5", "pass", "two", InvalidParameterError, "a function of own_module"),
        ("", "raise Strange('no table')", "one", DataError, r"one\(\) raised Strange: no table \("),
        ("import nowhere_at_all", "pass", "one", DataError, "importing it raised ModuleNotFound"),
        ("1 / 0", "pass", "one", DataError, r"importing it raised ZeroDivisionError.*, line 2\)"),
        ("", "pass", "two-three", InvalidParameterError, "module:function, such as"),
        ("", "pass", "", InvalidParameterError, "module:function, such as"),
    ],
)
def test_what_is_no_task(
    here: Path, top: str, body: str, function: str, error: type[Exception], message: str
) -> None:
    module = write_module(here, BROKEN.format(top, body))
    with pytest.raises(error, match=message):
        task(f"{module}:{function}")


@pytest.mark.parametrize("name", ["no_such_module:income", "no_such_module.deep:income"])
def test_a_module_that_is_not_there(name: str, here: Path) -> None:
    with pytest.raises(InvalidParameterError, match=f"there is no 'no_such_module' in {here}"):
        task(name)


MODELS = {
    "torch.nn.Linear(3, 2)": (DataError, "its model raised RuntimeError"),
    "torch.nn.Linear(4, 1)": (InvalidParameterError, "labels = 1: .*classes below 1"),
    "torch.nn.Identity()": (InvalidParameterError, "model = 'Identity'"),
    "len": (InvalidParameterError, "model = 'builtin"),
    "torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Unflatten(1, (1, 2)))": (
        InvalidParameterError,
        r"outputs of the model = \(18, 1, 2\): .*\(batch, classes\)",
    ),
    "1 / 0": (DataError, "its model raised ZeroDivisionError"),
}


@pytest.mark.parametrize("model", MODELS)
def test_models_that_do_not_fit_the_records(here: Path, model: str) -> None:
    module = write_module(here, TASK.replace("torch.nn.Linear(4, 2)", model))
    error, message = MODELS[model]
    with pytest.raises(error, match=message):
        check_own_task(task(f"{module}:income"), None)


LOSSES = {
    "lambda outputs, labels: 3.0": "loss = 'float'",
    "lambda outputs, labels: outputs.sum(1)": "loss = 'Tensor'",
    "lambda outputs, labels: outputs.sum().detach()": "loss = 'Tensor'",
    "lambda outputs, labels: outputs.sum() * float('nan')": "loss = nan: .*a finite loss",
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_that_are_none(here: Path, loss: str) -> None:
    module = write_module(here, TASK.replace("data=data", f"loss={loss}, data=data"))
    with pytest.raises(InvalidParameterError, match=LOSSES[loss]):
        check_own_task(task(f"{module}:income"), None)


def test_a_class_that_only_a_late_record_has(here: Path) -> None:
    module = write_module(here, TASK.replace("data, test =", "classes[120] = 2; data, test ="))
    with pytest.raises(InvalidParameterError, match=r"labels = 2: .*classes below 2"):
        check_own_task(task(f"{module}:income"), None)


def test_own_records_are_not_for_schemes_with_columns(here: Path) -> None:
    name = f"{write_module(here, TASK)}:income"
    with pytest.raises(InvalidParameterError, match="columns of the same records: digits-rows"):
        tasks.task_of(Settings(scheme="fedvs", task=name))


def test_the_digest_tells_tasks_apart_by_data_and_model(here: Path) -> None:
    first = f"{write_module(here, TASK)}:income"
    digest = task_digest(first)
    same = f"{write_module(here, TASK)}:income"
    check_same_task(same, digest)
    check_same_task(same, "")  # of a run that noted none
    assert task_digest("digits-mlp") == task_digest("digits-rows") == ""
    changes = {
        "other data.": ("columns[:, 0] > 0", "columns[:, 0] > 0.1"),
        "other model.": ("torch.nn.Linear(4, 2)", "torch.nn.Linear(4, 3)"),
        "other model": (
            "torch.nn.Linear(4, 2)",
            "torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())",
        ),
        "other  model": ("data=data", "data=data, loss=torch.nn.functional.multi_margin_loss"),
        "other data and other model.": ("Linear(4, 2)", "Linear(4, 3)"),
    }
    for message, (old, new) in changes.items():
        text = TASK.replace(old, new)
        if "data and" in message:
            text = text.replace("> 0)", "> 0.1)")
        assert text != TASK
        other = f"{write_module(here, text)}:income"
        with pytest.raises(CheckpointError, match=message.replace("  ", " ")):
            check_same_task(other, digest)


def test_a_test_record_more_is_other_data(here: Path) -> None:
    digest = task_digest(f"{write_module(here, TASK)}:income")
    other = write_module(here, TASK.replace("columns[150:], classes[150:]", "columns, classes"))
    with pytest.raises(CheckpointError, match="other data"):
        check_same_task(f"{other}:income", digest)


def install(folder: Path, package: str, **values: str) -> None:
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name.replace('_', '-')} = {value}" for name, value in values.items()]
    (info / "entry_points.txt").write_text("\n".join(["[flwr_privacy.tasks]", *lines, ""]))


def test_an_installed_task_has_a_name(here: Path) -> None:
    module = write_module(here, TASK)
    install(here, "acme", acme_income=f"{module}:income", acme_broken="nowhere:income")
    assert {*installed_tasks()} == {"acme-income", "acme-broken"}
    assert module not in sys.modules  # a list imports nothing
    assert task("acme-income").name == "acme-income"
    assert len(task_digest("acme-income")) == 33
    with pytest.raises(InvalidParameterError, match=r"acme-broken.*no 'nowhere'"):
        task("acme-broken")
    with pytest.raises(InvalidParameterError, match="nearest: 'acme-income'"):
        task("acme-incom")
    assert tasks.task_of(Settings(task="acme-income")) is task("acme-income")


@pytest.mark.parametrize("name", ["digits_mlp", "digits_rows", "acme_income"])
def test_an_installed_task_needs_a_name_of_its_own(here: Path, name: str) -> None:
    own: dict[str, Any] = {name: "one:income"}
    install(here, "acme", **own)
    install(here, "other", acme_income="two:income")
    with pytest.raises(InvalidParameterError, match="another task has that name"):
        installed_tasks()
