"""One client under FedVS, asked directly: what it answers once, declines and refuses."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vertical
from vertical import EMBEDDING, ROWS, TEST_ROWS, Circle, coding_fields

from flwr_privacy.clients.vertical.columns import common_order
from flwr_privacy.errors import (
    DeclinedError,
    FlwrPrivacyError,
    InvalidParameterError,
    ProtocolError,
)
from flwr_privacy.fedvs.terms import Chunk, Evaluation
from flwr_privacy.strategies.vertical.fedvs import CODE, DEAL, DEAL_EVALUATION, EMBED_EVALUATION
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.message import TRAIN

ENROL, ORACLE = "enrol", "oracle"


@pytest.fixture
def circle(tmp_path: Path) -> Circle:
    circle = Circle(tmp_path, 4)
    circle.code()
    return circle


@pytest.fixture
def uncoded(tmp_path: Path) -> Circle:
    return Circle(tmp_path, 4)


def update(circle: Circle, number: int, share_set: str, **changes: Any) -> Any:
    """Return a dealing that moves all weights first."""
    usual = {
        "update": number,
        "trained_rows": [0, 3, 7],
        "trained_dealers": circle.names,
        "learning_rate": 2.0,
    }
    return circle.dealing(share_set, **{**usual, **changes})


def gradient(rows: int = 3, value: float = 0.5) -> dict[str, Any]:
    return {"gradient": np.full((rows, EMBEDDING), value, np.float32)}


def answers(circle: Circle, dealt: Any, share_set: str = "s1", **changes: Any) -> dict[str, bytes]:
    return {
        name: circle.evaluate(name, dealt, share_set, **changes).tobytes()
        for name in changes.get("dealers") or circle.names
    }


# -- A set of shares is used once ----------------------------------------------------------------


def test_the_answers_decode_to_the_sum(circle: Circle) -> None:
    dealt = circle.deal(circle.dealing())
    field, code = circle.terms.field, circle.terms.code
    given = {
        int(name): field.from_bytes(answer, 3 * EMBEDDING).reshape(3, EMBEDDING)
        for name, answer in answers(circle, dealt).items()
    }
    one = code.decode({place: given[place] for place in (0, 1, 2)})
    other = code.decode({place: given[place] for place in (3, 1, 0)})
    np.testing.assert_array_equal(one, other)
    assert np.abs(field.signed(one)).max() < 2**24  # not anywhere in the field


def test_shares_of_one_set_are_the_same_bytes_when_they_are_asked_for_again(
    circle: Circle,
) -> None:
    dealing = circle.dealing()
    first, again = circle.deal(dealing), circle.deal(dealing, server_round=5)
    for name, sealed in first.items():
        np.testing.assert_array_equal(sealed, again[name])


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluated_rows": [0, 3, 8]},
        {"maskers": ["0", "1"]},
        {"part": "test"},
        {"learning_rate": 0.2},
    ],
)
def test_a_set_is_dealt_for_one_purpose(circle: Circle, changes: Any) -> None:
    circle.deal(circle.dealing())
    with pytest.raises(DeclinedError, match="shares of this set were dealt before"):
        circle.deal(circle.dealing(**changes))


@pytest.mark.parametrize("server_round", [1, 2], ids=["same round", "next round"])
def test_another_set_has_other_masks_of_the_same_weights(
    circle: Circle, server_round: int, tmp_path: Path
) -> None:
    """Plain shares, those that clients keep for themselves: what is sealed always differs."""

    def plain() -> dict[str, np.ndarray]:
        return {name: state["set"]["own"] for name, state in vertical.states(tmp_path).items()}

    circle.deal(circle.dealing("s1"))
    one = plain()
    circle.deal(circle.dealing("s2"), server_round=server_round)
    for name, other in plain().items():
        # The weights are the same but for their rounding, by one step of the grid.
        moved = np.abs(circle.terms.field.signed(circle.terms.field.reduce(other - one[name])))
        assert np.mean(moved < 2**20) < 0.02  # of masks drawn anew, one in a thousand
        assert len(moved) == circle.terms.widths[int(name)] * EMBEDDING + 3 * EMBEDDING


def test_an_answer_is_the_same_bytes_when_it_is_asked_for_again(circle: Circle) -> None:
    dealt = circle.deal(circle.dealing())
    assert answers(circle, dealt) == answers(circle, dealt, server_round=3)


def test_a_set_is_evaluated_once(circle: Circle) -> None:
    """Not with other dealers, and not with other shares, which would be of another dealing."""
    dealt = circle.deal(circle.dealing())
    answers(circle, dealt)
    with pytest.raises(DeclinedError, match="a set is used once"):
        circle.evaluate("0", dealt, dealers=["0", "1", "2"])
    changed = {name: sealed[::-1].copy() for name, sealed in dealt.items()}
    with pytest.raises(DeclinedError, match="a set is used once"):
        circle.evaluate("0", changed)


def test_the_last_set_alone_is_evaluated(circle: Circle) -> None:
    old = circle.deal(circle.dealing("s1"))
    circle.deal(circle.dealing("s2"))
    with pytest.raises(ProtocolError, match="no shares of this set"):
        circle.evaluate("0", old, "s1")


def test_a_refused_evaluation_does_not_use_the_set_up(circle: Circle) -> None:
    dealt = circle.deal(circle.dealing())
    for dealers in (["0", "1"], ["1", "2", "3"]):
        with pytest.raises(FlwrPrivacyError):
            circle.evaluate("0", dealt, dealers=dealers)
    assert len(answers(circle, dealt)) == 4


# -- Whose sum -----------------------------------------------------------------------------------


def test_a_sum_over_too_few_is_declined(circle: Circle) -> None:
    dealt = circle.deal(circle.dealing())
    with pytest.raises(DeclinedError, match="a sum over 2 clients was asked for: at least 3"):
        circle.evaluate("0", dealt, dealers=["0", "1"])


@pytest.mark.parametrize(
    "dealers", [["1", "2", "3"], ["1", "0", "2"], ["0", "1", "1"], ["0", "0", "1", "2"]]
)
def test_dealers_are_distinct_in_order_and_have_the_client_among_them(
    circle: Circle, dealers: list[str]
) -> None:
    dealt = circle.deal(circle.dealing())
    with pytest.raises(ProtocolError, match="not distinct and in order, or lack this client"):
        circle.evaluate("0", dealt, dealers=dealers)


def test_a_dealer_that_is_no_member(circle: Circle) -> None:
    dealt = circle.deal(circle.dealing())
    question = Evaluation(generation="g1", share_set="s1", dealers=["0", "1", "x"])
    arrays = circle.passed_on(dealt, "0")
    with pytest.raises(ProtocolError, match="'x' is no member"):
        circle.nodes["0"].ask(TRAIN, arrays, records.write(question), round=1)


def test_the_same_rows_and_weights_are_not_summed_over_others(circle: Circle) -> None:
    """The difference of the two sums would be one client's embeddings."""
    answers(circle, circle.deal(circle.dealing("s1")), "s1")
    again = circle.deal(circle.dealing("s2", evaluated_rows=[7, 11]))
    with pytest.raises(DeclinedError, match="these rows were summed with these weights before"):
        circle.evaluate("0", again, "s2", dealers=["0", "1", "2"])
    assert len(answers(circle, again, "s2")) == 4  # over the same ones it is the same sum
    others = circle.deal(circle.dealing("s3", evaluated_rows=[12, 13]))
    assert len(answers(circle, others, "s3", dealers=["0", "1", "2"])) == 3


