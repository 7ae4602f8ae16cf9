"""A device of M2FDP, asked directly: what it sends, and what it charges for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from tier_device import GRID, NONE, OPEN, START, Fields, Node, simulated, terms, vector

from flwr_privacy.accounting import Charge
from flwr_privacy.clients import M2FDPClient
from flwr_privacy.clients.node.base import Trained
from flwr_privacy.clients.node.rehearsal import rehearse
from flwr_privacy.errors import (
    ChargedFailureError,
    DeclinedError,
    InvalidParameterError,
    ProtocolError,
)
from flwr_privacy.m2fdp import SCHEME, TierSums
from flwr_privacy.m2fdp.zone_average import GAP
from flwr_privacy.wire.message import METRICS

# -- What it sends -------------------------------------------------------------------------------


def test_a_device_sends_codes_of_its_clipped_update_and_nothing_of_its_data(tmp_path: Path) -> None:
    arrays, own = simulated(tmp_path).ask(terms(**OPEN))
    assert {name: (a.shape, a.dtype) for name, a in arrays.items()} == {
        "w": ((2, 3), np.int32),
        "b": ((2,), np.int32),
    }
    expected = np.full(8, 0.5 / np.sqrt(8))
    np.testing.assert_allclose(vector(arrays), expected, atol=GRID.step)
    assert np.linalg.norm(vector(arrays)) <= 0.5
    assert own == {METRICS: {"num-examples": 1}}  # as for everybody; and no loss


def test_its_noise_is_that_of_the_charge(tmp_path: Path) -> None:
    """50 answers of 8 entries: the deviation is z 2 C within 5 standard errors (a sixth)."""
    node = Node(tmp_path)
    answers = [vector(node.ask(terms(epsilon=1e5), round=r)[0]) for r in range(1, 51)]
    noise = np.array(answers) - 0.5 / np.sqrt(8)
    assert noise.std() == pytest.approx(0.5 * 2 * 0.5, rel=5 / np.sqrt(2 * noise.size))
    charge = Charge(neighbours="replace_one", noise_multiplier=0.5, gap=GAP)
    assert {entry.charge for entry in node.entries()} == {charge}
    assert {(entry.scheme, entry.unit) for entry in node.entries()} == {(SCHEME, "user")}


def test_without_noise_nothing_is_charged(tmp_path: Path) -> None:
    node = simulated(tmp_path)
    arrays, _ = node.ask(terms(**NONE, clipping_norm=0.0, grid=-20))
    assert (arrays["w"] == 7 * 2**20).all()
    assert node.entries() == []


@pytest.mark.parametrize("keep_back", [["b"], []])
def test_arrays_that_are_kept_back_are_not_sent(keep_back: list[str], tmp_path: Path) -> None:
    arrays, _ = Node(tmp_path).ask(terms(keep_back=keep_back))
    assert sorted(arrays) == (["w"] if keep_back else ["b", "w"])


def test_a_node_that_plays_many_adds_their_codes_up_by_groups() -> None:
    client = M2FDPClient(None, Context(1, 1, {"partition-id": 0}, RecordDict(), {}))
    mean = client.accumulator("train", START, {"groups": {"0": "left"}, "keep-back": ["b"]})
    assert isinstance(mean, TierSums)
    assert sorted(mean.template) == ["w"]
    with pytest.raises(ProtocolError, match="'keep-back' is no list of names"):
        client.accumulator("train", START, {"groups": {}, "keep-back": "b"})


# -- Once ----------------------------------------------------------------------------------------


def test_the_same_question_gets_the_same_bytes_and_costs_once(tmp_path: Path) -> None:
    node = Node(tmp_path)
    one, other = node.ask()[0], node.ask()[0]
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])
    assert (len(node.entries()), node.trainings) == (1, 1)


def test_the_same_question_with_other_terms_is_another_charge(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.ask()
    changes = ({"clipping_norm": 0.25}, {"keep_back": ["b"]})
    for change in changes:
        node.ask(terms(epsilon=100.0, **change))
    assert len(node.entries()) == 1 + len(changes)


def test_a_lost_answer_is_given_and_paid_for_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    first = node.ask()[0]
    for kept in tmp_path.glob("a.replies/*.reply"):
        kept.unlink()
    assert (vector(node.ask()[0]) != vector(first)).any()
    assert len(node.entries()) == 2


def test_an_answer_in_the_open_is_paid_for_once_per_period(tmp_path: Path) -> None:
    """Clean events: two exchanges of one period, then one of the next."""
    node = simulated(tmp_path)
    for event, period in ((0, 0), (1, 0), (2, 2)):
        node.ask(terms(**OPEN, event=event, period=period), request=event)
    assert node.trainings == 3
    assert [entry.question.request for entry in node.entries()] == [0, 2]
    with pytest.raises(DeclinedError, match="the same period was asked about with other noise"):
        node.ask(terms(**OPEN, event=3, period=2, noise_multiplier=0.25), request=3)
    assert len(node.entries()) == 2


def test_an_answer_in_the_open_and_a_noised_one_are_two_releases(tmp_path: Path) -> None:
    node = simulated(tmp_path)
    node.ask(terms(**OPEN))
    node.ask(terms())
    assert len(node.entries()) == 2


@pytest.mark.parametrize("asked", [{}, OPEN], ids=["noised", "in the open"])
def test_a_budget_that_is_spent_ends_it_before_the_training(asked: Fields, tmp_path: Path) -> None:
    node = simulated(tmp_path)
    node.ask(terms(**asked, epsilon=12.0), round=1)
    done = node.trainings
    with pytest.raises(DeclinedError, match=r"the budget is spent: epsilon .* of 12 after 1 rel"):
        node.ask(terms(**asked, epsilon=12.0), round=2)
    assert (len(node.entries()), node.trainings) == (1, done)


def test_an_experiment_protects_one_unit(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.ask()
    other = {"unit": "record", "sampling": 0.36, "sampling_rate": 0.2}
    with pytest.raises(ProtocolError, match="unit 'record': this experiment had another one"):
        node.ask(terms(**other), round=2)


@pytest.mark.parametrize("asked", [{}, OPEN], ids=["noised", "in the open"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_update_that_is_not_finite_cannot_be_told_from_none(
    asked: Fields, value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent = []
    for name, w in (("one", np.full((2, 3), value)), ("other", START["w"])):
        (tmp_path / name).mkdir()
        node = Node(tmp_path / name, **{"privacy-simulated": True, "insecure-seed": 3})

        def train(start: Any, w: Any = w) -> Trained:
            return Trained({**START, "w": w}, {"num-examples": 1})

        sent.append(vector(node.ask(terms(**asked), train=train)[0]))
        assert len(node.entries()) == 1
    np.testing.assert_array_equal(*sent)
    assert "the update of 'w' has NaN or infinity" in caplog.text  # in the log of the node


@pytest.mark.parametrize("asked", [{}, OPEN], ids=["noised", "in the open"])
def test_a_training_that_fails_is_paid_for_and_told_of_simulated_clients(
    asked: Fields, tmp_path: Path
) -> None:
    node = simulated(tmp_path)

    def train(start: Any) -> Trained:
        raise RuntimeError("no data")

    with pytest.raises(ChargedFailureError, match="there is no answer: RuntimeError"):
        node.ask(terms(**asked), train=train)
    assert len(node.entries()) == 1


@pytest.mark.parametrize("unit", ["user", "record"])
def test_a_training_that_fails_tells_a_server_nothing_that_is_not_paid_for(
    unit: str, tmp_path: Path
) -> None:
    node = Node(tmp_path)

    def train(start: Any) -> Trained:
        # In a rehearsal it gets no further than a trainer would.
        rehearse("train", np.zeros((3, 2)), np.zeros(3), work=lambda generated: None)
        raise RuntimeError("no data")

    if unit == "user":
        node.ask(train=train)
    else:  # nobody knows which records were in the steps of a training that failed
        asked = terms(unit="record", sampling_rate=0.1, steps=2, sampling=0.19)
        with pytest.raises(ChargedFailureError, match="until its operator acts"):
            node.ask(asked, train=train)
        with pytest.raises(DeclinedError, match="nothing more of this experiment"):
            node.ask(asked, round=2)
    assert len(node.entries()) == 1


def test_settings_that_do_not_fit_are_told_before_anything_is_paid(tmp_path: Path) -> None:
    node, misfit = Node(tmp_path), InvalidParameterError("steps", 3, "2, as the scheme asks")

    def train(start: Any) -> Trained:
        def work(generated: Any) -> None:
            raise misfit

        rehearse("train", np.zeros((3, 2)), np.zeros(3), work=work)
        raise misfit  # as the trainer would on the records

    with pytest.raises(InvalidParameterError, match="2, as the scheme asks"):
        node.ask(terms(unit="record", sampling_rate=0.1, steps=2, sampling=0.19), train=train)
    assert node.entries() == []
