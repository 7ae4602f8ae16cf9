"""Nodes that were let in and send what no app of ours sends, on a real SuperLink."""

import json
from pathlib import Path

import pytest
from deployment import Deployment

pytestmark = pytest.mark.deployed

APP = Path(__file__).parent / "deployed"
HOSTILE = ["garbage", "bomb", "impostor"]
HONEST = 2


def federation(folder: Path, hostile: list[str]) -> list[dict[str, str | float]]:
    """Return the configurations of hostile and honest nodes, each with a folder of its own."""
    nodes: list[dict[str, str | float]] = [
        {"client-id": kind, "shift": 1.0, "examples": 1, "hostile": kind} for kind in hostile
    ] + [{"client-id": f"ward-{i}", "shift": 1.0, "examples": 1} for i in range(HONEST)]
    for node in nodes:
        state = folder / f"state-{node['client-id']}"
        state.mkdir()
        node["privacy-state"] = str(state)
    return nodes


def test_no_reply_ends_a_run_and_who_sends_garbage_is_left_out(tmp_path: Path) -> None:
    nodes = federation(tmp_path, HOSTILE)
    out = tmp_path / "out.json"
    config = {"scheme": "fedavg", "rounds": 4, "nodes": len(nodes), "out": str(out)}
    with Deployment(nodes=nodes, folder=tmp_path) as deployment:
        deployment.run(APP, run_config=config, timeout=300)
    result = json.loads(out.read_text())
    rounds = [line for line in result["history"] if line["round"] > 0]
    for line in rounds[:3]:
        assert (line["asked"], line["accumulated"]) == (5, HONEST)
        assert line["refused"] == {"malformed": 2, "unknown node": 1}
    last = rounds[3]
    assert (last["asked"], last["accumulated"], last["refused"]) == (HONEST, HONEST, {})
    # x -> 2 x + 1 for those who are honest.
    assert result["arrays"][1] == [0.5 * 2**4 + 15] * 3


def test_a_flood_of_replies_and_one_that_drips_hold_up_nobody(tmp_path: Path) -> None:
    nodes = federation(tmp_path, ["flood", "drip"])
    out, marks, rounds = tmp_path / "out.json", tmp_path / "marks", 2
    marks.mkdir()
    config = {"rounds": rounds, "nodes": len(nodes), "out": str(out), "quorum": HONEST}
    own = {"PYTHONPATH": str(APP), "HOSTILE_MARKS": str(marks)}
    with Deployment(nodes=nodes, folder=tmp_path, node_environment=own) as deployment:
        deployment.run(APP, run_config=config, timeout=300)
    result = json.loads(out.read_text())
    for line in result["history"][1:]:
        assert (line["accumulated"], line["refused"]) == (HONEST, {})
    assert result["arrays"][1] == [0.5 * 2**rounds + 2**rounds - 1] * 3
