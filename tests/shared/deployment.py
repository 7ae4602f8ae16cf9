"""A real deployment on this machine: a SuperLink and SuperNodes that talk TLS over loopback.

    with Deployment(nodes=[{"client-id": "ward-0"}, {"client-id": "ward-1"}], folder=path) as d:
        d.run(app_dir, run_config={"rounds": 2})

Nothing of it outlives the context, however that ends: every process is held by a `Keeper`.
"""

import datetime
import http.client
import ipaddress
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from flwr_privacy.simulations.keeper import Keeper, Process
from flwr_privacy.simulations.superlink import free_port

__all__ = ["Deployment", "DeploymentError"]

Value = str | int | float | bool
PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

HOST = "127.0.0.1"
START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0
SHOWN_LINES = 30


class DeploymentError(Exception):
    """A process did not start or ended too early, or a run did not complete."""


class Deployment:
    """A SuperLink and its SuperNodes, for as long as the context is open.

    Parameters
    ----------
    nodes : sequence of mapping
        The configuration of each node, as ``--node-config`` gets it.
    folder : Path
        Existing folder for certificates, for each process its FLWR_HOME and its log
        (``superlink.log``, ``node-0.log``, ..., ``run-1.log``, ...).
    node_environment : mapping, optional
        Environment variables of the nodes. What differs between them belongs into `nodes`.

    Attributes
    ----------
    port : int
        The one port of the SuperLink.
    ca_certificate : Path
        The certificate that nodes and `flwr` trust.
    """

    def __init__(
        self,
        *,
        nodes: Sequence[Mapping[str, Any]],
        folder: Path,
        node_environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder.absolute()
        self.ca_certificate = self.folder / "ca.pem"
        self.port = 0
        self._node_configs = [dict(node) for node in nodes]
        self._node_environment = dict(node_environment or {})
        self._home = self.folder / "superlink"
        self._kept: dict[str, Keeper] = {}
        self._stack = ExitStack()
        self._submitted = 0
        self._known_runs: set[str] = set()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._stack = stack
            certificate, key = write_certificates(self.folder)
            self.port = free_port()
            self._home.mkdir()
            (self._home / "config.toml").write_text(tomli_w.dumps(self._connection()))
            command = ["flower-superlink", "--host", HOST, "--port", str(self.port)]
            command += ["--ssl-ca-certfile", str(self.ca_certificate)]
            command += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
            self._keep("superlink", command, self._environment(self._home))
            self._wait_for_superlink()
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
        timeout: float = 300.0,
        on_poll: Callable[[], None] | None = None,
    ) -> None:
        """Run a Flower App and wait for its end.

        Parameters
        ----------
        app_dir : Path
            Folder with the app's ``pyproject.toml``.
        run_config : mapping
            Values for keys that the app declares.
        timeout : float, default 300
            Seconds that the run may take. Afterwards the deployment is of no more use: the run
            goes on.
        on_poll : callable, optional
            Called ten times a second while the app runs.

        Raises
        ------
        DeploymentError
            If the run's status is not ``finished:completed``, a process of the deployment ends by
            itself, or the time is over.
        """
        self._submitted += 1
        name = f"run-{self._submitted}"
        config = self.folder / f"{name}.toml"
        config.write_text(tomli_w.dumps(dict(run_config)))
        command = ["flwr", "run", str(app_dir.absolute()), "--stream", "--run-config", str(config)]
        deadline = time.monotonic() + timeout
        stream = self._keep(name, command, self._environment(self._home))
        try:
            while stream.alive:
                self._check_alive(but=name)
                if time.monotonic() > deadline:
                    raise self._error(f"{name} took longer than {timeout:g} s")
                if on_poll is not None:
                    on_poll()
                time.sleep(0.1)
            self._check_alive(but=name)
            status = self._status()
            if status != "finished:completed":
                raise self._error(f"{name} ended as {status}")
        finally:
            self._drop(name)

    def start(self, index: int) -> None:
        """Start a node; it connects by itself, and a strategy waits for it."""
        name = f"node-{index}"
        home = self.folder / name
        home.mkdir(exist_ok=True)
        command = ["flower-supernode", "--superlink", f"{HOST}:{self.port}"]
        command += ["--root-certificates", str(self.ca_certificate), "--port", str(free_port())]
        config = self._node_configs[index]
        if config:
            values = [f"{key}={json.dumps(value)}" for key, value in config.items()]
            command += ["--node-config", " ".join(values)]
        self._keep(name, command, {**self._environment(home), **self._node_environment})

    def kill(self, index: int) -> None:
        """Kill a node and the app it runs.

        The SuperLink takes it for connected until a minute after its last sign of life.
        """
        self._drop(f"node-{index}")

    def stop(self, index: int) -> None:
        """End a node in order: it tells the SuperLink that it leaves."""
        name = f"node-{index}"
        keeper = self._kept[name]
        told = False  # once only: a second signal would cut its leave-taking short
        deadline = time.monotonic() + STOP_TIMEOUT
        while keeper.alive:
            for process in keeper.processes():
                if not told and "flower-supernode" in process.command:
                    os.kill(process.pid, signal.SIGTERM)
                    told = True
            if time.monotonic() > deadline:
                raise self._error(f"{name} did not end within {STOP_TIMEOUT:g} s")
            time.sleep(0.05)
        self._drop(name)

    def online(self) -> int:
        """Return the number of nodes that the SuperLink takes for connected."""
        nodes = self._listed("supernode", "list")["nodes"]
        return sum(node["status"] == "online" for node in nodes)

    def processes(self) -> list[Process]:
        """Return all processes of the deployment."""
        return [process for keeper in self._kept.values() for process in keeper.processes()]

    def _keep(self, name: str, command: list[str], environment: dict[str, str]) -> Keeper:
        keeper = Keeper(
            [[_program(command[0]), *command[1:]]],
            environment=environment,
            log=self.folder / f"{name}.log",
        )
        self._stack.callback(keeper.stop)
        self._kept[name] = keeper
        return keeper

    def _drop(self, name: str) -> None:
        self._kept.pop(name).stop()

    def _wait_for_superlink(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not self._answers():
            self._check_alive()
            if time.monotonic() > deadline:
                raise self._error(f"the SuperLink did not answer within {START_TIMEOUT:g} s")
            time.sleep(0.1)

    def _answers(self) -> bool:
        context = ssl.create_default_context(cafile=str(self.ca_certificate))
        connection = http.client.HTTPSConnection(HOST, self.port, timeout=5, context=context)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (ConnectionError, TimeoutError):
            return False
        finally:
            connection.close()

    def _check_alive(self, but: str = "") -> None:
        for name, keeper in self._kept.items():
            if name != but and not keeper.alive:
                raise self._error(f"{name} ended by itself")

    def _status(self) -> str:
        """Return the status of the newest run; ``flwr run`` exits with 0 when the app failed."""
        for run in self._listed("ls")["runs"]:
            if run["run-id"] not in self._known_runs:
                self._known_runs.add(run["run-id"])
                return str(run["status"])
        return "refused"

    def _listed(self, *command: str) -> dict[str, Any]:
        answer = subprocess.run(
            [_program("flwr"), *command, "--format", "json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self._environment(self._home),
            timeout=60,
            check=False,
        )
        if answer.returncode != 0:
            raise self._error(f"flwr {' '.join(command)} failed: {answer.stdout}{answer.stderr}")
        listed: dict[str, Any] = json.loads(answer.stdout)
        return listed

    def _error(self, what: str) -> DeploymentError:
        shown = [what]
        for name in self._kept:
            log = self.folder / f"{name}.log"
            lines = log.read_text(errors="replace").splitlines()
            # The SuperLink writes a line for each request.
            lines = [line for line in lines if "[uvicorn.access]" not in line]
            shown += [f"--- {log}", *lines[-SHOWN_LINES:]]
        return DeploymentError("\n".join(shown))

    def _connection(self) -> dict[str, Any]:
        own = {"address": f"{HOST}:{self.port}", "root-certificates": str(self.ca_certificate)}
        return {"superlink": {"default": "own", "own": own}}

    def _environment(self, home: Path) -> dict[str, str]:
        # What the shell says of Flower, of our nodes or of proxies is not for this deployment.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("FLWR_") and not name.lower().endswith("_proxy")
        }
        # Flower starts its own commands by their names.
        search_path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        return {
            **inherited,
            "PATH": os.pathsep.join(search_path),
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "PYTHONUNBUFFERED": "1",
        }


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def write_certificates(folder: Path) -> tuple[Path, Path]:
    """Write ``ca.pem`` and, signed by it, a server's certificate for loopback and its key.

    Returns
    -------
    certificate, key : Path
        The server's files, in `folder` too.
    """
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))]
    ca = _certificate("Test CA", ca_key.public_key(), issuer=ca_key, is_ca=True)
    server = _certificate("SuperLink", key.public_key(), issuer=ca_key, is_ca=False)
    server = server.add_extension(x509.SubjectAlternativeName(names), critical=False)
    for name, certificate in (("ca.pem", ca), ("superlink.pem", server)):
        signed = certificate.sign(ca_key, hashes.SHA256())
        (folder / name).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (folder / "superlink.key").touch(mode=0o600)
    (folder / "superlink.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return folder / "superlink.pem", folder / "superlink.key"


def _certificate(
    subject: str, public_key: PublicKey, *, issuer: PrivateKey, is_ca: bool
) -> x509.CertificateBuilder:
    names = [
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (subject, "Test CA")
    ]
    uses = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    ) | {"encipher_only": False, "decipher_only": False}
    uses |= {"digital_signature": not is_ca, "key_cert_sign": is_ca, "crl_sign": is_ca}
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.UTC)
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), True),
        (x509.KeyUsage(**uses), True),
        (x509.SubjectKeyIdentifier.from_public_key(public_key), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), False),
    ]
    certificate = x509.CertificateBuilder(
        subject_name=names[0],
        issuer_name=names[1],
        public_key=public_key,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - day,
        not_valid_after=now + day,
    )
    for extension, critical in extensions:
        certificate = certificate.add_extension(extension, critical=critical)
    return certificate
