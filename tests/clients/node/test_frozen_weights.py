"""A deployed node keeps what the first question of an experiment said of frozen weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_scheme import CASES
from scheme_node import Node, join_any_sum
from torch import nn

from flwr_privacy.clients.torch import get_arrays, load_trainable, trainable_state
from flwr_privacy.wire.arrays import array_digest
from flwr_privacy.wire.frozen import frozen_digest
from flwr_privacy.wire.message import ERROR_CODE

ONE, OTHER = bytes(32), bytes(31) + b"1"


@pytest.mark.parametrize("name", ["udp", "central-dp"])
@pytest.mark.parametrize("later", [OTHER, None])
def test_a_node_holds_the_server_to_its_first_word(
    name: str, later: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_any_sum(monkeypatch)
    node = Node(tmp_path / "node", CASES[name])
    # Its app knows nothing of frozen weights: a charged training that failed.
    assert node.ask(frozen=ONE)[0] == "answer"
    assert node.charges() == 1
    changes = {} if later is None else {"frozen": later}
    said = node.ask(header={"server_round": 2}, **changes)
    assert said[:2] == ("refused", ERROR_CODE)
    assert "than the first one of this experiment" in said[2]
    assert node.charges() == 1
    assert node.ask(header={"server_round": 2}, frozen=ONE)[0] == "answer"
    assert node.ask(header={"experiment_id": "f"}, **changes)[0] == "answer"


@pytest.mark.parametrize("value", ["no bytes", bytes(31)])
def test_what_is_no_digest_is_refused(value: object, tmp_path: Path) -> None:
    node = Node(tmp_path / "node", CASES["udp"])
    assert node.ask(frozen=value)[:2] == ("refused", ERROR_CODE)
    assert node.charges() == 0


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        for parameter in made[0].parameters():
            parameter.fill_(0.5)
    made[0].requires_grad_(False)
    return made


def fit(parameters: list[Any]) -> tuple[list[Any], int, dict[str, Any]]:
    own = model()
    load_trainable(own, parameters)
    optimizer = torch.optim.SGD(own[1].parameters(), lr=0.1)
    own(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return [tensor.numpy() for tensor in trainable_state(own).values()], 2, {}


def test_without_declared_records_a_deployed_node_checks_its_model_before_a_charge(
    tmp_path: Path,
) -> None:
    """What is wrong stays in its log: the server gets one text."""
    arrays = get_arrays(model())
    right = frozen_digest({n: array_digest(a) for n, a in arrays.items() if n != "1.weight"})
    start = {"1.weight": np.zeros((1, 3), np.float32)}
    case = replace(CASES["udp"], user=fit, model=start)
    node = Node(tmp_path / "node", case)
    said = node.ask(frozen=OTHER)
    assert said[:2] == ("refused", ERROR_CODE)
    assert "nothing was charged; the log of the node says how" in said[2]
    assert node.charges() == 0
    other = {"0.bias": np.zeros(3, np.float32)}
    assert node.ask(model=other, header={"experiment_id": "f"}, frozen=right)[0] == "refused"
    assert node.charges() == 0
    kind, made, *_ = node.ask(header={"experiment_id": "g"}, frozen=right)
    assert kind == "answer"
    assert "1.weight" in made
    assert node.charges() == 1
