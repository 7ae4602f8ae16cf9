"""The table of phases: what it names exists, and stacks get the phase of what they do."""

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from flwr_privacy.simulations.engines.profiling.phases import (
    ENTRIES,
    EVALUATIONS,
    PHASES,
    TABLE,
    is_clients,
    phase_of,
)
from tests.shared.imports import ROOT


@cache
def files_of(module: str) -> tuple[Path, ...]:
    """Return the source files of a module, of a package those of all of its modules."""
    spec = find_spec(module)
    assert spec is not None, module
    inside = [path for place in spec.submodule_search_locations or [] for path in modules_in(place)]
    return tuple(inside or [Path(str(spec.origin))])


def modules_in(folder: str) -> list[Path]:
    return sorted(Path(folder).rglob("*.py"))


def defines(path: Path, function: str) -> bool:
    text = path.read_text(encoding="utf-8", errors="replace")
    if f"def {function}(" not in text:
        return False
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(n, kinds) and n.name == function for n in ast.walk(ast.parse(text)))


@pytest.mark.parametrize("name", [*TABLE, *sorted(EVALUATIONS), *sorted(ENTRIES)])
def test_what_the_table_names_exists(name: str) -> None:
    module, _, function = name.partition(":")
    files = files_of(module)
    assert not function or any(defines(path, function) for path in files)


def test_the_phases_are_those_that_the_page_explains() -> None:
    assert {*TABLE.values()} <= {*PHASES}
    page = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")
    section = page.partition("\n## Where the time goes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| (.*) \|$", section, re.M)
    assert dict(rows[1:]) == PHASES
    assert rows[0] == ("phase", "what belongs there")


OURS = "flwr_privacy"
RUN = (f"{OURS}.simulations.engines.inline.run", "run_on", "run.py")
CLIENT = (f"{OURS}.clients.node.node", "answer", "node.py")
OWN = ("mytask", "train", "/home/me/mytask.py")


@pytest.mark.parametrize(
    ("stack", "phase"),
    [
        ([OWN], "own code"),
        ([OWN, ("torch.nn.modules.linear", "forward", "linear.py")], "training"),
        ([OWN, ("torch.nn.modules.linear", "__init__", "linear.py")], "own code"),
        ([OWN, ("torch.nn.modules.module", "load_state_dict", "module.py")], "records"),
        ([OWN, ("", "sum", "<built-in>")], "own code"),
        ([OWN, ("", "sleep", "<built-in>")], "wait"),
        ([OWN, ("torch", "<module>", "__init__.py")], "start"),
        ([CLIENT, (f"{OURS}.privacy.noise", "discrete_gaussian", "noise.py")], "noise"),
        ([CLIENT, (f"{OURS}.wire.files", "write_file", "files.py")], "ledger"),
        ([(f"{OURS}.clients.torch.training", "evaluate", "t.py"), OWN], "evaluation"),
        (
            [
                (f"{OURS}.simulations.tasks.tasks", "evaluate_server", "tasks.py"),
                ("torch.nn.modules.linear", "forward", "linear.py"),
            ],
            "evaluation",
        ),
        ([(f"{OURS}.simulations.cli.training", "run", "training.py")], "other"),
        ([("", "MainThread", "<thread>")], "other"),
    ],
)
def test_the_innermost_frame_that_is_known_decides(
    stack: list[tuple[str, str, str]], phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [
        (m, f, file if file.startswith(("/home", "<")) else f"/usr/lib/{file}")
        for m, f, file in stack
    ]
    monkeypatch.setattr("flwr_privacy.clients.profiling.frames._LIBRARIES", ("/usr/lib/",))
    assert phase_of([RUN, *frames] if phase != "other" else frames) == phase


def test_the_work_of_clients_is_known_by_where_it_begins() -> None:
    assert is_clients([RUN, CLIENT, OWN])
    assert not is_clients([RUN, OWN])
