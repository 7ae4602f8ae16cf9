"""What the pipeline charges for a question, and which bytes it gives again."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from summing_node import MODEL, QUESTION, Sum, ask, fail, same, store_in

from flwr_privacy.errors import ChargedFailureError, DeclinedError
from flwr_privacy.pipeline.answer import answer
from flwr_privacy.pipeline.mechanism import Answer, Release
from flwr_privacy.pipeline.reply_cache import ReplyCache
from flwr_privacy.pipeline.request import Request
from flwr_privacy.privacy.ledger import Question


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


@pytest.mark.parametrize("given", [{}, SETUP], ids=["round", "experiment"])
@pytest.mark.parametrize("noise", [2.0, 0.0])
def test_whatever_an_answer_costs_it_leaves_sealed_if_it_is_to_be(
    tmp_path: Path, noise: float, given: dict[str, Any]
) -> None:
    store = store_in(tmp_path)
    own = {"summed": 0, "honest": 0, "certain": 0, "code-limit": 0}
    request = Request("toy", QUESTION, MODEL, own)
    release = Release(mechanism=Sum(noise_multiplier=noise), work=lambda _, __: 0.5, **given)
    for _ in range(2):  # the second time from the cache, if it is kept
        said = answer(
            store, request, release, seal=lambda made: ({}, {"sealed": len(made[0])}), sealed=True
        )
        assert said == ({}, {"sealed": 2})


@pytest.mark.parametrize("parties", [0, 2])
@pytest.mark.parametrize("noise", [2.0, 0.0])
def test_two_processes_at_once_give_one_answer_for_an_experiment(
    tmp_path: Path, noise: float, parties: int
) -> None:
    store, mechanism = store_in(tmp_path), Sum(parties=parties, noise_multiplier=noise)
    sent, refused = list[Answer](), list[str]()

    def ask_once(work: Callable[[], Any], **fields: Any) -> None:
        try:
            sent.append(ask(store, work, mechanism, given=SETUP, summed=parties, **fields))
        except DeclinedError as error:
            refused.append(str(error))

    def slow(**fields: Any) -> float:
        """Meanwhile another process answers, the same question or one with other terms."""
        ask_once(lambda: 0.25, **fields)
        return 0.5

    ask_once(slow)
    assert sent
    assert all(same(sent[0], one) for one in sent)
    assert len(sent) == 1 or not parties
    if not noise:
        sent.clear()
        store = replace(store, setups=ReplyCache(tmp_path / "other"))
        ask_once(lambda: slow(rate=0.5))
        assert len(sent) == 1
    assert all("answered before" in text for text in refused)
