"""A simulation on a Ray cluster of several raylets is the one on the inline engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_privacy.accounting import Charge
from flwr_privacy.clients.node.context_store import STATE_VARIABLE
from flwr_privacy.clients.node.node_settings import COHORTS_VARIABLE
from flwr_privacy.errors import EngineError
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.ray_engine import RayResources
from flwr_privacy.simulations.engines.ray_hosts import HostNeeds, check_hosts
from flwr_privacy.simulations.engines.superlink import TEST_SEED_VARIABLE
from flwr_privacy.simulations.runner.complete_settings import settings_of
from flwr_privacy.simulations.runner.jobs import Engine, carry_out
from flwr_privacy.simulations.settings.run_folder import RunFolder

from .ray_cluster import ray_cluster

CLIENTS, PER_ROUND, NODES, SEED = 200, 40, 4, 7
CHOSEN: dict[str, dict[str, Any]] = {
    "fedavg": {"rounds": 2},
    # Some clients take part twice, the second time perhaps on the other raylet.
    "udp": {"rounds": 6, "unit": "user", "strategy.epsilon": 50.0},
    # With noise in shares, under a secure sum, of which each exchange needs what the last one left.
    "central-dp": {"rounds": 2, "strategy.epsilon": 50.0},
}
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Hold a cluster that shares its files; the noise of its clients can be computed."""
    environment = {COHORTS_VARIABLE: "1", TEST_SEED_VARIABLE: str(SEED)}
    with ray_cluster(folder, [environment, environment]) as (address, _):
        yield address


def created(scheme: str, folder: Path, engine: str) -> RunFolder:
    values = {
        "scheme": scheme,
        "task": "digits-linear",
        "clients": CLIENTS,
        "per_round": PER_ROUND,
        "test_records": 60,
        **CHOSEN[scheme],
    }
    settings = settings_of(values)
    path = folder / engine / scheme
    return RunFolder.create(path, settings, engine=engine, nodes=NODES, test_seed=SEED)


def charges(run: RunFolder) -> dict[str, list[Charge]]:
    """Return what each client's own ledger was charged."""
    ledgers = (run.path / "clients").rglob("*.ledger")
    return {
        path.stem: [entry.charge for entry in Ledger(path, data_set=path.stem).entries()]
        for path in ledgers
    }


def test_it_trains_the_same_model_with_the_same_ledgers(folder: Path, address: str) -> None:
    on_ray, inline = (
        [created(scheme, folder, engine) for scheme in CHOSEN] for engine in ("ray", "inline")
    )
    carry_out(on_ray, Engine(workers=NODES, resources=RayResources(ray_address=address)))
    carry_out(inline, Engine(name="inline", test_seed=SEED))
    for scheme, there, here in zip(CHOSEN, on_ray, inline, strict=True):
        with np.load(there.model_path) as ours, np.load(here.model_path) as expected:
            assert ours.files == expected.files
            for name in ours.files:
                # FedAvg's sums of floats follow the order of arrival; codes on a grid do not.
                tolerance = 1e-6 if scheme == "fedavg" else 0.0
                np.testing.assert_allclose(ours[name], expected[name], rtol=tolerance)
        taken = [line["accumulated"] for line in there.rounds()[1:]]
        assert taken == [PER_ROUND] * CHOSEN[scheme]["rounds"]
        assert charges(there) == charges(here)
        if scheme != "fedavg":
            assert len(charges(there)) == min(CLIENTS, sum(taken))


def test_what_a_host_lacks_is_refused_with_its_remedy(tmp_path: Path) -> None:
    own = [tmp_path / "own", tmp_path / "other"]
    for path in own:
        path.mkdir()
    lacking = [
        {COHORTS_VARIABLE: "1", STATE_VARIABLE: str(own[0])},
        {STATE_VARIABLE: str(own[1])},
        {COHORTS_VARIABLE: "1", STATE_VARIABLE: str(tmp_path / "nowhere")},
    ]
    needs = HostNeeds(cohorts=True, folders=[tmp_path])
    with (
        ray_cluster(tmp_path, lacking) as (address, _),
        pytest.raises(EngineError, match="cannot run the clients of this simulation") as refused,
    ):
        check_hosts(address, needs)
    text = str(refused.value)
    for path in own:
        assert f"state, {path}, is not the one of" in text
    assert text.count("all hosts need the same shared folder") == 2
    assert text.count(f"{COHORTS_VARIABLE} is not 1 there: set it before `ray start`") == 1
    assert text.count("cannot be used: [Errno 2] No such file or directory") == 1
    assert not any(path for folder in own for path in folder.iterdir())
