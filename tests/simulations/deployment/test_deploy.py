"""`flwr-privacy deploy`: what it refuses, the files it makes, a run with a node that is killed."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from commands import Command
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key
from flwr.common.config import parse_config_args

from flwr_privacy.errors import EngineError, InvalidParameterError
from flwr_privacy.privacy.policy import Policy
from flwr_privacy.simulations.deployment import processes as deployment
from flwr_privacy.simulations.deployment.deploy import (
    DeployOptions,
    deploy,
    reopened,
    what_happened,
)
from flwr_privacy.simulations.deployment.keys import write_certificates, write_node_key
from flwr_privacy.simulations.deployment.nodes import DeployedNode, members_of, prepare
from flwr_privacy.simulations.deployment.processes import Deployment, DeploymentError
from flwr_privacy.simulations.engines.process_supervisor import ProcessSupervisor, descendants
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.wire.pins import Identity, Pins

TREE = ("--scheme", "m2fdp", "--set", "unit=device", "--set", "fanouts=2,2")

COMMAND = Path(sys.executable).parent / "flwr-privacy"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "--nodes = None: expected the number of clients"),
        (("--nodes", "1"), 2, "--nodes = 1: expected an integer of at least 2"),
        (("--nodes", "3", "--task", "digit-mlp"), 2, "nearest: 'digits-mlp'"),
        (("--nodes", "3", "--scheme", "udpp"), 2, "nearest: 'udp'"),
        (("--nodes", "3", "--rounds", "0"), 2, "rounds = 0: expected an integer of at least 1"),
        (("--nodes", "3", "--task", "mnist-mlp"), 3, "--data-root DIR"),
        (("--nodes", "3", "--task", "mnist-mlp", "--data-root", "nowhere"), 3, "nowhere"),
        (("--nodes", "3", "--port", "70000"), 2, "--port = 70000: expected an integer from 1"),
        (("--nodes", "3", "--timeout", "0"), 2, "--timeout = 0.0: expected"),
        (("--nodes", "3", "--test-seed", "-1"), 2, "--test-seed = -1: expected"),
        (("--nodes", "3", "--policy", "nowhere.toml"), 2, "nowhere.toml"),
        (("--nodes", "3"), 2, "--policy = None: expected a TOML file with limits such as"),
        (("--resume", "r", "--no-policy"), 2, "a run keeps its own"),
        (("--nodes", "3", "--set", "clients=4"), 2, "--nodes says how many"),
        (("--nodes", "3", "--set", "per_round=4"), 2, "per_round = 4: expected"),
        (("--nodes", "3", "--set", "secure_sum.threshold=4"), 2, "at most the 3 clients of a"),
        (("--resume", "nowhere"), 2, "run folder = 'nowhere': expected a folder that exists"),
        (("--resume", "r", "--nodes", "3"), 2, "a run keeps its own"),
        (
            (*("--nodes", "4", *TREE), "--set", "p=0.5"),
            2,
            "relay = False: expected true: the devices trust aggregators (t1-0)",
        ),
        (
            ("--nodes", "3", *TREE, "--set", "relay=true"),
            2,
            "--nodes = 3: expected 4, the devices of the tree",
        ),
    ],
)
def test_what_a_user_did_wrong_is_one_line_before_anything_is_made(
    tmp_path: Path, command: Command, arguments: tuple[str, ...], code: int, text: str
) -> None:
    done = command("deploy", *arguments)
    assert done.returncode == code
    assert text in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_policy_does_not_say_whom_a_node_trusts_where_the_tree_does(
    tmp_path: Path, command: Command
) -> None:
    Path("policy.toml").write_text("trusted_parents = []\n")
    arguments = ["--nodes", "4", *TREE, "--policy", "policy.toml", "--set", "p=0.5"]
    arguments += ["--set", "relay=true"]
    done = command("deploy", *arguments)
    assert done.returncode == 2
    assert "--policy = 'policy.toml': expected a policy without" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["policy.toml"]


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InvalidParameterError, match=f"--port = {port}: expected a port of"):
            DeployOptions(nodes=3, port=port)


def test_every_client_of_a_simulation_gets_a_node_of_its_own() -> None:
    assert members_of(Settings(scheme="udp", clients=3), 3) == [
        DeployedNode(client_id=str(i), partition=i, partitions=3) for i in range(3)
    ]


def test_the_trusted_aggregators_of_a_tree_are_nodes_beside_the_devices() -> None:
    settings = Settings(
        scheme="m2fdp",
        strategy={
            "unit": "device",
            "fanouts": "2,2",
            "p": 0.5,
            "relay": True,
            "clipping_norm": 0.05,
        },
    )
    members = members_of(settings, 4)
    assert [m.client_id for m in members] == ["0", "1", "2", "3", "t1-0"]
    assert [m.partition for m in members] == [0, 1, 2, 3, None]
    assert [m.trusted_parent for m in members] == ["t1-0", "t1-0", None, None, None]
    assert [m.aggregator for m in members] == [False] * 4 + [True]


def test_a_node_has_a_folder_keys_and_a_policy_of_its_own(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("max_epsilon = 4.0\n")
    members = [
        DeployedNode(client_id="0", partition=0, partitions=2, trusted_parent="t1-0"),
        DeployedNode(client_id="1", partition=1, partitions=2),
        DeployedNode(client_id="t1-0", partition=None, partitions=2, aggregator=True),
    ]
    configs = prepare(members, tmp_path, policy=policy, test_seed=None)
    publics = {}
    for index, (member, config) in enumerate(zip(members, configs, strict=True)):
        home = tmp_path / f"node-{index}"
        assert config["client-id"] == member.client_id
        assert config["privacy-state"] == str(home / "state")
        assert mode(home / "state") == 0o700
        assert mode(home / "identity.pem") == 0o600
        publics[member.client_id] = Identity.read(str(config["privacy-identity"])).public
        assert "insecure-seed" not in config
    assert len(set(publics.values())) == 3
    for config in configs:
        assert dict(Pins.read(str(config["privacy-pins"])).clients) == publics
    policies = [Policy.read(str(config["privacy-policy"])) for config in configs]
    assert [p.max_epsilon for p in policies] == [4.0] * 3
    assert [tuple(p.trusted_parents or ()) for p in policies] == [("t1-0",), (), ()]
    assert [c.get("m2fdp-role") for c in configs] == [None, None, "aggregator"]
    assert [c.get("partition-id") for c in configs] == [0, 1, None]


@pytest.mark.parametrize(
    ("scheme", "strategy", "listed"),
    [
        ("central-dp", {"noise": "server"}, "central-dp"),
        ("central-dp", {}, None),
        ("udp", {"noise": "none"}, None),  # nobody is trusted: their operators have to say so
    ],
)
def test_nodes_trust_the_server_where_the_settings_say_that_it_adds_the_noise(
    scheme: str, strategy: dict[str, Any], listed: str | None, tmp_path: Path
) -> None:
    settings = Settings(scheme=scheme, task="digits-linear", clients=2, strategy=strategy)
    members = members_of(settings, 2)
    configs = prepare(members, tmp_path / "plain", policy=None, test_seed=None)
    assert [config.get("privacy-allow-unprotected") for config in configs] == [listed] * 2
    policy = tmp_path / "policy.toml"
    policy.write_text("max_epsilon = 4.0\n")  # then it decides, and it lists nothing
    configs = prepare(members, tmp_path / "strict", policy=policy, test_seed=None)
    assert not any("privacy-allow-unprotected" in config for config in configs)


def test_a_second_start_finds_the_keys_of_the_first(tmp_path: Path) -> None:
    members = [DeployedNode(client_id=str(i), partition=i, partitions=2) for i in range(2)]
    prepare(members, tmp_path, policy=None, test_seed=None)
    before = [(tmp_path / f"node-{i}" / "identity.pem").read_bytes() for i in range(2)]
    configs = prepare(members, tmp_path, policy=None, test_seed=7)
    assert [(tmp_path / f"node-{i}" / "identity.pem").read_bytes() for i in range(2)] == before
    assert [config["insecure-seed"] for config in configs] == [7, 7]
    assert not any("privacy-policy" in config for config in configs)


def test_a_second_start_keeps_the_policies_of_the_first(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("max_epsilon = 4.0\n")
    members = [DeployedNode(client_id="0", partition=0, partitions=1, trusted_parent="t1-0")]
    prepare(members, tmp_path, policy=policy, test_seed=None)
    (config,) = prepare(members, tmp_path, policy=None, test_seed=None)
    kept = Policy.read(str(config["privacy-policy"]))
    assert (kept.max_epsilon, tuple(kept.trusted_parents or ())) == (4.0, ("t1-0",))


def test_the_servers_certificate_is_for_loopback_and_its_key_for_the_owner(tmp_path: Path) -> None:
    for _ in range(2):  # the second time there are files already
        certificate, key = write_certificates(tmp_path)
    assert mode(key) == 0o600
    server = x509.load_pem_x509_certificate(certificate.read_bytes())
    ca = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(n) for n in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    private = load_pem_private_key(key.read_bytes(), None)
    assert private.public_key() == server.public_key()
    # The CA's own key is nowhere.
    assert {path.name for path in tmp_path.iterdir()} == {"ca.pem", "superlink.pem", key.name}


def test_a_nodes_key_is_in_the_format_that_ssh_keygen_has(tmp_path: Path) -> None:
    private, public = write_node_key(tmp_path)
    assert mode(private) == 0o600
    key = load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")


def test_a_value_that_flowers_command_line_cannot_carry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="without quotation marks"):
        Deployment(nodes=[{"client-id": 'a"b'}], folder=tmp_path)


def test_a_policy_and_none_are_not_given_together(command: Command) -> None:
    Path("policy.toml").write_text("max_epsilon = 10\n")
    done = command("deploy", "--nodes", "3", "--policy", "policy.toml", "--no-policy")
    assert done.returncode == 2
    assert "--policy = 'policy.toml': expected a TOML file with limits" in done.stderr
    assert not Path("runs").exists()


def test_what_a_deployment_writes_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        own = Deployment(nodes=[], folder=tmp_path)
        (tmp_path / "flower-superlink").write_text(f"#!/bin/sh\ntouch {tmp_path}/superlink.db\n")
        (tmp_path / "flower-superlink").chmod(0o700)
        own._keep("superlink", [[str(tmp_path / "flower-superlink")]], dict(os.environ))
        end = time.monotonic() + 30
        while not (tmp_path / "superlink.db").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        own._drop("superlink")
    finally:
        os.umask(before)
    assert mode(tmp_path / "superlink.db") == 0o600


@pytest.mark.parametrize(
    ("script", "ending"),
    [("kill -9 $$", "killed by signal 9"), ("exit 3", "exit status 3"), ("true", "exit status 0")],
)
def test_a_keeper_says_how_its_command_ended(tmp_path: Path, script: str, ending: str) -> None:
    supervisor = ProcessSupervisor(
        [["sh", "-c", script]], environment=os.environ, log=tmp_path / "log"
    )
    end = time.monotonic() + 30
    while supervisor.alive:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert supervisor.ending == ending


def test_a_flwr_that_takes_too_long_or_is_missing_is_an_error_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = Deployment(nodes=[], folder=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(deployment, "COMMAND_TIMEOUT", 0.0)
        with pytest.raises(DeploymentError, match=r"flwr supernode list failed: .* timed out"):
            idle.online()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="flwr is not installed"):
        idle.online()


def test_a_nodes_configuration_is_toml_as_flower_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(Deployment, "_keep", lambda self, name, given, own: commands.extend(given))
    monkeypatch.setattr(Deployment, "_listed", lambda self, *command: {"node-id": "1"})
    config = {"client-id": "Zürich 🏥", "partition-id": 0, "shift": 0.5}
    Deployment(nodes=[config], folder=tmp_path).start(0)
    (command,) = commands
    assert parse_config_args([command[command.index("--node-config") + 1]]) == config


def finished(folder: Path, lines: list[dict[str, Any]], **summary: Any) -> RunFolder:
    run = RunFolder.create(folder, Settings(clients=3), engine="deployed", nodes=3)
    for line in lines:
        run.append(line)
    run.update(**summary)
    return run


def test_the_end_says_who_was_lost_and_what_the_rounds_came_to(tmp_path: Path) -> None:
    lost = {"node": 1, "client_id": "1", "server_round": 2, "seconds": 34.0, "ending": "it ended"}
    lines = [
        {"round": 0, "exchanges": 4, "seconds": 9.0},
        {"round": 1, "asked": 3, "accumulated": 3, "refused": {}, "skipped": False},
        {"round": 2, "asked": 3, "accumulated": 2, "refused": {}, "skipped": False},
        {"round": 3, "asked": 2, "accumulated": 0, "refused": {"declined": 2}, "skipped": True},
    ]
    for line in lines[1:]:
        line |= {"exchanges": 2, "seconds": 9.0 + 12.0 * line["round"]}
    run = finished(tmp_path / "r", lines, lost_nodes=[lost])
    assert what_happened(run) == [
        "nodes: 2 of 3 to the end",
        "lost: node 1 (client 1) in round 2, 34.0 s after the start: it ended",
        "rounds: 3, skipped: 3",
        "exchanges: 6 in these rounds, 6.0 s each",
        "answers: 5 of 8 used; fewer than asked in round 2, 3",
        f"refused: 2 declined (the nodes' logs in {tmp_path / 'r' / 'deployment'} say why)",
    ]


def test_only_a_deployed_run_that_is_not_complete_is_gone_on_with(tmp_path: Path) -> None:
    run = finished(tmp_path / "r", [], test_seed=7)
    run.finish("interrupted")
    assert reopened(run.path) == (run, 3, 7)
    run.finish("completed")
    with pytest.raises(InvalidParameterError, match="not complete"):
        reopened(run.path)
    other = RunFolder.create(tmp_path / "o", Settings(clients=3), engine="inline", nodes=3)
    with pytest.raises(InvalidParameterError, match="was deployed"):
        reopened(other.path)


def test_the_end_says_that_a_node_was_back_when_the_run_was_gone_on_with(tmp_path: Path) -> None:
    lost = {"node": 1, "client_id": "1", "server_round": 2, "seconds": 34.0, "ending": "it ended"}
    again = {**lost, "node": 0, "client_id": "0", "server_round": 3}
    run = finished(tmp_path / "r", [], lost_nodes=[{**lost, "returned": True}, again])
    assert what_happened(run)[:3] == [
        "nodes: 2 of 3 to the end",
        "lost: node 1 (client 1) in round 2, 34.0 s after the start: it ended; back when the run "
        "was gone on with",
        "lost: node 0 (client 0) in round 3, 34.0 s after the start: it ended",
    ]


class Stage:
    """In place of a deployment: no process, and the course of a run as a test has it."""

    port, ca_certificate = 1, Path("ca.pem")
    course: Callable[[Callable[[int, str], None]], None]
    config: ClassVar[dict[str, Any]] = {}

    def __init__(self, **options: Any) -> None:
        pass

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *ending: object) -> None:
        pass

    def pid(self, index: int) -> int:
        return index

    def run(self, app_dir: Path, *, run_config: Any, timeout: Any, on_lost: Any) -> None:
        Stage.config = run_config
        Stage.course(on_lost)


MEMBERS = [DeployedNode(client_id=str(i), partition=i, partitions=3) for i in range(3)]


def staged(
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    course: Callable[[Callable[[int, str], None]], None],
    *,
    resume: bool = False,
    members: list[DeployedNode] = MEMBERS,
) -> list[str]:
    monkeypatch.setattr(Stage, "course", staticmethod(course), raising=False)
    monkeypatch.setattr("flwr_privacy.simulations.deployment.deploy.Deployment", Stage)
    said: list[str] = []
    deploy(run, members, DeployOptions(nodes=3), say=said.append, resume=resume)
    return said


def test_a_node_lost_before_the_training_goes_on_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server waits for all nodes, and one that was there before is none it has counted."""
    run = finished(tmp_path / "r", [])
    with pytest.raises(DeploymentError, match="node 1 ended before the training began \\(killed"):
        staged(run, monkeypatch, lambda on_lost: on_lost(1, "killed"))
    for server_round in range(2):
        run.append({"round": server_round})
    with pytest.raises(DeploymentError, match="node 1 ended before the training went on \\(killed"):
        staged(run, monkeypatch, lambda on_lost: on_lost(1, "killed"), resume=True)
    assert run.summary["status"] == "failed"
    assert run.summary["lost_nodes"] == []


