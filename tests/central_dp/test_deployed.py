"""Correlated noise on real processes: a node notes in which rounds it took part, and the server
goes on with the state of the noise that its checkpoint has.
"""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.deployment.nodes import members_of, prepare
from flwr_privacy.simulations.deployment.processes import Deployment
from flwr_privacy.simulations.runner.jobs import APP, Engine, carry_out
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.wire.files import read_checksummed

SEED, CLIENTS, ROUNDS = 7, 3, 4
SETTINGS = Settings(
    scheme="central-dp",
    task="digits-linear",
    clients=CLIENTS,
    per_round=1,
    rounds=ROUNDS,
    strategy={
        **{"noise": "server", "sampling": "balanced", "correlated": "banded-mf"},
        **{"epsilon": 50.0, "insecure_seed": SEED},
    },
)


def run_folder(folder: Path, engine: str) -> RunFolder:
    return RunFolder.create(
        folder, SETTINGS, engine=engine, nodes=CLIENTS, experiment_id="e", test_seed=SEED
    )


def model(run: RunFolder) -> dict[str, np.ndarray]:
    with np.load(run.model_path) as archive:
        return dict(archive)


@pytest.mark.deployed
def test_it_trains_as_in_the_simulation_and_nodes_keep_to_their_turns(tmp_path: Path) -> None:
    simulated = run_folder(tmp_path / "inline", "inline")
    carry_out([simulated], Engine(name="inline", test_seed=SEED))
    members = members_of(SETTINGS, CLIENTS)
    folder = tmp_path / "federation"
    folder.mkdir()
    nodes = prepare(members, folder, policy=None, test_seed=SEED)
    with Deployment(nodes=nodes, folder=folder) as deployment:
        run = run_folder(tmp_path / "deployed", "deployed")
        run.begin()
        config = {"settings": SETTINGS.to_toml(), "run-dir": str(run.path.resolve())}
        deployment.run(APP, run_config=config, timeout=400)
    deployed, expected = model(run), model(simulated)
    assert deployed.keys() == expected.keys()
    for key, array in deployed.items():
        np.testing.assert_array_equal(array, expected[key])
    card = PrivacyCard.from_json(run.card_path.read_text())
    assert sum(len(release.clients) for release in card.releases) == ROUNDS
    for index, member in enumerate(members):
        client, state = member.client_id, folder / f"node-{index}" / "state"
        mine = [r.server_round for r in card.releases if client in r.clients]
        assert all(later - earlier >= CLIENTS for earlier, later in pairwise(mine))
        (note,) = state.glob("*.notes/*.participations")
        *_, noted = json.loads(read_checksummed(note, b"flwr-privacy note\n"))
        assert noted == mine
        ledger = Ledger(state / f"{client}.ledger", data_set=client)
        assert not ledger.entries()  # the server accounts for it
