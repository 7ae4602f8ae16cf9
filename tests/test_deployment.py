"""A Flower app on a real SuperLink with real SuperNodes over TLS."""

import http.client
import json
import math
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from deployment import HOST, Deployment, DeploymentError, wait_until_online

from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.flower_processes import is_free
from flwr_privacy.simulations.engines.process_supervisor import descendants
from flwr_privacy.wire.pins import Identity

pytestmark = pytest.mark.deployed

APP = Path(__file__).parent / "deployed"
NODES: list[dict[str, str | float]] = [
    {"client-id": "ward-0", "shift": 1.0, "examples": 1},
    {"client-id": "ward-1", "shift": 2.0, "examples": 1},
    {"client-id": "ward-2", "shift": 4.0, "examples": 2},
]
# A round is x -> 2 x + 2.75 with the weighted mean (1 + 2 + 2 * 4) / 4 of the shifts.
AFTER_ONE_ROUND = [[[2.75, 4.75], [6.75, 8.75]], [3.75, 3.75, 3.75]]
AFTER_TWO_ROUNDS = [[[8.25, 12.25], [16.25, 20.25]], [10.25, 10.25, 10.25]]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    nodes, pinned = [], ["[clients]"]
    for node in NODES:
        state = folder / f"state-{node['client-id']}"
        state.mkdir()
        identity = Identity.generate()
        identity.write(state / "identity.pem")
        pinned.append(f'"{node["client-id"]}" = "{identity.public}"')
        own = {"privacy-state": str(state), "privacy-identity": str(state / "identity.pem")}
        nodes.append({**node, **own, "privacy-pins": str(folder / "pins.toml")})
    (folder / "pins.toml").write_text("\n".join(pinned))
    policy = folder / "policy.toml"
    policy.write_text("")
    nodes[2]["privacy-policy"] = str(policy)
    with Deployment(nodes=nodes, folder=folder) as deployment:
        yield deployment


def programs(deployment: Deployment) -> list[str]:
    names = ("flower-superlink", "flower-supernode", "flwr-clientapp", "flwr-serverapp")
    return [name for name in names for p in deployment.processes() if f"/{name} " in p.command]


@pytest.mark.smoke
def test_a_node_can_leave_and_come_back(deployment: Deployment) -> None:
    wait_until_online(deployment, 3)
    deployment.stop(1)
    try:
        assert programs(deployment).count("flower-supernode") == 2
        assert deployment.online() == 2
    finally:  # the other tests need it
        deployment.start(1)
    wait_until_online(deployment, 3)


@pytest.mark.smoke
def test_fedavg_trains_on_three_nodes(deployment: Deployment) -> None:
    """The server knows their keys, with which they sign who they are."""
    out, pins = deployment.folder / "out.json", deployment.folder / "pins.toml"
    config = {"scheme": "fedavg", "rounds": 2, "out": str(out), "pins": str(pins)}
    deployment.run(APP, run_config=config)
    result = json.loads(out.read_text())
    rounds = [line for line in result["history"] if line["round"] > 0]
    assert [line["round"] for line in rounds] == [1, 2]
    for line in rounds:
        assert (line["asked"], line["accumulated"], line["skipped"]) == (3, 3, False)
    assert result["arrays"] == AFTER_TWO_ROUNDS


def test_a_secure_sum_trains_on_three_nodes_that_pin_each_others_keys(
    deployment: Deployment,
) -> None:
    out = deployment.folder / "secure-sum.json"
    deployment.run(APP, run_config={"scheme": "secure-sum", "rounds": 1, "out": str(out)})
    result = json.loads(out.read_text())
    assert result["arrays"] == AFTER_ONE_ROUND  # the numbers lie on the grid
    (line,) = result["history"][1:]
    assert line["scheme"]["sum_opened"] == 3
    assert line["exchanges"] == 4
    assert "of 3 clients" in PrivacyCard.from_json(result["card"]).guarantee.secure_sum
    for client in ("ward-0", "ward-1", "ward-2"):
        (state,) = (deployment.folder / f"state-{client}" / f"{client}.secure-sum").glob("*[!k]")
        assert state.stat().st_mode & 0o077 == 0


def test_mspdq_mixes_on_three_nodes_and_the_server_opens_two_sums(deployment: Deployment) -> None:
    out = deployment.folder / "mspdq.json"
    deployment.run(APP, run_config={"scheme": "mspdq", "rounds": 1, "out": str(out)})
    result = json.loads(out.read_text())
    (line,) = result["history"][1:]
    assert line["scheme"]["mixing_rounds"] == 2
    assert line["scheme"]["sum_opened"] == 3
    assert line["exchanges"] == 2 + 2 * 2  # keys and shares, then a vector and shares for each sum
    # x -> 2 x + 7 / 3 with equal weights; two steps leave 0.4^2 of the way.
    start = [np.array([[0.0, 1.0], [2.0, 3.0]]), np.full(3, 0.5)]
    for array, begun in zip(result["arrays"], start, strict=True):
        expected = begun + (1 - 0.4**2) * (begun + 7 / 3)
        np.testing.assert_allclose(array, expected, atol=0.01)


