"""All schemes on real processes: the models of the simulations, bit for bit, and the ledgers.

One SuperLink has a SuperNode for each of three clients, and one for the trusted aggregator of a
tree, which goes when the tree is done. What the clients draw in secret is from a seed of their own
configuration, so that the deployed training can be compared with that on Ray and with the inline
one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.deployment.nodes import DeployedNode, members_of, prepare
from flwr_privacy.simulations.deployment.processes import Deployment
from flwr_privacy.simulations.engines.ray_engine import RayResources
from flwr_privacy.simulations.runner.jobs import APP, Engine, carry_out
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings

pytestmark = pytest.mark.deployed

SEED = 7
CLIENTS = 3
ROUNDS = 2
TREE = {
    "unit": "device",
    "fanouts": [1, 3],
    "p": 1.0,
    "clipping_norm": 0.05,
    "epsilon": 50.0,
}


def settings_of(
    scheme: str, task: str = "digits-linear", *, rounds: int = ROUNDS, **more: Any
) -> Settings:
    return Settings(scheme=scheme, task=task, clients=CLIENTS, rounds=rounds, **more)


SCHEMES = {
    "m2fdp": settings_of("m2fdp", strategy={**TREE, "insecure_seed": SEED}),
    # Discounting makes them fewer:
    "udp": settings_of(
        "udp", rounds=4, strategy={"unit": "user", "epsilon": 50.0, "schedule": "discounting"}
    ),
    "udp-dp-sgd": settings_of(
        "udp",
        rounds=1,
        strategy={"unit": "dp-sgd", "epsilon": 50.0, "sampling_rate": 0.1, "steps": 3},
    ),
    # One round where each is on its own: what nodes keep from round to round the others show.
    "mspdq": settings_of(
        "mspdq",
        rounds=1,
        strategy={"bits": 8, "bound": 4.0, "mixing_rounds": 1},
        secure_sum=SecureSum(),
    ),
    "acfl": settings_of("acfl", "digits-rff"),
    "fedvs": settings_of("fedvs", "digits-rows", strategy={"evaluate_every": ROUNDS}),
    "central-dp": settings_of("central-dp", rounds=1, strategy={"epsilon": 50.0}),
    # Codes that each client sends by itself, in several exchanges of a round:
    "mspdq-open": settings_of("mspdq", rounds=1, strategy={"bits": 8, "mixing_rounds": 2}),
    # How long a round is goes with the questions:
    "m2fdp-control": settings_of(
        "m2fdp",
        strategy={
            **{**TREE, "p": 0.0},  # the devices add the noise: the server has none to seed
            **{"control": "adaptive", "total_steps": 4, "max_steps": 3},
        },
    ),
    "mspdq-ldp": settings_of(
        "mspdq-ldp", rounds=1, strategy={"clipping_norm": 10.0, "smallest_data": 479}
    ),
}
CHARGED = {"m2fdp", "udp", "udp-dp-sgd", "acfl", "central-dp", "m2fdp-control"}  # others: no budget
RELAYED = Settings(
    scheme="m2fdp", rounds=ROUNDS, task="digits-linear", strategy={**TREE, "relay": True}
)


class Federation:
    """What is deployed, and the folders of the nodes."""

    def __init__(self, deployment: Deployment, members: list[DeployedNode]) -> None:
        self.deployment = deployment
        self.members = members

    def train(self, name: str, folder: Path) -> RunFolder:
        relayed = name == "m2fdp"
        if not relayed and len(self.members) > CLIENTS:
            self.members.pop()
            self.deployment.stop(len(self.members))
        settings = RELAYED if relayed else SCHEMES[name]
        run = RunFolder.create(
            folder,
            settings,
            engine="deployed",
            nodes=len(self.members),
            experiment_id=name,  # of its own: the nodes have one ledger for all of them
            test_seed=SEED,
        )
        run.begin()
        config = {"settings": settings.to_toml(), "run-dir": str(folder.resolve())}
        self.deployment.run(APP, run_config=config, timeout=400)
        return run

    def ledger(self, index: int) -> Ledger:
        name = self.members[index].client_id
        state = self.deployment.folder / f"node-{index}" / "state"
        return Ledger(state / f"{name}.ledger", data_set=name)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("federation")
    members = members_of(RELAYED, CLIENTS)
    nodes = prepare(members, folder, policy=None, test_seed=SEED)
    with Deployment(nodes=nodes, folder=folder) as deployment:
        yield Federation(deployment, members)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, RunFolder]]:
    """Return the trainings of both engines by scheme."""
    runs = {}
    for engine in ("inline", "ray"):
        folder = tmp_path_factory.mktemp(engine)
        runs[engine] = {
            name: RunFolder.create(
                folder / name,
                settings,
                engine=engine,
                nodes=CLIENTS,
                experiment_id=name,
                test_seed=SEED,
            )
            for name, settings in SCHEMES.items()
        }
        one = RayResources(total_cpus=1)  # worker: each imports torch anew for every run
        carry_out(list(runs[engine].values()), Engine(name=engine, resources=one, test_seed=SEED))
    return runs


def model(run: RunFolder) -> dict[str, np.ndarray]:
    with np.load(run.model_path) as archive:
        return dict(archive)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_model_is_that_of_both_simulations(
    name: str,
    federation: Federation,
    simulated: dict[str, dict[str, RunFolder]],
    tmp_path: Path,
) -> None:
    before = [len(federation.ledger(i).entries()) for i in range(CLIENTS)]
    run = federation.train(name, tmp_path / name)
    deployed = model(run)
    assert all(np.isfinite(array).all() for array in deployed.values())
    for engine in ("inline", "ray"):
        other = model(simulated[engine][name])
        assert deployed.keys() == other.keys()
        for key, array in deployed.items():
            assert array.dtype == other[key].dtype
            np.testing.assert_array_equal(array, other[key], err_msg=f"{key} on {engine}")
    lines, expected = run.rounds(), simulated["inline"][name].rounds()
    for line, twin in zip(lines, expected, strict=True):
        assert line.get("server") == twin.get("server")
        for count in ("asked", "accumulated", "skipped"):
            assert line.get(count) == twin.get(count), (count, line["round"])
        assert not line.get("refused")
    # Each node has paid for what its client released, and for no more.
    card = PrivacyCard.from_json(run.card_path.read_text())
    for index in range(CLIENTS):
        client = federation.members[index].client_id
        released = sum(release.clients.count(client) for release in card.releases)
        paid = len(federation.ledger(index).entries()) - before[index]
        assert paid == released, client
        assert (released > 0) == (name in CHARGED), client
