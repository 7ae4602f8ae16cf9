"""Stock PyTorch apps, with the change of docs/drop-in.md and without: on Ray, and deployed."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from deployment import Deployment
from drop_in import changed

import flwr_privacy.simulations
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.ray_engine import RayResources, RaySession

QUICKSTARTS = Path(flwr_privacy.simulations.__file__).parent / "quickstarts"
KINDS = ("message", "numpy")
SCHEMES = ("secure-sum", "mspdq", "udp", "m2fdp")
SUMS = ("secure-sum", "mspdq")
CHARGES = ("udp", "m2fdp")  # and their noise for a whole user drowns what four clients learn
LEARNED = 0.6  # guessing gives 0.1


def app_with(kind: str, scheme: str | None, folder: Path) -> Path:
    """Copy a quickstart, as a user does, and apply the blocks for a scheme."""
    app = Path(shutil.copytree(QUICKSTARTS / f"pytorch-{kind}", folder / f"{kind}-{scheme}"))
    if scheme is None:
        return app
    server = [*(["server-fn"] if kind == "numpy" else []), f"server-{scheme}"]
    for half, blocks in (("server", server), ("client", [f"client-{scheme}"])):
        source = app / f"{kind}_app" / f"{half}_app.py"
        for block in blocks:
            source.write_text(changed(source.read_text(), block))
    return app


def task_of(kind: str) -> ModuleType:
    path = QUICKSTARTS / f"pytorch-{kind}" / f"{kind}_app" / "task.py"
    spec = importlib.util.spec_from_file_location(f"task_of_{kind}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accuracy_of(kind: str, model: Path) -> float:
    """Return the accuracy of a saved model; names, shapes and finite values are checked."""
    task = task_of(kind)
    net = task.Net()
    net.load_state_dict(torch.load(model, weights_only=True))
    assert all(value.isfinite().all() for value in net.state_dict().values())
    return float(task.test(net, task.load_test_data())[1])


def releases(state: Path, client: str) -> list[int]:
    entries = Ledger(state / f"{client}.ledger", data_set=client).entries()
    return [entry.question.server_round for entry in entries]


class Federation:
    """Ray, and the folder in which its nodes keep what is theirs."""

    def __init__(self, session: RaySession, state: Path) -> None:
        self._session = session
        self.state = state

    def accuracy(self, kind: str, scheme: str | None, folder: Path) -> float:
        for left in self.state.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        model = folder / "model.pt"
        config = {"model-path": str(model)}
        app = app_with(kind, scheme, folder)
        self._session.run(app, nodes=4, run_config=config, timeout=180)
        return accuracy_of(kind, model)

    def kept(self, kind: str) -> list[Path]:
        return sorted(self.state.glob(f"*.{kind}"))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    state = tmp_path_factory.mktemp("state")
    log = tmp_path_factory.mktemp("log") / "engine.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLWR_PRIVACY_STATE", str(state))
        # One worker: each imports torch and scikit-learn, which takes longer than the training.
        with RaySession(resources=RayResources(total_cpus=1), log_path=log) as session:
            yield Federation(session, state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quickstart_knows_nothing_of_this_library(kind: str) -> None:
    files = [
        path for path in (QUICKSTARTS / f"pytorch-{kind}").rglob("*.*") if path.suffix != ".pyc"
    ]
    assert {path.name for path in files} >= {"pyproject.toml", "client_app.py", "server_app.py"}
    for path in files:
        assert "privacy" not in path.read_text()


@pytest.mark.ray
@pytest.mark.parametrize("kind", KINDS)
def test_a_quickstart_trains_as_it_is(kind: str, federation: Federation, tmp_path: Path) -> None:
    assert federation.accuracy(kind, None, tmp_path) > LEARNED
    assert list(federation.state.iterdir()) == []


@pytest.mark.ray
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quickstart_trains_with_the_documented_change(
    scheme: str, kind: str, federation: Federation, tmp_path: Path
) -> None:
    accuracy = federation.accuracy(kind, scheme, tmp_path)
    if scheme in SUMS:
        assert accuracy > LEARNED
    clients = [str(i) for i in range(4)]
    charged = {
        path.stem: releases(federation.state, path.stem) for path in federation.kept("ledger")
    }
    assert charged == ({client: [1, 2] for client in clients} if scheme in CHARGES else {})
    summed = [path.stem for path in federation.kept("secure-sum")]
    assert summed == (clients if scheme in SUMS else [])


@pytest.mark.deployed
def test_a_quickstart_with_udp_deployed_keeps_a_ledger_on_each_node(tmp_path: Path) -> None:
    nodes = []
    for partition in range(3):
        state = tmp_path / f"state-{partition}"
        state.mkdir()
        own = {"client-id": f"ward-{partition}", "privacy-state": str(state)}
        nodes.append({**own, "partition-id": partition, "num-partitions": 3})
    app = app_with("numpy", "udp", tmp_path)
    server = app / "numpy_app" / "server_app.py"  # which waits for four nodes
    server.write_text(server.read_text().replace("min_available_nodes=4", "min_available_nodes=3"))
    model, folder = tmp_path / "model.pt", tmp_path / "deployment"
    folder.mkdir()
    with Deployment(nodes=nodes, folder=folder) as deployment:
        deployment.run(app, run_config={"model-path": str(model)})
    accuracy_of("numpy", model)  # it is whole and finite
    for partition in range(3):
        state = tmp_path / f"state-{partition}"
        assert releases(state, f"ward-{partition}") == [1, 2]
        assert [path.name for path in state.glob("*.ledger")] == [f"ward-{partition}.ledger"]
