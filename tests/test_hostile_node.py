"""Nodes that were let in and send what no app of ours sends, on a real SuperLink."""

import json
from pathlib import Path

import pytest
from deployment import Deployment

pytestmark = pytest.mark.deployed

APP = Path(__file__).parent / "deployed"
HOSTILE = ["garbage", "bomb", "impostor"]
HONEST = 2


def test_no_reply_ends_a_run_and_who_sends_garbage_is_left_out(tmp_path: Path) -> None:
    nodes = [
        {"client-id": kind, "shift": 1.0, "examples": 1, "hostile": kind} for kind in HOSTILE
    ] + [{"client-id": f"ward-{i}", "shift": 1.0, "examples": 1} for i in range(HONEST)]
    for node in nodes:
        state = tmp_path / f"state-{node['client-id']}"
        state.mkdir()
        node["privacy-state"] = str(state)
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
