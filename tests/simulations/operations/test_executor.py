"""Which apps a node runs: the operator's list, and what the executor does with an app."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from flwr.supercore.constant import SUPEREXEC_AUTH_SIGNATURE_HEADER
from typer.testing import CliRunner

from flwr_privacy.errors import DeclinedError, EngineError, InvalidParameterError
from flwr_privacy.simulations.cli import app as cli
from flwr_privacy.simulations.operations import executor
from flwr_privacy.simulations.operations.allowed_apps import AllowedApp, AllowedApps, entry_of
from flwr_privacy.simulations.operations.executor import RuntimeAPI, execute, read_secret

PROJECT = """
[project]
name = "app"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "ours"
[tool.flwr.app.components]
serverapp = "its_client:app"
clientapp = "its_client:app"
"""
CLIENT = """
import os
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
print("imported", {mark!r})
print("data set", repr(os.environ.get("FLWR_PRIVACY_DATA_SET")))
app = ClientApp()

@app.train()
def train(message, context):
    if {fails!r}:
        raise ValueError("what is in the data")
    return Message(RecordDict({{"m": MetricRecord({{"n": 1}})}}), reply_to=message)
"""
# What a task has from a SuperNode, answered in a process of its own.
TASK = """
import json, sys
from pathlib import Path
from flwr.app import Context, Message, RecordDict
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run
from flwr_privacy.simulations.engines.inline.flower_internals import TaskIdentity
from flwr_privacy.simulations.operations import executor

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 7, 3
message = Message(RecordDict(), dst_node_id=7, message_type="train")
context = Context(1, 7, {}, RecordDict(), {})
run = Run.create_empty(1)
run.fab_id, run.fab_version = "ours/app", "1.0.0"
fab, allowed, claimed = sys.argv[1:]
given = Fab(claimed, Path(fab).read_bytes(), {})
reply = executor._answer(message, context, run, given, Path(allowed))
code = reply.error.code if reply.has_error() else None
print(json.dumps([code, reply.error.reason if reply.has_error() else ""]))
"""


def fab_of(folder: Path, *, mark: str = "allowed", fails: bool = False) -> Path:
    files = {"pyproject.toml": PROJECT, "its_client.py": CLIENT.format(mark=mark, fails=fails)}
    content = "\n".join(
        f"{name},{hashlib.sha256(text.encode()).hexdigest()},{8 * len(text)}"
        for name, text in files.items()
    )
    path = folder / f"{mark}.fab"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, ".info/CONTENT": content}.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def fab(tmp_path: Path) -> Path:
    return fab_of(tmp_path)


@pytest.fixture
def allowed(fab: Path) -> Path:
    path = fab.with_name("allowed-apps.toml")
    path.write_text(entry_of(fab))
    return path


def answered(fab: Path, allowed: Path, claimed: str = "") -> tuple[int | None, str, str]:
    """Return code and reason of the answer's error, and what the process has printed."""
    home = {**os.environ, "FLWR_HOME": str(allowed.parent / "home")}
    done = subprocess.run(
        [sys.executable, "-c", TASK, str(fab), str(allowed), claimed],
        capture_output=True,
        text=True,
        check=False,
        env=home,
    )
    assert done.returncode == 0, done.stderr
    code, reason = json.loads(done.stdout.splitlines()[-1])
    return code, reason, done.stdout + done.stderr


def test_an_app_that_is_allowed_runs(fab: Path, allowed: Path) -> None:
    code, _, text = answered(fab, allowed)
    assert code is None, text
    assert "imported allowed" in text
    assert "runs ours/app 1.0.0, which is allowed" in text


def test_the_servers_hash_is_not_believed(tmp_path: Path, fab: Path, allowed: Path) -> None:
    changed = fab_of(tmp_path, mark="changed")
    true = hashlib.sha256(fab.read_bytes()).hexdigest()
    code, reason, text = answered(changed, allowed, claimed=true)
    assert code == 7
    assert hashlib.sha256(changed.read_bytes()).hexdigest() in reason
    assert "imported" not in text
    assert "refused, called 'ours/app 1.0.0' by the server: this node does not run" in text


