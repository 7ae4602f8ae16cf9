"""The commands in the pages: each exists with its options, and a run's settings are allowed."""

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from flwr_privacy.errors import DataError
from flwr_privacy.simulations.cli import app
from flwr_privacy.simulations.cli.run_options import given
from flwr_privacy.simulations.runner.complete_settings import settings_of
from tests.shared.imports import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[list[str]]:
    """Return the arguments of every `flwr-privacy` in the code of a page."""
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    lines = re.findall(r"^ {4}.*?\bflwr-privacy +([a-z].*)$", text, re.M)
    lines += re.findall(r"`flwr-privacy +([a-z][^`|]*)`", text)
    lines += [f"run {options}" for options in re.findall(r"`(--scheme [^`]*--clients[^`]*)`", text)]
    return [shlex.split(re.split(r" *(?:#|\|\||;)", line)[0].strip()) for line in lines]


each_page = pytest.mark.parametrize(
    "page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES]
)


@each_page
def test_every_command_exists_with_its_options(page: Path) -> None:
    for arguments in commands(page):
        command = typer.main.get_command(app)
        while isinstance(command, click.Group) and arguments:
            name = arguments.pop(0)
            assert name in command.commands, name
            command = command.commands[name]
        known = {option for parameter in command.params for option in parameter.opts}
        given = {one.partition("=")[0] for one in arguments if one.startswith("--")}
        known.add("--help")
        assert given <= known, (command.name, given - known)


@each_page
def test_the_settings_of_a_run_are_allowed(page: Path) -> None:
    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    for arguments in commands(page):
        text = " ".join(arguments)
        if arguments[0] != "run" or "..." in text or re.search("--help|--resume", text):
            continue
        named = [word.replace("mytask:income", "digits-linear") for word in arguments[1:]]
        options = run.make_context("run", named).params
        root = options["data_root"]
        names = ("scheme", "task", "clients", "per_round", "rounds", "seed")
        values = given(
            options["assignments"],
            root and Path(root),
            **{name: options[name] for name in names},
            **{"partition.kind": options["partition"]},
        )
        try:
            settings_of(values, say=lambda _: None)
        except DataError:
            assert root == "DATA"


def test_the_table_has_every_command() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert re.findall(r"^\| `flwr-privacy (\S+)`", page, re.M) == list(commands)
