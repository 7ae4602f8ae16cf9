"""The fault matrix: cells of each kind, what counts as a defect, and the page."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Command

from flwr_privacy.privacy.ledger import LockedLedger
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline.faults import KINDS
from flwr_privacy.simulations.reliability import matrix as reliability
from flwr_privacy.simulations.reliability.federations import FEDERATIONS, Spot
from flwr_privacy.simulations.reliability.grid import FAULTS, Strike
from flwr_privacy.simulations.reliability.matrix import (
    DEFECT,
    REFUSED,
    VERDICTS,
    Cell,
    cell_of,
    matrix,
    verdict_of,
)
from flwr_privacy.simulations.reliability.page import page, sections, table
from flwr_privacy.simulations.reliability.training import strike_at, train
from flwr_privacy.strategies import UDP
from flwr_privacy.strategies.participants import Participants

PAGE = Path(__file__, "../../../../docs/reliability.md").resolve()
ELSEWHERE = {"mspdq": {"sync"}, "fedvs": {"oracle"}}  # not under a sum; simulations only


@pytest.fixture(scope="module")
def clean() -> dict[str, Any]:
    return {}


def cell(clean: dict[str, Any], scheme: str, column: str, fault: str) -> Cell:
    federation = FEDERATIONS[scheme]
    if scheme not in clean:
        clean[scheme] = train(federation)
    (spot,) = (s for s in federation.spots if column in (s.phase, s.name))
    return cell_of(federation, clean[scheme], spot, fault)


@pytest.mark.parametrize(
    ("scheme", "column", "fault", "verdict"),
    [
        ("fedavg", "hello", "drop", "exact"),
        ("fedavg", "train", "duplicate", "exact"),
        ("fedavg", "train", "nan", "left out"),
        ("fedavg", "hello", "infinity", "-"),
        ("fedavg-sum", "keys", "restarted", "exact"),
        ("fedavg-sum", "shares", "server killed", "skipped"),
        ("fedavg-sum", "shares", "corrupt", "left out"),
        ("udp", "train", "server killed", "exact"),
        ("udp", "train", "crash", "left out"),
        ("udp", "train", "late", "left out"),
        ("udp", "train", "disk full", "left out"),
        ("udp", "hello", "disk full", "-"),
        ("udp", "train", "clock behind", "exact"),
        ("central-dp", "train", "lost request", "left out"),
        ("mspdq", "mix", "clock ahead", "exact"),
        ("acfl", "setup", "server killed", "exact"),
        ("acfl", "setup", "disk full", "left out"),
        ("acfl-sum", "setup", "drop", "left out"),  # asked again, it refuses: charged all the same
        ("acfl", "train", "moved", "exact"),
        ("m2fdp", "train (noised)", "reshape", "left out"),
        ("m2fdp", "deliver", "delay", "exact"),
        ("fedvs", "enrol", "drop", "exact"),
        ("fedvs", "train", "corrupt", "exact"),
        ("fedvs", "weights", "crash", "skipped"),
    ],
)
def test_a_cell_is_what_it_is_known_to_be(
    clean: dict[str, Any], scheme: str, column: str, fault: str, verdict: str
) -> None:
    found = cell(clean, scheme, column, fault)
    assert (found.verdict, found.fault, found.phase) == (verdict, fault, column), found.why
    assert bool(found.why) == (verdict == "refused")


def test_a_whole_matrix_has_no_empty_cell_and_no_defect() -> None:
    seen: list[Cell] = []
    cells = matrix(FEDERATIONS["udp"], told=seen.append)
    assert cells == seen
    assert [(c.phase, c.fault) for c in cells] == [
        (p, f) for p in ("hello", "train") for f in FAULTS
    ]
    assert {c.verdict for c in cells} <= VERDICTS.keys() - {"DEFECT"}
    lines = table(cells).splitlines()
    assert lines[0] == "| fault | hello | train |"
    assert len(lines) == 2 + len(FAULTS)
    assert all(line.count("|") == 4 and "|  |" not in line for line in lines)
    assert sections(PAGE.read_text(encoding="utf-8"))[FEDERATIONS["udp"].title] == table(cells)


def test_a_training_that_does_not_move_the_model_tells_nothing() -> None:
    coarse = {"secure_sum": SecureSum(value_range=2.0**20)}  # every update is rounded to nothing
    with pytest.raises(RuntimeError, match="does not move the model"):
        matrix(replace(FEDERATIONS["fedavg-sum"], options=coarse))


def test_every_phase_of_every_scheme_has_a_column() -> None:
    for name, federation in FEDERATIONS.items():
        mine = {spot.phase for spot in federation.spots}
        assert federation.client.phases - mine == ELSEWHERE.get(name, set()), name
        assert "hello" in mine
        assert ({"keys", "shares"} <= mine) == (
            "secure_sum" in federation.options or name == "central-dp"
        )


def test_the_faults_of_the_engine_are_all_in_the_matrix() -> None:
    assert KINDS.keys() <= FAULTS.keys()


def test_a_fault_happens_once_and_where_it_was_meant() -> None:
    federation = FEDERATIONS["fedavg"]
    outcome = train(federation, strike_at(Spot(phase="train", server_round=3, client="1"), "drop"))
    assert [line["accumulated"] for line in outcome.history[1:]] == [4, 4, 3]
    never = train(federation, strike_at(Spot(phase="train", server_round=9), "drop"))
    verdict = verdict_of(train(federation), never)
    assert verdict == ("DEFECT", "the fault did not happen")


def test_a_fault_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="fault = 'fire'"):
        Strike(fault="fire", phase="train", server_round=1, client="2")


# -- Defects -------------------------------------------------------------------------------------

TRAIN = Spot(phase="train")


def test_an_answer_without_a_charge_is_a_defect(
    clean: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell(clean, "udp", "train", "delay")
    charge = LockedLedger.charge

    def forget_round_three(locked: LockedLedger, entry: Any) -> int:
        if entry.question.server_round == 3:
            entry = replace(entry, question=replace(entry.question, server_round=2))
        return charge(locked, entry)

    monkeypatch.setattr(LockedLedger, "charge", forget_round_three)
    found = cell(clean, "udp", "train", "delay")
    assert found.verdict == "DEFECT"
    assert found.why == "round 3: client 0 gave 1 answers of phase train, its ledger has 0"


def test_a_charge_that_the_card_lacks_is_a_defect(
    clean: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell(clean, "udp", "train", "delay")
    charged = Participants.charged
    monkeypatch.setattr(Participants, "charged", lambda self, *args: charged(self, *args) - {"3"})
    found = cell(clean, "udp", "train", "delay")
    assert found.verdict == "DEFECT"
    assert "the privacy card lacks [('3', 'train', 1, 0)" in found.why


def test_an_error_of_another_kind_is_a_defect(
    clean: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell(clean, "udp", "train", "delay")

    def fail(self: Any, *args: Any) -> None:
        raise KeyError("2")

    monkeypatch.setattr(UDP, "take", fail)
    assert cell(clean, "udp", "train", "delay").why == "KeyError: '2'"


def test_another_model_of_which_nothing_is_said_is_a_defect(clean: dict[str, Any]) -> None:
    cell(clean, "udp", "train", "delay")
    was = clean["udp"]
    moved = {name: array + 1 for name, array in was.model.items()}
    silent = replace(was, model=moved, struck=[strike_at(TRAIN, "drop")])
    assert verdict_of(was, silent)[0] == "DEFECT"
    told = [dict(line) for line in was.history]
    told[2]["accumulated"] -= 1
    assert verdict_of(was, replace(silent, history=told))[0] == "left out"
    told[2]["skipped"] = True
    assert verdict_of(was, replace(silent, history=told))[0] == "skipped"
    nothing = {name: array * float("nan") for name, array in was.model.items()}
    assert verdict_of(was, replace(silent, model=nothing)) == (
        "DEFECT",
        "the model is not finite",
    )


def test_who_is_left_out_leaves_the_model_of_a_training_without_the_answer(
    clean: dict[str, Any],
) -> None:
    cell(clean, "udp", "train", "delay")
    spot = FEDERATIONS["udp"].spots[-1]
    silent = train(FEDERATIONS["udp"], strike_at(spot, "lost request"))
    dropped = train(FEDERATIONS["udp"], strike_at(spot, "drop"))
    assert verdict_of(clean["udp"], dropped, silent=[silent])[0] == "left out"
    moved = {name: array + 1e-9 for name, array in dropped.model.items()}
    accumulated = replace(dropped, model=moved)
    assert verdict_of(clean["udp"], accumulated, silent=[silent]) == (
        "DEFECT",
        "the model is not that of a training in which the request is lost",
    )
    # A reply that comes late may be accumulated later: its model is another one.
    late = replace(accumulated, struck=[strike_at(spot, "late")])
    assert verdict_of(clean["udp"], late, silent=[silent])[0] == "left out"


def test_a_charge_may_be_without_an_answer_but_not_the_other_way_round(
    clean: dict[str, Any],
) -> None:
    cell(clean, "udp", "train", "delay")
    was = replace(clean["udp"], struck=[strike_at(TRAIN, "drop")])
    more = was.charges + Counter({("2", "train", 2): 1})
    assert verdict_of(was, replace(was, charges=more))[0] == "exact"
    assert verdict_of(was, replace(was, charges=Counter()))[0] == "DEFECT"


# -- The page and the command --------------------------------------------------------------------

CELLS = [
    Cell(fault=fault, phase=phase, verdict=verdict)
    for phase in ("hello", "train")
    for fault, verdict in (("drop", "left out"), ("nan", "-"))
]


def test_a_table_has_a_line_per_fault_and_a_column_per_phase() -> None:
    assert table(CELLS) == (
        "| fault | hello | train |\n| --- | --- | --- |\n"
        "| drop | left out | left out |\n| nan | - | - |"
    )
    with pytest.raises(KeyError):
        table(CELLS[:-1])


def test_a_page_keeps_what_was_not_carried_out_anew() -> None:
    first = page({"B": CELLS}, order=["A", "B"])
    both = page({"A": CELLS}, order=["A", "B"], earlier=first)
    assert list(sections(both))[-2:] == ["A", "B"]
    assert sections(both)["B"] == sections(first)["B"] == table(CELLS)
    assert page({"B": CELLS}, order=["A", "B"], earlier=both) == both
    assert all(f"- **{fault}**: " in both for fault in FAULTS)


def test_the_page_in_the_repository_has_every_cell() -> None:
    found = sections(PAGE.read_text(encoding="utf-8"))
    for federation in FEDERATIONS.values():
        lines = found[federation.title].splitlines()
        columns = ["fault", *(spot.name or spot.phase for spot in federation.spots)]
        assert lines[0] == f"| {' | '.join(columns)} |"
        rows = [line.strip("| ").split(" | ") for line in lines[2:]]
        assert [row[0] for row in rows] == list(FAULTS)
        assert all(set(row[1:]) <= VERDICTS.keys() and len(row) == len(columns) for row in rows)


def test_the_page_in_the_repository_says_what_the_program_says_and_its_tables_show() -> None:
    text = PAGE.read_text(encoding="utf-8")
    titles = {name: federation.title for name, federation in FEDERATIONS.items()}
    assert page({}, order=list(titles.values()), earlier=text) == text
    found = sections(text)
    ended = {name for name, title in titles.items() if f"| {REFUSED} |" in found[title]}
    assert ended == {"acfl-sum", "m2fdp", "fedvs"}  # as its first lines say
    assert not any(f"| {DEFECT} |" in found[title] for title in titles.values())


def test_the_command_prints_and_writes_and_fails_for_a_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    cells = list(CELLS)
    monkeypatch.setattr(reliability, "matrix", lambda federation: cells)
    done = command("reliability", "--scheme", "udp", "--out", "page.md")
    assert done.returncode == 0
    assert table(CELLS) in done.stdout
    assert sections((tmp_path / "page.md").read_text())[FEDERATIONS["udp"].title] == table(CELLS)
    cells[0] = replace(CELLS[0], verdict="DEFECT", why="it broke")
    done = command("reliability", "--scheme", "udp", "--out", "page.md")
    assert done.returncode == 1
    assert f"defect: {FEDERATIONS['udp'].title}, drop, phase hello: it broke" in done.stderr
    done = command("reliability", "--scheme", "none", "--out", "page.md")
    assert done.returncode == 2
    assert "scheme = 'none'" in done.stderr
