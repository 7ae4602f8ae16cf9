"""Small apps that keep or break a promise, written into a folder: one array, no training."""

from pathlib import Path

__all__ = ["PROJECT", "written"]

PROJECT = """
[project]
name = "{name}"
version = "1.0.0"
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "{name}_server:app"
clientapp = "{name}_client:app"
[tool.flwr.app.config]
num-server-rounds = {rounds}
"""

_CLIENT = """
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
{mod}
app = ClientApp(mods=[{mods}])

@app.train()
def train(message: Message, context: Context) -> Message:
    own = np.random.default_rng(context.node_config["partition-id"])
    start = message.content["arrays"]["w"].numpy()
    weights = start + {length} * own.normal(size=start.shape) / np.sqrt(start.size)
    {after}
    metrics = MetricRecord({{"loss": float(np.random.normal()), "num-examples": 8}})
    arrays = ArrayRecord({{"w": Array(weights)}})
    return Message(RecordDict({{"arrays": arrays, "metrics": metrics}}), reply_to=message)

@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    metrics = MetricRecord({{"eval_loss": 0.0, "num-examples": 2}})
    return Message(RecordDict({{"metrics": metrics}}), reply_to=message)
"""

_SERVER = """
import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(
        fraction_evaluate={evaluate}, min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1
    )
    {wrap}
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({{"w": Array(np.zeros(1000))}}),
        num_rounds=context.run_config["num-server-rounds"],
    )
"""


def written(
    folder: Path,
    name: str,
    *,
    rounds: int = 3,
    length: float = 2.0,
    after: str = "",
    mod: str = "",
    mods: str = "",
    wrap: str = "",
    evaluate: float = 1.0,
) -> Path:
    """Write an app.

    Parameters
    ----------
    folder, name
        Where, and its name, which is that of its modules.
    rounds : int, default 3
        Rounds of training.
    length : float, default 2.0
        Length of an update.
    after : str, default ""
        A statement of the client's function, after it trained ``weights`` from ``start``.
    mod, mods : str, default ""
        Code that defines a mod, and the client's mods.
    wrap : str, default ""
        A statement about the server's ``strategy``.
    evaluate : float, default 1.0
        Share of the clients that evaluate, also the last model.
    """
    app = folder / name
    app.mkdir()
    client = _CLIENT.format(mod=mod, mods=mods, length=length, after=after or "pass")
    (app / "pyproject.toml").write_text(PROJECT.format(name=name, rounds=rounds))
    (app / f"{name}_client.py").write_text(client)
    (app / f"{name}_server.py").write_text(_SERVER.format(wrap=wrap or "pass", evaluate=evaluate))
    return app