def test_once_the_weights_have_moved_rows_are_summed_over_others(circle: Circle) -> None:
    answers(circle, circle.deal(circle.dealing("s1")), "s1")
    moved = circle.deal(update(circle, 1, "s2"), arrays=gradient())
    assert len(answers(circle, moved, "s2", dealers=["0", "1", "2"])) == 3


@pytest.mark.parametrize(
    "nothing",
    [
        {"trained_rows": [], "trained_dealers": []},
        {"trained_dealers": ["1", "2", "3"]},
        {"learning_rate": 0.0},
    ],
    ids=["no rows", "others", "no step"],
)
def test_an_update_that_moves_nothing_does_not_hide_that_rows_were_summed(
    circle: Circle, nothing: Any
) -> None:
    answers(circle, circle.deal(circle.dealing("s1")), "s1")
    again = circle.deal(update(circle, 1, "s2", **nothing), arrays=gradient())
    with pytest.raises(DeclinedError, match="these rows were summed with these weights before"):
        circle.evaluate("0", again, "s2", dealers=["0", "1", "2"])


def test_masks_come_from_more_clients_than_may_collude(circle: Circle) -> None:
    for maskers in ([], ["2"], ["2", "2"], ["2", "x"]):
        with pytest.raises(DeclinedError, match="with T = 1 it takes 2"):
            circle.deal(circle.dealing(f"s{len(maskers)}{maskers}", maskers=maskers))
    dealt = circle.deal(circle.dealing("s9", maskers=["2", "3"]))
    with pytest.raises(DeclinedError, match=r"1 clients add zero masks: with T = 1 it takes 2"):
        circle.evaluate("0", dealt, "s9", dealers=["0", "1", "2"])
    assert len(answers(circle, dealt, "s9")) == 4


