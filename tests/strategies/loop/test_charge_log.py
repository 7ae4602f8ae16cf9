"""What clients are charged for what they were asked, and by which run."""

from pathlib import Path
from typing import Any

import pytest
from apps import record

from flwr_privacy.accounting import Charge
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.strategies import Instruction, LoopOptions
from flwr_privacy.strategies.loop.charge_log import ChargeLog
from flwr_privacy.strategies.requests.ledger_heads import LedgerHeads
from flwr_privacy.strategies.requests.request_log import RequestLog
from flwr_privacy.strategies.state.experiment import Experiment
from flwr_privacy.wire.message import Header

ONE, OTHER = (
    Charge(neighbours="replace_one", noise_multiplier=2.0),
    Charge(neighbours="replace_one", noise_multiplier=3.0),
)
COSTS = {"a": ONE, "b": OTHER, "c": ONE, "node-9": ONE}


def books_of(folder: Path) -> ChargeLog:
    experiment = Experiment("udp", LoopOptions(seed=1, experiment_id="e", run_dir=folder))
    experiment.begin(record())
    return ChargeLog(experiment, LedgerHeads(experiment, lambda client: ""))


def question(*clients: str, server_round: int = 1, node: int = 0) -> RequestLog:
    header = Header(scheme="udp", experiment_id="e", phase="train", server_round=server_round)
    return RequestLog(header, {node + i: [client] for i, client in enumerate(clients)})


def told(**changes: Any) -> Instruction:
    options: dict[str, Any] = {"accumulator": lambda: WeightedMean({}), "cost": COSTS.get}
    return Instruction(**{**options, **changes})


def charged(charge_log: ChargeLog) -> list[tuple[int, Charge, tuple[str, ...]]]:
    return [(r.server_round, r.charge, r.clients) for r in charge_log.releases]


def test_everybody_who_was_asked_is_charged_what_it_costs(tmp_path: Path) -> None:
    charge_log, asked = books_of(tmp_path), question("a", "b", "c")
    charge_log.note(asked, told())
    charge_log.charge(asked, told())
    charge_log.charge_broken_off()
    assert charged(charge_log) == [(1, ONE, ("a", "c")), (1, OTHER, ("b",))]


def test_an_answer_that_releases_nothing_costs_nothing(tmp_path: Path) -> None:
    charge_log, asked = books_of(tmp_path), question("a")
    charge_log.note(asked, told(cost=None))
    charge_log.charge(asked, told(cost=None))
    assert charge_log.releases == []
    assert not (tmp_path / "asked.json").exists()


def test_a_question_that_broke_off_is_charged_by_the_run_that_goes_on(tmp_path: Path) -> None:
    books_of(tmp_path).note(question("a", "b"), told())
    charge_log = books_of(tmp_path)
    charge_log.charge_broken_off()
    charge_log.charge_broken_off()
    assert charged(charge_log) == [(1, ONE, ("a",)), (1, OTHER, ("b",))]


def test_asked_again_it_is_charged_once_with_those_who_were_asked_before(tmp_path: Path) -> None:
    books_of(tmp_path).note(question("a"), told())
    charge_log, asked = books_of(tmp_path), question("a", "c")
    charge_log.note(asked, told())
    charge_log.charge(asked, told())
    charge_log.charge_broken_off()
    assert charged(charge_log) == [(1, ONE, ("a", "c"))]


def test_a_node_without_a_name_is_charged_under_the_one_that_it_says_later(tmp_path: Path) -> None:
    charge_log, lost = books_of(tmp_path), question("", node=9)
    charge_log.charge(lost, told())
    assert charged(charge_log) == [(1, ONE, ("node-9",))]
    heard = question("", server_round=2, node=9)
    heard.answered.add("a")
    heard.named[9] = "a"
    charge_log.charge(heard, told())
    assert charged(charge_log) == [(1, ONE, ("a",)), (2, ONE, ("a",))]


def test_what_broke_off_under_an_address_that_is_known_by_then_is_its_clients(
    tmp_path: Path,
) -> None:
    books_of(tmp_path).note(question("", node=9), told())
    charge_log, heard = books_of(tmp_path), question("", server_round=2, node=9)
    heard.named[9] = "a"
    heard.answered.add("a")
    charge_log.charge(heard, told())
    charge_log.charge_broken_off()
    charge_log.charge(question("b", server_round=3), told())
    assert charged(charge_log)[:2] == [(2, ONE, ("a",)), (1, ONE, ("a",))]


def test_the_card_states_the_epsilon_of_its_releases_however_they_came(tmp_path: Path) -> None:
    promise = Guarantee(
        scheme="udp", protects="a client", adversary="the server", epsilon=8.0, delta=1e-5
    )

    def check(charge_log: ChargeLog) -> float:
        card = charge_log.card(lambda: promise, accountant="gdp", final=False)
        read = PrivacyCard.from_json(card.to_json())
        assert read.epsilon("gdp") == card.stated["gdp"]
        assert card.followed().clients == len(read.charges())
        return card.stated["gdp"]

    charge_log = books_of(tmp_path)
    charge_log.charge(question("", node=9), told())
    charge_log.charge(question("a", "b", server_round=2), told())
    before = check(charge_log)
    heard = question("", server_round=3, node=9)
    heard.named[9] = "a"  # so the first charge was that of "a", too
    charge_log.charge(heard, told())
    assert check(charge_log) > before
    later = books_of(tmp_path)
    later.load(charge_log.card(lambda: promise, accountant="gdp", final=False))
    assert check(later) == check(charge_log)
    earlier = later.card(lambda: promise, accountant="gdp", final=False)
    later.charge(question("a", server_round=4), told())
    assert check(later) > check(charge_log)
    # A card stays as it was, whatever is charged after it.
    assert earlier.epsilon("gdp") == earlier.stated["gdp"] == check(charge_log)


@pytest.mark.parametrize("earlier", [True, False])
def test_the_card_has_the_promise_of_the_run_before_until_something_is_asked(
    tmp_path: Path, earlier: bool
) -> None:
    before, now = (
        Guarantee(scheme="udp", protects=what, adversary="the server", epsilon=8.0, delta=1e-5)
        for what in ("a record", "a client")
    )
    first = books_of(tmp_path)
    first.charge(question("a"), told())
    charge_log = books_of(tmp_path)
    charge_log.load(first.card(lambda: before, accountant=None, final=False))
    if not earlier:
        charge_log.earlier = None
    card = charge_log.card(lambda: now, accountant="gdp", final=False)
    assert card.guarantee.protects == ("a record" if earlier else "a client")
    assert card.guarantee.spent == card.stated["gdp"] > 0
    assert charged(charge_log) == [(1, ONE, ("a",))]
