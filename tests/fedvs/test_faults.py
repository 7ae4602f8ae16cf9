"""Every kind of fault in every phase: the exact result, a skipped round, or a clear error."""

from typing import Any

import numpy as np
import pytest
import vertical
from apps import model_of, same
from vertical import EMBEDDING, Wire, arrays_in, replace_array

from flwr_privacy.errors import ProtocolError
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.simulations.engines.inline.faults import KINDS
from flwr_privacy.strategies.vertical.fedvs import CODE, DEAL, DEAL_EVALUATION, EMBED_EVALUATION
from flwr_privacy.wire.message import TRAIN

ENROL = "enrol"
HARMLESS = {"delay", "reorder", "duplicate"}
DAMAGE = {"corrupt", "nan", "infinity", "reshape"}
ROUNDS = 3
RUN = {"num_rounds": ROUNDS, "experiment_id": "e", "deadline": 1.0, "evaluation": "none"}


@pytest.fixture(scope="module")
def clean() -> Any:
    return vertical.train(num_rounds=ROUNDS, experiment_id="e")


def hit(kind: str, phase: str, server_round: int, **changes: Any) -> Any:
    fault = Fault(kind=kind, client="2", phase=phase, server_round=server_round, seconds=0.05)
    return vertical.train(faults=[fault], **{**RUN, **changes})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", [ENROL, CODE])
