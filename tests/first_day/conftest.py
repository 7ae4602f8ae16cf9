"""What the first days share: small apps that nobody here wrote for this library, as it were."""

import importlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets
from sklearn.datasets import load_digits

import flwr_privacy.simulations
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.inspector.app_folder import AppFolder
from flwr_privacy.simulations.inspector.arrays import Arrays, arrays_of
from tests.simulations.conftest import command

__all__ = ["command"]

APPS = Path(__file__).parent / "apps"
QUICKSTARTS = Path(flwr_privacy.simulations.__file__).parent / "quickstarts"
NODES = 4


def folder_of(name: str) -> Path:
    """Return the folder of an app."""
    return QUICKSTARTS / name if name.startswith("pytorch") else APPS / name


@cache
def initial(name: str) -> Arrays | str:
    """Return what an app starts from: finding it imports torch in another process."""
    return arrays_of(AppFolder.read(folder_of(name)))


@cache
def digits() -> Any:
    """Return the digits, which the apps read for every message, from memory."""
    return load_digits()


class Apps:
    """Copies of apps, and how they are run."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._patch = patch

    def copy(self, name: str) -> Path:
        """Copy an app, as a user does."""
        ignored = shutil.ignore_patterns("__pycache__")
        return Path(shutil.copytree(folder_of(name), self._folder / name, ignore=ignored))

    def module(self, app: Path, name: str) -> Any:
        """Import a module of an app anew."""
        with self._patch.context() as patch:
            patch.syspath_prepend(str(app))
            forget(app)
            module = importlib.import_module(name)
            forget(app)
        return module

    def run(
        self, app: Path, nodes: Sequence[Mapping[str, Any]] | int = NODES, **config: Any
    ) -> Any:
        """Run an app inline, from its folder; return the module of its server."""
        read = AppFolder.read(app)
        forget(app)
        with self._patch.context() as patch:
            patch.chdir(app)  # where it writes its files
            patch.syspath_prepend(str(app))
            patch.setattr(sklearn.datasets, "load_digits", digits)
            halves = [reference.split(":") for reference in (read.server, read.client)]
            modules = [importlib.import_module(module) for module, _ in halves]
            server, client = (
                getattr(module, attribute)
                for module, (_, attribute) in zip(modules, halves, strict=True)
            )
            try:
                run_config = {**read.config, **config}
                run_inline(server, client, nodes=nodes, run_config=run_config, state=self._state())
            finally:
                forget(app)
        return modules[0]

    def _state(self) -> Path:
        state = self._folder / "state"
        state.mkdir(exist_ok=True)
        return state

    def charged(self) -> list[str]:
        """Return the clients that have a ledger."""
        return sorted(path.stem for path in self._state().glob("*.ledger"))


def forget(app: Path) -> None:
    """Forget the modules of an app: another copy of it has the same names."""
    own = {path.name for path in app.iterdir() if path.is_dir()}
    for module in [m for m in sys.modules if m.partition(".")[0] in own]:
        del sys.modules[module]


@pytest.fixture
def apps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Apps:
    """Return where copies of apps are."""
    return Apps(tmp_path, monkeypatch)
