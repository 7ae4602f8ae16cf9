import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT

from flwr_privacy.errors import EngineError, InvalidParameterError
from flwr_privacy.simulations.engines import process_supervisor as supervisor_module
from flwr_privacy.simulations.engines.flower_processes import free_port, is_free
from flwr_privacy.simulations.engines.logs import exceptions_in
from flwr_privacy.simulations.engines.process_supervisor import ProcessSupervisor, descendants
from flwr_privacy.simulations.engines.ray_engine import RayResources, RaySession
from flwr_privacy.simulations.engines.superlink import SuperLink

from .ray_cluster import ray_cluster

SETTINGS = (
    'text = """line\n\'\'\'quoted\'\'\'"""\nname = "ümlaut = \\"x\\""\n\n[t]\nwidths = [4, 8]\n'
)

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "pinger"
version = "1.0.0"
description = "Asks every node who it is"
license = "Apache-2.0"
dependencies = ["flwr>=1.41"]

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "server:app"
clientapp = "client:app"

[tool.flwr.app.config]
settings = ""
out = ""
mode = ""
share = 0.5
"""

SERVER = """
import json
import time
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    if config["mode"] == "fail":
        raise ValueError("the model fell over")
    if config["mode"] == "hang":
        Path(config["out"]).touch()
        time.sleep(600)
    while len(nodes := list(grid.get_node_ids())) < 4:
        time.sleep(0.1)
    replies = grid.send_and_receive([Message(RecordDict(), node, "query") for node in nodes])
    hosts = sorted({reply.content["reply"]["host"] for reply in replies})
    Path(config["out"]).write_text(json.dumps({**config, "nodes": len(nodes), "hosts": hosts}))
"""

CLIENT = """
import time

import ray
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message, context):
    time.sleep(0.3)
    reply = ConfigRecord({"host": ray.get_runtime_context().get_node_id()})
    return Message(RecordDict({"reply": reply}), reply_to=message)
