"""DP-SGD of adapters: private steps in the part that travels, on frozen weights that all have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import FEATURES, run_adapted
from apps import model_of
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.clients.torch import (
    freeze_lora_factor,
    initialise,
    load_trainable,
    mlp,
    private_training,
    trainable_names,
    trainable_state,
)
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.strategies import DPSGD, UDP

CLASSES = 3
PRIVACY = {"epsilon": 50.0, "sampling_rate": 0.25, "steps": 8}


def lora(seed: int = 3) -> nn.Module:
    config = LoraConfig(r=2, target_modules=["1"], modules_to_save=["3"])

    def new() -> nn.Module:
        return get_peft_model(mlp([FEATURES, 16, CLASSES]), config)  # type: ignore[arg-type]

    return initialise(new, seed)


def ffa_lora() -> nn.Module:
    model = lora()
    freeze_lora_factor(model)
    return model


def data(client: int) -> TensorDataset:
    draws = torch.Generator().manual_seed(client)
    features = torch.randn(60, FEATURES, generator=draws)
    return TensorDataset(features, features[:, :CLASSES].argmax(dim=1))


def trained_parts(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def app(
    make: Callable[[], nn.Module] = lora,
    *,
    parameters: Callable[[nn.Module], Any] = trained_parts,
    after_step: Callable[[nn.Module], None] = lambda model: None,
    load: Callable[[nn.Module, Any], None] = load_trainable,
    reply: Callable[[nn.Module], Any] = trainable_state,
) -> ClientApp:
    """The app of docs/adapters.md with private steps; what is given replaces one line of it."""
    client_app = ClientApp(mods=[as_mod(UDPClient)])

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        model = make()
        load(model, message.content["arrays"])
        optimizer: Any = torch.optim.AdamW(parameters(model), lr=0.05)
        loader: Any = DataLoader(data(int(context.node_config["partition-id"])))
        model, optimizer, loader = private_training(model, optimizer, loader, context)
        for _ in range(loader.passes):
            for features, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(features), labels).backward()
                optimizer.step()
                after_step(model)
        arrays = ArrayRecord(reply(model))
        metrics = MetricRecord({"num-examples": len(loader.dataset)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return client_app


def run(client_app: ClientApp, make: Callable[[], nn.Module] = lora, **more: Any) -> Any:
    strategy = UDP(privacy=DPSGD(**PRIVACY), trainable=trainable_names(make()))
    return run_adapted(strategy, client_app, model=make(), **more)


def accuracy(model: nn.Module, arrays: Any) -> float:
    model.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in model_of(arrays).items()})
    features, labels = data(3).tensors
    return float((model(features).argmax(dim=1) == labels).float().mean())


@pytest.mark.parametrize("make", [lora, ffa_lora])
def test_adapters_learn_in_private_steps_and_the_base_stays(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    result = run(app(make), make, num_rounds=3, state=tmp_path)
    start, moved = make().state_dict(), model_of(result.arrays)
    assert [n for n in start if (moved[n] != start[n].numpy()).any()] == trainable_names(make())
    assert [line["accumulated"] for line in result.history[1:]] == [4, 4, 4]
    assert accuracy(make(), result.arrays) > accuracy(make(), ArrayRecord(start)) + 0.15
    charges = [entry.charge for entry in Ledger(tmp_path / "0.ledger", data_set="0").entries()]
    assert [charge.count for charge in charges] == [8, 8, 8]


def test_the_reply_may_be_the_whole_model() -> None:
    result = run(app(reply=lambda model: model.state_dict()), num_rounds=1)
    assert result.history[-1]["accumulated"] == 4


def move_a_frozen_weight(model: Any) -> None:
    with torch.no_grad():
        model.get_parameter("base_model.model.1.base_layer.weight").add_(0.01)


def without_one_factor(model: nn.Module) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if p.requires_grad and "lora_B" not in n]


BUGS: dict[str, tuple[dict[str, Any], str]] = {
    "the loop changes a frozen weight": (
        {"after_step": move_a_frozen_weight},
        "the training changed frozen weights",
    ),
    "the optimiser lacks an adapter": ({"parameters": without_one_factor}, "never saw"),
    "the optimiser has frozen weights": (
        {"parameters": lambda model: model.parameters()},
        "which are frozen",
    ),
    "another base model": ({"make": lambda: lora(seed=4)}, "the frozen weights ="),
    "nothing is loaded": ({"load": lambda model, arrays: None}, "load_trainable"),
    "a part of the adapters is returned": (
        {"reply": lambda model: dict([*trainable_state(model).items()][1:])},
        "returned no",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_the_app_is_found_before_anything_is_charged(
    bug: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    changes, text = BUGS[bug]
    result = run(app(**changes), num_rounds=1, state=tmp_path)
    assert result.history[-1]["skipped"]
    assert text in caplog.text
    assert not Ledger(tmp_path / "0.ledger", data_set="0").entries()
