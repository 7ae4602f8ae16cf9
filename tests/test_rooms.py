"""The rooms of the code: which may import which, what a node loads, and how large a folder is."""

import ast
import re
import sys
import tomllib

import pytest

from tests.shared.imports import FLOORS, ROOT, foreign, imported, modules, reached

# A room imports rooms of the lines above its own, and nothing of the lines below.
LAYERS = [
    ["errors"],
    ["accounting", "keywords", "lazy", "wire"],
    ["stragglers"],
    ["privacy"],
    ["coding"],
    ["pipeline"],
    ["evaluation"],
    ["acfl", "fedvs", "m2fdp", "mspdq", "secure_sum", "udp"],
    ["central_dp"],
    ["clients.profiling"],
    ["clients.certificates"],
    ["clients.node"],
    ["clients.torch", "clients"],
    ["clients.m2fdp", "clients.mspdq", "clients.vertical"],
    ["strategies.options"],
    ["strategies.state"],
    ["strategies.requests"],
    ["strategies.transport"],
    ["strategies.loop"],
    ["strategies"],
    [f"strategies.{s}" for s in ("acfl", "central_dp", "m2fdp", "mspdq", "udp", "vertical")],
    ["simulations.engines"],
    ["simulations.inspector"],
    ["simulations.settings"],
    ["simulations.tasks"],
    ["simulations.verification"],
    ["simulations.app", "simulations.reports"],
    ["simulations.runner"],
    ["simulations.deployment", "simulations.reliability"],
    ["simulations.research"],
    ["simulations.calibration"],
    ["simulations.testing"],
    ["simulations.operations"],
    ["simulations"],
    ["simulations.cli"],
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
OWN = {"__init__.py", "__pycache__", "py.typed", "LICENSE"}
PACKAGES = sorted(m for m, path in modules().items() if path.name == "__init__.py")
MOST_ENTRIES = 17  # of a folder, beside what makes it a package or an app


def room_of(module: str) -> str:
    """Return the innermost room that a module is in."""
    parts = module.split(".")[1:]
    return next(
        (
            room
            for length in range(len(parts), 0, -1)
            if (room := ".".join(parts[:length])) in LEVEL
        ),
        "",
    )


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_module_imports_what_its_room_may(module: str) -> None:
    room = room_of(module)
    if module == "flwr_privacy" or module in PACKAGES:
        return  # a package shows what its rooms have
    assert room, f"{module} is in no room"
    wrong = [
        other
        for other in imported(module)
        if room_of(other) not in ("", room) and LEVEL[room_of(other)] >= LEVEL[room]
    ]
    assert not wrong


def test_the_floors_of_nodes_and_servers_have_nothing_that_none_of_them_runs() -> None:
    floors = {m for m in modules() if not m.startswith("flwr_privacy.simulations")}
    halves = {m for m in floors if m.split(".")[1:2] in (["strategies"], ["clients"])}
    assert floors - reached(halves) - set(PACKAGES) == {"flwr_privacy.lazy"}


def test_nodes_and_servers_import_only_what_pip_installs_with_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = {re.split(r"[<>=]", line)[0].replace("-", "_") for line in project["dependencies"]}
    with_extras = ("flwr_privacy.simulations", "flwr_privacy.clients.torch")
    with_extras += ("flwr_privacy.clients.profiling",)  # the extra "profile"
    imported_by = {
        name: m
        for m in modules()
        if not m.startswith(with_extras)
        for name in foreign(m) - sys.stdlib_module_names
    }
    # An operator's commands run on a node, too: tests/simulations/operations/test_node.py.
    command_line = {"typer", "tomli_w"}
    assert set(imported_by) | command_line == installed, imported_by


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_in_a_sentence_what_belongs_there(package: str) -> None:
    text = ast.get_docstring(ast.parse(modules()[package].read_text(encoding="utf-8")))
    assert text
    assert text.splitlines()[0].endswith(".")


@pytest.mark.parametrize("floor", FLOORS)
def test_a_folder_can_be_taken_in_at_a_glance(floor: str) -> None:
    for folder in [ROOT / floor, *(p for p in (ROOT / floor).rglob("*") if p.is_dir())]:
        if OWN.intersection(folder.parts):
            continue
        entries = [p for p in folder.iterdir() if p.name not in OWN]
        assert len(entries) <= MOST_ENTRIES, folder
