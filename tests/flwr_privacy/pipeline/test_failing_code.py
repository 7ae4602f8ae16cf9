"""What a server learns from the pipeline where the user's code fails."""

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from summing_node import QUESTION, Sum, ask, fail, same, store_in

from flwr_privacy.errors import ChargedFailureError, DataError, DeclinedError, ProtocolError
from flwr_privacy.privacy.randomness import SecureRandom

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
