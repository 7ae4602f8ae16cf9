"""The code of docs/adapters.md runs as it stands."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context
from torch import Tensor

from flwr_privacy.clients.torch import trainable_names
from flwr_privacy.simulations.engines.inline import run_inline

PAGE = Path(__file__).parents[1] / "docs" / "adapters.md"
BLOCKS = dict(re.findall(r"^```python (\w+)\n(.*?)^```", PAGE.read_text(), re.M | re.S))


def load_data(context: Context) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    features = torch.randn(16, 8, generator=draws)
    return features, (features[:, 0] > 0).long()


def run(*names: str) -> dict[str, Any]:
    values: dict[str, Any] = {"load_data": load_data}
    for name in names:
        exec(compile(BLOCKS[name], f"adapters.md, {name}", "exec"), values)
    return values


def test_server_and_clients_train_the_adapters(caplog: pytest.LogCaptureFixture) -> None:
    server, client = run("task", "server")["app"], run("task", "client")["app"]
    with caplog.at_level(logging.INFO, "flwr.privacy"):
        run_inline(server, client, nodes=3)
    assert "trained: 2 of 2 rounds" in caplog.text
    assert "a part of the model travels: 642 of 5508 numbers (4 arrays)" in caplog.text


def test_names_and_the_frozen_factor() -> None:
    names = run("task", "server", "names")["strategy"].trainable
    assert any("lora_A" in name for name in names)
    frozen = run("task", "server", "names", "ffa")["strategy"].trainable
    assert [name for name in names if "lora_A" not in name] == frozen
    assert frozen == trainable_names(run("task", "server", "names", "ffa")["model"])
