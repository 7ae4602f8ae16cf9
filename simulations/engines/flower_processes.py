"""Commands, ports and environments of the Flower processes that this package starts."""

import http.client
import os
import shutil
import socket
import ssl
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr_privacy.errors import EngineError, InvalidParameterError, check_integer

__all__ = [
    "HOST",
    "answers",
    "check_port",
    "environment",
    "executable",
    "free_port",
    "is_free",
    "new_run",
]

HOST = "127.0.0.1"
RAY_AGENT_PORT = 52365  # Ray refuses to start where another of its parts is told to use it


def free_port() -> int:
    """Return a loopback port that nobody listens on and that no part of Ray is fixed to."""
    port = RAY_AGENT_PORT
    while port == RAY_AGENT_PORT:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = int(probe.getsockname()[1])
    return port


def is_free(port: int) -> bool:
    """Return whether nobody listens on a loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _search_path() -> str:
    """Return where commands are looked for: first in this environment, though not activated."""
    own = str(Path(sys.executable).parent)
    return os.pathsep.join([own, os.environ.get("PATH", os.defpath)])


def executable(name: str) -> str:
    """Return the path of a command.

    Raises
    ------
    EngineError
        If it is not installed.
    """
    path = shutil.which(name, path=_search_path())
    if path is None:
        raise EngineError(f"{name} is not installed: pip install 'flwr-privacy[simulation]'")
    return path


def check_port(parameter: str, port: int) -> int:
    """Return `port` if nobody listens on it.

    Raises
    ------
    InvalidParameterError
        If it is no port, or taken.
    """
    check_integer(parameter, port, minimum=1, maximum=65535)
    if not is_free(port):
        raise InvalidParameterError(parameter, port, f"a port of {HOST} that is not taken")
    return port


def answers(port: int, context: ssl.SSLContext | None = None) -> bool:
    """Tell whether a SuperLink answers at a loopback port; over TLS if there is a context."""
    if context is None:
        connection = http.client.HTTPConnection(HOST, port, timeout=1)
    else:
        connection = http.client.HTTPSConnection(HOST, port, timeout=5, context=context)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):  # perhaps of another program at this port
        return False
    finally:
        connection.close()


def environment(flwr_home: Path, *, inherits: Callable[[str], bool]) -> dict[str, str]:
    """Return the environment of a Flower process.

    Parameters
    ----------
    flwr_home : Path
        Its FLWR_HOME.
    inherits : callable
        Tells for the name of a variable of this process whether Flower's process has it too.
    """
    return {
        **{name: value for name, value in os.environ.items() if inherits(name)},
        "PATH": _search_path(),  # Flower starts its own commands by their names
        "FLWR_HOME": str(flwr_home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "PYTHONUNBUFFERED": "1",
    }


def new_run(runs: Iterable[dict[str, Any]], known: set[str]) -> dict[str, Any] | None:
    """Return the first run of ``flwr ls`` that is not known, and add it to the known ones."""
    for run in runs:
        if run["run-id"] not in known:
            known.add(run["run-id"])
            return run
    return None
