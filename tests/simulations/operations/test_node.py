"""What `flwr-privacy node check` finds, and what `node metrics` tells a monitor."""

import email.utils
import errno
import http.server
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.clients.node import context_store
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.pipeline.operator_checks import PINS_VARIABLE
from flwr_privacy.privacy.ledger import Entry, Ledger, Question
from flwr_privacy.simulations.cli import app
from flwr_privacy.simulations.deployment import keys
from flwr_privacy.simulations.operations import node_checks
from flwr_privacy.wire.pins import Identity

SECRET = "9f1c-an-experiment"


def run(*arguments: str | Path) -> Result:
    command = ["node", *map(str, arguments)]
    return CliRunner().invoke(app, command, catch_exceptions=False)


def charge(folder: Path, server_round: int, *, sampling: float = 1.0, unit: str = "record") -> None:
    question = Question(experiment_id=SECRET, phase="train", server_round=server_round)
    own = Charge(neighbours="replace_one", noise_multiplier=2.0, sampling=sampling)
    with Ledger(folder / "ward-7.ledger", data_set="ward-7").locked() as book:
        book.charge(Entry(question=question, scheme="udp", unit=unit, charge=own))


class Node:
    """The files of a node that has everything as it should be."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.state.mkdir(mode=0o700)
        charge(self.state, 1)
        self.policy = folder / "policy.toml"
        self.policy.write_text("max_epsilon = 10.0\nmin_noise_multiplier = 0.5\n")
        self.identity = folder / "ward-7.pem"
        identity = Identity.generate()
        identity.write(self.identity)
        self.pins = folder / "pins.toml"
        self.pins.write_text(
            f'[clients]\n"ward-7" = "{identity.public}"\n'
            f'"ward-8" = "{Identity.generate().public}"\n'
        )
        self.key, _ = keys.write_node_key(folder)
        keys.write_certificates(folder)
        self.certificate = folder / "ca.pem"
        self.allowed_apps = folder / "allowed-apps.toml"
        self.allowed_apps.write_text(f'[[app]]\nname = "ours/app 1.0"\nsha256 = "{"0" * 64}"\n')
        for path in (self.policy, self.pins, self.allowed_apps):
            path.chmod(0o644)

    def options(self) -> list[str]:
        return [f"--{name.replace('_', '-')}={path}" for name, path in vars(self).items()]

    def check(self, *more: str) -> Result:
        return run("check", *self.options(), *more)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    return Node(tmp_path)


def test_a_good_node_has_one_warning(node: Node) -> None:
    done = node.check()
    assert done.exit_code == 0
    warned = [line for line in done.stdout.splitlines() if not line.startswith("ok")]
    assert len(warned) == 1
    assert "1 charges without an answer" in warned[0]
    assert "this node is 'ward-7'" in done.stdout


@pytest.mark.parametrize("method", ["lstat", "is_dir"])
def test_a_state_folder_out_of_reach_has_a_line(
    node: Node, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = getattr(Path, method)

    def denied(path: Path) -> Any:
        if node.state in (path, path.parent):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(Path, method, denied)
    done = node.check()
    assert done.exit_code == 1
    assert "fail  state: --state = " in done.stdout
    assert "that this user may search (Permission denied)\n" in done.stdout


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda n: n.state.rename(n.state.parent / "elsewhere"), ": mkdir -m 700 "),
        (lambda n: n.state.chmod(0o750), "fail  state: other users may look into"),
        (lambda n: (n.state / "ward-7.ledger").chmod(0o640), "fail  state: other users may use"),
        (lambda n: n.policy.unlink(), "fail  policy: policy = "),
        (lambda n: n.policy.write_text("max_epsilons = 1"), "nearest: 'max_epsilon'"),
        (lambda n: n.policy.chmod(0o664), "fail  policy: other users may change it"),
        (lambda n: n.policy.write_text("min_sigma = 1"), "has no max_epsilon and no min_noise"),
        (
            lambda n: n.policy.write_text("max_epsilon = 1e-9\nmin_noise_multiplier = 0.5"),
            "fail  ledger ward-7: epsilon",
        ),
        (
            lambda n: n.policy.write_text('allow_unprotected = ["central-dp"]'),
            "warn  policy: ",
        ),
        (
            lambda n: n.policy.write_text("max_epsilon = 9\nmax_disk = 100"),
            "fail  max_disk: ",
        ),
        (lambda n: n.allowed_apps.unlink(), "fail  allowed-apps: allowed-apps = "),
        (
            lambda n: n.allowed_apps.write_text(
                "".join(f'[[app]]\nname = "{a}"\nsha256 = "{a * 64}"\n' for a in "ab")
            ),
            "warn  allowed-apps: a, b share one ledger: give each a data_set in ",
        ),
        (lambda n: n.allowed_apps.write_text(""), "expected tables [[app]], as `flwr-privacy node"),
        (lambda n: n.allowed_apps.chmod(0o664), "fail  allowed-apps: other users may change them"),
        (lambda n: n.identity.chmod(0o644), "fail  identity: identity ="),
        (lambda n: n.key.chmod(0o640), "fail  key: other users may use"),
        (lambda n: n.key.unlink(), "fail  key: there is no file"),
        (lambda n: n.pins.write_text("[client]"), "fail  pins: pins "),
        (lambda n: n.pins.chmod(0o666), "fail  pins: other users may change them"),
        (
            lambda n: n.pins.write_text(f'[clients]\na = "{Identity.generate().public}"'),
            "warn  pins: ",
        ),
        (lambda n: n.certificate.write_text("none"), "has no certificate in PEM format"),
        (lambda n: n.certificate.unlink(), "fail  certificate: "),
        (
            lambda n: os.utime(n.state / "ward-7.ledger", (time.time() + 9999,) * 2),
            "fail  clock: a file of the state is of",
        ),
    ],
)
def test_what_is_wrong_has_a_line(node: Node, wrong: Any, line: str) -> None:
    wrong(node)
    done = node.check()
    assert line in done.stdout
    assert done.exit_code == (1 if "\nfail" in done.stdout else 0)
    if line.startswith("fail"):
        assert done.exit_code == 1


@pytest.mark.parametrize(
    ("days", "line"),
    [
        (0, "fail  certificate: "),
        (10, "warn  certificate: "),
        (40, "ok    certificate: "),
    ],
)
def test_a_certificate_is_renewed_in_time(
    node: Node, monkeypatch: pytest.MonkeyPatch, days: int, line: str
) -> None:
    monkeypatch.setattr(keys, "DAYS", days)
    keys.write_certificates(node.certificate.parent)
    assert line in node.check().stdout


def test_a_full_disk_is_told_before_it_is_full(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 5_000_000

    monkeypatch.setattr(node_checks.shutil, "disk_usage", lambda path: Usage)
    assert "warn  disk: 5000000 bytes are free, 100000000 may be needed" in node.check().stdout


def test_a_node_without_anything_has_no_policy() -> None:
    done = run("check")
    assert done.exit_code == 1
    assert "fail  policy: none is set" in done.stdout
    assert "fail  allowed-apps: none are listed: the node runs any app" in done.stdout


def test_the_nodes_environment_names_its_files(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, path in (
        (context_store.STATE_VARIABLE, node.state),
        (context_store.POLICY_VARIABLE, node.policy),
        (context_store.IDENTITY_VARIABLE, node.identity),
        (PINS_VARIABLE, node.pins),
        ("FLWR_PRIVACY_ALLOWED_APPS", node.allowed_apps),
    ):
        monkeypatch.setenv(variable, str(path))
    text = run("check").stdout
    for path in (node.state, node.policy, node.identity, node.pins, node.allowed_apps):
        assert f"{path}" in text


class SuperLink(http.server.BaseHTTPRequestHandler):
    """Answers as a SuperLink, or as a proxy in front of it."""

    ahead = 0.0
    version = ""
    proxied = False

    def do_GET(self) -> None:
        content = b"{}"
        if self.path == "/openapi.json" and not self.proxied:
            content = b'{"info": {"version": "%s"}}' % self.version.encode()
        self._reply(403 if self.proxied else 200, content)

    def do_POST(self) -> None:
        self._reply(403 if self.proxied else 415, b"{}")

    def _reply(self, status: int, content: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Date", email.utils.formatdate(time.time() + self.ahead, usegmt=True))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *given: Any) -> None:
        pass


@pytest.fixture
def superlink(node: Node) -> Iterator[str]:
    folder = node.certificate.parent
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "superlink.pem", folder / "superlink.key")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), SuperLink) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("answers", "lines"),
    [
        ({}, ["ok    SuperLink: ", "ok    SuperLink's certificate: ", "ok    clock: "]),
        ({}, ["warn  apps: whoever reaches this port may start apps on all nodes (status 415"]),
        ({"proxied": True}, ["ok    apps: ", "a proxy is in front"]),
        ({"version": "9.9"}, ["warn  flwr on both ends: ", "'9.9' at the SuperLink"]),
        ({"ahead": -65.0}, ["fail  clock: 6", " s ahead of the SuperLink's: it refuses this node"]),
        ({"ahead": 200.0}, ["warn  clock: ", "behind the SuperLink's: run NTP"]),
        ({"ahead": 400.0}, ["fail  clock: "]),
    ],
)
def test_a_superlink_is_asked_for_its_certificate_its_time_and_its_doors(
    node: Node, superlink: str, monkeypatch: pytest.MonkeyPatch, answers: Any, lines: list[str]
) -> None:
    for name, value in answers.items():
        monkeypatch.setattr(SuperLink, name, value)
    done = node.check("--superlink", superlink)
    for line in lines:
        assert line in done.stdout, done.stdout
    assert done.exit_code == ("\nfail" in done.stdout)


def test_an_open_door_of_another_machine_is_an_error(
    node: Node, superlink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flwr_privacy.simulations.operations.superlink_checks.is_loopback", lambda host: False
    )
    assert "fail  apps: whoever reaches" in node.check("--superlink", superlink).stdout


def test_a_superlink_that_nobody_vouches_for_is_an_error(node: Node, superlink: str) -> None:
    done = run("check", "--superlink", superlink)
    assert "fail  SuperLink: " in done.stdout
    assert "its certificate is not trusted" in done.stdout
    other = superlink.replace("127.0.0.1", "127.0.0.2")  # not in the certificate, nobody listens
    assert f"fail  SuperLink: {other}" in node.check("--superlink", other).stdout
    for address in ("127.0.0.1", "127.0.0.1:http", ":9443", "a:70000"):
        with pytest.raises(InvalidParameterError, match=r"--superlink = .*: expected HOST:PORT"):
            node.check("--superlink", address)


def metrics(node: Node) -> dict[str, float]:
    text = run("metrics", *node.options()).stdout
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def test_metrics_have_what_the_server_knows_anyway(node: Node) -> None:
    charge(node.state, 2)
    found = metrics(node)
    labels = '{data_set="ward-7",scheme="udp",unit="record"}'
    assert found[f"flwr_privacy_charges{labels}"] == 2
    assert found[f"flwr_privacy_charges_unanswered{labels}"] == 2
    epsilon = spent([Charge(neighbours="replace_one", noise_multiplier=2.0, count=2)], delta=1e-5)
    assert found['flwr_privacy_epsilon{data_set="ward-7"}'] == pytest.approx(epsilon)
    assert found["flwr_privacy_policy_max_epsilon"] == 10
    assert found["flwr_privacy_ledgers_unreadable"] == 0
    assert found['flwr_privacy_check{check="state"}'] == 0
    days = (found["flwr_privacy_certificate_end_seconds"] - time.time()) / 86400
    assert 364 < days < 366
    assert SECRET not in run("metrics", *node.options()).stdout
    named = run("metrics", "--node", 'a"b', *node.options()).stdout.splitlines()
    assert all('{node="a\\"b"' in line for line in named if not line.startswith("#"))
    node.state.chmod(0o755)
    (node.state / "ward-7.ledger").write_bytes(b"damaged")
    assert metrics(node)['flwr_privacy_check{check="state"}'] == 2
    assert metrics(node)["flwr_privacy_ledgers_unreadable"] == 1


def test_metrics_do_not_depend_on_charges_whose_sample_is_a_secret(
    node: Node, tmp_path: Path
) -> None:
    def told() -> list[str]:
        lines = run("metrics", *node.options()).stdout.splitlines()
        return [line for line in lines if not line.startswith("flwr_privacy_written")]

    before = told()
    for server_round in range(2, 30):
        charge(node.state, server_round, sampling=0.1, unit="user")
    assert told() == before
    (node.state / "ward-7.ledger").unlink()
    without = told()
    charge(node.state, 1, sampling=0.1, unit="user")  # the first charge makes the file
    assert told() == without


def test_metrics_are_written_at_once_and_can_be_read_by_the_collector(
    node: Node, tmp_path: Path
) -> None:
    out = tmp_path / "flwr.prom"
    before = os.umask(0o077)
    try:
        done = run("metrics", *node.options(), "--out", out)
    finally:
        os.umask(before)
    assert done.exit_code == 0
    assert out.stat().st_mode & 0o777 == 0o644
    assert out.read_text().endswith("\n")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".flwr")]


BARE = """
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {extra!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Refuse())
from flwr_privacy.simulations.cli import main

sys.argv = ["flwr-privacy", *{arguments!r}]
main()
"""
EXTRA = (
    *("ray", "torch", "torchvision", "sklearn", "galois", "pandas", "matplotlib", "PIL"),
    *("flwr_datasets", "datasets", "threadpoolctl"),
)


@pytest.mark.parametrize(
    "command",
    [
        "ledger show",
        "ledger check",
        "ledger export",
        "state show",
        "state prune",
        "node check",
        "key",
        "executor --help",
        "doctor --certificate",
    ],
)
def test_a_node_without_the_simulation_extra_has_the_commands(node: Node, command: str) -> None:
    arguments = command.split()
    if command == "node check":
        arguments += node.options()
    elif "doctor" in command:
        arguments.append(str(node.certificate))
    elif "--help" not in command:
        arguments += ["--state", str(node.state)]
    if command == "key":
        arguments = ["key", str(node.state / "new.pem")]
    code = BARE.format(extra=EXTRA, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
