"""Steps of a protocol in the pipeline: what they remember, and what they are allowed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from summing_node import store_in

from flwr_privacy.errors import DeclinedError, ProtocolError
from flwr_privacy.pipeline import answer as pipeline
from flwr_privacy.pipeline.mechanism import Answer, ProtocolStep
from flwr_privacy.pipeline.node_store import NodeStore
from flwr_privacy.pipeline.step_store import StepStore
from flwr_privacy.privacy.policy import Policy


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
