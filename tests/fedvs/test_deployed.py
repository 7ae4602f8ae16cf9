"""FedVS on a real SuperLink with real SuperNodes over TLS, each message in a process of its own."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from apps import run_strategy
from deployment import Deployment

from flwr_privacy.clients import fedvs_client_app
from flwr_privacy.strategies import FedVS, LoopOptions
from flwr_privacy.wire.identity import client_id_from

APP = Path(__file__).parents[1] / "deployed"
SEED, ROUNDS = 7, 2


def simulated(state: Path) -> Any:
    sys.path.insert(0, str(APP))
    try:
        import columns
    finally:
        sys.path.remove(str(APP))
    app = fedvs_client_app(lambda context: columns.columns_of(client_id_from(context.node_config)))
    return run_strategy(
        FedVS(**columns.parameters(), loop=LoopOptions(experiment_id="columns", seed=1)),
        app,
        nodes=3,
        arrays=columns.initial(),
        insecure_seed=SEED,
        num_rounds=ROUNDS,
        state=state,
    )


@pytest.mark.deployed
def test_deployed_the_model_is_that_of_the_simulation_and_no_share_is_readable(
    tmp_path: Path,
) -> None:
    nodes = []
    for index in range(3):
        state = tmp_path / f"state-{index}"
        state.mkdir()
        node = {"client-id": str(index), "privacy-state": str(state), "insecure-seed": SEED}
        nodes.append(node)
    out = tmp_path / "out.json"
    with Deployment(nodes=nodes, folder=tmp_path) as deployment:
        deployment.run(
            APP, run_config={"scheme": "fedvs", "nodes": 3, "rounds": ROUNDS, "out": str(out)}
        )
    deployed = json.loads(out.read_text())
    (tmp_path / "inline").mkdir()
    expected = simulated(tmp_path / "inline")
    assert deployed["arrays"] == [a.tolist() for a in expected.arrays.to_numpy_ndarrays()]
    lines = [(line["accumulated"], line["refused"]) for line in deployed["history"][1:]]
    assert lines == [(3, {})] * ROUNDS
    # What the clients hold of each other is the same files, and none of it passed the server.
    overheard = Path(f"{out}.seen").read_bytes()
    assert len(overheard) > 1000
    for index in range(3):
        held = sorted((tmp_path / f"state-{index}").glob("*.fedvs/*/*.coded"))
        assert len(held) == 1
        for path in held:
            shares = path.read_bytes()
            assert path.stat().st_mode & 0o777 == 0o600
            assert len(shares) == 12 * 6 * 4
            rows = [shares[start : start + 24] for start in range(0, len(shares), 24)]
            assert not any(row[8 * c : 8 * c + 8] in overheard for row in rows for c in range(3))
