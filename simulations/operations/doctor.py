"""Checks whether this machine can run a simulation, and says what to install or change."""

import importlib
import importlib.util
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flwr_privacy.errors import FlwrPrivacyError, InvalidParameterError
from flwr_privacy.simulations.engines.flower_processes import is_free
from flwr_privacy.simulations.engines.placement import Machine, suggest
from flwr_privacy.simulations.runner.complete_settings import DEFAULT_CLIENTS
from flwr_privacy.simulations.runner.jobs import model_bytes
from flwr_privacy.simulations.settings.run_settings import Settings

from .checks import (
    FAIL,
    INSTALL,
    OK,
    WARN,
    Check,
    Status,
    python_check,
    telemetry_check,
    version_check,
)

__all__ = ["diagnose"]

PACKAGES = ("numpy", "flwr", "ray", "torch")
FLOWER_PORTS = {39091: "SuperLink", 39093: "Control API"}


def diagnose(
    data_root: Path | None = None,
    settings: Settings | None = None,
) -> list[Check]:
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
        python_check(),
        *(_package(name) for name in PACKAGES),
        _gpu(),
        *(_port(port, use) for port, use in FLOWER_PORTS.items()),
        _ray_cluster(),
        _temporary_folder(),
        telemetry_check(),
        *_data(data_root),
        *_installed_tasks(),
        *workers,
    ]


def _package(name: str) -> Check:
    check = version_check(name)
    if check.status == FAIL or name == "flwr":
        return check
    try:
        importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a shared library does not load.
        return Check(name, FAIL, f"{check.detail} is installed but cannot be imported: {error}")
    return check


def _gpu() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("gpu", WARN, "unknown: torch is not installed")
    import torch

    if not torch.cuda.is_available():
        return Check("gpu", OK, "none (torch.cuda is not available); clients train on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("gpu", OK, ", ".join(names))


def _port(port: int, use: str) -> Check:
    name = f"port {port}"
    if is_free(port):
        return Check(name, OK, f"free (Flower's default for the {use})")
    return Check(
        name,
        WARN,
        f"in use, probably by a SuperLink that an earlier `flwr run` has left behind. A plain "
        f"`flwr run` uses it whatever environment it belongs to, so an app may meet the wrong "
        f"packages; `flwr-privacy` brings a SuperLink of its own. Its process can be found with: "
        f"lsof -i :{port}",
    )


def _ray_cluster() -> Check:
    name = "Ray cluster"
    file = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    if not file.is_file():
        return Check(name, OK, "none is running or left over")
    address = file.read_text(encoding="utf-8").strip()
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except (OSError, ValueError):
        detail = (
            f"{file} names a cluster at {address} that does not answer: a plain `flwr run` waits "
            "for it; remove the file (flwr-privacy run is not affected)"
        )
        return Check(name, WARN, detail)
    return Check(name, OK, f"one answers at {address}; a plain `flwr run` uses it")


def _temporary_folder() -> Check:
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"test")
    except OSError as error:
        return Check("temporary folder", FAIL, f"{folder} cannot be written: {error}")
    return Check("temporary folder", OK, f"{folder} can be written")


def _workers(settings: Settings) -> Check:
    clients = settings.per_round or settings.clients or DEFAULT_CLIENTS
    size = model_bytes(settings)
    placement = suggest(Machine.here(), model_bytes=size, clients=clients)
    return Check(f"workers for {settings.task}", OK, str(placement))


def _installed_tasks() -> Iterator[Check]:
    """Yield a check for each task that a package installs: its function is called."""
    try:
        from flwr_privacy.simulations.tasks.lookup import check_own_task, installed_tasks, task
    except ImportError:  # which the check of the data reports
        return
    try:
        names = installed_tasks()
    except InvalidParameterError as error:
        yield Check("installed tasks", FAIL, str(error))
        return
    for name, entry in names.items():
        try:
            found = task(name)
            check_own_task(found, None)
        except FlwrPrivacyError as error:
            yield Check(f"task {name}", FAIL, str(error))
        else:
            yield Check(f"task {name}", OK, f"{entry.value}: {found.description or 'installed'}")


def _data(data_root: Path | None) -> Iterator[Check]:
    try:
        from flwr_privacy.simulations.tasks.data import available
    except ImportError as error:
        yield Check("data", FAIL, f"cannot be read: {error} ({INSTALL})")
        return
    states = available(data_root)
    if data_root is None:
        elsewhere = [name for name, state in states.items() if state.startswith("missing")]
        yield Check("data", OK, f"a folder is needed for {', '.join(elsewhere)} (--data-root DIR)")
        states = {name: state for name, state in states.items() if name not in elsewhere}
    for name, state in states.items():
        status: Status = OK if state.startswith("found") else WARN
        if state.startswith("damaged"):
            status = FAIL
        yield Check(f"data {name}", status, state)
