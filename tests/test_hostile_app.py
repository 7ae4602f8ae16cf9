"""An app that no operator has allowed, on a real SuperNode with the executor of this package."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from deployment import Deployment, DeploymentError
from typer.testing import CliRunner

from flwr_privacy.clients.node.context_store import STATE_VARIABLE
from flwr_privacy.simulations.cli import app as cli
from flwr_privacy.simulations.engines.flower_processes import executable

pytestmark = pytest.mark.deployed

APP = Path(__file__).parent / "deployed"
# What a server would have the node run: it takes what it likes, and adds no noise.
HOSTILE = """
import os, pathlib
mark = pathlib.Path({mark!r})
mark.write_text(str([*pathlib.Path(os.environ[{state!r}]).iterdir()]))
"""


def test_a_changed_app_is_never_imported_and_costs_nothing(tmp_path: Path) -> None:
    state, mark, out = tmp_path / "state", tmp_path / "imported", tmp_path / "out.json"
    state.mkdir(mode=0o700)
    build = [executable("flwr"), "build", "--app", str(APP)]
    subprocess.run(build, check=True, capture_output=True, cwd=tmp_path)
    (fab,) = tmp_path.glob("*.fab")
    allowed = tmp_path / "allowed-apps.toml"
    allowed.write_text(CliRunner().invoke(cli, ["node", "allow", str(fab)]).stdout)

    changed = tmp_path / "changed" / "deployed"  # with the name and the version of the other
    shutil.copytree(APP, changed, ignore=shutil.ignore_patterns("__pycache__"))
    code = HOSTILE.format(mark=str(mark), state=STATE_VARIABLE)
    (changed / "client_app.py").write_text(code + (APP / "client_app.py").read_text())
    publisher, name, version, digits = fab.stem.split(".")
    # Flower would take this folder for the app that is allowed.
    planted = (
        tmp_path / "node-0" / "apps" / f"{publisher}.{name}.{version.replace('-', '.')}.{digits}"
    )
    shutil.copytree(changed, planted)

    config = {"scheme": "udp", "rounds": 1, "nodes": 1, "out": str(out)}
    with Deployment(
        nodes=[{"client-id": "ward-0", "shift": 1.0, "examples": 1}],
        node_environment={STATE_VARIABLE: str(state)},
        folder=tmp_path,
        allowed_apps=allowed,
    ) as deployment:
        with pytest.raises(DeploymentError):
            deployment.run(changed, run_config=config, timeout=120)
        assert not any(state.iterdir())
        deployment.run(APP, run_config=config, timeout=120)
    assert not mark.exists()
    (line,) = [line for line in json.loads(out.read_text())["history"] if line["round"] == 1]
    assert line["accumulated"] == 1
    assert (state / "ward-0.ledger").exists()
    log = (tmp_path / "node-0.log").read_text()
    assert "refused, called 'flwr-privacy/flwr-privacy-deployed 0.1.0' by the server" in log
    assert "runs flwr-privacy/flwr-privacy-deployed 0.1.0, which is allowed" in log
    assert "this node does not run the app whose FAB has sha256" in deployment_error(tmp_path)


def deployment_error(folder: Path) -> str:
    return (folder / "superlink.log").read_text() + (folder / "run-1.log").read_text()
