"""The pages of docs/facts: what they name exists, and every fact and equation has its row."""

import re
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
EQUATIONS = {  # the numbers that the papers print
    "acfl": {*range(1, 44)},
    "fedvs": {*range(1, 22)},
    "m2fdp": {*range(1, 97)} - {19},
    "mspdq": {*range(1, 80)} - {12, 17, 36, 37, 38, 39, 40, 42, 45, 46},
    "udp": {*range(1, 60)},
}
each_page = pytest.mark.parametrize("scheme", EQUATIONS)


def rows(scheme: str, heading: str) -> list[list[str]]:
    page = (ROOT / "docs" / "facts" / f"{scheme}.md").read_text()
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[1:]]


def both(scheme: str) -> list[list[str]]:
    return rows(scheme, "Facts") + rows(scheme, "Formulas")


def named(cell: str) -> list[tuple[str, str]]:
    """Return file and name of the tests that a cell names."""
    return re.findall(r"`([\w/.]+)::(\w+)`", cell)


def facts_of(test: str) -> set[str]:
    return set(re.findall(r"(?<=_)[FA]\d+(?=_)", test))


@cache
def written() -> set[tuple[str, str]]:
    """Return file and name of every test."""
    return {
        (path.relative_to(ROOT).as_posix(), name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }


@each_page
def test_every_function_exists(scheme: str) -> None:
    for *_, cell, _test in both(scheme):
        names = re.findall(r"`([\w.]+)`", cell)
        assert names or cell.startswith("No function: "), cell
        for name in names:
            assert not isinstance(resolve_name(name), ModuleType), name


@each_page
def test_every_test_exists(scheme: str) -> None:
    for *_, cell in both(scheme):
        assert named(cell) or cell.startswith("No test: "), cell
        assert set(named(cell)) <= written(), cell


@each_page
def test_every_fact_is_numbered_and_has_a_test_of_its_number(scheme: str) -> None:
    facts = rows(scheme, "Facts")
    letter = "A" if scheme == "m2fdp" else "F"
    assert [row[0] for row in facts] == [f"{letter}{n}" for n in range(1, len(facts) + 1)]
    for number, *_, cell in facts:
        found = [facts_of(name) for _, name in named(cell)]
        assert all(number in numbers for numbers in found if numbers), f"{number}: {cell}"
        assert any(found) or cell.startswith("No test: "), f"{number}: {cell}"


def test_every_test_of_a_fact_has_its_row() -> None:
    """In its scheme's folder by its number; a test outside of these folders by its name."""
    facts = {
        scheme: {row[0]: named(row[-1]) for row in rows(scheme, "Facts")} for scheme in EQUATIONS
    }
    for path, name in written():
        folder = path.split("/")[1]
        for number in facts_of(name):
            if folder in facts:
                assert number in facts[folder], f"{path}::{name}"
            else:
                pages = [page.get(number, []) for page in facts.values()]
                assert any((path, name) in tests for tests in pages), f"{path}::{name}"


@each_page
def test_every_equation_of_the_paper_has_a_row(scheme: str) -> None:
    found: set[int] = set()
    for source, *_ in rows(scheme, "Formulas"):
        for first, last in re.findall(r"\((\d+)\)(?: to \((\d+)\))?", source):
            found |= {*range(int(first), int(last or first) + 1)}
    assert found == EQUATIONS[scheme]
