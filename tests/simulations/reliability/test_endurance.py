"""Long runs: what they find in order, and that they would find what is not."""

import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.card import CardRelease as Charged
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.privacy.ledger import Entry, LockedLedger, Question
from flwr_privacy.simulations.reliability import page as reliability_page
from flwr_privacy.simulations.reliability.endurance import Endured, endure, kinds_of
from flwr_privacy.simulations.reliability.endurance_checks import (
    Account,
    Held,
    Mark,
    account,
    growth,
    held,
    size_of,
)
from flwr_privacy.simulations.reliability.endurance_faults import FaultPlan, Journal
from flwr_privacy.simulations.reliability.federations import FEDERATIONS
from flwr_privacy.simulations.reliability.grid import FAULTS
from flwr_privacy.simulations.reliability.page import LONG, long_run_of, page, sections, write_rows
from flwr_privacy.simulations.reliability.page_sections import long_rows
from flwr_privacy.strategies import SchemeStrategy
from flwr_privacy.strategies.participants import Participants

pytestmark = pytest.mark.long

# -- What is found in order ----------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["udp", "fedvs"])
def test_after_a_long_run_all_is_as_it_was(scheme: str) -> None:
    kinds = ("server killed", "restarted", "moved", "crash", "drop")
    found = endure(scheme, rounds=20, rate=0.7, seed=3, kinds=kinds)
    assert found.wrong == ()
    assert sum(found.faults.values()) >= 8
    assert found.faults["server killed"] >= 1
    assert found.restarts >= 1
    assert found.skipped < 12
    assert [mark.server_round for mark in found.marks] == [3, 7, 11, 15, 19]
    assert found.before == found.after
    if scheme == "fedvs":
        assert found.accounts == ()  # it promises no epsilon
    else:
        assert [mine.client for mine in found.accounts] == ["0", "1", "2", "3"]
        assert all(mine.entries == mine.released > 0 for mine in found.accounts)
        assert all(mine.spent == pytest.approx(mine.recomputed) for mine in found.accounts)
        assert all(mine.stated >= mine.spent for mine in found.accounts)


def test_a_run_that_is_too_short_to_measure_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="rounds = 19"):
        endure("udp", rounds=19)
    with pytest.raises(InvalidParameterError, match="scheme = 'none'"):
        endure("none")
    with pytest.raises(InvalidParameterError, match="rate = 2"):
        endure("udp", rate=2)


# -- What would be found -------------------------------------------------------------------------

KEPT: list[Any] = []


@pytest.fixture
def kept() -> Iterator[list[Any]]:
    yield KEPT
    for thing in KEPT:
        if isinstance(thing, int):
            os.close(thing)
        if isinstance(thing, threading.Event):
            thing.set()
    KEPT.clear()


def leave_descriptor(strategy: SchemeStrategy) -> None:
    KEPT.append(os.open(os.devnull, os.O_RDONLY))


def leave_thread(strategy: SchemeStrategy) -> None:
    KEPT.append(threading.Event())
    threading.Thread(target=KEPT[-1].wait, name="left", daemon=True).start()


def leave_memory(strategy: SchemeStrategy) -> None:
    KEPT.append(bytes(2**15))


def leave_temporary_file(strategy: SchemeStrategy) -> None:
    Path(tempfile.gettempdir(), "left").touch()


def leave_half_written(strategy: SchemeStrategy) -> None:
    assert strategy.experiment.run_dir is not None
    (strategy.experiment.run_dir / ".card.json.7").touch()


def leave_file(strategy: SchemeStrategy) -> None:
    assert strategy.experiment.run_dir is not None
    (strategy.experiment.run_dir / str(len(strategy.experiment.history.lines))).touch()


LEFT = {  # what each of them is reported as
    leave_descriptor: "descriptor left open: /dev/null",
    leave_thread: "thread left open: left",
    leave_memory: "memory grows by ",
    leave_temporary_file: "left among temporary files: left",
    leave_half_written: "left half written: run/.card.json.7",
    leave_file: "files of nodes and server grow by ",
}


