"""Starts and stops a SuperLink and SuperNodes on this machine; they talk TLS over loopback.

    with Deployment(nodes=[{"client-id": "ward-0"}, {"client-id": "ward-1"}], folder=path) as d:
        d.run(app_dir, run_config={"rounds": 2})

The SuperLink takes the nodes whose keys were registered with it and no others. Nothing of a
deployment outlives the context, however that ends: every process is held by a `ProcessSupervisor`.
"""

import json
import os
import secrets
import signal
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tomli_w

from flwr_privacy.clients.profiling import PROFILE_VARIABLE
from flwr_privacy.errors import EngineError, InvalidParameterError, check_flag
from flwr_privacy.simulations.engines.flower_processes import (
    HOST,
    answers,
    check_port,
    environment,
    executable,
    free_port,
    new_run,
)
from flwr_privacy.simulations.engines.logs import exceptions_in
from flwr_privacy.simulations.engines.process_supervisor import Process, ProcessSupervisor

from .keys import write_certificates, write_node_key

__all__ = ["Deployment", "DeploymentError"]

Value = str | int | float | bool

START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0
COMMAND_TIMEOUT = 60.0
SHOWN_EXCEPTIONS = 4
SHOWN_LINES = 30
SUPERLINK, NODE, RUN = "superlink", "node-", "run-"  # names of processes and of their logs


class DeploymentError(EngineError):
    """A process did not start or ended too early, or a run did not complete."""


