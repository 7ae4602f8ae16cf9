"""Small apps as texts: their halves differ from test to test."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flwr_privacy.simulations.inspector.app_folder import AppFolder
from flwr_privacy.simulations.inspector.changes.change import Change, change_of
from flwr_privacy.simulations.inspector.wraps import Options, wrap_of

PROJECT = """
[project]
name = "small"

[tool.flwr.app.components]
serverapp = "small.server:app"
clientapp = "small.client:app"
"""
CLIENT = """
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    ...
"""
SERVER = """
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = FedAvg()
    strategy.start(grid, arrays, num_rounds=3)
"""

Small = Callable[..., AppFolder]


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """Return what writes an app to a folder and reads it."""

    def written(*, server: str = SERVER, client: str = CLIENT, **others: str) -> AppFolder:
        (tmp_path / "pyproject.toml").write_text(PROJECT)
        package = tmp_path / "small"
        package.mkdir(exist_ok=True)
        for name, text in {"server": server, "client": client, **others}.items():
            (package / f"{name}.py").write_bytes(text.encode())
        return AppFolder.read(tmp_path)

    return written


def changed(app: AppFolder, scheme: str = "udp", **options: bool) -> Change:
    """Return the change that a scheme makes."""
    return change_of(app, wrap_of(scheme, Options(clients=4, **options)))


def new(change: Change, name: str) -> str:
    """Return the new text of a file; "" if it stays."""
    return change.texts.get(change.app.path / "small" / f"{name}.py", "")
