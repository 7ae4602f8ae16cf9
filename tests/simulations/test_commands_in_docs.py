"""The commands in the pages: each exists, with the options that it is given."""

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from flwr_privacy.simulations.cli import app
from tests.shared.imports import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[list[str]]:
    """Return the arguments of every `flwr-privacy` in the code of a page."""
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    lines = re.findall(r"^ {4}.*?\bflwr-privacy +([a-z].*)$", text, re.M)
    lines += re.findall(r"`flwr-privacy +([a-z][^`|]*)`", text)
    return [shlex.split(re.split(r" *(?:#|\|\||;)", line)[0].strip()) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
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