def test_a_run_that_is_gone_on_with_keeps_who_was_lost_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished(tmp_path / "r", [])

    def lose(index: int, server_round: int) -> Callable[[Callable[[int, str], None]], None]:
        def course(on_lost: Callable[[int, str], None]) -> None:
            run.append({"round": server_round})
            on_lost(index, "killed")

        return course

    (*_, told) = staged(run, monkeypatch, lose(1, 0))
    assert told.startswith("lost node 1 (client 1) in round 1, ")
    assert told.endswith("killed; the run goes on without it")
    staged(run, monkeypatch, lose(2, 1), resume=True)
    told_of = [(n["node"], n["server_round"], n["returned"]) for n in run.summary["lost_nodes"]]
    assert told_of == [(1, 1, True), (2, 2, False)]


def test_it_says_that_the_server_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusting = [replace(member, allow_unprotected="central-dp") for member in MEMBERS]
    told = (
        "the server is trusted with answers without noise: "
        'privacy-allow-unprotected = "central-dp" on nodes 0, 1, 2'
    )
    for members, count in ((trusting, 1), (MEMBERS, 0)):
        run = finished(tmp_path / str(count), [])
        assert staged(run, monkeypatch, lambda on_lost: None, members=members).count(told) == count


def test_a_run_without_a_checkpoint_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished(tmp_path / "r", [])
    staged(run, monkeypatch, lambda on_lost: None, resume=True)
    assert Stage.config["resume"] is False
    run.checkpoint_path.touch()
    staged(run, monkeypatch, lambda on_lost: None, resume=True)
    assert Stage.config["resume"] is True


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("run-1 took longer than 9 s", True),
        ("run-1 ended as finished:failed\n  InvalidParameterError: threshold = 5", False),
    ],
)
def test_what_can_be_gone_on_with_is_told_after_the_error(
    monkeypatch: pytest.MonkeyPatch, command: Command, error: str, hint: bool
) -> None:
    """A setting that was refused would be refused again: a run keeps its own."""

    def fail(*_: object, **__: object) -> None:
        raise DeploymentError(error)

    monkeypatch.setattr("flwr_privacy.simulations.deployment.deploy.deploy", fail)
    arguments = ("--nodes", "2", "--task", "digits-linear", "--no-policy", "--out", "r")
    done = command("deploy", *arguments)
    assert done.returncode == 4
    told = ["to go on: flwr-privacy deploy --resume r"] if hint else []
    assert done.stderr.splitlines() == [*f"error: {error}".splitlines(), *told]


