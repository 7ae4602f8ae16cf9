"""An app with adapters: only they travel after the change, where its lines are the usual ones."""

import pytest

from flwr_privacy.simulations.inspector.app_folder import AppFolder
from flwr_privacy.simulations.inspector.findings import of_arrays
from flwr_privacy.simulations.inspector.inspection import Inspection, inspect_app
from flwr_privacy.simulations.inspector.wraps import Options
from tests.simulations.inspector.conftest import SERVER, Small, new

CLIENT = """
from flwr.clientapp import ClientApp

from small.task import make_model

app = ClientApp()


@app.train()
def train(message, context):
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    ...


@app.evaluate()
def evaluate(message, context):
    net = make_model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=True)
    ...
"""
HELPER = CLIENT.replace("net.load_state_dict(", "load_into(net, ")
NAMES = [
    "base_model.model.q.base_layer.weight",
    "base_model.model.q.lora_A.default.weight",
    "base_model.model.q.lora_B.default.weight",
]


def server(names: list[str]) -> str:
    values = ", ".join(f'"{name}": Array(np.zeros((10, 2), np.float32))' for name in names)
    text = SERVER.replace(
        "    strategy.start", f"    arrays = ArrayRecord({{{values}}})\n    strategy.start"
    )
    return f"import numpy as np\nfrom flwr.app import Array, ArrayRecord\n{text}"


def inspected(
    small: Small, scheme: str, client: str = CLIENT, names: list[str] = NAMES
) -> Inspection:
    return inspect_app(small(client=client, server=server(names)), scheme, Options(clients=4))


@pytest.mark.parametrize("scheme", ["fedavg", "udp", "central-dp", "mspdq", "msp"])
def test_the_change_has_only_the_adapters_travel(scheme: str, small: Small) -> None:
    found = inspected(small, scheme)
    assert 'trainable=["*.lora_*"]' in new(found.change, "server")
    client = new(found.change, "client")
    assert "from flwr_privacy.clients.torch import load_trainable" in client
    assert 'load_trainable(model, message.content["arrays"])\n' in client
    assert 'load_trainable(net, message.content["arrays"])\n' in client
    assert "load_state_dict" not in client
    lines = "\n".join(of_arrays(found.found, found.wrap))
    assert "(40 weights)" in lines
    assert "1 frozen arrays never travel (66.67% of the values do)" in lines
    if scheme == "udp":
        assert "noise in 40 weights" in found.forecast


def test_applied_twice_it_changes_nothing(small: Small) -> None:
    found = inspected(small, "udp")
    found.change.apply()
    again = inspect_app(AppFolder.read(found.change.app.path), "udp", Options(clients=4))
    assert again.change.empty


@pytest.mark.parametrize(
    ("client", "names", "scheme", "line"),
    [
        (HELPER, NAMES, "udp", "adapters: all arrays travel. With trainable="),
        (CLIENT, NAMES, "m2fdp", ""),
        (CLIENT, NAMES[1:], "udp", ""),
        (CLIENT, NAMES[:1], "udp", ""),
    ],
)
def test_otherwise_the_whole_model_travels_as_before(
    client: str, names: list[str], scheme: str, line: str, small: Small
) -> None:
    found = inspected(small, scheme, client, names)
    assert "trainable" not in new(found.change, "server")
    assert "load_trainable" not in new(found.change, "client")
    lines = "\n".join(of_arrays(found.found, found.wrap))
    assert ("adapters:" in lines) == bool(line)
    assert line in lines
