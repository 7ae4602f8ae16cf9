"""Small apps for probes, written into a folder: a few numbers, no torch in their own code."""

from pathlib import Path

PROJECT = """\
[project]
name = "{name}"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "{name}.server_app:app"
clientapp = "{name}.client_app:app"

[tool.flwr.app.config]
num-server-rounds = {rounds}
hub-token = "hf_AbCdEfGhIjKlMnOpQr12"

[tool.flwr.federations]
default = "local"

[tool.flwr.federations.local]
options.num-supernodes = {nodes}
"""

SERVER = """\
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes={nodes})
    start = ArrayRecord([np.zeros(64, np.float32)])
    strategy.start(grid, start, num_rounds=context.run_config["num-server-rounds"])
"""

CLIENT = """\
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
{imports}

app = ClientApp(mods=[{mods}])


@app.train()
def train(message, context):
    name, record = next(iter(message.content.array_records.items()))
    rng = np.random.default_rng(context.node_config["partition-id"])
    arrays = [a + rng.normal(size=a.shape).astype(np.float32) for a in record.to_numpy_ndarrays()]
    {before}
    content = RecordDict({{name: ArrayRecord(arrays)}})
    content["metrics"] = MetricRecord({{"num-examples": 10}})
    return Message(content=content, reply_to=message)
"""


def small_app(
    folder: Path,
    *,
    name: str = "small",
    nodes: int = 3,
    rounds: int = 2,
    server: str = SERVER,
    client: str = CLIENT,
    imports: str = "",
    mods: str = "",
    before: str = "pass",
) -> Path:
    """Write an app; return its folder."""
    package = folder / name / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "server_app.py").write_text(server.format(nodes=nodes))
    (package / "client_app.py").write_text(client.format(imports=imports, mods=mods, before=before))
    project = PROJECT.format(name=name, nodes=nodes, rounds=rounds)
    (package.parent / "pyproject.toml").write_text(project)
    return package.parent
