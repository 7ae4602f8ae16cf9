"""The pipeline: its order under kills and faults, who is charged what, and what a server learns."""

import multiprocessing
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import (
    ChargedFailureError,
    DataError,
    DeclinedError,
    InvalidParameterError,
    LedgerError,
    ProtocolError,
)
from flwr_privacy.pipeline import answer as pipeline
from flwr_privacy.pipeline.mechanism import (
    Answer,
    Facts,
    Mechanism,
    Plan,
    ProtocolStep,
    Release,
    Unprotected,
)
from flwr_privacy.pipeline.node_store import NodeRules, NodeStore
from flwr_privacy.pipeline.reply_cache import ReplyCache
from flwr_privacy.pipeline.step_store import StepStore
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.ledger import Entry, Ledger, Question
from flwr_privacy.privacy.policy import Policy
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.pins import Identity, Pins

QUESTION = Question(experiment_id="e", phase="train", server_round=1)
MODEL = {"w": np.zeros(2)}


@dataclass(frozen=True)
class Sum(Mechanism):
    """A toy: a number between -1 and 1 with noise."""

    zero: bool = True
    noise_multiplier: float = 2.0
    epsilon: float = 100.0
    parties: int = 0
    least_records: int = 0

    def plan(self, start: Any, facts: Facts) -> Plan:
        if facts.records is not None and facts.records < self.least_records:
            raise InvalidParameterError("records", facts.records, "more")
        charge = Charge(noise_multiplier=self.noise_multiplier) if self.noise_multiplier else None
        return Plan(
            unit="user",
            charge=charge,
            epsilon=self.epsilon,
            delta=1e-5,
            noise_multiplier=self.noise_multiplier,
            sigma=self.noise_multiplier,
            parties=self.parties,
        )

    def measure(self, start: Any, outcome: Any) -> float:
        if not np.isfinite(outcome):
            raise DataError("not finite")
        return float(np.clip(outcome, -1, 1))

    def failed(self, start: Any) -> float | None:
        return 0.0 if self.zero else None

    def noise(self, measured: float, plan: Plan, random: SecureRandom) -> Answer:
        noise = random.uint64(1) if plan.charge is not None else np.zeros(1, np.uint64)
        return {"sum": np.array([measured]), "noise": noise}, {"metrics": {}}

    def accumulator(self, start: Any) -> WeightedMean:
        return WeightedMean({})


PINS = Pins(clients={name: Identity.generate().public for name in "bcd"})


def store_in(folder: Path, policy: Policy | None = None, *, durable: bool = True) -> NodeStore:
    return NodeStore(
        ledger=Ledger(folder / "a.ledger", data_set="a", durable=durable),
        replies=ReplyCache(folder / "a.replies", durable=durable, experiments=4),
        setups=ReplyCache(folder / "a.setups", durable=durable),
        policy=policy or Policy(allow_unprotected=["toy"]),
        client_id="a",
        simulated=not durable,
        folder=folder,
        sessions=folder / "a.secure-sum",
        identity=None,
        pins=PINS,
    )


def ask(
    store: NodeStore,
    work: Callable[[], Any] = lambda: 0.5,
    mechanism: Mechanism | None = None,
    *,
    question: Question = QUESTION,
    arrays: Any = MODEL,
    count: Callable[[], int] | None = None,
    given: dict[str, Any] | None = None,
    **fields: Any,
) -> Answer:
    summed = fields.get("summed", 0)
    own = {"summed": 0, "honest": summed, "certain": summed, "code-limit": 0, **fields}
    request = pipeline.Request("toy", question, arrays, own)
    facts = None if count is None else (lambda: Facts(records=count()))
    release = Release(
        mechanism=mechanism or Sum(), work=lambda _, __: work(), facts=facts, **given or {}
    )
    return pipeline.answer(store, request, release)


def same(one: Answer, other: Answer) -> bool:
    return all(np.array_equal(one[0][name], other[0][name]) for name in ("sum", "noise"))