# Memory by itself, as threads take some too; of the others none can be taken for another.
@pytest.mark.parametrize(
    "leave", [{leave_memory}, LEFT.keys() - {leave_memory}], ids=["memory", "all else"]
)
def test_what_a_round_leaves_behind_is_reported(
    leave: set[Any], kept: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: SchemeStrategy) -> str:
        for one in leave:
            one(self)
        return ""

    monkeypatch.setattr(SchemeStrategy, "stop", stop)
    found = endure("fedavg", rounds=20, rate=0)
    for one in leave:
        assert any(line.startswith(LEFT[one]) for line in found.wrong), LEFT[one]


def test_a_charge_that_the_ledger_lacks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    charge, answer, is_answered = (
        getattr(LockedLedger, name) for name in ("charge", "answer", "is_answered")
    )

    def forget_round_three(book: LockedLedger, entry: Entry) -> int:
        if entry.question.server_round == 3:
            return book.count
        return charge(book, entry)

    def answer_what_is_there(book: LockedLedger, number: int) -> None:
        if number < book.count:
            answer(book, number)

    def is_there_and_answered(book: LockedLedger, number: int) -> bool:
        return number < book.count and is_answered(book, number)

    monkeypatch.setattr(LockedLedger, "is_answered", is_there_and_answered)
    monkeypatch.setattr(LockedLedger, "charge", forget_round_three)
    monkeypatch.setattr(LockedLedger, "answer", answer_what_is_there)
    wrong = endure("udp", rounds=20, rate=0).wrong
    for client in range(4):
        told = f"client {client}, phase train, round 3: 1 answers, 0 entries in the ledger"
        assert told in wrong
        assert any(line.startswith(f"client {client}: the ledger gives epsilon") for line in wrong)


def test_a_charge_that_the_card_lacks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    charged = Participants.charged
    monkeypatch.setattr(Participants, "charged", lambda self, *args: charged(self, *args) - {"3"})
    wrong = endure("udp", rounds=20, rate=0).wrong
    assert "client 3, phase train, round 7: 1 answers, 0 charges in the card" in wrong
    assert not any(line.startswith("client 2") for line in wrong)


def test_a_training_that_ends_early_is_reported() -> None:
    federation = replace(
        FEDERATIONS["udp"], options={"unit": "user", "rounds": 500, "epsilon": 1.0, "delta": 1e-5}
    )
    stopped = replace(federation, options={**federation.options, "min_train_nodes": 9})
    assert "InvalidParameterError" in endure("udp", rounds=20, rate=0, federation=stopped).wrong[0]


# -- Ledgers -------------------------------------------------------------------------------------

COST = Charge(neighbours="replace_one", noise_multiplier=5.0)


def entry(server_round: int, charge: Charge = COST) -> Entry:
    question = Question(experiment_id="e", phase="train", server_round=server_round)
    return Entry(question=question, scheme="udp", unit="user", charge=charge)


def card(rounds: int) -> PrivacyCard:
    guarantee = Guarantee(
        scheme="udp",
        protects="all data of a client",
        adversary="the server",
        epsilon=100.0,
        delta=1e-5,
    )
    releases = [
        Charged(
            phase="train", server_round=r, request=0, charge=COST, clients=("1",), unanswered=()
        )
        for r in range(1, rounds + 1)
    ]
    return PrivacyCard(experiment_id="e", guarantee=guarantee, releases=releases)


def audited(released: int, entries: int, charged: int, **more: Any) -> Account:
    return account(
        "1",
        {("train", r): 1 for r in range(1, released + 1)},
        {("train", r): [entry(r)] for r in range(1, entries + 1)},
        card(charged),
        **more,
    )


