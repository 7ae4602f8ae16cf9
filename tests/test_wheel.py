"""The wheel and the source distribution: their contents, and their use in an empty environment."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from build import ProjectBuilder
from build.env import DefaultIsolatedEnv

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
from flwr_privacy.clients import CentralDPClient, FedAvgClient, UDPClient, as_mod
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.strategies import UDP, CentralDP, FedAvg
import flwr_privacy, sys

assert "site-packages" in flwr_privacy.__file__, flwr_privacy.__file__
assert not {"torch", "ray"} & set(sys.modules)
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
CALIBRATE = "calibrate --unit record --epsilon 8 --rounds 20 --records 1200"
WORKS = {
    "--help": "Federated learning schemes for Flower",
    "--version": "0.",
    "verify --help": "Usage: flwr-privacy verify",
    CALIBRATE: "A run with noise=gdp_fixed: noise multiplier",
}
"""What a command prints that pip's installation without extras suffices for."""
NEEDS = {
    "run --clients 4 --rounds 1": "torch",
    "run --help": "torch",
    "experiment --list": "torch",
    "report runs": "jinja2",
    "attack secure-sum": "matplotlib",
}
"""The package that another one lacks; the extra `simulation` has it."""


@dataclass(frozen=True)
class Built:
    """What the release is made of, and the tree that it was built from."""

    tracked: set[str]
    sdist: set[str]
    wheel: Path
    wheel_of_sdist: Path


def contents(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build both from a copy of what git tracks, then the wheel of the source distribution."""
    folder = tmp_path_factory.mktemp("release")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True, cwd=ROOT, text=True)
    tracked = {name for name in names.stdout.splitlines() if (ROOT / name).exists()}
    for name in tracked:
        copy = folder / "tree" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy)
    for junk in ("strategies/__pycache__/loop.cpython-311.pyc", "runs/demo/summary.json"):
        (folder / "tree" / junk).parent.mkdir(parents=True)
        (folder / "tree" / junk).write_text("")
    with DefaultIsolatedEnv() as environment:
        tree = ProjectBuilder.from_isolated_env(environment, folder / "tree", quiet)
        environment.install(tree.build_system_requires)
        sdist = Path(tree.build("sdist", folder / "dist"))
        wheel = Path(tree.build("wheel", folder / "dist"))
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        unpacked = folder / sdist.name.removesuffix(".tar.gz")
        again = ProjectBuilder.from_isolated_env(environment, unpacked, quiet)
        of_sdist = Path(again.build("wheel", folder / "again"))
    files = {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file()}
    made = {name for name in files if name.startswith(("build/", "flwr_privacy.egg-info/"))}
    return Built(tracked, files - made, wheel, of_sdist)


def quiet(command: list[str], cwd: str | None = None, extra: dict[str, str] | None = None) -> None:
    environment = {**os.environ, **(extra or {})}
    subprocess.run(command, cwd=cwd, env=environment, check=True, capture_output=True)


@pytest.mark.wheel
def test_the_wheels_contents_equal_the_tree(built: Built) -> None:
    tree = set()
    for name in built.tracked:
        floor, _, rest = name.partition("/")
        tree |= {f"{FLOORS[floor]}/{rest}"} if floor in FLOORS else set()
    packed = {name for name in contents(built.wheel) if ".dist-info/" not in name}
    assert packed == tree
    assert "flwr_privacy/simulations/pyproject.toml" in packed
    assert "flwr_privacy/py.typed" in packed


@pytest.mark.wheel
def test_the_source_distribution_has_all_that_the_tree_has(built: Built) -> None:
    made = {"PKG-INFO", "setup.cfg"}
    assert built.sdist - made == built.tracked
    assert {"CITATION.cff", "CHANGELOG.md", "LICENSE", "tests/test_wheel.py"} <= built.sdist


@pytest.mark.wheel
def test_the_wheel_of_the_source_distribution_is_that_of_the_tree(built: Built) -> None:
    assert built.wheel_of_sdist.name == built.wheel.name
    assert contents(built.wheel_of_sdist) == contents(built.wheel)


@pytest.fixture(scope="module")
def empty(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the commands of an environment into which pip installed the wheel, without extras."""
    # Our pip installs into it, and compiles nothing beforehand: that would take half of the time.
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, str(built.wheel)], check=True, capture_output=True)
    return folder / "bin"


@pytest.mark.long
@pytest.mark.wheel
def test_it_trains_inline_in_an_empty_environment(empty: Path, tmp_path: Path) -> None:
    python = str(empty / "python")
    done = subprocess.run([python, "-c", USE], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3.0", "3"]


@pytest.mark.long
@pytest.mark.wheel
def test_a_command_works_in_an_empty_environment_or_names_the_extra(
    empty: Path, tmp_path: Path
) -> None:
    for arguments, printed in WORKS.items():
        command = [str(empty / "flwr-privacy"), *arguments.split()]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert printed in done.stdout
    for arguments, package in NEEDS.items():
        command = [str(empty / "flwr-privacy"), *arguments.split()]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        told = f"error: {package} is not installed: pip install 'flwr-privacy[simulation]'\n"
        assert (done.returncode, done.stderr) == (4, told)