def test_a_setup_is_exact_or_fails_with_the_name_of_who_is_missing(
    phase: str, kind: str, clean: Any
) -> None:
    harmless = HARMLESS | (DAMAGE if phase == ENROL else set())  # an enrolment has no arrays
    if kind in harmless:
        assert same(clean.arrays, hit(kind, phase, 0).arrays)
        return
    text = {
        ENROL: r"clients \['2'\] did not say what data they have",
        CODE: r"the data could not be coded: clients \['2'\]",
    }
    with pytest.raises(ProtocolError, match=text[phase]):
        hit(kind, phase, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_do_not_come_are_left_out_and_that_is_counted(kind: str, clean: Any) -> None:
    """Where that is allowed: the sum is over the other three."""
    result = hit(kind, DEAL, 2, least_dealers=3)
    numbers = [line["scheme"]["dealers"] for line in result.history[1:]]
    if kind in HARMLESS:
        assert numbers == [4, 4, 4]
        assert same(clean.arrays, result.arrays)
        return
    assert numbers == [4, 3, 4]
    assert not same_model(clean, result)
    assert all(np.isfinite(array).all() for array in model_of(result.arrays).values())
    if kind not in ("drop", "crash"):
        assert result.history[2]["scheme"]["refused_shares"] == 1


@pytest.mark.parametrize("kind", ["drop", "stale", "reshape"])
def test_without_everybodys_weights_the_round_is_skipped(kind: str) -> None:
    """And the gradient of the round before is kept for the next one."""
    result = hit(kind, DEAL, 2)
    assert [line["skipped"] for line in result.history[1:]] == [False, True, False]
    assert result.history[3]["scheme"]["dealers"] == 4


@pytest.mark.parametrize(
    ("kind", "spare"), [*((kind, 1) for kind in KINDS), ("drop", 0), ("nan", 0), ("delay", 0)]
)
def test_an_answer_that_does_not_come_changes_no_bit(spare: int, kind: str, clean: Any) -> None:
    result = hit(kind, TRAIN, 2, spare=spare)
    assert same(clean.arrays, result.arrays)
    line = result.history[2]
    assert line["accumulated"] == (4 if kind in HARMLESS and spare else 3)
    if kind in DAMAGE and spare:
        assert sum(line["refused"].values()) == 1


@pytest.mark.parametrize("kind", ["crash", "stranger", "nan"])
def test_without_enough_answers_the_round_is_skipped_and_the_next_one_works(kind: str) -> None:
    faults = [
        Fault(kind=kind, client=client, server_round=2, seconds=0.05) for client in ("1", "2")
    ]
    result = vertical.train(faults=faults, **RUN)
    assert [line["skipped"] for line in result.history[1:]] == [False, True, False]
    assert result.history[3]["scheme"]["answers"] == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", [DEAL_EVALUATION, EMBED_EVALUATION])
def test_an_evaluation_is_of_the_whole_model_or_is_left_out(
    phase: str, kind: str, clean: Any, caplog: pytest.LogCaptureFixture
) -> None:
    result = hit(kind, phase, ROUNDS, evaluation="secure")
    assert same(clean.arrays, result.arrays)
    if kind in HARMLESS or phase == EMBED_EVALUATION:
        assert result.history[ROUNDS]["server"] == clean.history[ROUNDS]["server"]
        return
    assert result.history[ROUNDS]["server"] == {}
    assert f"round {ROUNDS} is not evaluated" in caplog.text
    assert "missing: 2" in caplog.text


def same_model(one: Any, other: Any) -> bool:
    mine, theirs = model_of(one.arrays), model_of(other.arrays)
    return all(np.array_equal(mine[name], theirs[name]) for name in mine)


# -- Answers that are wrong ---------------------------------------------------------------------


def tamper(server_round: int, client: str = "1", place: int = 0) -> Wire:
    """Change one element of one client's answer to another element."""

    def change(reply: Any) -> Any:
        if wire.of([reply], TRAIN, server_round) and wire.name(reply) == client:
            answer = arrays_in(reply)["answer"]
            answer[place] ^= 1
            replace_array(reply, "answer", answer)
        return reply

    wire = Wire(change)
    return wire


def test_with_a_spare_answer_a_wrong_one_refuses_the_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = vertical.train(before=tamper(2), spare=1, **RUN)
    assert [line["skipped"] for line in result.history[1:]] == [False, True, False]
    text = "the answers contradict each other, one of ['0', '1', '2', '3'] is wrong"
    assert f"round 2: {text}" in caplog.text
    assert result.history[2]["refused"] == {"malformed": 1}


def test_without_a_spare_answer_a_wrong_one_is_not_noticed() -> None:
    """As the promise says: one bit moves the decoded sum anywhere in the field."""
    fine = {**RUN, "data_bits": 11, "weight_bits": 12}  # so that the loss stays finite
    result = vertical.train(before=tamper(2, "0", 3), **fine)
    assert not any(line["skipped"] for line in result.history[1:])
    assert not same_model(vertical.train(**fine), result)


def test_a_wrong_answer_among_more_spare_ones_is_found_whoever_gives_it() -> None:
    for client in "03":
        result = vertical.train(6, before=tamper(1, client), spare=3, **{**RUN, "num_rounds": 1})
        assert result.history[1]["skipped"], client


@pytest.mark.parametrize("value", [2**31 - 1, 2**32 - 1], ids=["p", "all ones"])
def test_an_answer_outside_the_field_is_refused(value: int, clean: Any) -> None:
    def change(reply: Any) -> Any:
        if wire.of([reply], TRAIN, 2) and wire.name(reply) == "1":
            answer = arrays_in(reply)["answer"]
            answer[:4] = np.frombuffer(np.uint32(value).astype("<u4").tobytes(), np.uint8)
            replace_array(reply, "answer", answer)
        return reply

    wire = Wire(change)
    result = vertical.train(before=wire, **RUN)
    assert sum(result.history[2]["refused"].values()) == 1
    assert same(clean.arrays, result.arrays)


# -- A server that passes on what it should not --------------------------------------------------


def relay(phase: str, server_round: int, change: Any) -> Wire:
    """Change the sealed shares on their way to client 1."""

    def ask(message: Any) -> None:
        if wire.of([message], phase, server_round) and wire.name(message) == "1":
            arrays = arrays_in(message)
            if "sealed" in arrays:
                replace_array(message, "sealed", change(arrays["sealed"].copy()))

    wire = Wire(ask=ask)
    return wire


def flip(sealed: Any) -> Any:
    sealed[30] ^= 4
    return sealed


def test_a_share_that_was_changed_on_its_way_is_refused_and_the_sum_is_exact(
    clean: Any, caplog: pytest.LogCaptureFixture
) -> None:
    result = vertical.train(before=relay(TRAIN, 2, flip), spare=1, **RUN)
    assert f"round 2, phase '{DEAL}': the share of client 0 cannot be used: damaged" in caplog.text
    assert result.history[2]["refused"] == {"error": 1}
    assert same(clean.arrays, result.arrays)


def test_a_share_of_the_data_that_was_changed_ends_the_setup() -> None:
    with pytest.raises(ProtocolError, match=f"phase '{CODE}': the share of client 0 cannot be us"):
        vertical.train(before=relay(CODE, 0, flip), **RUN)


def test_a_share_set_that_was_kept_back_is_of_no_use(
    clean: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The shares of round 1, handed on again in round 2."""
    kept: list[Any] = []

    def ask(message: Any) -> None:
        if wire.of([message], TRAIN) and wire.name(message) == "1":
            sealed = arrays_in(message)["sealed"]
            if not kept:
                kept.append(sealed)
            elif len(kept[0]) == len(sealed) and wire.of([message], TRAIN, 3):
                replace_array(message, "sealed", kept[0])

    wire = Wire(ask=ask)
    result = vertical.train(before=wire, spare=1, **RUN)
    assert result.history[3]["refused"] == {"error": 1}
    assert "round 3, phase 'weights': the share of client" in caplog.text
    assert same(clean.arrays, result.arrays)


def test_a_gradient_of_another_form_is_refused() -> None:
    """The weights stay; the round has too few shares then."""

    def ask(message: Any) -> None:
        if wire.of([message], DEAL, 2):
            replace_array(message, "gradient", np.zeros((1, EMBEDDING), np.float32))

    wire = Wire(ask=ask)
    result = vertical.train(before=wire, **RUN)
    assert [line["skipped"] for line in result.history[1:]] == [False, True, False]