def test_what_an_earlier_app_has_left_in_flowers_folder_is_not_run(
    tmp_path: Path, fab: Path, allowed: Path
) -> None:
    digits = hashlib.sha256(fab.read_bytes()).hexdigest()[:8]
    planted = tmp_path / "home" / "apps" / f"ours.app.1.0.0.{digits}"
    planted.mkdir(parents=True)
    (planted / "pyproject.toml").write_text(PROJECT)
    (planted / "its_client.py").write_text(CLIENT.format(mark="planted", fails=False))
    code, _, text = answered(fab, allowed, claimed=digits)
    assert code is None
    assert "imported allowed" in text
    assert "planted" not in text


def test_an_app_without_a_fab_is_refused(tmp_path: Path, allowed: Path) -> None:
    empty = tmp_path / "empty.fab"
    empty.touch()
    code, reason, _ = answered(empty, allowed)
    assert code == 7
    assert "e3b0c442" in reason


def test_a_list_that_cannot_be_read_allows_nothing(fab: Path, allowed: Path) -> None:
    allowed.write_text("[[app]]")
    code, reason, text = answered(fab, allowed)
    assert (code, reason) == (7, "this node's list of allowed apps cannot be read")
    assert "imported" not in text


def test_an_app_that_fails_answers_as_on_flowers_executor(tmp_path: Path) -> None:
    fab, allowed = fab_of(tmp_path, fails=True), tmp_path / "allowed-apps.toml"
    allowed.write_text(entry_of(fab))
    code, reason, text = answered(fab, allowed)
    assert (code, reason) == (2, "<class 'ValueError'>:<'what is in the data'>")
    assert "Traceback" in text


def test_a_list_names_and_allows_what_was_appended(tmp_path: Path) -> None:
    one, two = fab_of(tmp_path), fab_of(tmp_path, mark="two")
    path = tmp_path / "allowed-apps.toml"
    for fab in (one, two, two):  # twice is no error
        done = CliRunner().invoke(cli, ["node", "allow", str(fab)])
        with path.open("a") as file:
            file.write(done.stdout)
    apps = AllowedApps.read(path)
    found = [apps.check(fab.read_bytes()) for fab in (one, two)]
    assert found == [AllowedApp("ours/app 1.0.0")] * 2
    with pytest.raises(DeclinedError, match="this node does not run the app whose FAB has sha256"):
        apps.check(one.read_bytes() + b"\0")
    digest = hashlib.sha256(one.read_bytes()).hexdigest()
    with pytest.raises(DeclinedError):  # Flower compares eight digits
        AllowedApps({digest[:-1] + "x": AllowedApp("almost")}).check(one.read_bytes())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"keys = \[\]: expected tables \[\[app\]\]"),
        ("app = []", "expected tables"),
        ("app = [1]", "app = 1: expected a table with name and sha256"),
        ('[[app]]\nname = "a"', "expected a table with name and sha256"),
        ('[[app]]\nname = "a"\nsha256 = "ABC"', "app.sha256 = 'ABC': expected 64 hexadecimal"),
        (f'[[app]]\nname = "a"\nsha256 = "{"0" * 64}"\ndata_set = "../x"', "app.data_set = '../x'"),
        (f'[[app]]\nname = "a"\nsha256 = "{"0" * 64}"\ndata_set = 3', "app.data_set = ''"),
        (
            f'[[app]]\nname = "a"\nsha256 = "{"0" * 64}"\ndata_set = "x"\n'
            f'[[app]]\nname = "a"\nsha256 = "{"0" * 64}"\n',
            "app.data_set = None: expected one data set for one app; a has several",
        ),
        (f'[[app]]\nname = "a\\nb"\nsha256 = "{"0" * 64}"', "app.name = "),
        (f'allow = "all"\n[[app]]\nname = "a"\nsha256 = "{"0" * 64}"', "keys = "),
    ],
)
def test_a_list_with_anything_else_in_it_is_an_error(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "allowed-apps.toml"
    path.write_text(text)
    with pytest.raises(InvalidParameterError, match=problem):
        AllowedApps.read(path)


def test_the_operators_list_says_on_which_data_set_an_app_trains(fab: Path, allowed: Path) -> None:
    assert "data set None" in answered(fab, allowed)[2]
    allowed.write_text(entry_of(fab) + 'data_set = "images"\n')
    assert "data set 'images'" in answered(fab, allowed)[2]


def listed(*apps: tuple[str, str | None]) -> AllowedApps:
    return AllowedApps({f"{i:064x}": AllowedApp(*app) for i, app in enumerate(apps)})


def test_apps_that_would_share_a_ledger_by_accident_are_named() -> None:
    assert listed(("a/x 1.0", None), ("a/x 1.1", None)).sharing() == []
    assert listed(("a/x 1.0", "x"), ("b/y 1.0", None)).sharing() == []
    assert listed(("a/x 1.0", "x"), ("b/y 1.0", "x")).sharing() == []  # it was said
    unnamed = listed(("b/y 1.0", None), ("a/x 1.0", None), ("c/z 2.0", "z"))
    assert unnamed.sharing() == ["a/x 1.0", "b/y 1.0"]


def test_what_is_no_fab_is_not_allowed(tmp_path: Path) -> None:
    path = tmp_path / "app.fab"
    for content in (None, b"PK", b""):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InvalidParameterError, match="expected a FAB"):
            entry_of(path)