"""


def write_app(folder: Path) -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "server.py").write_text(SERVER)
    (folder / "client.py").write_text(CLIENT)
    return folder


@pytest.mark.parametrize("cpus", [0.5, 1.0])
def test_cpu_share_is_a_whole_number(cpus: float) -> None:
    with pytest.raises(InvalidParameterError, match="CPU shares are whole numbers, GPU shares may"):
        RayResources(cpus_per_client=cpus)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"cpus_per_client": 0}, "cpus_per_client = 0"),
        ({"gpus_per_client": -0.1}, "gpus_per_client = -0.1"),
        ({"gpus_per_client": 1.5}, "a fraction up to 1 or a whole number"),
        ({"gpus_per_client": 0.5, "total_gpus": 0}, "gpus_per_client = 0.5"),
        ({"cpus_per_client": 3, "total_cpus": 2}, "total_cpus = 2"),
        ({"total_gpus": 0.5}, "total_gpus = 0.5"),
        ({"ray_address": "auto"}, "ray_address = 'auto': expected host:port"),
        ({"ray_address": "ray://head:10001"}, "host:port"),
        ({"ray_address": "head:6379", "total_cpus": 2}, "total_cpus = 2: expected no value with"),
    ],
)
def test_wrong_resources_are_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        RayResources(**values)  # type: ignore[arg-type]


def test_federation_config() -> None:
    assert RayResources(gpus_per_client=0.25).federation_config(nodes=7) == (
        "num-supernodes=7 client-resources-num-cpus=1 client-resources-num-gpus=0.25"
    )


def test_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(InvalidParameterError, match=f"port = {port}: .* not taken"):
            RaySession(port=port).__enter__()


def test_free_port_is_none_that_ray_is_fixed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe(socket.socket):
        ports = iter([DEFAULT_DASHBOARD_AGENT_LISTEN_PORT, 40_000])

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", next(self.ports)

    monkeypatch.setattr(socket, "socket", Probe)
    assert free_port() == 40_000


def test_unreachable_cluster_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=f"no Ray cluster answers at ray_address {address}"):
        RaySession(resources=RayResources(ray_address=address)).__enter__()


def test_wrong_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    session = RaySession()
    with pytest.raises(InvalidParameterError, match="nodes = 0"):
        session.run(tmp_path, nodes=0, run_config={})
    with pytest.raises(InvalidParameterError, match="app_dir"):
        session.run(tmp_path, nodes=1, run_config={})
    app = write_app(tmp_path / "app")
    with pytest.raises(InvalidParameterError, match=r"run_config\.settings"):
        session.run(app, nodes=1, run_config={"settings": [1]})  # type: ignore[dict-item]


def test_exceptions_in_a_log() -> None:
    log = textwrap.dedent(
        """\
        \x1b[92mINFO \x1b[0m:      Starting
        \x1b[36m(ClientAppActor pid=12)\x1b[0m   File "/w/client.py", line 7, in query
        \x1b[36m(ClientAppActor pid=12)\x1b[0m ValueError: client is unwell
        Traceback (most recent call last):
          File "/w/a.py", line 1, in outer
            inner()
          File "/w/b.py", line 2, in inner
            raise KeyError("x")
        KeyError: 'x'

        During handling of the above exception, another exception occurred:

        Traceback (most recent call last):
          File "/w/a.py", line 3, in <module>
            ^^^^^
        RuntimeError: gave up
        """
    )
    assert exceptions_in(log + log) == [
        "ValueError: client is unwell (client.py, line 7, in query)",
        "KeyError: 'x' (b.py, line 2, in inner)",
        "RuntimeError: gave up (a.py, line 3, in <module>)",
    ]


def ended(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not set(pids) & {process.pid for process in descendants(0)}:
            return True
        time.sleep(0.1)
    return False


def keep_an_orphan(folder: Path) -> ProcessSupervisor:
    # A child that has left its session, and whose parent is gone.
    shell = "setsid sh -c 'sleep 300 & echo $! > child.pid; sleep 300' & sleep 300"
    folder.mkdir()
    supervisor = ProcessSupervisor(
        [["sh", "-c", f"cd {folder}; {shell}"]],
        environment=os.environ,
        log=folder.parent / "log",
        remove=[folder],
    )
    while len(supervisor.processes()) < 4 or not (folder / "child.pid").read_text():
        time.sleep(0.05)
    return supervisor


def test_supervisor_ends_everything_and_removes_its_folders(tmp_path: Path) -> None:
    supervisor = keep_an_orphan(tmp_path / "kept")
    child = int((tmp_path / "kept" / "child.pid").read_text())
    pids = [process.pid for process in supervisor.processes()]
    assert child in pids
    if sys.platform == "linux":
        parent = next(p.parent for p in supervisor.processes() if p.pid == child)
        os.kill(parent, signal.SIGKILL)
        time.sleep(0.2)
        assert child in [process.pid for process in supervisor.processes()]
    supervisor.stop()
    assert ended(pids)
    assert not (tmp_path / "kept").exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is one way only")
def test_both_ways_to_list_processes_agree(tmp_path: Path) -> None:
    supervisor = keep_an_orphan(tmp_path / "kept")
    try:
        ours = {process.pid: process.parent for process in supervisor.processes()}
        listed = {p.pid: p.parent for p in supervisor_module._running_by_ps()}
        assert ours.items() <= listed.items()
    finally:
        supervisor.stop()


def test_supervisor_ends_everything_when_its_owner_is_killed(tmp_path: Path) -> None:
    code = f"""
        import os, time
        from pathlib import Path
        from flwr_privacy.simulations.engines.process_supervisor import ProcessSupervisor
        folder = Path({str(tmp_path)!r})
        commands = [["sleep", "300"]]
        supervisor = ProcessSupervisor(commands, environment=os.environ, log=folder / "log")
        while not supervisor.processes():
            time.sleep(0.05)
        (folder / "pid").write_text(str(supervisor.processes()[0].pid))
        os.kill(os.getpid(), 9)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert ended([int((tmp_path / "pid").read_text())])


def test_supervisor_ends_when_a_command_ends(tmp_path: Path) -> None:
    supervisor = ProcessSupervisor(
        [["true"], ["sleep", "300"]], environment=os.environ, log=tmp_path / "log"
    )
    deadline = time.monotonic() + 10
    while supervisor.alive and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not supervisor.alive
    supervisor.stop()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(tmp_path_factory.mktemp("apps") / "pinger")


@pytest.fixture
def session(_ray_session: RaySession) -> RaySession:
    """Return the session of all tests: these leave it as usable as they found it."""
    return _ray_session


@pytest.mark.smoke
@pytest.mark.ray
def test_settings_arrive_intact(session: RaySession, app: Path, tmp_path: Path) -> None:
    polls: list[int] = []
    out = tmp_path / "out.json"
    session.run(
        app,
        nodes=4,
        run_config={"settings": SETTINGS, "out": str(out), "share": 0.25},
        on_poll=lambda: polls.append(1),
        timeout=120,
    )
    result = json.loads(out.read_text())
    assert result["settings"] == SETTINGS
    assert (result["share"], result["nodes"], len(result["hosts"])) == (0.25, 4, 1)
    assert polls


@pytest.mark.smoke
@pytest.mark.ray
def test_failing_app(session: RaySession, app: Path) -> None:
    with pytest.raises(EngineError) as failure:
        session.run(app, nodes=4, run_config={"mode": "fail"}, timeout=120)
    text = str(failure.value)
    assert "ValueError: the model fell over (server.py, line 16, in main)" in text
    assert "engine.log" in text
    assert len(text.splitlines()) < 10


@pytest.mark.smoke
@pytest.mark.ray
def test_undeclared_key_is_refused(session: RaySession, app: Path) -> None:
    with pytest.raises(EngineError, match=r"flwr run refused the app(.|\n)*'rounds'"):
        session.run(app, nodes=4, run_config={"rounds": 3}, timeout=120)


@pytest.mark.smoke
@pytest.mark.ray
def test_killed_app_then_nothing_is_left(session: RaySession, app: Path, tmp_path: Path) -> None:
    out = tmp_path / "hangs"
    seen: dict[int, str] = {}
    folders: list[Path] = []

    def kill_simulation() -> None:
        link = session._superlink
        assert isinstance(link, SuperLink)
        folders.append(link.folder)
        seen.update({process.pid: process.command for process in link.processes()})
        simulation = link.simulation()
        if out.exists() and simulation is not None:
            os.kill(simulation.pid, signal.SIGKILL)

    with pytest.raises(EngineError, match="the app's process was killed"):
        session.run(
            app,
            nodes=4,
            run_config={"mode": "hang", "out": str(out)},
            on_poll=kill_simulation,
            timeout=120,
        )
    commands = " ".join(seen.values())
    for name in ("raylet", "gcs_server", "flower-superlink", "flower-superexec"):
        assert name in commands
    assert ended(list(seen))
    assert not folders[0].exists()


@pytest.mark.ray
def test_existing_cluster_of_two_nodes(app: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with ray_cluster(tmp_path, [{}, {}]) as (address, holder):
        resources = RayResources(ray_address=address)
        with RaySession(resources=resources, log_path=tmp_path / "log") as session:
            session.run(app, nodes=8, run_config={"out": str(out)}, timeout=120)
        assert len(json.loads(out.read_text())["hosts"]) == 2
        assert sum("raylet/raylet" in process.command for process in holder.processes()) == 2


@pytest.mark.smoke
@pytest.mark.ray
def test_share_larger_than_the_cluster(app: Path) -> None:
    with (
        RaySession(resources=RayResources(total_cpus=1, gpus_per_client=1)) as session,
        pytest.raises(EngineError, match="ActorPool is empty"),
    ):
        session.run(app, nodes=4, run_config={}, timeout=120)
