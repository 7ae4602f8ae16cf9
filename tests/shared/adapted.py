"""An app that trains adapters of a small network, and the bugs that such apps have."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from apps import run_strategy
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from flwr_privacy.clients import as_mod, numpy_client_app
from flwr_privacy.clients.torch import (
    initialise,
    load_trainable,
    train_per_record,
    trainable_state,
)

PATTERNS = ("*.lora_*", "3.*")
TRAINED = ["0.lora_A.default.weight", "0.lora_B.default.weight", "3.weight", "3.bias"]
FEATURES, HIDDEN, CLASSES, RANK = 6, 40, 3, 2


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter; the names are those of peft."""

    def __init__(self, base: nn.Linear, rank: int = RANK) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        down = nn.Linear(base.in_features, rank, bias=False)
        up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(up.weight)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": down}), nn.ModuleDict({"default": up})

    def forward(self, inputs: Tensor) -> Tensor:
        change: Tensor = self.lora_B["default"](self.lora_A["default"](inputs))
        return self.base_layer(inputs) + change


def network(seed: int = 7, hidden: int = HIDDEN) -> nn.Module:
    """Return adapters and a head to train around a base that is frozen."""

    def new() -> nn.Module:
        middle = nn.Linear(hidden, hidden).requires_grad_(False)
        first = Adapted(nn.Linear(FEATURES, hidden))
        return nn.Sequential(first, nn.ReLU(), middle, nn.Linear(hidden, CLASSES))

    return initialise(new, seed)


def records_of(client: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(client)
    features = torch.randn(24, FEATURES, generator=draws)
    return features, (features[:, 0] > 0).long() + (features[:, 1] > 0.5).long()


def usual_steps(model: nn.Module, features: Tensor, labels: Tensor) -> None:
    """Train by an optimiser of torch."""
    descend(model, features, labels, model.parameters())


def descend(
    model: nn.Module, features: Tensor, labels: Tensor, parameters: Iterable[nn.Parameter]
) -> None:
    optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.2)
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()


def record_steps(model: nn.Module, features: Tensor, labels: Tensor) -> None:
    """Train by the trainer that clips the gradient of each record."""
    train_per_record(model, features, labels)


def adapted_app(
    half: Any,
    *,
    model_of: Callable[[int], nn.Module] = lambda client: network(),
    steps: Callable[[nn.Module, Tensor, Tensor], None] = usual_steps,
    load: Callable[[nn.Module, Any], None] = load_trainable,
    reply: Callable[[nn.Module], Any] = trainable_state,
    data: Callable[[int], tuple[Tensor, Tensor]] = records_of,
) -> ClientApp:
    """Return a Message-API app; what is given replaces one line of it."""
    app = ClientApp(mods=[as_mod(half)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        model = model_of(client)
        load(model, message.content.array_records["arrays"])
        features, labels = data(client)
        steps(model, features, labels)
        content = RecordDict(
            {
                "arrays": ArrayRecord(reply(model)),
                "metrics": MetricRecord({"num-examples": len(labels)}),
            }
        )
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        model = model_of(client)
        load(model, message.content.array_records["arrays"])
        features, labels = data(client)
        hits = float((model(features).argmax(dim=1) == labels).float().mean())
        metrics = MetricRecord({"num-examples": len(labels), "accuracy": hits})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class ListClient(NumPyClient):
    """The same app as a NumPyClient."""

    def __init__(self, client: int) -> None:
        self.client = client

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
        model = network()
        load_trainable(model, parameters)
        features, labels = records_of(self.client)
        usual_steps(model, features, labels)
        return [t.numpy() for t in trainable_state(model).values()], len(labels), {}


def list_app(half: Any) -> ClientApp:
    def client_fn(context: Context) -> NumPyClient:
        return half(ListClient(int(context.node_config["partition-id"])), context)

    return numpy_client_app(client_fn)


def run_adapted(
    strategy: Any, app: ClientApp, *, model: nn.Module | None = None, **more: Any
) -> Any:
    """Run a training of adapters inline."""
    arrays = ArrayRecord((model or network()).state_dict())
    more.setdefault("num_rounds", 2)
    return run_strategy(strategy, app, arrays=arrays, **more)