@pytest.mark.smoke
def test_udp_trains_on_three_nodes_and_each_keeps_its_own_ledger(deployment: Deployment) -> None:
    """The third node's policy allows one of the two releases that the budget is meant for."""
    (deployment.folder / "policy.toml").write_text("max_epsilon = 7.0\n")
    out = deployment.folder / "udp.json"
    deployment.run(APP, run_config={"scheme": "udp", "rounds": 2, "out": str(out)})
    result = json.loads(out.read_text())
    first, second = result["history"][1:]
    assert (first["asked"], first["accumulated"], first["refused"]) == (3, 3, {})
    assert (second["asked"], second["accumulated"], second["refused"]) == (3, 2, {"declined": 1})
    assert all(math.isfinite(x) for array in result["arrays"] for x in np.ravel(array))
    card = PrivacyCard.from_json(result["card"])
    assert [release.clients for release in card.releases] == [
        ("ward-0", "ward-1", "ward-2"),
        ("ward-0", "ward-1"),
    ]
    assert card.verify()["gdp"][1] == pytest.approx(8.0, rel=1e-6)
    for name, releases in (("ward-0", 2), ("ward-1", 2), ("ward-2", 1)):
        path = deployment.folder / f"state-{name}" / f"{name}.ledger"
        entries = Ledger(path, data_set=name).entries()
        assert [entry.question.server_round for entry in entries] == [1, 2][:releases]
        assert {entry.question.experiment_id for entry in entries} == {card.experiment_id}
    # The operator of the third node sees why, with the figure; the server does not.
    log = (deployment.folder / "node-2.log").read_text()
    assert "max_epsilon = 7 at delta 1e-05 for the neighbours 'replace_one'" in log
    assert "with this release epsilon would be 8" in log


@pytest.mark.smoke
def test_the_superlink_speaks_to_nobody_without_tls(deployment: Deployment) -> None:
    plain = http.client.HTTPConnection(HOST, deployment.port, timeout=5)
    plain.request("GET", "/health")
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        plain.getresponse()


@pytest.mark.smoke
def test_its_certificate_is_only_good_with_the_root_certificate(deployment: Deployment) -> None:
    stranger = http.client.HTTPSConnection(
        HOST, deployment.port, timeout=5, context=ssl.create_default_context()
    )
    with pytest.raises(ssl.SSLCertVerificationError):
        stranger.request("GET", "/health")
    context = ssl.create_default_context(cafile=str(deployment.ca_certificate))
    trusting = http.client.HTTPSConnection(HOST, deployment.port, timeout=5, context=context)
    trusting.request("GET", "/health")
    assert trusting.getresponse().status == 200


@pytest.mark.smoke
def test_an_app_that_fails_is_an_error_with_its_log(deployment: Deployment) -> None:
    with pytest.raises(DeploymentError, match="ended as finished:failed") as error:
        deployment.run(APP, run_config={"scheme": "no such scheme"})
    assert "KeyError: 'no such scheme'" in str(error.value)


@pytest.mark.smoke
def test_a_run_that_is_refused_is_an_error(deployment: Deployment) -> None:
    with pytest.raises(DeploymentError, match="ended as refused"):
        deployment.run(APP, run_config={"no such key": 1})


@pytest.mark.smoke
def test_a_killed_node_and_an_interrupted_run_leave_nothing_behind(tmp_path: Path) -> None:
    everything: set[int] = set()

    def kill_and_interrupt() -> None:
        if "flwr-clientapp" not in programs(own):
            return
        everything.update(process.pid for process in own.processes())
        own.kill(0)
        assert programs(own) == ["flower-superlink", "flwr-serverapp"]
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        Deployment(nodes=NODES[:1], folder=tmp_path) as own,
    ):
        own.run(APP, run_config={"nodes": 1}, on_poll=kill_and_interrupt)
    assert everything
    assert not everything & {process.pid for process in descendants(0)}
    assert is_free(own.port)


@pytest.mark.smoke
def test_a_process_that_ends_by_itself_ends_the_run(tmp_path: Path) -> None:
    def crash() -> None:
        for process in own.processes():
            if "flower-superlink" in process.command:
                os.kill(process.pid, signal.SIGKILL)

    with Deployment(nodes=[], folder=tmp_path) as own:
        with pytest.raises(DeploymentError, match="superlink ended by itself"):
            own.run(APP, run_config={}, on_poll=crash)
        assert programs(own) == []
