"""The pages: every import, name, file and link in them exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests.shared.imports import ROOT, modules

PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
ROOMS = "flwr_privacy|strategies|clients|simulations|tests|benchmarks|docs"
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES]
)


def blocks(text: str) -> Iterator[str]:
    """Return the Python code of a page; of a change to an app, the lines that it adds."""
    for language, block in re.findall(r"^```(\w+)[^\n]*\n(.*?)^```", text, re.M | re.S):
        if language in ("python", "py"):
            yield block
        if language == "diff":
            yield "\n".join(line[1:] for line in block.splitlines() if line.startswith("+"))


def imports(text: str) -> Iterator[str]:
    """Return the statements that import this library."""
    for block in blocks(text):
        yield from re.findall(r"^(?:from|import) flwr_privacy[^(\n]*(?:\([^)]*\))?", block, re.M)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_import_works(page: Path) -> None:
    for statement in imports(page.read_text()):
        assert ast.parse(statement)
        exec(statement, {})


@each_page
def test_every_name_exists(page: Path) -> None:
    for name in re.findall(r"`(flwr_privacy(?:\.\w+)+)`", page.read_text()):
        resolve_name(name)


@each_page
def test_every_file_exists(page: Path) -> None:
    for name in re.findall(rf"`((?:{ROOMS})/[\w./-]*)`", page.read_text()):
        assert (ROOT / name).exists(), name


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        other = (page.parent / target).resolve() if target else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), f"{target}#{anchor}"


def test_the_map_shows_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.parent for path in modules().values() if path.name == "__init__.py"}
    shown = {
        ROOT / name
        for row in re.findall(r"^\| (`.*?) \|", page, re.M)
        for name in re.findall(r"`([\w/]+)`", row)
    }
    assert rooms - {ROOT / "flwr_privacy"} == {path for path in shown if path.is_dir()}
