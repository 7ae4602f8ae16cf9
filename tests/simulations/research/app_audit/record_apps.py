"""A small app that trains on records, with or without noise on their gradients, in a folder."""

from pathlib import Path

from .promise_apps import PROJECT

__all__ = ["written"]

_TASK = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4))

def load_arrays(partition):
    draws = np.random.default_rng(partition)
    labels = draws.integers(4, size=120)
    centres = np.random.default_rng(99).normal(size=(4, 24))
    features = centres[labels] + draws.normal(size=(120, 24))
    return features.astype(np.float32), labels

def load(partition):
    features, labels = load_arrays(partition)
    data = TensorDataset(torch.tensor(features), torch.tensor(labels))
    return DataLoader(data, batch_size=30, shuffle={shuffle})

def train(model, partition):
    loader = {loader}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model.train()
    {private}
    for features, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features{changed}), labels).backward()
        optimizer.step()
"""

_OPACUS = """from opacus import PrivacyEngine
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader,
        noise_multiplier={noise}, max_grad_norm=1.0,
    )"""

_ARRAYS = """list(zip(*(torch.tensor(part).split(30) for part in load_arrays(partition))))"""

_CLIENT = """
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from {name}_task import make_model, train

app = ClientApp()

@app.train()
def train_fn(message: Message, context: Context) -> Message:
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(model, context.node_config["partition-id"])
    metrics = MetricRecord({{"num-examples": 1}})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({{"arrays": arrays, "metrics": metrics}}), reply_to=message)
"""

_SERVER = """
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from {name}_task import make_model

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_model().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
    )
"""


def written(
    folder: Path,
    name: str,
    *,
    rounds: int = 2,
    noise: float | None = None,
    shuffle: bool = True,
    arrays: bool = False,
    changed: str = "",
) -> Path:
    """Write an app.

    Parameters
    ----------
    folder, name
        Where, and its name, with which its modules begin.
    rounds : int, default 2
        Rounds of training, each one pass over 120 records.
    noise : float, optional
        Noise multiplier of Opacus' DP-SGD at clipping norm 1; by default it trains plainly.
    shuffle : bool, default True
        Whether the DataLoader shuffles.
    arrays : bool, default False
        Whether it trains on arrays of `load_arrays` of its task, without its DataLoader.
    changed : str, default ""
        What is done to features before the model gets them, as " * 2".
    """
    app = folder / name
    app.mkdir()
    task = _TASK.format(
        shuffle=shuffle,
        private="" if noise is None else _OPACUS.format(noise=noise),
        loader=_ARRAYS if arrays else "load(partition)",
        changed=changed,
    )
    (app / "pyproject.toml").write_text(PROJECT.format(name=name, rounds=rounds))
    (app / f"{name}_task.py").write_text(task)
    (app / f"{name}_client.py").write_text(_CLIENT.format(name=name))
    (app / f"{name}_server.py").write_text(_SERVER.format(name=name))
    return app