def test_ledgers_that_agree_are_in_order() -> None:
    mine = audited(3, 3, 3)
    assert mine.wrong == []
    assert (mine.released, mine.entries) == (3, 3)
    assert mine.spent == mine.recomputed == mine.stated > 0
    assert audited(2, 3, 3, spare=True).wrong == []
    assert audited(3, 3, 0, on_card=False).wrong == []


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((3, 2, 3), "round 3: 1 answers, 0 entries in the ledger"),
        ((2, 3, 3), "round 3: 1 entries in the ledger, 0 answers"),
        ((3, 3, 2), "round 3: 1 answers, 0 charges in the card"),
    ],
)
def test_ledgers_that_disagree_are_reported(numbers: tuple[int, int, int], told: str) -> None:
    assert any(told in line for line in audited(*numbers).wrong)


def test_an_entry_that_costs_too_little_is_reported() -> None:
    cheap = {("train", 1): [entry(1, Charge(neighbours="replace_one", noise_multiplier=50.0))]}
    mine = account("1", {("train", 1): 1}, cheap, card(1))
    assert len(mine.wrong) == 1
    assert mine.wrong[0].startswith("client 1: the ledger gives epsilon")


def test_a_journal_forgets_what_came_before_a_ledger_was_lost(tmp_path: Path) -> None:
    journal = Journal(path=tmp_path / "journal")
    journal.keep(("1", "train", 1, 0), b"a")
    journal.keep(("2", "train", 1, 0), b"b")
    journal.forget("1")
    journal.keep(("1", "train", 2, 0), b"c")
    journal.keep(("1", "train", 2, 0), b"d")
    assert not journal.answers
    journal.read()
    assert dict(journal.answers) == {
        ("2", "train", 1, 0): {b"b"},
        ("1", "train", 2, 0): {b"c", b"d"},
    }


# -- Faults --------------------------------------------------------------------------------------


def strikes(plan: FaultPlan, rounds: int) -> list[tuple[int, str, str, str]]:
    found = []
    for server_round in range(1, rounds + 1):
        for phase in ("train", "evaluate"):
            for client in "0123":
                if (strike := plan.strike(phase, server_round, client)) is not None:
                    found.append((server_round, phase, client, strike.fault))
    return found


def test_faults_follow_from_the_seed_and_are_about_as_many_as_the_rate_says() -> None:
    kinds = tuple(FAULTS)
    found = strikes(FaultPlan(kinds=kinds, seed=1), 600)
    assert found == strikes(FaultPlan(kinds=kinds, seed=1), 600)
    assert found != strikes(FaultPlan(kinds=kinds, seed=2), 600)
    assert abs(len(found) - 200) < 4 * (600 * 2 / 9) ** 0.5
    assert {strike[3] for strike in found} == set(FAULTS)
    assert {strike[1:3] for strike in found} == {
        (p, c) for p in ("train", "evaluate") for c in "0123"
    }
    assert len({strike[0] for strike in found}) == len(found)
    assert strikes(FaultPlan(kinds=kinds, seed=1, rate=0), 50) == []


def test_a_round_that_is_repeated_has_its_fault_once() -> None:
    plan = FaultPlan(kinds=("drop",), seed=1, rate=1)
    assert strikes(plan, 2)
    assert all(plan.strike("train", 2, client) is None for client in "0123")


def test_a_course_of_faults_that_do_not_exist_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="kinds = 'fire'"):
        FaultPlan(kinds=("fire",), seed=1)
    with pytest.raises(InvalidParameterError, match="rate = -1"):
        FaultPlan(kinds=("drop",), seed=1, rate=-1)


def test_every_fault_is_tried_that_a_scheme_can_outlive() -> None:
    assert set(FAULTS) - set(kinds_of("fedavg")) == {"disk full"}
    assert set(FAULTS) - set(kinds_of("udp")) == {"node lost"}
    assert set(FAULTS) - set(kinds_of("fedvs")) == {"node lost", "disk full"}
    assert set(FAULTS) - set(kinds_of("central-dp")) == {"node lost"}


# -- Measures ------------------------------------------------------------------------------------


