"""A deployed node keeps what the first question of an experiment said of frozen weights."""

from pathlib import Path

import pytest
from every_scheme import CASES
from scheme_node import Node, join_any_sum

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
