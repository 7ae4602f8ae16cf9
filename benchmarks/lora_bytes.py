"""The row of adapters: the bytes that a client sends, beside those of its full model."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from peft import LoraConfig, get_peft_model
from torch import nn

from flwr_privacy.clients import (
    CentralDPClient,
    MSPDQClient,
    SchemeClient,
    SecureSumClient,
    UDPClient,
    as_mod,
)
from flwr_privacy.clients.torch import initialise, load_trainable, trainable_names
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.strategies import MSPDQ, UDP, CentralDP, FedAvg, LoopOptions, UserLevel

from .report import Comparison

__all__ = ["lora_bytes"]

CLIENTS, WIDTH, LAYERS, RANK, CLASSES = 4, 128, 4, 4, 10
SCHEMES: dict[str, tuple[Callable[..., Any], type[SchemeClient]]] = {
    "UDP": (lambda **o: UDP(privacy=UserLevel(), **o), UDPClient),
    "CentralDP, shares": (CentralDP, CentralDPClient),
    "FedAvg, summed": (lambda **o: FedAvg(secure_sum=SecureSum(), **o), SecureSumClient),
    "MSPDQ, summed": (lambda **o: MSPDQ(secure_sum=SecureSum(), **o), MSPDQClient),
}


def lora_bytes() -> Iterator[Comparison]:
    """Compare a round of LoRA with one of the whole model, under the same scheme."""
    model = initialise(_adapted, 0)
    state, names = model.state_dict(), trainable_names(model)
    share = sum(state[name].numel() for name in names) / sum(t.numel() for t in state.values())
    for name, (strategy, half) in SCHEMES.items():
        yield Comparison(
            what=f"LoRA, {name}: bytes up of a client",
            rival=f"the full model; the adapters have {share:.2%} of its values",
            ours=[_sent(strategy, half, names)],
            theirs=[_sent(strategy, half, None)],
            unit="B",
            at_most=round(share + 0.01, 4),
        )


def _adapted() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    parts = {
        "encoder": nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
        "head": nn.Linear(WIDTH, CLASSES),
    }
    base = nn.Sequential()
    for name, part in parts.items():
        base.add_module(name, part)
    config = LoraConfig(r=RANK, target_modules=["linear1", "linear2"])
    return get_peft_model(base, config)  # type: ignore[arg-type]


def _sent(strategy: Callable[..., Any], half: type[SchemeClient], names: list[str] | None) -> float:
    """Return the bytes that a client sends in a round; without names the whole model."""
    app = ClientApp(mods=[as_mod(half)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = initialise(_adapted, 0)
        arrays = message.content.array_records["arrays"]
        if names is None:
            model.load_state_dict(arrays.to_torch_state_dict())
        else:
            load_trainable(model, arrays)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(torch.ones(2, 3, WIDTH)).square().mean().backward()
        optimizer.step()
        content = RecordDict(
            {
                "arrays": ArrayRecord(model.state_dict()),
                "metrics": MetricRecord({"num-examples": 2}),
            }
        )
        return Message(content, reply_to=message)

    server = ServerApp()
    results: list[Any] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord(initialise(_adapted, 0).state_dict())
        loop = LoopOptions(seed=1, write_card=False)
        made = strategy(trainable=names, loop=loop)
        results.append(made.start(grid, arrays, num_rounds=1))

    run_inline(server, app, nodes=CLIENTS)
    return float(results[0].history[1]["wire_bytes_up"]) / CLIENTS