def test_without_zero_masks_nobody_adds_any(tmp_path: Path) -> None:
    circle = Circle(tmp_path, 4, zero_mask=False, paper=True)
    circle.code()
    with pytest.raises(InvalidParameterError, match="maskers"):
        circle.deal(circle.dealing("s1", maskers=["0", "1"]))
    with pytest.raises(InvalidParameterError, match=r"K . T. b"):
        circle.deal(circle.dealing("s2", evaluated_rows=list(range(24))))
    assert len(answers(circle, circle.deal(circle.dealing("s3")), "s3")) == 4


# -- Which rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"evaluated_rows": []}, "not distinct, or there are none"),
        ({"evaluated_rows": [1, 2, 1]}, "not distinct, or there are none"),
        ({"evaluated_rows": [ROWS]}, "coded rows from 0 to 40"),
        ({"evaluated_rows": [-1]}, "coded rows from 0 to 40"),
        ({"part": "test", "evaluated_rows": [TEST_ROWS]}, "coded rows from 0 to 12"),
        ({"part": "more"}, "there is no part 'more'"),
    ],
)
def test_rows_that_are_none(circle: Circle, changes: Any, text: str) -> None:
    with pytest.raises(FlwrPrivacyError, match=text):
        circle.deal(circle.dealing(**changes))


def test_shares_of_another_coding_are_lost(circle: Circle) -> None:
    """The client says so, and neither answers nor fails."""
    fields = records.write(circle.dealing(generation="g0"))
    arrays, own = circle.nodes["0"].ask(DEAL, None, fields, round=1)
    assert arrays == {}
    assert own["lost"] is True


# -- The gradient --------------------------------------------------------------------------------


def test_weights_move_by_the_gradient_once(circle: Circle, tmp_path: Path) -> None:
    """dW = X^T G / N, of the rounded powers; a question that is asked again moves nothing."""
    circle.deal(circle.dealing("s1"))
    before = vertical.weights(tmp_path)
    for _ in range(2):
        circle.deal(update(circle, 1, "s2"), arrays=gradient())
    circle.deal(update(circle, 1, "s3"), arrays=gradient())
    after = vertical.weights(tmp_path)
    place = common_order(ROWS, "e", "train")
    for i, name in enumerate(circle.names):
        columns = vertical.digits(4)[0][i][place][[0, 3, 7]]
        powers = np.concatenate([columns, columns**2], axis=1)
        rounded = np.floor(powers * 256 + 0.5) / 256
        step = rounded.T @ np.full((3, EMBEDDING), 0.5) / 4
        np.testing.assert_allclose(after[name], before[name] - 2.0 * step, atol=1e-12)
        assert np.abs(step).max() > 0.01


def test_who_was_not_in_the_sum_leaves_its_gradient_out(circle: Circle, tmp_path: Path) -> None:
    before = vertical.weights(tmp_path)
    dealing = update(circle, 1, "s1", trained_dealers=["0", "1", "3"])
    circle.deal(dealing, arrays=gradient())
    after = vertical.weights(tmp_path)
    np.testing.assert_array_equal(before["2"], after["2"])
    assert np.abs(before["1"] - after["1"]).max() > 0.01


