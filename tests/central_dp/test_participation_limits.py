"""A client takes part in correlated noise as seldom as it was told first, whatever comes later."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import MODEL
from asked_terms import central_terms
from flwr.app import Context, RecordDict

from flwr_privacy.clients import CentralDPClient, Trained
from flwr_privacy.errors import DeclinedError, LedgerError
from flwr_privacy.wire.fields import write

LIMITED = {"factor": "f" * 32, "rounds": 20, "separation": 4, "participations": 3}


class Node:
    """A deployed node whose operator allows answers without noise, asked in one process each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.trained = folder, 0
        policy = folder / "policy.toml"
        policy.write_text('allow_unprotected = ["central-dp"]\n')
        self.config = {
            "client-id": "ward-7",
            "privacy-state": str(folder),
            "privacy-policy": str(policy),
        }

    def ask(self, server_round: int, *, far: float = 1.0, **changed: Any) -> Any:
        def train(start: Any) -> Trained:
            self.trained += 1
            return Trained({n: a + (far if a.ndim else 1) for n, a in start.items()}, {})

        terms = central_terms(noise="server", parties=1, count_share=0.0, **{**LIMITED, **changed})
        context = Context(
            run_id=1, node_id=1, node_config=self.config, state=RecordDict(), run_config={}
        )
        question = {"experiment-id": "e", "round": server_round, "request": 0, "summed": 0}
        question |= {"honest": 0, "certain": 1.0, "code-limit": 2**31 - 1}
        fields = {**write(terms), **question}
        return CentralDPClient(None, context).handle("train", MODEL, fields, train)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_rounds_that_are_far_enough_apart_are_answered_until_there_are_enough(node: Node) -> None:
    for server_round in (1, 5, 9):
        node.ask(server_round)
    with pytest.raises(DeclinedError, match="took part in 3 rounds, all that"):
        node.ask(13)
    assert node.trained == 3


@pytest.mark.parametrize("server_round", [2, 4, 1, 0])
def test_a_round_that_is_too_early_or_past_is_declined_before_training(
    node: Node, server_round: int
) -> None:
    node.ask(1)
    with pytest.raises(DeclinedError, match="too early: the client took part in round 1"):
        node.ask(server_round, clipping_norm=0.25)  # another question, in the same round too
    assert node.trained == 1
    node.ask(5)


def test_the_same_question_is_no_other_participation(node: Node) -> None:
    """A server that died before its round was over asks again, and nobody saw the first sum."""
    one, again = (node.ask(1)[0] for _ in range(2))
    assert all((one[name] == again[name]).all() for name in one)
    node.ask(5)
    node.ask(9)
    with pytest.raises(DeclinedError):
        node.ask(13)


@pytest.mark.parametrize(
    "changed", [{"factor": "e" * 32}, {"separation": 1}, {"participations": 100}]
)
def test_limits_are_those_that_the_client_was_told_first(
    node: Node, changed: dict[str, Any]
) -> None:
    node.ask(1)
    with pytest.raises(DeclinedError, match="began with correlated noise of another factor"):
        node.ask(5, **changed)
    assert node.trained == 1


def test_a_round_beyond_those_of_the_plan_is_declined(node: Node) -> None:
    node.ask(17)
    with pytest.raises(DeclinedError, match="round 21: the correlated noise is for 20 rounds"):
        node.ask(21)


def test_correlated_noise_does_not_become_independent_on_the_way(node: Node) -> None:
    node.ask(1)
    with pytest.raises(DeclinedError, match="began with correlated noise of another factor"):
        node.ask(2, factor="independent", rounds=1, separation=1, participations=1)
    assert node.trained == 1


def test_independent_noise_needs_no_rest(node: Node) -> None:
    for server_round in (1, 2, 3, 4):
        node.ask(server_round, factor="independent", separation=1)
    assert not list(node.folder.glob("*.notes"))


def test_a_damaged_record_stops_the_client(node: Node) -> None:
    node.ask(1)
    (note,) = (node.folder / "ward-7.notes").glob("*.participations")
    note.write_bytes(note.read_bytes()[:-3])
    with pytest.raises(LedgerError):
        node.ask(5)
    assert node.trained == 1


def test_the_answer_is_the_clipped_update_without_noise(node: Node) -> None:
    arrays, _ = node.ask(1, far=0.0)
    assert all(not np.any(array) for array in arrays.values())