def test_the_size_of_a_thing_has_all_that_it_holds_once() -> None:
    text = "a" * 10_000
    assert 10_000 < size_of([text, text, {"key": text}]) < 11_000
    assert size_of([bytes(5000), bytes(6000)]) > 11_000
    assert size_of(entry(1)) > size_of(vars(entry(1))) > 200


def mark(server_round: int, rest: int) -> Mark:
    return Mark(
        server_round=server_round, traced=rest + 7, history=7, resident=1, files=1, seconds=0.01
    )


def test_growth_is_what_every_part_has_and_not_what_one_has() -> None:
    assert growth([mark(10, 100), mark(20, 90_000), mark(30, 90_010), mark(40, 90_020)]) == 1
    assert growth([mark(10, 100), mark(20, 1100), mark(30, 2100)]) == 100
    assert growth([mark(10, 100)]) == 0


def test_what_is_held_is_compared_by_name() -> None:
    before = Held(descriptors=("/a",), threads=("MainThread",), processes=())
    after = Held(descriptors=("/a", "/a"), threads=("MainThread",), processes=("17",))
    assert before.leaked(after) == ["descriptor left open: /a", "process left open: 17"]
    assert after.leaked(before) == []
    assert "MainThread" in held().threads


# -- The page ------------------------------------------------------------------------------------


def endured(scheme: str, **more: Any) -> Endured:
    nothing = Held(descriptors=(), threads=("MainThread",), processes=())
    values: dict[str, Any] = {
        "title": FEDERATIONS[scheme].title,
        "rounds": 500,
        "seed": 1,
        "faults": Counter({"drop": 3, "moved": 2, "server killed": 1}),
        "skipped": 4,
        "fewer": 5,
        "marks": (mark(100, 2**20), mark(500, 2**20)),
        "before": nothing,
        "after": nothing,
        "accounts": (audited(3, 3, 3),),
        "wrong": (),
    }
    return Endured(**{**values, **more})


def test_a_row_says_what_became_of_a_run() -> None:
    rows = long_rows(endured("udp"))
    title = FEDERATIONS["udp"].title
    assert rows["Rounds"] == [[title, "500", "1", "6", "491", "5", "4", "2", "1", "as it was"]]
    (ledgers,) = rows["Ledgers"]
    assert ledgers[:3] == [title, "3", "3"]
    assert ledgers[3] == ledgers[4] == ledgers[5]
    assert long_rows(endured("udp", wrong=("it broke",)))["Rounds"][0][-1] == "DEFECT"
    assert "-" in long_rows(endured("udp", marks=()))["Memory and what a process holds"][0]


def test_the_page_keeps_the_rows_of_other_schemes() -> None:
    order = [federation.title for federation in FEDERATIONS.values()]
    first = page({}, order=order, rows={LONG: long_rows(endured("udp"))})
    both = page({}, order=order, earlier=first, rows={LONG: long_rows(endured("fedavg"))})
    assert sections(both)["Long runs"].count("| 500 | 1 |") == 2
    assert page({}, order=order, earlier=both) == both
    again = page({}, order=order, earlier=both, rows={LONG: long_rows(endured("udp", rounds=600))})
    assert sections(again)["Long runs"].count("| 500 | 1 |") == 1
    assert sections(again)["Long runs"].count("| 600 | 1 |") == 1
    assert "Long runs" not in sections(page({}, order=order))


def test_long_runs_are_written_one_by_one_and_defects_are_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_up(scheme: str, *, rounds: int, seed: int) -> Endured:
        wrong = ("it broke",) if scheme == "udp" else ()
        return endured(scheme, rounds=rounds, seed=seed, wrong=wrong)

    monkeypatch.setattr(reliability_page, "endure", made_up)
    out, said = tmp_path / "page.md", list[str]()
    run = partial(long_run_of, rounds=70, seed=9)
    defects = write_rows(LONG, ["udp", "fedavg"], run, out=out, say=said.append)
    assert defects == [f"{FEDERATIONS['udp'].title}: it broke"]
    assert sections(out.read_text())["Long runs"].count("| 70 | 9 |") == 2
    assert any("rounds: 70" in line for line in said)
