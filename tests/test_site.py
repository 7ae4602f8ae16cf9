"""The site of the pages: what `make docs` builds is complete, and its numbers are those of runs."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.shared.imports import ROOT, modules

DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
COMMAND_LINE = "flwr_privacy.simulations.cli"
each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[p.stem for p in NOTEBOOKS])


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    """The extension that the reference is built with."""
    sys.path.insert(0, str(DOCS))
    import sphinx_api

    yield sphinx_api
    sys.path.remove(str(DOCS))


@each_notebook
def test_a_notebook_is_kept_without_outputs(notebook: Path) -> None:
    for cell in cells(notebook, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@each_notebook
def test_the_links_of_a_notebook_lead_somewhere(notebook: Path) -> None:
    for cell in cells(notebook, "markdown"):
        for target in re.findall(r"\]\((?!https?:)([^)#]*)", "".join(cell["source"])):
            assert (notebook.parent / target).exists(), target


def test_every_notebook_is_linked_from_the_start() -> None:
    text = (DOCS / "index.md").read_text()
    assert all(f"notebooks/{notebook.stem}" in text for notebook in NOTEBOOKS)


def test_every_package_with_public_names_has_its_page_in_the_reference(reference: Any) -> None:
    public = {
        name
        for name, path in modules().items()
        if path.name == "__init__.py" and "\n__all__ = " in path.read_text()
    }
    assert public - {COMMAND_LINE} == set(reference.PUBLIC) - {"flwr_privacy.errors"}
    index = (DOCS / "api" / "index.md").read_text()
    for package in reference.PUBLIC:
        page = package.removeprefix("flwr_privacy.")
        text = (DOCS / "api" / f"{page}.md").read_text()
        assert f".. automodule:: {package}\n" in text
        assert f"\n{page}\n" in index


def test_each_public_name_has_one_home_and_a_text(reference: Any) -> None:
    homes = reference.homes()
    assert homes["flwr_privacy.udp", "UserLevel"] == "flwr_privacy.strategies"
    for (package, name), home in homes.items():
        value = getattr(sys.modules[package], name)
        if home == package and not reference.is_constant(value):
            assert value.__doc__, f"{package}.{name}"


def test_the_build_warns_of_a_public_name_without_an_entry(
    reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {f"{home}.{name}": None for (_, name), home in reference.homes().items()}
    del entries["flwr_privacy.strategies.UDP"]
    warned: list[str] = []
    monkeypatch.setattr(reference._log, "warning", lambda text, *of, **_: warned.append(text % of))
    domains = SimpleNamespace(python_domain=SimpleNamespace(objects=entries))
    reference.missing(None, SimpleNamespace(domains=domains))
    assert warned == ["no entry for flwr_privacy.strategies.UDP"]


def test_a_default_that_is_an_object_is_short(reference: Any) -> None:
    signature = "(a=1, loop=LoopOptions(seed=None, forget_keys=()), privacy=<factory>, keep=())"
    shown = reference.shorten(None, "class", "", None, None, signature, "")
    assert shown == ("(a=1, loop=LoopOptions(), privacy=..., keep=())", "")


def test_the_pictures_are_those_of_the_script() -> None:
    source = DOCS / "pictures" / "draw.py"
    names: dict[str, Any] = {"__name__": "draw", "__file__": str(source)}
    exec(compile(source.read_text(), str(source), "exec"), names)
    page = (DOCS / "threat-model.md").read_text()
    for name, places in names["PICTURES"].items():
        assert (source.parent / f"{name}.svg").read_text() == names["draw"](places), name
        assert f"(pictures/{name}.svg)" in page


# Of docs/which-scheme.md: the experiment, its curve (with the epsilon), and the number on the page.
NUMBERS = [
    ("mspdq/recommended-digits", "FedAvg", 0.916),
    ("mspdq/recommended-digits", "MSPDQ under a secure sum", 0.917),
    *(
        ("udp/shared-noise", f"{kind}, records | {epsilon}", number)
        for kind, numbers in (
            ("shared", {1: 0.773, 4: 0.856, 8: 0.862}),
            ("local", {1: 0.438, 4: 0.782, 8: 0.839}),
        )
        for epsilon, number in numbers.items()
    ),
    ("udp/shared-noise", "shared, users | 8", 0.644),
    *(
        ("central-dp/choose-epsilon", f"{curve} | {epsilon}", number)
        for curve, numbers in (
            ("server, banded", {1: 0.333, 4: 0.784, 8: 0.880}),
            ("shares, everybody", {1: 0.371, 4: 0.691, 8: 0.801}),
            ("each client", {1: 0.106, 8: 0.214}),
        )
        for epsilon, number in numbers.items()
    ),
    ("central-dp/less-noise", "server, fixed", 0.521),
    ("central-dp/less-noise", "server, balanced", 0.700),
    ("central-dp/less-noise", "server, banded", 0.843),
    ("central-dp/committee", "committee, banded", 0.758),
    ("central-dp/committee", "shares, independent", 0.576),
    ("m2fdp/figure5-digits-equal --full", "M2FDP, p = 1 | 200", 0.399),
    ("m2fdp/figure5-digits-equal --full", "M2FDP, p = 0.5 | 200", 0.262),
    ("m2fdp/figure5-digits-equal --full", "HFL-DP | 200", 0.199),
    ("fedvs/lossless", "FedVS | 1800", 0.944),
    ("fedvs/lossless", "Wait | 1800", 0.947),
]


@pytest.mark.parametrize(("experiment", "curve", "number"), NUMBERS)
def test_a_number_of_the_decision_table_is_that_of_its_run(
    experiment: str, curve: str, number: float
) -> None:
    page = (DOCS / "which-scheme.md").read_text()
    assert f"`flwr-privacy experiment {experiment}`" in page
    assert f"{number:.3f}" in page
    place = f"{experiment.replace(' --', '-')}.json"
    results = json.loads((DOCS / "replication" / "results" / place).read_text())
    rows = [" | ".join(row) for table in results["tables"] for row in table["rows"]]
    (found,) = re.findall(rf"^{re.escape(curve)} \| ([\d.]+) ± ", "\n".join(rows), re.M)
    assert abs(float(found) - number) < 0.00051


# Of docs/less-noise.md: its tables of what to choose in their order, and the curves of their rows.
TABLES = (
    "choose-epsilon",
    "choose-trainings",
    "choose-secret-epsilon",
    "choose-secret-trainings",
    "choose-epsilon-full",
    "choose-trainings-full",
    "mnist-epsilon",
    "mnist-trainings",
    "choose-secret-epsilon-full",
)
CURVES = {
    "trusted server, fixed": "server, fixed",
    "trusted server, balanced": "server, balanced",
    "trusted server, balanced, banded": "server, banded",
    "trusted server, balanced, BLT": "server, BLT",
    "trusted server, everybody": "server, everybody",
    "in shares, balanced": "shares, balanced",
    "in shares, everybody": "shares, everybody",
    "UDP: each client alone": "each client",
    "four groups in turn": "cyclic",
    "four groups in turn, banded": "cyclic, banded",
}


def test_the_tables_of_what_to_choose_are_those_of_their_runs() -> None:
    text = (DOCS / "less-noise.md").read_text()
    tables = re.findall(r"^\| (?:epsilon|trainings)(?:, .*? clients)? \| .*(?:\n\|.*)+", text, re.M)
    for name, table in zip(TABLES, tables, strict=True):
        head, _, *rows = (
            [cell.strip() for cell in row.split("|")[1:-1]] for row in table.split("\n")
        )
        place = DOCS / "replication" / "results" / "central-dp" / f"{name}.json"
        (found,) = json.loads(place.read_text())["tables"]
        values = {(curve, x): value.split(" ± ") for curve, x, value in found["rows"]}
        for label, *cells in rows:
            for x, cell in zip(head[1:], cells, strict=True):
                mean, error = values[CURVES.get(label, label), x]
                assert cell == f"{float(mean):.3f} ± {float(error):.3f}", (name, label, x)


# Of docs/schemes/m2fdp.md: the columns of its table of what trust is worth, and the curves.
BUDGETS = ("figure5-full", "figure5-equal-full", "figure5-record-full")
TRUSTED = {
    "no noise": "HFL without DP",
    "all edges trusted": "M2FDP, p = 1",
    "the same, with clean events": "M2FDP, p = 1, clean events",
    "half of them": "M2FDP, p = 0.5",
    "none (HFL-DP)": "HFL-DP",
    "star (PEDPFL)": "PEDPFL",
}


def test_the_table_of_what_trust_is_worth_is_that_of_its_runs() -> None:
    text = (DOCS / "schemes" / "m2fdp.md").read_text().partition("## What trust is worth")[2]
    results = DOCS / "replication" / "results" / "m2fdp"
    tables = [json.loads((results / f"{name}.json").read_text())["tables"] for name in BUDGETS]
    for column, (found,) in enumerate(tables):
        values = {curve: value for curve, x, value, *_ in found["rows"] if x == "200"}
        for label, curve in TRUSTED.items():
            (cells,) = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", text, re.M)
            cell = cells.split("|")[column].strip()
            assert cell == (f"{float(values[curve].split()[0]):.2f}" if curve in values else "")
    notes = {curve: note for curve, *_, note in tables[0][0]["rows"]}
    said = re.search(r"an\s+epsilon of (\S+), and a device below an untrusted edge (\S+)\.", text)
    assert said is not None
    assert notes["M2FDP, p = 0.5"].startswith("epsilon of a device {} / {},".format(*said.groups()))


def test_no_accuracy_of_the_decision_table_is_without_a_run() -> None:
    page = (DOCS / "which-scheme.md").read_text()
    private_evaluation = "0.894"  # of docs/drop-in.md
    assert f"| {private_evaluation} |" in (DOCS / "drop-in.md").read_text()
    known = {f"{number:.3f}" for *_, number in NUMBERS} | {private_evaluation}
    assert set(re.findall(r"\b0\.\d{3}\b", page)) == known


def test_the_tutorial_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "tutorial.md").read_text()
    values: dict[str, Any] = {}
    for name, block in re.findall(r"^```python (\S+)\n(.*?)^```", text, re.M | re.S):
        exec(compile(block, f"tutorial.md, {name}", "exec"), values)
    accuracy = {n: values[n].evaluate_metrics_serverapp[4]["accuracy"] for n in ("plain", "summed")}
    assert 0.85 < accuracy["plain"] < 0.89
    assert abs(accuracy["summed"] - accuracy["plain"]) < 0.01
    assert 0.4 < values["private"].evaluate_metrics_serverapp[4]["accuracy"] < 0.9
    assert values["private"].guarantee.spent == pytest.approx(8, abs=0.01)
    assert "200 charged, 200 answered" in capsys.readouterr().out
    for stated, recomputed in values["card"].verify().values():
        assert stated == pytest.approx(recomputed)


def test_what_the_decision_table_says_to_take_can_be_made() -> None:
    names: dict[str, Any] = {}
    exec("from flwr_privacy.secure_sum import SecureSum", names)
    exec("from flwr_privacy.strategies import *", names)
    page = (DOCS / "which-scheme.md").read_text()
    taken = re.findall(r"`([A-Z]\w+\(.*?\))`", page.split("\n## What helps")[0])
    assert len(taken) > 5
    for expression in taken:
        if "..." not in expression:
            eval(expression, names)
