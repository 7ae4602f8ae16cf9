"""The pipeline under kills after each step that writes, and in several processes."""

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from summing_node import QUESTION, Sum, ask, fail, same, store_in

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import DeclinedError
from flwr_privacy.pipeline import charging
from flwr_privacy.pipeline.mechanism import Answer
from flwr_privacy.pipeline.reply_cache import ReplyCache
from flwr_privacy.privacy.ledger import Ledger, Question

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
    assert same(answer, charging._read(kept[0]))
    assert len(store.ledger.entries()) == 1


def test_the_charge_is_durable_before_the_users_code_runs(tmp_path: Path) -> None:
    def work() -> float:
        (entry,) = Ledger(tmp_path / "a.ledger", data_set="a").entries()  # from the disk
        assert entry.charge == Charge(neighbours="replace_one", noise_multiplier=2.0)
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
