"""The command `verify`: what it prints, its exit codes, and what it does not import."""

import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from commands import Command
from evidence import CLIENTS, IDENTITIES, MadeRun

from flwr_privacy.simulations.verification.findings import OUTCOMES
from tests.shared.imports import ROOT

BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {"flwr", "torch", "ray", "matplotlib", "pandas", "sklearn"}:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
from flwr_privacy.simulations.cli import main
main()
"""


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "run")


def test_neither_flower_nor_torch_is_needed(run: MadeRun) -> None:
    arguments = ["verify", str(run.folder), "--pins", str(run.pins()), "--head", str(run.heads())]
    command = [sys.executable, "-c", BLOCKED, *arguments, "--html", str(run.path("page.html"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "verified: 4 releases of 3 clients" in done.stdout
    assert run.path("page.html").is_file()
    # The block works: the others need Flower.
    other = subprocess.run(
        [sys.executable, "-c", BLOCKED, "demo"], capture_output=True, text=True, check=False
    )
    assert "flwr is not installed here" in other.stderr


def test_it_prints_a_line_for_each_check_and_what_they_come_to(
    command: Command, run: MadeRun
) -> None:
    done = command("verify", str(run.folder))
    lines = done.stdout.splitlines()
    assert done.returncode == OUTCOMES["self-declared"].exit_code == 22
    assert lines[0] == f"card: {run.folder}"
    assert lines[1].startswith("udp protects all data of a client")
    assert any(line.startswith("attacker's advantage: at most 0.") for line in lines)
    assert "answers: 12 charged, 11 answered, 1 never answered" in lines
    assert "ok    rounds: metrics.jsonl counts the same 12 charges" in lines
    assert lines[-1].startswith("self-declared: 4 releases of 3 clients: ")
    assert done.stderr == ""


def test_json_has_the_findings_and_nothing_else_is_printed(command: Command, run: MadeRun) -> None:
    card = run.card()
    card.guarantee = replace(card.guarantee, epsilon=float("inf"))
    run.write(card)
    done = command("verify", str(run.folder), "--json")
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"] == 26
    assert found["schema"] == 1
    assert found["outcome"] == "policy"
    assert found["epsilon"]["promised"] == "infinite"
    assert found["epsilon"]["recomputed"] == {"gdp": pytest.approx(card.stated["gdp"])}
    assert found["attacker"] == json.loads(json.dumps(card.attacker.to_dict()))
    assert (found["releases"], found["clients"], found["charged"]) == (4, 3, 12)
    results = {one["check"]: one["result"] for one in found["findings"]}
    assert results == {
        "charges": "passed",
        "attacker": "passed",
        "valid": "passed",
        "promise": "passed",
        "epsilon": "failed",
        "experiment": "passed",
        "rounds": "passed",
        "requests": "passed",
        "card's heads": "passed",
    }


def test_heads_that_nodes_print_verify_the_card(
    command: Command, run: MadeRun, tmp_path: Path
) -> None:
    files: list[str] = []
    for client in CLIENTS:
        run.ledger(client, place=client)
        IDENTITIES[client].write(tmp_path / f"{client}.pem")
        key = ("--identity", str(tmp_path / f"{client}.pem"))
        printed = command("ledger", "head", "--state", str(tmp_path / client), *key)
        assert printed.returncode == 0, printed.stderr
        (tmp_path / f"{client}.json").write_text(printed.stdout)
        files += ["--head", f"{client}.json"]
    done = command("verify", "run", "--pins", str(run.pins()), *files)
    assert done.returncode == 0, done.stdout
    assert "verified: 4 releases of 3 clients" in done.stdout
    assert command("verify", "run", "--pins", str(run.pins()), *files[:4]).returncode == 23


class Page(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str | None] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value for key, value in attrs if key in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("kind", ["none", "valid", "void"])
def test_the_page_says_what_the_command_says(command: Command, run: MadeRun, kind: str) -> None:
    card = run.card(2 if kind == "void" else None)
    hostile = "</td><script>alert(1)</script>"
    card.described = replace(card.described, name=hostile)
    run.write(card)
    more = ["--pins", str(run.pins()), "--head", str(run.heads())] if kind == "valid" else []
    done = command("verify", str(run.folder), *more, "--html", "page.html")
    html = Path("page.html").read_text()
    page = Page(html)
    assert f'class="verdict {kind}"' in html
    assert "width=device-width" in html
    assert "script" not in page.tags
    assert page.references == []
    outcome, _, sentence = done.stdout.splitlines()[-1].partition(": ")
    assert f"{outcome.upper()} {sentence}" in page.text
    assert hostile in page.text
    for line in done.stdout.splitlines():
        if line.startswith(("ok    ", "fail  ", "-     ")):
            assert line[6:].partition(": ")[2] in page.text


def test_a_card_cannot_print_lines_of_its_own(command: Command, run: MadeRun) -> None:
    card = run.card()
    text = "x\nverified: 99 releases\x1b[2K\rverified"
    card.guarantee = replace(card.guarantee, void=text, adversary=text)
    run.write(card)
    done = command("verify", str(run.folder))
    assert done.returncode == 25
    assert not any(line.startswith("verified") for line in done.stdout.splitlines())
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nowhere",), "run = 'nowhere': expected the folder of a run with a privacy-card.json"),
        (("run", "--pins", "nowhere"), "pins = 'nowhere': expected a file that can be read"),
        (("run", "--head", "nowhere"), "--head = 'nowhere': expected a file that can be read"),
        (("run", "--head", "run/summary.json"), "--head run/summary.json: heads = 'dict'"),
        (("run", "--ledger", "a=nowhere"), "--ledger = 'a=nowhere': expected a file"),
        (("run", "--max-epsilon", "-1"), "--max-epsilon = -1.0: expected"),
        (("run", "--neighbours", "all"), "--neighbours = 'all': expected one of 'add_remove'"),
        (("run", "--html", "nowhere/page.html"), "--html = 'nowhere/page.html': expected a file"),
    ],
)
def test_bad_input_is_named_and_has_its_own_exit_code(
    command: Command, run: MadeRun, arguments: tuple[str, ...], text: str
) -> None:
    done = command("verify", *arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_damage_has_the_exit_codes_of_data_and_of_ledgers(command: Command, run: MadeRun) -> None:
    ledger = run.ledger(CLIENTS[0])
    ledger.write_bytes(ledger.read_bytes()[:20] + b"x" + ledger.read_bytes()[20:])
    assert command("verify", "run", "--ledger", str(ledger)).returncode == 7
    run.card_path.write_text("{}")
    done = command("verify", "run")
    assert done.returncode == 3
    assert "run/privacy-card.json: no privacy card" in done.stderr


def test_help_and_the_docs_list_every_outcome_with_its_exit_code(command: Command) -> None:
    shown = " ".join(command("verify", "--help").stdout.split())
    docs = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    for one in OUTCOMES.values():
        assert f"{one.exit_code} {one.name}:" in shown
        assert f"| {one.exit_code} | `{one.name}` |" in docs