def test_a_server_goes_back_one_gradient_where_it_was_killed_and_no_further(
    circle: Circle, tmp_path: Path
) -> None:
    """Its checkpoint is of the round before; within a run it never goes back."""
    first = vertical.weights(tmp_path)
    circle.deal(update(circle, 1, "s1"), arrays=gradient())
    second = vertical.weights(tmp_path)
    circle.deal(update(circle, 2, "s2"), arrays=gradient())
    with pytest.raises(ProtocolError, match="a request of gradient 1, and the client has 2"):
        circle.deal(update(circle, 1, "s3"), arrays=gradient())
    for old in (0, 0, 1):
        changes = {"session": "r2"} if old == 0 else {}
        with pytest.raises(ProtocolError, match=f"a request of gradient {old}, and the client"):
            circle.deal(update(circle, old, "s4", **changes), arrays=gradient())
    circle.deal(update(circle, 1, "s5", session="r2"), arrays=gradient())
    for name, weights in vertical.weights(tmp_path).items():
        np.testing.assert_array_equal(weights, second[name])
        assert np.abs(weights - first[name]).max() > 0.01
    circle.deal(update(circle, 2, "s6", session="r2"), arrays=gradient(value=-0.5))
    for name, weights in vertical.weights(tmp_path).items():
        np.testing.assert_allclose(weights, first[name], atol=1e-12)


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        gradient(2),
        {"gradient": np.zeros((3, EMBEDDING))},
        gradient(3, np.nan),
        gradient(3, np.inf),
        {"other": np.zeros((3, EMBEDDING), np.float32)},
    ],
    ids=["none", "shape", "dtype", "nan", "infinity", "name"],
)
def test_a_gradient_that_is_none_moves_nothing(circle: Circle, arrays: Any, tmp_path: Path) -> None:
    before = vertical.weights(tmp_path)
    with pytest.raises(ProtocolError, match="the array 'gradient' is no finite float32 of 3 x 4"):
        circle.deal(update(circle, 1, "s1"), arrays=arrays)
    for name, weights in vertical.weights(tmp_path).items():
        np.testing.assert_array_equal(weights, before[name])
    circle.deal(update(circle, 1, "s1"), arrays=gradient())  # the right one is taken


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 1e300])
def test_a_step_that_is_none_leaves_the_weights_within_their_bounds(
    circle: Circle, rate: float, tmp_path: Path
) -> None:
    with np.errstate(all="ignore"), contextlib.suppress(FlwrPrivacyError):
        circle.deal(update(circle, 1, "s1", learning_rate=rate), arrays=gradient())
    for weights in vertical.weights(tmp_path).values():
        assert np.abs(weights).max() <= 2.0


def test_weights_stay_within_their_bounds(circle: Circle, tmp_path: Path) -> None:
    circle.deal(update(circle, 1, "s1", learning_rate=1e6), arrays=gradient())
    for weights in vertical.weights(tmp_path).values():
        assert np.abs(weights).max() == 2.0


# -- The coding ----------------------------------------------------------------------------------


def coding(circle: Circle, name: str, chunk: Chunk, arrays: Any = None, **changes: Any) -> Any:
    fields = coding_fields(replace(circle.terms, **changes), chunk)
    return circle.nodes[name].ask(CODE, arrays, fields)


FIRST = Chunk(part="train", first=0, count=10)


@pytest.mark.parametrize(
    ("chunk", "text"),
    [
        (Chunk(part="train", first=5, count=5), "do not follow the 0 of 41"),
        (Chunk(part="train", first=0, count=ROWS + 1), "do not follow"),
        (Chunk(part="train", first=0, count=-1), "do not follow"),
        (Chunk(part="test", first=1, count=1), "do not follow the 0 of 13"),
        (Chunk(part="more", first=0, count=1), "there is no part 'more'"),
        (Chunk(part="train", first=0, count=0), "coded rows are missing"),
    ],
)
def test_rows_are_coded_one_after_the_other(uncoded: Circle, chunk: Chunk, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        coding(uncoded, "0", chunk)


def test_rows_are_not_dealt_twice(uncoded: Circle) -> None:
    """A second dealing of the same rows would have other masks."""
    dealt = {name: coding(uncoded, name, FIRST)[0]["sealed"] for name in uncoded.names}
    with pytest.raises(ProtocolError, match="the shares of the rows that were dealt last are miss"):
        coding(uncoded, "0", FIRST)
    passed = uncoded.passed_on(dealt, "0")
    with pytest.raises(ProtocolError, match="coded rows 0 to 10 of 'train' do not follow the 10"):
        coding(uncoded, "0", FIRST, passed)
    coding(uncoded, "0", Chunk(part="train", first=10, count=31), passed)


def test_shares_of_rows_that_were_not_dealt(circle: Circle) -> None:
    arrays = {"sealed": np.zeros(100, np.uint8)}
    with pytest.raises(ProtocolError, match="were not dealt, or were stored before"):
        coding(circle, "0", Chunk(part="train", first=0, count=0), arrays)


def test_terms_do_not_change_within_a_coding(circle: Circle) -> None:
    with pytest.raises(ProtocolError, match="not those with which this coding began"):
        coding(circle, "0", Chunk(part="train", first=0, count=0), w_max=1.5)


def test_no_weights_are_dealt_before_the_coding_is_complete(uncoded: Circle) -> None:
    coding(uncoded, "0", FIRST)
    arrays, own = uncoded.nodes["0"].ask(DEAL, None, records.write(uncoded.dealing()), round=1)
    assert (arrays, own["lost"]) == ({}, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": [6, 7, 6, 6]},
        {"columns": [6, 1, 6, 6]},
        {"rows": [ROWS + 1, TEST_ROWS]},
        {"parts": ["train", "more"]},
    ],
)
def test_terms_on_other_data_than_the_clients_are_refused(uncoded: Circle, changes: Any) -> None:
    length = changes.get("rows", [ROWS])[0]
    part = changes.get("parts", ["train"])[-1]
    count = length if part == "train" else TEST_ROWS
    with pytest.raises(FlwrPrivacyError):
        coding(uncoded, "1", Chunk(part=part, first=0, count=count), **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"members": ["0", "1", "2", "2"]}, "two members have one name or one key"),
        ({"members": ["4", "1", "2", "3"]}, "'0' is no member"),
        ({"members": ["0", "1", "2"]}, "different lengths"),
        ({"parts": ["test", "test"]}, "not distinct, or lack 'train'"),
        ({"least": 1}, "least = 1"),
        ({"least": 5}, "least = 5"),
        ({"partitions": 2}, "N = 4"),
        ({"privacy": 0}, "T = 0"),
        ({"prime": 2**31 - 3}, "expected a prime"),
        ({"data_bits": 20}, "data_bits, weight_bits"),
        ({"x_max": float("nan")}, "x_max"),
        ({"w_max": float("inf")}, "w_max"),
        ({"zero_mask": False, "paper": True, "project": False}, "paper=True"),
        ({"orders": [2, 2, 2, 65]}, "order = 65"),
        ({"embedding": 0}, "embedding = 0"),
    ],
)
def test_terms_that_do_not_hold_together(uncoded: Circle, changes: Any, text: str) -> None:
    with pytest.raises(FlwrPrivacyError, match=text):
        coding(uncoded, "0", FIRST, **changes)


