"""The wheel: its contents equal the tree, and it works in an empty environment."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {
    "flwr_privacy": "flwr_privacy",
    "strategies": "flwr_privacy/strategies",
    "clients": "flwr_privacy/clients",
    "simulations": "flwr_privacy/simulations",
}
USE = """
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr_privacy.clients import FedAvgClient, as_mod
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.strategies import FedAvg
import flwr_privacy, sys

assert "site-packages" in flwr_privacy.__file__, flwr_privacy.__file__
assert "torch" not in sys.modules
client_app, server_app = ClientApp(mods=[as_mod(FedAvgClient)]), ServerApp()

@client_app.train()
def train(message, context):
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
    return Message(content, reply_to=message)

@server_app.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord([np.ones(3)]), num_rounds=1)
    print(result.arrays.to_numpy_ndarrays()[0].sum(), result.history[1]["accumulated"])

run_inline(server_app, client_app, nodes=3)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.mark.wheel
def test_its_contents_equal_the_tree(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", *FLOORS], check=True, capture_output=True, cwd=ROOT, text=True
    ).stdout.split()
    tree = set()
    for name in tracked:
        floor, _, rest = name.partition("/")
        tree.add(f"{FLOORS[floor]}/{rest}")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == tree
    assert "flwr_privacy/simulations/pyproject.toml" in packed
    assert "flwr_privacy/py.typed" in packed


@pytest.mark.wheel
def test_it_trains_inline_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    # Our pip installs into it, and compiles nothing beforehand: that would take half of the time.
    venv = [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")]
    subprocess.run(venv, check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    done = subprocess.run([python, "-c", USE], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3.0", "3"]
