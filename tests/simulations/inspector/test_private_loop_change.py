"""The unit 'dp-sgd': one call before the app's loop, which stays; else the lines to write."""

import ast
import importlib
import sys

import pytest
import torch
from apps import run_strategy
from drop_in import sides
from flwr.app import ArrayRecord

from flwr_privacy.simulations.inspector.changes.change import change_of
from flwr_privacy.simulations.inspector.findings import losses
from flwr_privacy.simulations.inspector.unfit import UnfitError
from flwr_privacy.simulations.inspector.wraps import Options, wrap_of
from tests.simulations.inspector.conftest import Small, new

CLIENT = """
from flwr.clientapp import ClientApp

from small.task import load, train as fit

app = ClientApp()


@app.train()
def train(message, context):
    net, loader = load(context)
    loss = fit(net, loader, 3)
    return reply(net, loss)
"""
TASK = """
import torch
from torch import nn


def load(context):
    ...


def train(net, loader, epochs):
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net.train()
    running = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(net(images), labels)  # a comment
            loss.backward()
            optimizer.step()
            running += loss.item()
    return running / len(loader)
"""
CHANGED = """\
def train(net, loader, epochs, *, context):
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net.train()
    running = 0.0
    net, optimizer, loader = private_training(net, optimizer, loader, context)
    for _ in range(loader.passes):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(net(images), labels)  # a comment
"""
WRAP = wrap_of("udp", Options(clients=4, unit="dp-sgd"))


def changed(small: Small, task: str = TASK, client: str = CLIENT) -> tuple[str, str]:
    """Return client and training with the change, and see that the server has its unit."""
    change = change_of(small(client=client, task=task), WRAP)
    server = new(change, "server")
    assert "privacy=DPSGD(epsilon=8.0, delta=1e-5, sampling_rate=0.1, steps=20)" in server
    assert "from flwr_privacy.strategies import DPSGD, UDP\n" in server
    for name in ("client", "task"):
        ast.parse(new(change, name))
    return new(change, "client"), new(change, "task")


def test_the_loop_stays_and_gets_one_call_before_it(small: Small) -> None:
    client, task = changed(small)
    assert CHANGED in task
    assert "from flwr_privacy.clients.torch import private_training\n" in task
    assert "    loss = fit(net, loader, 3, context=context)\n" in client
    assert "from flwr_privacy.clients import UDPClientApp as ClientApp\n" in client


def test_the_page_shows_this_change(small: Small) -> None:
    (call, before), (new_call, after) = (side.split("\n\n") for side in sides("dp-sgd"))
    assert call.splitlines()[1] in CLIENT
    step = TASK.partition("loader:\n")[2].partition("            running")[0]
    loop = step.replace("criterion", "nn.functional.cross_entropy")
    task = f"import torch\nfrom torch import nn\n\n\n{before}{loop}"
    client = CLIENT.replace("train as fit", "fit")
    changed_client, changed_task = changed(small, task=task, client=client)
    assert new_call.splitlines()[1] in changed_client
    assert changed_task.endswith(f"{after}{loop}")


def test_a_loop_in_the_training_itself_has_its_context(small: Small) -> None:
    body = TASK.partition("    criterion")[2].replace("    return running", "    loss = running")
    client = CLIENT.replace("    loss = fit(net, loader, 3)\n", f"    criterion{body}")
    client = client.replace(", train as fit", "").replace("range(epochs)", "range(3)")
    client = client.replace("\nfrom small", "\nimport torch\nfrom torch import nn\n\nfrom small", 1)
    client = client.replace("(message, context)", "(message, own)").replace("load(context)", "1, 2")
    text, _ = changed(small, "def load(context):\n    ...\n", client)
    assert "    net, optimizer, loader = private_training(net, optimizer, loader, own)\n" in text


@pytest.mark.parametrize(
    ("old", "other", "call", "head"),
    [
        ("    for _ in range(epochs):\n        for images, labels in loader:\n",
         "    if True:\n      pass\n    for images, labels in loader:\n",
         "net, optimizer, loader = private_training(net, optimizer, loader, context)",
         "    for _ in range(loader.passes):\n        for images, labels in loader:\n"
         "                optimizer.zero_grad()\n"),
        ("in loader:", "in self.loader:",
         "net, optimizer, private_loader = private_training(net, optimizer, self.loader, context)",
         "range(private_loader.passes):\n        for images, labels in private_loader:"),
        ("optimizer.zero_grad()", "images = images.to(device)\n            optimizer.zero_grad()",
         "net, optimizer, loader = private_training(net, optimizer, loader, context)", ""),
    ],
)  # fmt: skip
def test_loops_of_other_shapes(old: str, other: str, call: str, head: str, small: Small) -> None:
    assert old in TASK
    _, task = changed(small, TASK.replace(old, other))
    assert f"    {call}\n" in task
    assert head in task


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("def train(net, loader, epochs=3):", "def train(net, loader, epochs=3, *, context):"),
        (
            "def train(\n    net: Net,\n    loader,\n    epochs: int = 3,\n) -> float:",
            "def train(\n    net: Net,\n    loader,\n    epochs: int = 3, *, context,\n) -> float:",
        ),
    ],
)
def test_a_function_gets_the_context_by_its_name(head: str, expected: str, small: Small) -> None:
    _, task = changed(small, TASK.replace("def train(net, loader, epochs):", head))
    assert expected in task