class SuperNode(BaseHTTPRequestHandler):
    """Answers who asks for a task: a status each, or 0 for a connection that breaks off."""

    unsigned: ClassVar[list[int]] = []
    signed: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        own = self.signed if self.headers.get(SUPEREXEC_AUTH_SIGNATURE_HEADER) else self.unsigned
        if status := own.pop(0) if own else 401:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.send_header("Content-Type", "application/protobuf")
            self.end_headers()

    def log_message(self, *given: Any) -> None:
        pass


@pytest.fixture
def supernode() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), SuperNode) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("unsigned", "signed", "problem"),
    [
        ([200], [], "gives its messages to others, too, who run any app: start it with"),
        ([0, 503, 200], [], "gives its messages to others"),
        ([401], [200, 200, 401], "has another secret"),
        # It was started anew, without --isolation process: Flower's own executor runs beside it.
        ([401, 0, 200], [200, 0], "gives its messages to others"),
        ([401, 401, 200], [503, 0], "gives its messages to others"),
    ],
)
def test_a_supernode_that_anybody_may_ask_is_not_served(
    supernode: str,
    allowed: Path,
    monkeypatch: pytest.MonkeyPatch,
    unsigned: list[int],
    signed: list[int],
    problem: str,
) -> None:
    monkeypatch.setattr(executor, "POLL", 0.01)
    monkeypatch.setattr(SuperNode, "unsigned", unsigned)
    monkeypatch.setattr(SuperNode, "signed", signed)
    with pytest.raises(EngineError, match=problem):
        execute(RuntimeAPI(address=supernode), allowed, b"secret")
    assert unsigned == signed == []


def test_a_plain_connection_stays_on_this_machine(tmp_path: Path) -> None:
    for address in ("localhost:9094", "127.0.0.1:9094", "[::1]:9094"):
        RuntimeAPI(address=address)
    for address in ("10.0.0.1:9094", "node.example.org:9094"):
        with pytest.raises(InvalidParameterError, match="or --root-certificates"):
            RuntimeAPI(address=address)
    with pytest.raises(InvalidParameterError, match="expected host:port"):
        RuntimeAPI(address="localhost")
    with pytest.raises(InvalidParameterError, match="--root-certificates"):
        RuntimeAPI(address="10.0.0.1:9094", certificates=tmp_path / "none.pem")


def test_a_secret_is_there_and_not_empty(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(InvalidParameterError, match="a file that can be read"):
        read_secret(path)
    path.touch()
    with pytest.raises(InvalidParameterError, match="not empty"):
        read_secret(path)
    path.write_bytes(b"s")
    assert read_secret(path) == b"s"