@pytest.mark.parametrize("name", ["deploy", "run"])
def test_a_run_that_somebody_carries_out_is_not_gone_on_with(
    tmp_path: Path, command: Command, name: str
) -> None:
    engine = "deployed" if name == "deploy" else "inline"
    settings = Settings(clients=3, task="digits-linear")
    run = RunFolder.create(tmp_path / "r", settings, engine=engine, nodes=3)
    run.append({"round": 0})
    before = run.summary_path.read_bytes()
    with run.alone():
        done = command(name, "--resume", "r")
    assert done.returncode == 2
    assert "run folder = 'r': expected a run that nobody is carrying out" in done.stderr
    assert run.summary_path.read_bytes() == before
    with run.alone():  # nobody has it any more
        pass


@pytest.mark.deployed
def test_a_run_goes_on_without_a_node_that_is_killed_and_says_so(tmp_path: Path) -> None:
    arguments = ["--scheme", "udp", "--set", "unit=record", "--task", "digits-linear"]
    arguments += ["--nodes", "3", "--rounds", "2", "--no-policy"]
    arguments += ["--test-seed", "7", "--timeout", "500", "--out", "r"]
    output, metrics = tmp_path / "output", tmp_path / "r" / "metrics.jsonl"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [str(COMMAND), "deploy", *arguments], cwd=tmp_path, stdout=stream, stderr=stream
        )
    try:
        while not metrics.exists() or metrics.read_text().count("\n") < 2:  # rounds 0 and 1
            assert process.poll() is None, output.read_text()
            time.sleep(0.05)
        own = descendants(process.pid)
        (line,) = (x for x in output.read_text().splitlines() if x.startswith("node 1: client 1, "))
        os.kill(int(line.rpartition(" ")[2]), signal.SIGKILL)
        assert process.wait(timeout=500) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    text = output.read_text()
    assert "WARNING: --test-seed" in text
    assert "lost node 1 (client 1) in round 2" in text
    assert "killed by signal 9; the run goes on without it" in text
    assert "nodes: 2 of 3 to the end" in text
    run = RunFolder.open(tmp_path / "r")
    assert run.summary["status"] == "completed"
    assert [(n["client_id"], n["server_round"]) for n in run.summary["lost_nodes"]] == [("1", 2)]
    first, second = run.rounds()[1:]
    assert (first["asked"], first["accumulated"]) == (3, 3)
    assert not second["skipped"]
    with np.load(run.model_path) as model:
        assert all(np.isfinite(model[name]).all() for name in model)
    # Each node has a ledger of its own, that of the killed one too.
    ledgers = sorted((run.path / "deployment").glob("node-*/state/*.ledger"))
    assert [ledger.name for ledger in ledgers] == ["0.ledger", "1.ledger", "2.ledger"]
    assert json.loads((run.path / "privacy-card.json").read_text())
    # Nothing that was started still runs.
    assert len(own) > 4
    left = {p.pid for p in descendants(0)}
    assert not left & {p.pid for p in own}
    assert not [p for p in descendants(0) if str(tmp_path) in p.command]