class Deployment:
    """A SuperLink and its SuperNodes, for as long as the context is open.

    Parameters
    ----------
    nodes : sequence of mapping
        The configuration of each node, as ``--node-config`` gets it.
    folder : Path
        Existing folder for certificates, for each process its FLWR_HOME and its log
        (``superlink.log``, ``node-0.log``, ..., ``run-1.log``, ...), and in each node's FLWR_HOME
        (``node-0``, ...) its key.
    node_environment : mapping, optional
        Environment variables of the nodes. What differs between them belongs into `nodes`.
    port : int, optional
        Loopback port of the SuperLink; by default a free one.
    database : bool, default False
        Whether the SuperLink keeps nodes, runs and messages in a file (``superlink.db``), so that
        one that is started again still knows them; by default they are in its memory.
    allowed_apps : Path, optional
        The apps that the nodes run, each with a `flwr-privacy executor` beside it. By default they
        run any.

    Attributes
    ----------
    port : int
        The one port of the SuperLink.
    ca_certificate : Path
        The certificate that nodes and `flwr` trust.

    Raises
    ------
    InvalidParameterError
        If the port is taken, or a value of a node's configuration has a quotation mark in it, which
        Flower's command line cannot carry.
    """

    def __init__(
        self,
        *,
        nodes: Sequence[Mapping[str, Any]],
        folder: Path,
        node_environment: Mapping[str, str] | None = None,
        port: int | None = None,
        database: bool = False,
        allowed_apps: Path | None = None,
    ) -> None:
        if port is not None:
            check_port("port", port)
        self._database = check_flag("database", database)
        self.folder = folder.absolute()
        self.ca_certificate = self.folder / "ca.pem"
        self.port = port or 0
        self._node_configs = [_written(node) for node in nodes]
        self._node_environment = dict(node_environment or {})
        self._allowed_apps = allowed_apps
        self._home = self.folder / SUPERLINK
        self._kept: dict[str, ProcessSupervisor] = {}
        self._stack = ExitStack()
        self._submitted = 0
        self._known_runs: set[str] = set()
        self._ids: dict[int, str] = {}  # Flower's names of the nodes, in this SuperLink

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._stack = stack
            self._certificate, self._key = write_certificates(self.folder)
            self.port = self.port or free_port()
            self._home.mkdir(exist_ok=True)
            (self._home / "config.toml").write_text(tomli_w.dumps(self._connection()))
            self.start_superlink()
            for index in range(len(self._node_configs)):
                self.start(index)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(
        self,
        app_dir: Path,
        *,
        run_config: Mapping[str, Value],
        timeout: float | None = 300.0,
        on_poll: Callable[[], None] | None = None,
        on_lost: Callable[[int, str], None] | None = None,
    ) -> None:
        """Run a Flower App and wait for its end.

        Parameters
        ----------
        app_dir : Path
            Folder with the app's ``pyproject.toml``.
        run_config : mapping
            Values for keys that the app declares.
        timeout : float or None, default 300
            Seconds that the run may take; None for any number. Afterwards the deployment is of no
            more use: the run goes on.
        on_poll : callable, optional
            Called ten times a second while the app runs.
        on_lost : callable, optional
            Called with the number of a node that ended by itself, and how it ended. The node is
            taken out of the federation then, so that no round waits for it, and the run goes on;
            whoever does not want that raises an error. By default such a node ends the run.

        Raises
        ------
        DeploymentError
            If the run's status is not ``finished:completed``, a process of the deployment ends by
            itself, or the time is over.
        """
        self._submitted += 1
        name = f"{RUN}{self._submitted}"
        config = self.folder / f"{name}.toml"
        config.write_text(tomli_w.dumps(dict(run_config)), encoding="utf-8")
        command = ["flwr", "run", str(app_dir.absolute()), "--stream", "--run-config", str(config)]
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        stream = self._keep(name, [command], self._environment(self._home))
        try:
            while stream.alive:
                self._check_alive(but=name, on_lost=on_lost)
                if time.monotonic() > deadline:
                    raise self._error(f"{name} took longer than {timeout:g} s")
                if on_poll is not None:
                    on_poll()
                time.sleep(0.1)
            self._check_alive(but=name, on_lost=on_lost)
            status = self._status()
            if status != "finished:completed":
                raise self._error(f"{name} ended as {status}")
        finally:
            self._drop(name)

    def start(self, index: int, *, environment: Mapping[str, str] | None = None) -> None:
        """Start a node; it connects by itself, and a strategy waits for it.

        Parameters
        ----------
        index : int
            Which one. A node that is not registered gets a new key, and so another name in Flower.
        environment : mapping, optional
            Environment variables of this node, beside those of all.
        """
        name = _name(index)
        home = self.folder / name
        home.mkdir(exist_ok=True)
        if index not in self._ids:
            _, public = write_node_key(home)
            registered = self._listed("supernode", "register", str(public))
            self._ids[index] = str(registered["node-id"])
        command = ["flower-supernode", "--superlink", f"{HOST}:{self.port}"]
        port = str(free_port())
        command += ["--root-certificates", str(self.ca_certificate), "--port", port]
        command += ["--auth-supernode-private-key", str(home / "node.key")]
        if config := self._node_configs[index]:
            command += ["--node-config", config]
        own = {**self._node_environment, **(environment or {})}
        commands = [command]
        if self._allowed_apps is not None:
            (home / "executor.secret").write_bytes(secrets.token_bytes(32))
            shared = ["--superexec-auth-secret-file", str(home / "executor.secret")]
            command += ["--isolation", "process", *shared]
            executor = ["flwr-privacy", "executor", "--allowed-apps", str(self._allowed_apps)]
            executor += ["--runtime-api-address", f"{HOST}:{port}", *shared]
            commands.append(executor)
        self._keep(name, commands, {**self._environment(home), **own})

    def kill(self, index: int) -> None:
        """Kill a node and the app it runs.

        The SuperLink takes it for connected until a minute after its last sign of life, and lets
        nobody connect with its key until then: `unregister` it to start it again at once.
        """
        self._drop(_name(index))

    def unregister(self, index: int) -> None:
        """Remove a node from the federation: messages to it are answered as lost at once.

        Raises
        ------
        DeploymentError
            If it is not registered, or the SuperLink refuses.
        """
        if index not in self._ids:
            raise self._error(f"{_name(index)} is not registered")
        self._listed("supernode", "unregister", self._ids.pop(index))

    def start_superlink(self) -> None:
        """Start the SuperLink, at the same port each time; return when it answers.

        One that was killed knows its nodes and runs again if it has a database. Otherwise the
        nodes end by themselves, and each has to be started anew.

        Raises
        ------
        DeploymentError
            If it does not answer.
        """
        if not self._database:
            self._ids.clear()
            self._known_runs.clear()
        command = ["flower-superlink", "--host", HOST, "--port", str(self.port)]
        command += ["--ssl-ca-certfile", str(self.ca_certificate)]
        command += ["--ssl-certfile", str(self._certificate), "--ssl-keyfile", str(self._key)]
        command += ["--enable-supernode-auth"]
        if self._database:
            command += ["--database", str(self.folder / "superlink.db")]
        self._keep(SUPERLINK, [command], self._environment(self._home))
        self._wait_for_superlink()

    def kill_superlink(self) -> None:
        """Kill the SuperLink and the ServerApps that it runs; a run that goes on fails."""
        self._drop(SUPERLINK)

    def stop(self, index: int) -> None:
        """End a node in order, so that it tells the SuperLink that it leaves."""
        name = _name(index)
        supervisor = self._kept[name]
        told = False  # once only: a second signal would cut its leave-taking short
        deadline = time.monotonic() + STOP_TIMEOUT
        while supervisor.alive:
            if not told and (process := self._supernode(name)) is not None:
                os.kill(process.pid, signal.SIGTERM)
                told = True
            if time.monotonic() > deadline:
                raise self._error(f"{name} did not end within {STOP_TIMEOUT:g} s")
            time.sleep(0.05)
        self._drop(name)

    def alive(self, index: int) -> bool:
        """Tell whether the process of a node runs; it may have ended by itself."""
        return self._kept[_name(index)].alive

    def online(self) -> int:
        """Return the number of nodes that the SuperLink regards as connected."""
        nodes = self._listed("supernode", "list")["nodes"]
        return sum(node["status"] == "online" for node in nodes)

    def pid(self, index: int) -> int:
        """Return the process of a running SuperNode.

        Raises
        ------
        DeploymentError
            If it has ended.
        """
        while self.alive(index):
            if (process := self._supernode(_name(index))) is not None:
                return process.pid
            time.sleep(0.02)  # its supervisor has only just begun
        raise self._error(f"{_name(index)} ended by itself")

    def processes(self) -> list[Process]:
        """Return all processes of the deployment."""
        return [process for supervisor in self._kept.values() for process in supervisor.processes()]

    def _supernode(self, name: str) -> Process | None:
        own = (p for p in self._kept[name].processes() if "flower-supernode" in p.command)
        return next(own, None)

    def _keep(
        self, name: str, commands: list[list[str]], environment: dict[str, str]
    ) -> ProcessSupervisor:
        supervisor = ProcessSupervisor(
            [[executable(command[0]), *command[1:]] for command in commands],
            environment=environment,
            log=self.folder / f"{name}.log",
            umask=0o077,  # the SuperLink's database has the clients' replies
        )
        self._stack.callback(supervisor.stop)
        self._kept[name] = supervisor
        return supervisor

    def _drop(self, name: str) -> None:
        self._kept.pop(name).stop()

    def _wait_for_superlink(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        context = ssl.create_default_context(cafile=str(self.ca_certificate))
        while not answers(self.port, context):
            self._check_alive()
            if time.monotonic() > deadline:
                raise self._error(f"the SuperLink did not answer within {START_TIMEOUT:g} s")
            time.sleep(0.1)

    def _check_alive(
        self, but: str = "", on_lost: Callable[[int, str], None] | None = None
    ) -> None:
        if SUPERLINK not in self._kept:
            raise self._error("the SuperLink was killed")
        for name, supervisor in list(self._kept.items()):
            if name == but or supervisor.alive:
                continue
            if on_lost is None or name == SUPERLINK:
                raise self._error(f"{name} ended by itself ({supervisor.ending})")
            index = next(i for i in range(len(self._node_configs)) if _name(i) == name)
            on_lost(index, supervisor.ending)
            self._drop(name)
            # Otherwise the SuperLink waits a minute for a sign of life. That is no more than slow.
            with suppress(DeploymentError):
                self.unregister(index)

    def _status(self) -> str:
        """Return the status of the newest run; ``flwr run`` exits with 0 when the app failed."""
        run = new_run(self._listed("ls")["runs"], self._known_runs)
        return "refused" if run is None else str(run["status"])

    def _listed(self, *command: str) -> dict[str, Any]:
        try:
            answer = subprocess.run(
                [executable("flwr"), *command, "--format", "json"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=self._environment(self._home),
                timeout=COMMAND_TIMEOUT,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise self._error(f"flwr {' '.join(command)} failed: {error}") from error
        try:
            listed: dict[str, Any] = json.loads(answer.stdout)
        except json.JSONDecodeError:
            listed = {}
        if answer.returncode != 0 or not listed.get("success"):
            raise self._error(f"flwr {' '.join(command)} failed: {answer.stdout}{answer.stderr}")
        return listed

    def _error(self, what: str) -> DeploymentError:
        logs = {name: self.folder / f"{name}.log" for name in self._kept}
        texts = {name: log.read_text(errors="replace") for name, log in logs.items()}
        for kind in (RUN, SUPERLINK, NODE):  # the app's own error comes first
            text = "\n".join(text for name, text in texts.items() if name.startswith(kind))
            if causes := exceptions_in(text)[-SHOWN_EXCEPTIONS:]:
                return DeploymentError("\n  ".join([what, *causes, f"logs: {self.folder}"]))
        shown = [what]
        for name, text in texts.items():
            # The SuperLink writes a line for each request.
            lines = [line for line in text.splitlines() if "[uvicorn.access]" not in line]
            shown += [f"--- {logs[name]}", *lines[-SHOWN_LINES:]]
        return DeploymentError("\n".join(shown))

    def _connection(self) -> dict[str, Any]:
        own = {"address": f"{HOST}:{self.port}", "root-certificates": str(self.ca_certificate)}
        return {"superlink": {"default": "own", "own": own}}

    def _environment(self, home: Path) -> dict[str, str]:
        # What the shell says of Flower, of our nodes or of proxies is not for this deployment.
        return environment(
            home,
            inherits=lambda name: (
                name == PROFILE_VARIABLE
                or (not name.startswith("FLWR_") and not name.lower().endswith("_proxy"))
            ),
        )


def _name(index: int) -> str:
    return f"{NODE}{index}"


def _written(config: Mapping[str, Any]) -> str:
    """Return a node's configuration as ``--node-config`` takes it."""
    for key, value in config.items():
        if '"' in str(value) or "\n" in str(value):
            raise InvalidParameterError(key, value, "text without quotation marks and line breaks")
    # Flower reads it as TOML, which has no pairs of surrogates.
    written = {key: json.dumps(value, ensure_ascii=False) for key, value in config.items()}
    return " ".join(f"{key}={value}" for key, value in written.items())
