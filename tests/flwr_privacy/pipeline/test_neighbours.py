"""How a node counts releases for different neighbours: one relation for all times, or none."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from summing_node import QUESTION, Sum, ask, store_in

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.errors import DeclinedError, InvalidParameterError, ProtocolError
from flwr_privacy.privacy.policy import Policy

ADDED, REPLACED = Sum(neighbours="add_remove"), Sum()


def other(name: str) -> object:
    return replace(QUESTION, experiment_id=name)


def cost(*charges: tuple[float, str]) -> float:
    return spent(
        [Charge(noise_multiplier=z, neighbours=relation) for z, relation in charges], delta=1e-5
    )


def test_an_experiment_has_one_relation(tmp_path: Path) -> None:
    store = store_in(tmp_path, Policy())
    ask(store, mechanism=REPLACED)
    with pytest.raises(ProtocolError, match="neighbours 'add_remove': this experiment had others"):
        ask(store, mechanism=ADDED, question=replace(QUESTION, server_round=2))
    assert len(store.ledger.entries()) == 1


def test_max_epsilon_counts_every_charge_for_replaced_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Noise over one element's distance counts for half of itself, from the first release on."""
    needed = cost((1.0, "replace_one"))
    assert needed > 1.9 * cost((2.0, "add_remove"))
    with pytest.raises(DeclinedError, match="max_epsilon = "):
        ask(store_in(tmp_path, Policy(max_epsilon=needed * 0.999)), mechanism=ADDED)
    store = store_in(tmp_path, Policy(max_epsilon=needed * 1.001))
    ask(store, mechanism=ADDED)
    # Charges for several neighbours are one total, of which the server learns nothing.
    caplog.set_level(logging.WARNING, "flwr.privacy")
    with pytest.raises(DeclinedError, match="this release would pass it") as declined:
        ask(store, mechanism=REPLACED, question=other("f"))
    both = cost((1.0, "replace_one"), (2.0, "replace_one"))
    assert f"for the neighbours 'replace_one': with this release epsilon would be {both:.6g}" in (
        caplog.text
    )
    assert "neighbours" not in str(declined.value)
    store = store_in(tmp_path, Policy(max_epsilon=both * 1.001))
    ask(store, mechanism=REPLACED, question=other("f"))
    assert [e.charge.neighbours for e in store.ledger.entries()] == ["add_remove", "replace_one"]


def test_a_policy_with_one_relation_counts_by_it(tmp_path: Path) -> None:
    needed = cost((2.0, "add_remove"))
    limits = Policy(max_epsilon=needed * 1.001, neighbours=["add_remove"])
    ask(store_in(tmp_path, limits), mechanism=ADDED)
    assert limits.relation == "add_remove"


def test_nothing_bounds_a_replaced_element_for_one_more_or_less(tmp_path: Path) -> None:
    """The policy was another one when the ledger was charged."""
    ask(store_in(tmp_path, Policy()), mechanism=REPLACED)
    store = store_in(tmp_path, Policy(max_epsilon=1e6, neighbours=["add_remove"]))
    with pytest.raises(DeclinedError, match="this release would pass it"):
        ask(store, mechanism=ADDED, question=other("f"))
    with pytest.raises(InvalidParameterError, match="expected 'add_remove', as the policy counts"):
        store.policy.counted(entry.charge for entry in store.ledger.entries())


def test_zeroed_out_data_are_for_nodes_whose_operator_lists_them(tmp_path: Path) -> None:
    zeroed = Sum(neighbours="zero_out")
    ask(store_in(tmp_path / "listed", Policy(neighbours=["zero_out"])), mechanism=zeroed)
    simulated = store_in(tmp_path / "simulated", Policy(), durable=False)
    ask(simulated, mechanism=zeroed)
    bound = store_in(tmp_path / "bound", Policy(neighbours=["replace_one"]), durable=False)
    with pytest.raises(DeclinedError, match="neighbours = "):
        ask(bound, mechanism=zeroed)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    for name in ("listed", "simulated", "bound"):
        (tmp_path / name).mkdir()


def test_the_relation_of_a_policy_does_not_follow_from_what_was_charged() -> None:
    assert Policy().relation == "replace_one"
    assert Policy(neighbours=["add_remove", "zero_out"]).relation == "replace_one"
    assert Policy(neighbours=["zero_out", "zero_out"]).relation == "zero_out"
    charges = [Charge(noise_multiplier=2.0, neighbours="add_remove", sampling=0.5, count=3)]
    assert Policy().counted(charges) == [
        Charge(noise_multiplier=1.0, neighbours="replace_one", sampling=0.5, count=3)
    ]
    assert Policy(neighbours=["add_remove"]).counted(charges) == charges
