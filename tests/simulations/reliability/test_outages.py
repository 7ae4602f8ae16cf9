"""Whole outages and pairs of faults: known verdicts, and that a planted bug is found."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Command

from flwr_privacy.errors import ProtocolError
from flwr_privacy.simulations.reliability.federations import FEDERATIONS
from flwr_privacy.simulations.reliability.grid import FAULTS, Strike
from flwr_privacy.simulations.reliability.matrix import VERDICTS, clean_training
from flwr_privacy.simulations.reliability.outages import LOST, exchanges, outages
from flwr_privacy.simulations.reliability.page import OUTAGES, PAIRS, page, sections
from flwr_privacy.simulations.reliability.page_sections import outage_rows, pair_rows
from flwr_privacy.simulations.reliability.pairs import Pair, cell_of_pair, draw_pair, pairs
from flwr_privacy.simulations.reliability.training import Outcome
from flwr_privacy.strategies import FedAvg

PAGE = Path(__file__, "../../../../docs/reliability.md").resolve()
FEDAVG = FEDERATIONS["fedavg"]


@pytest.fixture(scope="module")
def clean() -> Outcome:
    return clean_training(FEDAVG)


def break_training(
    monkeypatch: pytest.MonkeyPatch, error: Exception, *, when: Callable[[int], bool]
) -> None:
    """Plant a bug: an error where so many clients answer in a round."""
    aggregate = FedAvg.aggregate_train

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        result = aggregate(self, *args, **options)
        if when(self.messenger.request_log("train").accumulated):
            raise error
        return result

    monkeypatch.setattr(FedAvg, "aggregate_train", broken)


# -- Outages -------------------------------------------------------------------------------------


def test_each_exchange_is_lost_in_each_way() -> None:
    cells = outages(FEDERATIONS["udp"])
    verdicts = {lost: Counter(c.verdict for c in cells if c.fault == lost) for lost in LOST}
    assert verdicts == {
        "all requests": {"exact": 1, "skipped": 3},  # the hello is sent again
        "all replies": {"exact": 1, "skipped": 3},
        "all requests but one": {"exact": 1, "left out": 3},
    }
    assert [c.phase for c in cells if c.fault == "all replies"] == [
        "hello (round 0, request 0)",
        *(f"train (round {number}, request 0)" for number in (1, 2, 3)),
    ]
    title = FEDERATIONS["udp"].title
    told = sections(PAGE.read_text(encoding="utf-8"))[OUTAGES]
    for row in outage_rows(title, cells)["What became of the trainings"]:
        assert f"| {' | '.join(row)} |" in told


def test_an_exchange_has_a_strike_for_each_client(clean: Outcome) -> None:
    found = exchanges(clean)
    assert [key[:2] for key in found] == [
        ("hello", 0),
        *((phase, number) for number in (1, 2, 3) for phase in ("train", "evaluate")),
    ]
    for strikes in found.values():
        assert sorted(one.client for one in strikes) == ["0", "1", "2", "3"]
        assert {(one.fault, one.nth) for one in strikes} == {("lost request", 1)}


def test_an_outage_that_breaks_the_strategy_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    break_training(monkeypatch, ZeroDivisionError("no weights"), when=lambda count: count == 0)
    cells = outages(FEDAVG, lost=["all requests"])
    wrong = {c.phase: c.why for c in cells if c.verdict == "DEFECT"}
    assert wrong == {
        f"train (round {number}, request 0)": "ZeroDivisionError: no weights"
        for number in (1, 2, 3)
    }


def test_an_error_that_does_not_say_what_is_missing_is_a_defect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_training(monkeypatch, ProtocolError("it failed"), when=lambda count: count == 1)
    cells = outages(FEDAVG, lost=["all requests but one"])
    (why,) = {c.why for c in cells if c.verdict == "DEFECT"}
    assert why == "the error names neither the phase nor what is missing: ProtocolError: it failed"


# -- Pairs ---------------------------------------------------------------------------------------


def at(client: str, fault: str, **more: Any) -> Strike:
    return Strike(**{"fault": fault, "phase": "train", "server_round": 2, "client": client, **more})


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (at("1", "drop"), at("2", "nan"), "left out"),
        (at("1", "delay"), at("2", "duplicate"), "exact"),
        (at("1", "delay"), at("2", "drop"), "left out"),
        (at("1", "server killed"), at("1", "crash", phase="evaluate"), "left out"),
        (at("1", "server killed"), at("2", "server killed", phase="evaluate"), "exact"),
        (at("1", "moved"), at("1", "nan", phase="evaluate"), "left out"),
    ],
)
def test_a_pair_is_what_it_is_known_to_be(
    clean: Outcome, first: Strike, second: Strike, verdict: str
) -> None:
    cell = cell_of_pair(FEDAVG, clean, Pair(seed=0, strikes=(first, second)))
    assert cell.verdict == verdict, cell.why
    assert cell.fault == f"{first.fault} and {second.fault}"


def test_pairs_are_of_one_round_or_of_one_client(clean: Outcome) -> None:
    drawn = [draw_pair(clean, seed=seed) for seed in range(200)]
    kinds = Counter()
    for pair in drawn:
        one, other = pair.strikes
        same_round = one.server_round == other.server_round and one.client != other.client
        assert same_round or (one.client == other.client and one.phase != other.phase)
        kinds[same_round] += 1
    assert min(kinds.values()) > 60
    assert {one.fault for pair in drawn for one in pair.strikes} == set(FAULTS)
    assert draw_pair(clean, seed=7) == drawn[7]


def test_two_faults_that_break_the_strategy_together_are_a_defect(
    clean: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_training(monkeypatch, KeyError("2"), when=lambda count: count == 2)
    alone = Pair(seed=0, strikes=(at("1", "drop"), at("1", "nan", phase="evaluate")))
    assert cell_of_pair(FEDAVG, clean, alone).verdict == "left out"
    both = cell_of_pair(FEDAVG, clean, Pair(seed=0, strikes=(at("1", "drop"), at("2", "nan"))))
    assert (both.verdict, both.why) == ("DEFECT", "KeyError: '2'")


# -- The page and the command --------------------------------------------------------------------


def test_the_page_has_every_federation_and_no_defect() -> None:
    found = sections(PAGE.read_text(encoding="utf-8"))
    for name in (OUTAGES, PAIRS):
        lines = [line.strip("| ").split(" | ") for line in found[name].splitlines()]
        rows = [line for line in lines if len(line) == 3 + len(VERDICTS)]
        assert {row[-1] for row in rows} == {"DEFECT", "---", "0"}
        assert {row[0] for row in rows} >= {one.title for one in FEDERATIONS.values()}


def test_the_command_repeats_a_pair_by_its_seed(tmp_path: Path, command: Command) -> None:
    title = FEDAVG.title
    (cell,) = pairs(FEDAVG, seed=4, count=1)
    done = command("reliability", "--scheme", "fedavg", "--pairs", "1", "--seed", "4", "--out", "p")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{title}: seed: 4, pairs: 1")
    written = (tmp_path / "p").read_text()
    assert written == page({}, order=[title], rows={PAIRS: pair_rows(title, [cell], seed=4)})


def test_the_command_says_how_to_repeat_a_defect(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_training(monkeypatch, KeyError("2"), when=lambda count: count < 4)
    options = ("--scheme", "fedavg", "--out", "p", "--seed", "1", "--pairs", "6")
    done = command("reliability", *options)
    assert done.returncode == 1
    assert "defect: FedAvg, " in done.stderr
    assert "flwr-privacy reliability --scheme fedavg --pairs 1 --seed " in done.stderr
    done = command("reliability", *options, "--outage")
    assert done.returncode == 2
    assert "expected one of --rounds, --outage, --pairs" in done.stderr
