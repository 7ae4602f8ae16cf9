"""Starts a SuperLink with Flower's simulation engine, used by this process alone.

It listens on a loopback port of its own, keeps its files in a folder of its own and, unless a
running cluster is named, brings a Ray cluster of its own. So it neither meets nor leaves anything:
`flwr run` by itself would use whatever SuperLink listens on Flower's default port, and Ray
whatever cluster was started last on the machine.
"""

import importlib.util
import json
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w

from flwr_privacy.clients.node.node_settings import COHORTS_VARIABLE
from flwr_privacy.errors import EngineError

from .flower_processes import HOST, answers, check_port, environment, executable, free_port, new_run
from .process_supervisor import Process, ProcessSupervisor, ray_command

__all__ = ["TEST_SEED_VARIABLE", "SuperLink"]

START_TIMEOUT = 90.0
TEST_SEED_VARIABLE = "FLWR_PRIVACY_TEST_SEED"  # for the clients of this package's app
# Ray puts sockets there, and the whole path of a socket has about 100 characters.
LONGEST_FOLDER = 30


class SuperLink:
    """A running SuperLink with Flower's Ray engine.

    Parameters
    ----------
    ray_address : str, optional
        ``host:port`` of a running Ray cluster; by default a new one is started.
    cpus, gpus : int, optional
        Resources of a new Ray cluster; by default what the machine has.
    port : int, optional
        Loopback port; by default a free one.
    log_path : Path, optional
        File to which all output is appended; by default one in the temporary folder.
    test_seed : int, optional
        What the environment of a new Ray cluster has as TEST_SEED_VARIABLE.

    Raises
    ------
    InvalidParameterError
        If the port is taken.
    EngineError
        If Flower or Ray is not installed or does not start, or no cluster is at `ray_address`.
    """

    def __init__(
        self,
        *,
        ray_address: str | None = None,
        cpus: int | None = None,
        gpus: int | None = None,
        port: int | None = None,
        log_path: Path | None = None,
        test_seed: int | None = None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise EngineError("Ray is not installed: pip install 'flwr-privacy[simulation]'")
        if port is not None:
            check_port("port", port)
        if ray_address is not None:
            _check_reachable(ray_address)
        self._port = port or free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="flp-", dir=_short_folder()))
        self.log = (log_path or self.folder / "log").absolute()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        flwr_home = Path(tempfile.mkdtemp(prefix="flwr-home-", dir=self.folder))
        (flwr_home / "config.toml").write_text(tomli_w.dumps(_connection(self._port)))

        ray_port = free_port()
        self._environment = _environment(flwr_home, ray_address or f"{HOST}:{ray_port}")
        if test_seed is not None:
            self._environment[TEST_SEED_VARIABLE] = str(test_seed)
        commands = [self._superlink_command()]
        ready: Path | None = None
        if ray_address is None:
            self._environment["RAY_TMPDIR"] = str(self.folder)
            ready = self.folder / "ray-is-ready"
            commands.append(ray_command(port=ray_port, cpus=cpus, gpus=gpus, ready=ready))

        self._known_runs: set[str] = set()
        self._supervisor = ProcessSupervisor(
            commands,
            environment=self._environment,
            log=self.log,
            remove=[self.folder],
        )
        self._wait_until_ready(ready)

    @property
    def alive(self) -> bool:
        """Whether the SuperLink and its Ray cluster run."""
        return self._supervisor.alive

    def simulation(self) -> Process | None:
        """Return the process that runs an app, if there is one."""
        return next((p for p in self._supervisor.processes() if p.is_simulation), None)

    def processes(self) -> list[Process]:
        """Return all processes of the SuperLink, its runs and its Ray cluster."""
        return self._supervisor.processes()

    def submit(
        self, app_dir: Path, *, run_config: Path, federation_config: str
    ) -> subprocess.Popen[bytes]:
        """Start ``flwr run``; it appends the run's output to the log and ends with the run.

        Its exit status tells nothing: it is 0 when the app failed.
        """
        command = [executable("flwr"), "run", str(app_dir.absolute()), "--stream"]
        command += ["--run-config", str(run_config), "--federation-config", federation_config]
        with self.log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def result(self) -> tuple[str, str] | None:
        """Return status and details of the run submitted last; None if it was refused."""
        command = [executable("flwr"), "ls", "--format", "json"]
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self._environment,
            check=False,
        )
        try:
            runs: list[dict[str, Any]] = json.loads(answer.stdout)["runs"]
        except (json.JSONDecodeError, KeyError) as error:
            output = answer.stdout + answer.stderr
            raise EngineError(f"flwr ls did not list the runs: {output.strip()}") from error
        run = new_run(runs, self._known_runs)
        return None if run is None else (str(run["status"]), str(run["status-details"]))

    def stop(self) -> None:
        """End all processes and remove the temporary folders."""
        self._supervisor.stop()

    def _superlink_command(self) -> list[str]:
        command = [executable("flower-superlink"), "--insecure", "--simulation"]
        command += ["--isolation", "subprocess", "--host", HOST, "--port", str(self._port)]
        return command

    def _wait_until_ready(self, ray_is_ready: Path | None) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        try:
            while not (answers(self._port) and (ray_is_ready is None or ray_is_ready.exists())):
                if not self.alive or time.monotonic() > deadline:
                    output = self.log.read_text(errors="replace")[-2000:]
                    raise EngineError(f"Flower's SuperLink or Ray did not start:\n{output}")
                time.sleep(0.05)
        except (EngineError, KeyboardInterrupt):
            self.stop()
            raise


def _check_reachable(ray_address: str) -> None:
    # Ray itself would try for more than a minute.
    host, _, port = ray_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise EngineError(
            f"no Ray cluster answers at ray_address {ray_address}: {error}"
        ) from error


def _connection(port: int) -> dict[str, Any]:
    return {"superlink": {"default": "own", "own": {"address": f"{HOST}:{port}", "insecure": True}}}


def _environment(flwr_home: Path, ray_address: str) -> dict[str, str]:
    strange = ("FLWR_LOCAL_", "FLWR_INTERNAL_", TEST_SEED_VARIABLE)
    local = f"{HOST},localhost"
    return {
        **environment(flwr_home, inherits=lambda name: not name.startswith(strange)),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray will do anyway, without its warning
        COHORTS_VARIABLE: "1",  # the nodes of a simulation run the clients they are told
        "RAY_ADDRESS": ray_address,
        "RAY_USAGE_STATS_ENABLED": "0",
        "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), local])),
        "no_proxy": ",".join(filter(None, [os.environ.get("no_proxy"), local])),
    }


def _short_folder() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder) <= LONGEST_FOLDER else "/tmp"