def test_weights_without_bounds_are_the_papers_version(uncoded: Circle) -> None:
    """A server cannot have them by another name."""
    with pytest.raises(FlwrPrivacyError):
        coding(uncoded, "0", FIRST, project=False)


# -- What else it is asked -----------------------------------------------------------------------


def test_plain_embeddings_do_not_leave(circle: Circle) -> None:
    chunk = records.write(Chunk(part="test", first=0, count=2))
    with pytest.raises(DeclinedError, match="the phase 'oracle' is answered in simulations only"):
        circle.nodes["0"].ask(ORACLE, None, chunk)


def test_a_message_does_not_set_what_is_the_nodes(circle: Circle) -> None:
    with pytest.raises(InvalidParameterError, match="no keys of the node's own configuration"):
        circle.nodes["0"].ask(ENROL, None, {"generation": "g1", "privacy-simulated": True})


def test_an_enrolment_says_sizes_and_a_key_and_nothing_else(uncoded: Circle) -> None:
    coding = {"generation": "g1"}
    arrays, own = uncoded.nodes["3"].ask(ENROL, None, coding)
    assert arrays == {}
    assert set(own) == {"metrics", "columns", "parts", "rows", "ids", "key", "signature"}
    assert (own["columns"], own["parts"], own["rows"]) == (6, ["train", "test"], [41, 13])
    assert (own["ids"], own["signature"], len(own["key"])) == ([b"", b""], b"", 32)
    assert uncoded.nodes["3"].ask(ENROL, None, coding)[1]["key"] == own["key"]


def test_another_experiment_or_coding_has_another_key(uncoded: Circle) -> None:
    node = uncoded.nodes["0"]
    keys = {
        node.ask(ENROL, None, {"generation": generation}, **{"experiment-id": name})[1]["key"]
        for generation in ("g1", "g2")
        for name in ("e", "f")
    }
    assert len(keys) == 4


@pytest.mark.parametrize(
    "phase", [ENROL, CODE, DEAL, TRAIN, DEAL_EVALUATION, EMBED_EVALUATION, ORACLE]
)
def test_a_question_without_its_fields_is_refused(circle: Circle, phase: str) -> None:
    with pytest.raises(FlwrPrivacyError):
        circle.nodes["0"].ask(phase)


def test_an_answer_needs_shares(circle: Circle) -> None:
    circle.deal(circle.dealing())
    question = Evaluation(generation="g1", share_set="s1", dealers=circle.names)
    with pytest.raises(ProtocolError, match="a request for coded embeddings without shares"):
        circle.nodes["0"].ask(TRAIN, None, records.write(question), round=1)