def fail(error: BaseException) -> Callable[[], Any]:
    def work() -> Any:
        raise error

    return work


# -- Questions, and what each of them costs --------------------------------------------------------


def test_the_same_question_gets_the_same_bytes_for_one_charge(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    first = ask(store)
    assert same(first, ask(store, fail(AssertionError("it trained again"))))
    assert len(store.ledger.entries()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"arrays": {"w": np.ones(2)}},
        {"arrays": {"w": np.zeros(2, np.float32)}},
        {"arrays": {"v": np.zeros(2)}},
        {"arrays": {"w": np.zeros((2, 1))}},
        {"rate": 0.5},
        {"question": replace(QUESTION, request=1)},
        {"question": replace(QUESTION, phase="other")},
    ],
)
def test_every_other_question_is_another_charge(tmp_path: Path, change: dict[str, Any]) -> None:
    store = store_in(tmp_path)
    first = ask(store)
    assert not same(first, ask(store, **change))
    assert len(store.ledger.entries()) == 2
    assert same(first, ask(store))  # both replies are there
    assert len(store.ledger.entries()) == 2


def test_how_an_answer_is_delivered_does_not_make_another_question(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert same(ask(store), ask(store, summed=5, **{"code-limit": 7}))
    assert len(store.ledger.entries()) == 1


def test_a_reply_that_was_forgotten_is_another_release(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    first = ask(store)
    ask(store, question=replace(QUESTION, server_round=2))
    assert not same(first, ask(store))
    assert len(store.ledger.entries()) == 3


def test_a_training_that_is_overtaken_by_a_later_round_sends_no_second_answer(
    tmp_path: Path,
) -> None:
    store, sent = store_in(tmp_path), []

    def slow() -> float:
        """Meanwhile another process answers the same question, and one of the next round."""
        sent.append(ask(store))
        ask(store, question=replace(QUESTION, server_round=2))  # its reply takes the first away
        return 0.5

    with pytest.raises(ChargedFailureError, match="its round was over"):
        sent.append(ask(store, slow))
    assert len(sent) == 1
    assert len(store.ledger.entries()) == 2
    assert store.ledger.unanswered() == ()


@pytest.mark.parametrize("durable", [True, False])
def test_only_what_was_never_answered_counts_so_whatever_was_forgotten(
    tmp_path: Path, durable: bool
) -> None:
    """Replies are pruned, files of the cache go, questions come again: the ledger knows."""
    store = store_in(tmp_path, durable=durable)

    def asked(server_round: int, work: Callable[[], Any] = lambda: 0.5, **given: Any) -> None:
        ask(store, work, question=replace(QUESTION, server_round=server_round), **given)

    def unanswered() -> list[int]:
        return [entry.question.server_round for entry in store.ledger.unanswered()]

    asked(1)
    with pytest.raises(KeyboardInterrupt):
        asked(2, fail(KeyboardInterrupt()))
    asked(3)
    assert len(list(tmp_path.glob("a.replies/*.reply"))) == 1
    shutil.rmtree(tmp_path / "a.replies")
    assert unanswered() == [2]
    asked(3)  # forgotten: another release
    asked(2)
    assert unanswered() == []
    assert len(store.ledger.entries()) == 4
    with pytest.raises(ChargedFailureError):
        asked(4, fail(ValueError()), mechanism=Sum(zero=False))
    assert unanswered() == [4]
    shared = {"mechanism": Sum(parties=2), "summed": 2}
    with pytest.raises((KeyboardInterrupt, DeclinedError)):  # a deployed node has stopped
        asked(5, fail(KeyboardInterrupt()), **shared)
    if not durable:
        asked(6, **shared)
        assert unanswered() == [4, 5]


def test_noise_in_shares_has_one_attempt_whatever_became_of_it(tmp_path: Path) -> None:
    shared = Sum(parties=2)
    store = store_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        ask(store, fail(KeyboardInterrupt()), shared, summed=2)
    for arrays in (MODEL, {"w": np.ones(2)}):
        with pytest.raises(DeclinedError, match="answered before"):
            ask(store, mechanism=shared, summed=2, arrays=arrays)
    assert len(store.ledger.entries()) == 1
    assert not (tmp_path / "a.replies").exists()


SETUP = {"name": Question(experiment_id="e", phase="setup", server_round=0), "keeps": "experiment"}


@pytest.mark.parametrize("noise", [2.0, 0.0])
def test_what_is_given_once_for_an_experiment_is_the_same_in_every_round(
    tmp_path: Path, noise: float
) -> None:
    store, mechanism = store_in(tmp_path), Sum(noise_multiplier=noise)
    first = ask(store, mechanism=mechanism, given=SETUP)
    later = replace(QUESTION, server_round=9, request=3)
    again = ask(store, fail(AssertionError()), mechanism, question=later, given=SETUP)
    assert same(first, again)
    with pytest.raises(DeclinedError, match="answered before, with other terms"):
        ask(store, mechanism=mechanism, given=SETUP, rate=0.5)
    assert len(store.ledger.entries()) == (noise > 0)


def test_what_is_given_once_and_lost_is_not_given_again(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    ask(store, given=SETUP)
    for path in (tmp_path / "a.setups").glob("*.reply"):
        path.unlink()
    with pytest.raises(DeclinedError, match="answered before, and the answer is lost"):
        ask(store, given=SETUP)
    assert len(store.ledger.entries()) == 1


def test_what_broke_off_before_its_one_answer_is_given(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        ask(store, fail(KeyboardInterrupt()), given=SETUP)
    ask(store, given=SETUP)
    assert len(store.ledger.entries()) == 1


@pytest.mark.parametrize("noise", [2.0, 0.0])
def test_one_answer_in_a_sum_is_the_only_one(tmp_path: Path, noise: float) -> None:
    store, shared = store_in(tmp_path), Sum(parties=2, noise_multiplier=noise)
    ask(store, mechanism=shared, given=SETUP, summed=2)
    with pytest.raises(DeclinedError, match="in a secure sum of its own"):
        ask(store, mechanism=shared, given=SETUP, summed=2)
    with pytest.raises(DeclinedError, match="answered before"):
        ask(store, mechanism=shared, given=SETUP, summed=2, rate=0.5)


# -- Kills: after each step that writes ------------------------------------------------------------

STEPS = {
    "before the charge": ("privacy.ledger.LockedLedger.charge", 0, 0),
    "after the charge": ("pipeline.answer.run", 1, 0),
    "before the reply is kept": ("pipeline.reply_cache.ReplyCache.keep", 1, 0),
    "before the charge counts as answered": ("privacy.ledger.LockedLedger.answer", 1, 1),
}


@pytest.mark.parametrize(("step", "charges", "replies"), STEPS.values(), ids=STEPS.keys())
def test_a_kill_leaves_a_charge_without_an_answer_and_never_the_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, charges: int, replies: int
) -> None:
    store = store_in(tmp_path)

    def kill(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"flwr_privacy.{step}", kill)
        with pytest.raises(KeyboardInterrupt):
            ask(store)
    assert len(store.ledger.entries()) == len(store.ledger.unanswered()) == charges
    assert len(list(tmp_path.glob("a.replies/*.reply"))) == replies
    answer = ask(store)
    assert len(store.ledger.entries()) == 1
    assert store.ledger.unanswered() == ()
    assert same(answer, ask(store))


def test_a_kill_in_training_costs_one_charge_however_often(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            ask(store, fail(KeyboardInterrupt()))
        assert len(store.ledger.entries()) == 1
    ask(store)
    assert len(store.ledger.entries()) == 1


def test_a_kill_after_the_reply_was_kept_sends_that_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, kept = store_in(tmp_path), []

    def keep(self: ReplyCache, question: Question, reply: bytes, key: str) -> bytes:
        kept.append(original(self, question, reply, key))
        raise KeyboardInterrupt

    original = ReplyCache.keep
    with monkeypatch.context() as patch:
        patch.setattr(ReplyCache, "keep", keep)
        with pytest.raises(KeyboardInterrupt):
            ask(store)
    answer = ask(store, fail(AssertionError("it trained again")))
    assert same(answer, pipeline._read(kept[0]))
    assert len(store.ledger.entries()) == 1


def test_the_charge_is_durable_before_the_users_code_runs(tmp_path: Path) -> None:
    def work() -> float:
        (entry,) = Ledger(tmp_path / "a.ledger", data_set="a").entries()  # from the disk
        assert entry.charge == Charge(noise_multiplier=2.0)
        with store.ledger.locked(timeout=0.0):  # nobody holds it while this runs
            return 0.5

    store = store_in(tmp_path)
    ask(store, work)


def test_what_is_sent_is_what_the_cache_holds(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    inner: list[Answer] = []

    def work() -> float:
        inner.append(ask(store))  # another message with the same question is faster
        return -1.0

    outer = ask(store, work)
    assert same(outer, inner[0])
    assert outer[0]["sum"] == 0.5
    assert len(store.ledger.entries()) == 1


def _asked(folder: Path, value: float, queue: Any, barrier: Any) -> None:
    def work() -> float:
        barrier.wait(10)  # all of them train at the same time
        return value

    arrays, _ = ask(store_in(folder), work)
    queue.put((float(arrays["sum"][0]), int(arrays["noise"][0])))


def test_processes_with_the_same_question_send_the_same_for_one_charge(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue, barrier = context.Queue(), context.Barrier(2)
    processes = [
        context.Process(target=_asked, args=(tmp_path, value, queue, barrier))
        for value in (0.25, -0.25)
    ]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert answers[0] == answers[1]
    assert len(store_in(tmp_path).ledger.entries()) == 1


def _once(folder: Path, number: int, queue: Any) -> None:
    question = replace(QUESTION, request=number)
    try:
        ask(store_in(folder), mechanism=Sum(epsilon=2.5), question=question)
        queue.put("answered")
    except DeclinedError as error:
        queue.put(str(error))


def test_processes_with_different_questions_never_pass_the_budget_together(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_once, args=(tmp_path, n, queue)) for n in range(4)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert answers.count("answered") == len(store_in(tmp_path).ledger.entries()) == 1
    assert sum("the budget is spent" in answer for answer in answers) == 3


# -- What a server learns from how the user's code fares -------------------------------------------

FAILURES = {
    "raises": fail(ValueError("record 7 is 42")),
    "raises an error of ours": fail(ProtocolError("record 7 is 42")),
    "runs out of memory": fail(MemoryError()),
    "not a number": lambda: np.nan,
    "infinite": lambda: np.inf,
    "of another type": lambda: "a string",
    "nothing": lambda: None,
}


@pytest.mark.parametrize("work", FAILURES.values(), ids=FAILURES.keys())
def test_a_training_that_fails_cannot_be_told_from_one_that_changes_nothing(
    tmp_path: Path, work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SecureRandom, "uint64", lambda _, n: np.arange(n, dtype=np.uint64))
    answers = []
    for name, what in (("failing", work), ("idle", lambda: 0.0)):
        (tmp_path / name).mkdir()
        store = store_in(tmp_path / name)
        answers.append(ask(store, what))
        assert len(store.ledger.entries()) == 1
    assert same(*answers)
    assert answers[0][1] == answers[1][1]


@pytest.mark.parametrize("work", FAILURES.values(), ids=FAILURES.keys())
def test_where_zero_would_say_more_a_failure_is_charged_and_ends_the_experiment(
    tmp_path: Path, work: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    store, records = store_in(tmp_path), Sum(zero=False)
    with pytest.raises(ChargedFailureError) as error:
        ask(store, work, records)
    assert str(error.value) == (
        "charged, and there is no answer: this node answers nothing more of this experiment until "
        "its operator acts"
    )
    assert error.value.__cause__ is None
    assert len(store.ledger.entries()) == 1
    assert "answers nothing more of experiment e" in caplog.text
    ran: list[int] = []
    for question in (QUESTION, replace(QUESTION, server_round=2), replace(QUESTION, phase="x")):
        with pytest.raises(DeclinedError, match="nothing more of this experiment"):
            ask(store_in(tmp_path), lambda: ran.append(1), records, question=question)
    assert (len(store.ledger.entries()), ran) == (1, [])
    ask(store, mechanism=records, question=replace(QUESTION, experiment_id="other"))


def test_an_operator_who_removes_the_note_lets_the_node_go_on(tmp_path: Path) -> None:
    store, records = store_in(tmp_path), Sum(zero=False)
    with pytest.raises(ChargedFailureError):
        ask(store, fail(ValueError()), records)
    (note,) = (tmp_path / "a.notes").iterdir()
    note.unlink()
    ask(store, mechanism=records)
    assert len(store.ledger.entries()) == 1  # the reservation is still there


def test_of_simulated_clients_the_reason_is_told(tmp_path: Path) -> None:
    store = store_in(tmp_path, durable=False)
    with pytest.raises(ChargedFailureError, match="no answer: record 7 is 42"):
        ask(store, fail(ProtocolError("record 7 is 42")))
    assert ask(store, lambda: np.nan)[0]["sum"] == 0  # data that diverge are no mistake of a user
    assert len(store.ledger.entries()) == 1


@pytest.mark.parametrize("work", FAILURES.values(), ids=FAILURES.keys())
def test_what_promises_nothing_is_refused_after_training_and_not_charged(
    tmp_path: Path, work: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path)
    with pytest.raises(DataError) as error:
        ask(store, work, Sum(noise_multiplier=0.0))
    assert str(error.value) == (
        "the client's own code failed, or what it returned is not sent; the log of the node says "
        "how"
    )
    assert "client a does not answer: " in caplog.text
    assert list(tmp_path.iterdir()) == []


def _noted(folder: Path, barrier: Any, queue: Any) -> None:
    store = store_in(folder)
    barrier.wait(30)
    store.note("e", "train.facts", "5")
    queue.put("noted")


def test_processes_may_note_the_same_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for number in range(5):
        folder, queue, barrier = tmp_path / str(number), context.Queue(), context.Barrier(2)
        folder.mkdir()
        processes = [
            context.Process(target=_noted, args=(folder, barrier, queue)) for _ in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        assert store_in(folder).noted("e", "train.facts") == "5"


# -- Everything that can be refused is refused before data are read --------------------------------

REFUSED: dict[str, tuple[Policy, Mechanism, dict[str, Any], str]] = {
    "scheme": (Policy(schemes=["nobody"]), Sum(), {}, "schemes = "),
    "unit": (Policy(units=["record"]), Sum(), {}, "units = "),
    "noise": (Policy(min_noise_multiplier=3), Sum(), {}, "min_noise_multiplier = 3"),
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
    assert [path.name for path in tmp_path.iterdir()] == ["a.ledger.lock"]


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
        charge, time = Charge(noise_multiplier=2.0), old.strftime("%Y-%m-%dT%H:%M:%SZ")
        locked.charge(Entry(question=QUESTION, scheme="toy", unit="user", charge=charge, time=time))
    ask(store, question=replace(QUESTION, server_round=2))
    with pytest.raises(DeclinedError, match="max_releases_per_day = 1"):
        ask(store, question=replace(QUESTION, server_round=3))


def test_the_disk_that_questions_can_fill_is_bounded(tmp_path: Path) -> None:
    model, limit = {"w": np.zeros(1000)}, 40_000

    @dataclass(frozen=True)
    class Large(Sum):
        def noise(self, measured: float, plan: Plan, random: SecureRandom) -> Answer:
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


# -- Steps of a protocol ---------------------------------------------------------------------------


def taken(store: NodeStore, step: ProtocolStep, experiment: str = "e", **fields: Any) -> Answer:
    given = {"experiment-id": experiment, "round": 1, "request": 0, "summed": 0, **fields}
    return pipeline.answer_step(store, step, "toy", "deal", given, False)


def counting(lent: StepStore) -> Answer:
    """Count the steps, in what the client remembers."""
    lent.state["steps"] = lent.state.get("steps", 0) + 1
    return {}, {"steps": lent.state["steps"], "metrics": {}}


def test_a_step_remembers_what_it_did_once_it_has_answered(tmp_path: Path) -> None:
    def failing(lent: StepStore) -> Answer:
        counting(lent)
        raise ProtocolError("unfit")

    with pytest.raises(ProtocolError):
        taken(store_in(tmp_path), ProtocolStep(failing))
    for steps in (1, 2):
        assert taken(store_in(tmp_path), ProtocolStep(counting))[1]["steps"] == steps
    assert taken(store_in(tmp_path), ProtocolStep(counting), "another")[1]["steps"] == 1


@pytest.mark.parametrize(
    "policy", [{"schemes": ["nobody"]}, {"max_epsilon": 1.0}, {"units": ["user"]}]
)
def test_a_step_is_taken_only_if_the_policy_allows_it(
    policy: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(DeclinedError):
        taken(store_in(tmp_path, Policy(**policy)), ProtocolStep(counting))
    assert not list(tmp_path.iterdir())


def test_a_step_says_over_how_many_clients_its_answer_is_summed(tmp_path: Path) -> None:
    """From what the client remembers, not from what a question says; nothing of data is free."""
    store = store_in(tmp_path, Policy(min_summed=3))
    agreed = ProtocolStep(counting, lambda state: state.get("least", 0))

    def agree(lent: StepStore) -> Answer:
        lent.state["least"] = 3
        return counting(lent)

    for summed in (0, 2):
        with pytest.raises(DeclinedError):
            taken(store, ProtocolStep(counting), summed=summed)
        with pytest.raises(DeclinedError):
            taken(store, ProtocolStep(counting, lambda state, least=summed: least), summed=3)
    with pytest.raises(DeclinedError):
        taken(store, agreed, summed=3)
    assert taken(store, ProtocolStep(counting), summed=3)[1]["steps"] == 1
    assert taken(store, ProtocolStep(agree, lambda state: None))[1]["steps"] == 2
    assert taken(store, agreed)[1]["steps"] == 3


def test_what_is_for_simulations_is_declined_elsewhere(tmp_path: Path) -> None:
    step = ProtocolStep(counting, simulated_only=True)
    with pytest.raises(DeclinedError, match="the phase 'deal' is answered in simulations only"):
        taken(store_in(tmp_path), step)
    assert not list(tmp_path.iterdir())
    simulated = replace(store_in(tmp_path), simulated=True)
    assert taken(simulated, step)[1]["steps"] == 1


def test_experiments_that_a_server_makes_up_fill_no_disk(tmp_path: Path) -> None:
    store = store_in(tmp_path, Policy(max_disk=1000))
    number = 0
    while store.disk() < 1000:
        taken(store, ProtocolStep(counting), f"e{number}")
        number += 1
    with pytest.raises(DeclinedError, match="max_disk = 1000"):
        taken(store, ProtocolStep(counting), "another")
    assert taken(store, ProtocolStep(counting), "e0")[1]["steps"] == 2  # it has its files


def test_a_file_of_a_size_that_a_server_chooses_needs_room(tmp_path: Path) -> None:
    def large(lent: StepStore) -> Answer:
        lent.check_room(5000)
        return counting(lent)

    with pytest.raises(DeclinedError, match="max_disk = 4000"):
        taken(store_in(tmp_path, Policy(max_disk=4000)), ProtocolStep(large))
    taken(store_in(tmp_path, Policy(max_disk=6000)), ProtocolStep(large))


def test_an_experiment_that_a_node_has_stopped_takes_no_more_steps(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.note("e", "stopped", "now")
    with pytest.raises(DeclinedError, match="answers nothing more of this experiment"):
        taken(store, ProtocolStep(counting))
