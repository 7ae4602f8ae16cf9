"""LoRA and FFA-LoRA by the library that apps take them from, under the schemes."""

from typing import Any

import pytest
import torch
from adapted import adapted_app, record_steps, run_adapted
from apps import make, model_of
from flwr.app import ArrayRecord
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from flwr_privacy.clients import CentralDPClient, FedAvgClient, UDPClient
from flwr_privacy.clients.torch import freeze_lora_factor, initialise, mlp, trainable_names
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.strategies import UDP, CentralDP, FedAvg

PATTERNS = ("*.lora_*", "*.modules_to_save.*")
BUDGET = {"epsilon": 200.0, "clipping_norm": 0.5}


class Sentence(nn.Module):
    """A transformer of one layer over six features, each a token of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 16)
        self.query, self.value = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, features: Tensor) -> Tensor:
        tokens = self.embed(features[..., None])
        scores = self.query(tokens) @ tokens.transpose(-1, -2) / 4
        mixed = self.norm(tokens + scores.softmax(dim=-1) @ self.value(tokens))
        logits: Tensor = self.head(mixed.mean(dim=-2))
        return logits


def lora(base: nn.Module | None = None, seed: int = 3) -> nn.Module:
    def new() -> nn.Module:
        config = LoraConfig(
            r=2, target_modules=["query", "value"], modules_to_save=["head"], lora_dropout=0.0
        )
        return get_peft_model(base or Sentence(), config)  # type: ignore[arg-type]

    return initialise(new, seed)


def ffa_lora(seed: int = 3) -> nn.Module:
    model = lora(seed=seed)
    freeze_lora_factor(model)
    return model


def run(strategy: Any, half: Any, model_of_client: Any, **options: Any) -> Any:
    app = adapted_app(half, model_of=lambda client: model_of_client(), **options)
    return run_adapted(strategy, app, model=model_of_client())


@pytest.mark.parametrize("model", [lora, ffa_lora])
@pytest.mark.parametrize(
    ("strategy", "half", "options"),
    [
        (lambda **o: FedAvg(**o), FedAvgClient, {}),
        (lambda **o: make(UDP, **BUDGET, **o), UDPClient, {}),
        (
            lambda **o: make(UDP, unit="record", learning_rate=0.5, **BUDGET, **o),
            UDPClient,
            {"steps": record_steps},
        ),
        (lambda **o: make(CentralDP, **BUDGET, **o), CentralDPClient, {}),
    ],
)
def test_adapters_of_peft_are_trained_and_nothing_else(
    strategy: Any, half: Any, options: dict[str, Any], model: Any
) -> None:
    names = trainable_names(model())
    result = run(strategy(trainable=names), half, model, **options)
    start, moved = model().state_dict(), model_of(result.arrays)
    assert list(moved) == list(start)
    assert [n for n in start if (moved[n] != start[n].numpy()).any()] == names
    assert [line["accumulated"] for line in result.history[1:]] == [4, 4]


def test_patterns_and_requires_grad_name_the_same() -> None:
    result = run(FedAvg(trainable=PATTERNS), FedAvgClient, lora)
    assert result.history[-1]["accumulated"] == 4


def test_one_factor_frozen_halves_what_travels_and_leaves_the_other() -> None:
    """For square layers."""

    def count(model: nn.Module) -> int:
        return sum(
            p.numel() for n, p in model.named_parameters() if "lora" in n and p.requires_grad
        )

    assert count(ffa_lora()) * 2 == count(lora())
    assert not any("lora_A" in name for name in trainable_names(ffa_lora()))


def test_the_mean_of_updates_is_the_update_of_the_mean() -> None:
    """With one factor frozen; with both trained it is not."""
    torch.manual_seed(0)
    a, clients = torch.randn(2, 16), [torch.randn(16, 2) for _ in range(3)]
    others = [torch.randn(2, 16) for _ in range(3)]
    mean = torch.stack(clients).mean(dim=0)
    products = torch.stack([b @ a for b in clients]).mean(dim=0)
    assert torch.allclose(mean @ a, products, atol=1e-6)
    both = torch.stack([b @ x for b, x in zip(clients, others, strict=True)]).mean(dim=0)
    assert not torch.allclose(mean @ torch.stack(others).mean(dim=0), both, atol=1e-2)


def test_a_frozen_factor_from_another_seed_is_another_base_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = make(UDP, **BUDGET, trainable=trainable_names(ffa_lora()))
    app = adapted_app(UDPClient, model_of=lambda client: ffa_lora(seed=4))
    result = run_adapted(strategy, app, model=ffa_lora(), num_rounds=1)
    assert result.history[-1]["skipped"]
    assert "from the same seed" in caplog.text


def test_adapters_that_are_switched_off_are_found_at_record_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def off() -> nn.Module:
        model = lora()
        model.base_model.disable_adapter_layers()  # type: ignore[union-attr, operator]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name or "modules_to_save" in name)
        return model

    strategy = make(UDP, unit="record", learning_rate=0.5, **BUDGET, trainable=PATTERNS)
    app = adapted_app(UDPClient, model_of=lambda client: off(), steps=record_steps)
    result = run_adapted(strategy, app, model=lora(), num_rounds=1)
    assert result.history[-1]["skipped"]
    assert "does not depend on" in caplog.text


def test_merging_adapters_into_the_base_is_found(caplog: pytest.LogCaptureFixture) -> None:
    def steps(model: Any, features: Tensor, labels: Tensor) -> None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
        model.merge_adapter()

    app = adapted_app(FedAvgClient, model_of=lambda client: lora(), steps=steps)
    run_adapted(FedAvg(trainable=PATTERNS), app, model=lora(), num_rounds=1)
    assert "the training changed frozen weights" in caplog.text


@pytest.mark.parametrize(
    ("model", "factor", "text"),
    [
        (lambda: mlp([4, 3]), "A", "model = 'Sequential': expected a model with adapters of peft"),
        (lora, "B", "expected a factor that is not zero"),
        (lora, "C", "factor = 'C': expected one of"),
    ],
)
def test_what_cannot_be_frozen_is_refused(model: Any, factor: str, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        freeze_lora_factor(model(), factor)


def test_the_record_of_a_model_of_peft_is_that_of_any_model() -> None:
    """The server's line is the usual one."""
    assert len(ArrayRecord(lora().state_dict())) > len(trainable_names(lora()))