@pytest.mark.parametrize(
    ("old", "other", "reason"),
    [
        ("loss.backward()", "loss.backward()\n            clip(net)", "more than a step"),
        ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(weight=w)", "value for single records"),
        ("            optimizer.step()\n",
         "            with torch.no_grad():\n                for p in net.parameters():\n"
         "                    p -= 0.1 * p.grad\n", "no optimizer of torch takes its steps"),
        ("def train(net, loader, epochs):", "def train(net, loader, *epochs):", "takes `context`"),
        ("def train(net, loader, epochs):", "def train(net, loader, context):", "takes `context`"),
        ("    ...\n",
         "    DataLoader(d, drop_last=True)\nfrom torch.utils.data import DataLoader\n",
         "a DataLoader with drop_last leaves out"),
    ],
)  # fmt: skip
def test_what_cannot_be_changed_is_said_with_the_lines_to_write(
    old: str, other: str, reason: str, small: Small
) -> None:
    app = small(client=CLIENT, task=TASK.replace(old, other, 1))
    before = {path: path.read_bytes() for path in app.path.rglob("*.py")}
    with pytest.raises(UnfitError, match=reason) as refused:
        change_of(app, WRAP).apply()
    by_hand = "\n".join(refused.value.by_hand)
    assert "from flwr_privacy.clients.torch import private_training" in by_hand
    assert "client.py:10: def train(message, context):" in by_hand
    assert "before its loop: " in by_hand
    assert "private_training(" in by_hand
    assert "for _ in range(loader.passes):" in by_hand
    assert "server: UDP(..., privacy=DPSGD(epsilon=8.0, delta=1e-5" in by_hand
    assert {path: path.read_bytes() for path in app.path.rglob("*.py")} == before


def test_a_numpy_client_has_to_keep_its_context(small: Small) -> None:
    client = """
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from small.task import train


class Mine(NumPyClient):
    def fit(self, parameters, config):
        train(self.net, self.loader, 3)
        return arrays(self.net), 1, {}


def client_fn(context):
    return Mine().to_client()


app = ClientApp(client_fn)
"""
    with pytest.raises(UnfitError, match="a NumPyClient does not get Flower's context") as refused:
        change_of(small(client=client, task=TASK), WRAP)
    assert any("client_fn" in line for line in refused.value.by_hand)


def test_applied_twice_is_applied_once(small: Small) -> None:
    app = small(client=CLIENT, task=TASK)
    change_of(app, WRAP).apply()
    assert change_of(type(app).read(app.path), WRAP).empty


def test_of_a_model_with_adapters_the_optimiser_gets_what_is_trained(small: Small) -> None:
    wrap = WRAP.training(("*.lora_*",))
    client = CLIENT.replace(
        "    loss = fit",
        "    net.load_state_dict(message.content['arrays'].to_torch_state_dict())\n    loss = fit",
    )
    change = change_of(small(client=client, task=TASK), wrap)
    assert "torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.1)" in new(
        change, "task"
    )
    assert "load_trainable(net, message.content['arrays'])" in new(change, "client")


def test_what_the_app_loses_is_told(small: Small) -> None:
    said = losses(small(client=CLIENT, task=TASK), WRAP)
    assert any("the server says how many steps" in line for line in said)


RUNS_CLIENT = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from small.task import load, model, train as fit

app = ClientApp()


@app.train()
def train(message, context):
    net = model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = fit(net, load(), 3)
    metrics = MetricRecord({"loss": loss, "num-examples": 40})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
"""
RUNS_LOAD = """
device = "cpu"


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def load():
    features = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(features, (features[:, 0] > 0).long()), batch_size=8)
"""


def test_the_changed_app_trains_in_private_steps(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TASK.replace("\n\ndef load(context):\n    ...\n", RUNS_LOAD).replace(
        "from torch import nn\n",
        "from torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n",
    )
    app = small(client=RUNS_CLIENT, task=task)
    change_of(app, WRAP).apply()
    monkeypatch.syspath_prepend(app.path)
    for name in ("small", "small.client", "small.task"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    client = importlib.import_module("small.client")
    start = ArrayRecord(sys.modules["small.task"].model().state_dict())
    strategy = WRAP.build(min_available_nodes=4)
    result = run_strategy(strategy, client.app, arrays=start, num_rounds=1)
    assert result.history[-1]["accumulated"] == 4
    assert [release.charge.count for release in strategy.releases] == [20]
    assert not torch.equal(
        result.arrays.to_torch_state_dict()["0.weight"], start.to_torch_state_dict()["0.weight"]
    )
