"""The app that is audited: its folder, its halves, its configuration."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.common.constant import APP_DIR
from flwr.supercore.utils import get_flwr_home

from flwr_privacy.errors import check_integer
from flwr_privacy.simulations.inspector.app_folder import AppFolder

__all__ = ["CLIENTS", "Target", "masked"]

CLIENTS = 10
"""Number of clients where neither the caller nor the app says one."""

_SECRET_NAME = re.compile(r"token|secret|passw|credential|api.?key|private.?key|auth", re.I)
_SECRET_VALUE = re.compile(r"^(?=.*\d)(?=.*[A-Za-z])[A-Za-z0-9_\-+/=.]{20,}$")
_MASK = "(masked)"


@dataclass(frozen=True)
class Target:
    """An app to audit.

    Parameters
    ----------
    app : AppFolder
        The app.
    clients : int
        Number of simulated clients.
    """

    app: AppFolder
    clients: int

    @classmethod
    def of(cls, path: str | Path, *, clients: int | None = None) -> "Target":
        """Read an app.

        Parameters
        ----------
        path : path
            The app's folder; or "publisher/name" of one that `flwr install` has installed, the
            newest where there are several.
        clients : int, optional
            Number of clients; by default that of the app's federation, or `CLIENTS`.

        Raises
        ------
        InvalidParameterError
            If it is no Flower app, or `clients` is below 1.
        """
        app = AppFolder.read(_installed(str(path)) or Path(path))
        if clients is not None:
            check_integer("clients", clients, minimum=1)
        return cls(app, clients or app.nodes or CLIENTS)

    @property
    def paths(self) -> list[str]:
        """Where Python looks for the app's modules."""
        folder = self.app.path.resolve()
        return [str(folder), str(folder / "src")]

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that runs the app: no GPU, no network, one core."""
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*self.paths, os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",  # nothing is left in the app's folder
            "FLWR_TELEMETRY_ENABLED": "0",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",  # what was downloaded before is used
            "HF_DATASETS_OFFLINE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }


def masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration for a report: what looks like a secret is masked.

    Examples
    --------
    >>> masked({"lr": 0.1, "wandb-api-key": "x", "user": "hf_AbCdEfGhIjKlMnOpQr12"})
    {'lr': 0.1, 'wandb-api-key': '(masked)', 'user': '(masked)'}
    """
    return {name: _MASK if _is_secret(name, value) else value for name, value in config.items()}


def _installed(name: str) -> Path | None:
    """Return the folder of an installed app; None if it is none."""
    publisher, _, project = name.partition("/")
    if Path(name).exists() or not project:
        return None
    found = (get_flwr_home() / APP_DIR).glob(f"{publisher}.{project}.*")
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def _is_secret(name: str, value: Any) -> bool:
    text = isinstance(value, str | bytes)
    return text and bool(
        _SECRET_NAME.search(name) or (isinstance(value, str) and _SECRET_VALUE.match(value))
    )
