"""What the pipeline refuses before data are read, and how many questions it answers."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from summing_node import QUESTION, Sum, ask, store_in

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import DeclinedError, InvalidParameterError, LedgerError
from flwr_privacy.pipeline import answer as pipeline
from flwr_privacy.pipeline.mechanism import (
    Answer,
    Mechanism,
    NoFactsError,
    ReleasePlan,
    Unprotected,
)
from flwr_privacy.pipeline.node_store import NodeRules
from flwr_privacy.privacy.ledger import Entry
from flwr_privacy.privacy.policy import Policy
from flwr_privacy.privacy.randomness import SecureRandom

# -- Everything that can be refused is refused before data are read --------------------------------


REFUSED: dict[str, tuple[Policy, Mechanism, dict[str, Any], str]] = {
    "scheme": (Policy(schemes=["nobody"]), Sum(), {}, "schemes = "),
    "unit": (Policy(units=["record"]), Sum(), {}, "units = "),
    "noise": (Policy(min_noise_multiplier=3), Sum(), {}, "min_noise_multiplier = 3"),
    "neighbours": (
        Policy(neighbours=["replace_one"]),
        Sum(neighbours="add_remove"),
        {},
        r"for the neighbours 'add_remove': the node's policy has neighbours = \['replace_one'\]$",
    ),
    "zeroed out, without a word": (
        Policy(),
        Sum(neighbours="zero_out"),
        {},
        r"the neighbours 'zero_out': .* neighbours = \['add_remove', 'replace_one'\], by default",
    ),
    "sigma": (Policy(min_sigma=3), Sum(), {}, "min_sigma = 3"),
    "epsilon": (Policy(max_epsilon=0.01), Sum(), {}, "max_epsilon = 0.01"),
    "no budget at all": (Policy(max_epsilon=0), Sum(), {}, "max_epsilon = 0"),
    "no noise": (Policy(), Sum(noise_multiplier=0.0), {}, "lists the scheme in allow_unprotected"),
    "budget": (Policy(), Sum(epsilon=0.01), {}, "the budget is spent"),
    "outside of a sum": (Policy(min_summed=3), Sum(), {}, "min_summed = 3"),
    "shares outside of a sum": (Policy(), Sum(parties=2), {}, "a share alone hides nothing"),
    "shares of too few": (Policy(), Sum(parties=3), {"summed": 2}, "this node counts on 2"),
    "no release": (Policy(max_releases=0), Sum(), {}, "max_releases = 0"),
    "no release today": (Policy(max_releases_per_day=0), Sum(), {}, "max_releases_per_day = 0"),
    "no disk": (Policy(max_disk=0), Sum(), {}, "max_disk = 0"),
}


@pytest.mark.parametrize(
    ("policy", "mechanism", "fields", "text"), REFUSED.values(), ids=REFUSED.keys()
)
def test_a_refusal_comes_before_data_are_read_and_costs_nothing(
    tmp_path: Path, policy: Policy, mechanism: Mechanism, fields: dict[str, Any], text: str
) -> None:
    ran: list[int] = []
    with pytest.raises(DeclinedError, match=text):
        ask(store_in(tmp_path, policy), lambda: ran.append(1), mechanism, **fields)
    assert ran == []
    assert not (tmp_path / "a.ledger").exists()
    assert not (tmp_path / "a.replies").exists()


def test_records_are_counted_once_and_before_the_charge(tmp_path: Path) -> None:
    store, counted = store_in(tmp_path), []

    def count() -> int:
        counted.append(1)
        return 5

    with pytest.raises(InvalidParameterError, match="records = 5"):
        ask(store, mechanism=Sum(least_records=6), count=count)
    assert store.ledger.entries() == ()
    for server_round in (1, 2):
        ask(store, question=replace(QUESTION, server_round=server_round), count=count)
    assert len(counted) == 2
    ask(store, question=replace(QUESTION, experiment_id="other"), count=count)
    assert len(counted) == 3


def test_a_refused_question_leaves_no_file_of_its_count(tmp_path: Path) -> None:
    store = store_in(tmp_path, Policy(max_releases=0))
    for number in range(3):
        question = replace(QUESTION, experiment_id=f"e{number}")
        with pytest.raises(DeclinedError):
            ask(store, question=question, count=lambda: 5)
    assert list(tmp_path.iterdir()) == []


LIMITED = {
    "releases": Policy(max_releases=1),
    "releases of a day": Policy(max_releases_per_day=1),
    "epsilon": Policy(max_epsilon=2.5, delta=1e-5),
}


@pytest.mark.parametrize("policy", LIMITED.values(), ids=LIMITED.keys())
@pytest.mark.parametrize("how", ["count", "rehearsal"])
def test_who_can_answer_nothing_more_calls_no_code_of_the_users(
    tmp_path: Path, policy: Policy, how: str
) -> None:
    """Else whether that code ends before it says its facts would be told, uncharged and unbounded.

    A server asks with terms that are refused once the facts are there, and so tells the two apart.
    """
    store, ran = store_in(tmp_path, policy), []
    ask(store)

    def count() -> int:
        ran.append(1)
        raise NoFactsError("a value of the data")

    called: dict[str, Any] = {"count": count}
    if how == "rehearsal":
        called = {"given": {"rehearsal": count}}
    for number in range(3):
        question = replace(QUESTION, experiment_id=f"e{number}")
        with pytest.raises(DeclinedError):
            ask(store, mechanism=Sum(least_records=6), question=question, **called)
    assert ran == []


def test_a_question_whose_name_was_charged_is_as_new_with_other_arrays(tmp_path: Path) -> None:
    store, ran = store_in(tmp_path, Policy(max_releases=1)), []
    ask(store)
    with pytest.raises(DeclinedError, match="max_releases = 1"):
        ask(store, arrays={"w": np.ones(2)}, count=lambda: ran.append(1) or 5)
    assert ran == []


def test_code_that_ends_before_it_says_its_facts_stops_an_experiment_that_cannot_be_charged(
    tmp_path: Path,
) -> None:
    store = store_in(tmp_path, Policy(max_releases=1))
    question = replace(QUESTION, experiment_id="other")

    def count() -> int:
        """Meanwhile another question takes what was left."""
        ask(store)
        raise NoFactsError("a value of the data")

    with pytest.raises(DeclinedError, match="max_releases = 1"):
        ask(store, question=question, count=count)
    with pytest.raises(DeclinedError, match="answers nothing more of this experiment"):
        ask(store, question=question)


# -- Limits on requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "answered"),
    [({"max_releases": 3}, 3), ({"max_releases_per_day": 2}, 2), ({"max_releases": 0}, 0)],
)
def test_cheap_releases_are_bounded_too(
    tmp_path: Path, limits: dict[str, int], answered: int
) -> None:
    store = store_in(tmp_path, Policy(max_epsilon=1.0, **limits))
    cheap = Sum(noise_multiplier=20_000.0)
    for number in range(answered):
        ask(store, mechanism=cheap, question=replace(QUESTION, experiment_id=f"e{number}"))
    for number in range(answered, 10):
        question = replace(QUESTION, experiment_id=f"e{number}")
        with pytest.raises(DeclinedError, match=next(iter(limits))):
            ask(store, mechanism=cheap, question=question)
    assert len(store.ledger.entries()) == answered


def test_a_day_later_a_node_answers_again(tmp_path: Path) -> None:
    store = store_in(tmp_path, Policy(max_releases_per_day=1))
    old = datetime.now(UTC) - timedelta(hours=25)
    with store.ledger.locked() as locked:
        charge, time = (
            Charge(neighbours="replace_one", noise_multiplier=2.0),
            old.strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        locked.charge(Entry(question=QUESTION, scheme="toy", unit="user", charge=charge, time=time))
    ask(store, question=replace(QUESTION, server_round=2))
    with pytest.raises(DeclinedError, match="max_releases_per_day = 1"):
        ask(store, question=replace(QUESTION, server_round=3))


def test_the_disk_that_questions_can_fill_is_bounded(tmp_path: Path) -> None:
    model, limit = {"w": np.zeros(1000)}, 40_000

    @dataclass(frozen=True)
    class Large(Sum):
        def noise(self, measured: float, plan: ReleasePlan, random: SecureRandom) -> Answer:
            return model, {"metrics": {}}

    store = store_in(tmp_path, Policy(max_disk=limit))
    large = Large(noise_multiplier=20_000.0)
    for number in range(5):  # a reply of 8 kB each
        ask(store, mechanism=large, arrays=model, question=replace(QUESTION, request=number))
    assert limit <= store.disk() < limit + 10_000
    with pytest.raises(DeclinedError, match=f"max_disk = {limit}"):
        ask(store, mechanism=large, arrays=model, question=replace(QUESTION, request=5))


def test_a_file_that_goes_while_the_disk_is_measured_counts_as_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path, Policy(max_disk=10**6))
    ask(store)
    before, glob = store.disk(), Path.glob

    def racing(self: Path, pattern: str) -> Any:
        yield from glob(self, pattern)
        yield self / "a.replies.new"  # it was there when the folder was listed

    monkeypatch.setattr(Path, "glob", racing)
    monkeypatch.setattr(Path, "is_file", lambda self: not self.is_dir())
    assert store.disk() == before
    assert ask(store, question=replace(QUESTION, server_round=2))


def test_kept_replies_do_not_pile_up(tmp_path: Path) -> None:
    store, cheap = store_in(tmp_path), Sum(noise_multiplier=20_000.0)
    for number in range(20):
        ask(store, mechanism=cheap, question=replace(QUESTION, experiment_id=f"e{number}"))
    replies = [path for path in (tmp_path / "a.replies").iterdir() if path.name != "lock"]
    assert len(replies) == 4


def test_files_that_cannot_be_used_are_no_answer(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    ask(store)
    (tmp_path / "a.ledger").write_bytes(b"damaged")
    ran: list[int] = []
    with pytest.raises(LedgerError):
        ask(store, lambda: ran.append(1), question=replace(QUESTION, server_round=2))
    assert ran == []


def test_the_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    ask(store_in(tmp_path), count=lambda: 3)
    for folder, _, names in os.walk(tmp_path):
        for name in names:
            assert (Path(folder) / name).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "policy",
    [
        {"schemes": ["other"]},
        {"max_epsilon": 1.0},
        {"units": ["user"]},
        {"min_noise_multiplier": 0.1},
        {"min_sigma": 2.0},
        {"min_summed": 3},
    ],
)
def test_what_promises_nothing_is_worked_on_only_if_the_policy_allows_it(
    policy: dict[str, Any],
) -> None:
    asked: list[str] = []

    def work(random: Callable[[str], SecureRandom]) -> Answer:
        asked.append("work")
        return {}, {"drawn": random("noise").bits(64)}

    def answered(policy: dict[str, Any], **fields: Any) -> int:
        rules = NodeRules(policy=Policy(**policy), client_id="a", simulated=False, insecure_seed=3)
        given = {"experiment-id": "e", "round": 1, "request": 0, **fields}
        release = Unprotected(work, sigma=1.0)
        drawn = pipeline.answer_unprotected(rules, release, "toy", "train", given, False)[1][
            "drawn"
        ]
        return int(drawn)

    with pytest.raises(DeclinedError):
        answered(policy)
    assert asked == []
    drawn = SecureRandom.insecure(3, "noise", "a", "e", "train", 1, 0).bits(64)
    assert answered({"min_sigma": 1.0}) == drawn
    assert answered({"min_summed": 3}, summed=3) == drawn
