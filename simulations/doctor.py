"""Checks whether this machine can run a simulation, and says what to install or change."""

import importlib
import importlib.util
import os
import platform
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from flwr_privacy.simulations.engines.flower_processes import is_free
from flwr_privacy.simulations.engines.placement import Machine, suggest
from flwr_privacy.simulations.runner.jobs import DEFAULT_CLIENTS, model_bytes
from flwr_privacy.simulations.settings.run_settings import Settings

__all__ = ["Check", "diagnose"]

Status = Literal["ok", "warning", "error"]

OLDEST_PYTHON = (3, 11)
OLDEST_FLWR = (1, 41)
FIRST_FLWR_TOO_NEW = (2, 0)
PACKAGES = ("numpy", "flwr", "ray", "torch")
FLOWER_PORTS = {39091: "SuperLink", 39093: "Control API"}
INSTALL = "pip install 'flwr-privacy[simulation]'"


@dataclass(frozen=True)
class Check:
    """The result of one check; `detail` says what was found and what to do about it."""

    name: str
    status: Status
    detail: str


def diagnose(data_root: Path | None = None, settings: Settings | None = None) -> list[Check]:
    """Check the environment, the machine and the data sets; never raises for a problem.

    Parameters
    ----------
    data_root : Path, optional
        Folder with the data sets that no library brings.
    settings : Settings, optional
        A run, for which workers are suggested; its task must not need data to make a model.

    Returns
    -------
    list of Check
    """
    workers = [] if settings is None else [_workers(settings)]
    return [
        _python(),
        *(_package(name) for name in PACKAGES),
        _gpu(),
        *(_port(port, use) for port, use in FLOWER_PORTS.items()),
        _ray_cluster(),
        _temporary_folder(),
        _telemetry(),
        *_data(data_root),
        *workers,
    ]


def flwr_status(found: str) -> Check:
    """Judge a version of flwr.

    Examples
    --------
    >>> flwr_status("1.41.0").status, flwr_status("1.40.2").status, flwr_status("2.0.0").status
    ('ok', 'error', 'error')
    """
    oldest = ".".join(map(str, OLDEST_FLWR))
    try:
        numbers = tuple(int(part) for part in found.split(".")[:2])
    except ValueError:
        return Check("flwr", "warning", f"{found}: cannot be compared with >={oldest},<2")
    if OLDEST_FLWR <= numbers < FIRST_FLWR_TOO_NEW:
        return Check("flwr", "ok", found)
    return Check("flwr", "error", f"{found}: needed is >={oldest},<2 ({INSTALL})")


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    needed = tuple(map(int, platform.python_version_tuple()[:2])) >= OLDEST_PYTHON
    return Check("python", "ok" if needed else "error", found)


def _package(name: str) -> Check:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Check(name, "error", f"not installed: {INSTALL}")
    if name == "flwr":
        return flwr_status(found)
    try:
        importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a shared library does not load.
        return Check(name, "error", f"{found} is installed but cannot be imported: {error}")
    return Check(name, "ok", found)


def _gpu() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("gpu", "warning", "unknown: torch is not installed")
    import torch

    if not torch.cuda.is_available():
        return Check("gpu", "ok", "none (torch.cuda is not available); clients train on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("gpu", "ok", ", ".join(names))


def _port(port: int, use: str) -> Check:
    name = f"port {port}"
    if is_free(port):
        return Check(name, "ok", f"free (Flower's default for the {use})")
    return Check(
        name,
        "warning",
        f"in use, probably by a SuperLink that an earlier `flwr run` has left behind. A plain "
        f"`flwr run` uses it whatever environment it belongs to, so an app may meet the wrong "
        f"packages; `flwr-privacy` brings a SuperLink of its own. Its process can be found with: "
        f"lsof -i :{port}",
    )


def _ray_cluster() -> Check:
    name = "Ray cluster"
    file = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    if not file.is_file():
        return Check(name, "ok", "none is running or left over")
    address = file.read_text(encoding="utf-8").strip()
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except (OSError, ValueError):
        detail = (
            f"{file} names a cluster at {address} that does not answer: a plain `flwr run` waits "
            "for it; remove the file (flwr-privacy run is not affected)"
        )
        return Check(name, "warning", detail)
    return Check(name, "ok", f"one answers at {address}; a plain `flwr run` uses it")


def _temporary_folder() -> Check:
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"test")
    except OSError as error:
        return Check("temporary folder", "error", f"{folder} cannot be written: {error}")
    return Check("temporary folder", "ok", f"{folder} can be written")


def _telemetry() -> Check:
    if os.environ.get("FLWR_TELEMETRY_ENABLED", "1") == "0":
        return Check("telemetry", "ok", "Flower's telemetry is off")
    return Check(
        "telemetry",
        "warning",
        "a plain `flwr run` sends usage data to Flower Labs unless FLWR_TELEMETRY_ENABLED=0; "
        "`flwr-privacy` switches it off for its own runs",
    )


def _workers(settings: Settings) -> Check:
    clients = settings.per_round or settings.clients or DEFAULT_CLIENTS
    size = model_bytes(settings)
    placement = suggest(Machine.here(), model_bytes=size, clients=clients)
    return Check(f"workers for {settings.task}", "ok", str(placement))


def _data(data_root: Path | None) -> Iterator[Check]:
    try:
        from flwr_privacy.simulations.tasks.data import available
    except ImportError as error:
        yield Check("data", "error", f"cannot be read: {error} ({INSTALL})")
        return
    for name, state in available(data_root).items():
        status: Status = "ok" if state.startswith("found") else "warning"
        if state.startswith("damaged"):
            status = "error"
        yield Check(f"data {name}", status, state)
