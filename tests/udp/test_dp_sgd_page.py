"""The code of docs/dp-sgd.md is a whole app: it trains and is charged as the page says."""

import re
from pathlib import Path
from typing import Any

import torch
from apps import run_strategy
from flwr.app import Array, ArrayRecord, Context
from torch import nn
from torch.utils.data import TensorDataset

from flwr_privacy.clients.torch import get_arrays, initialise, mlp

PAGE = Path(__file__).parents[2] / "docs" / "dp-sgd.md"


def build_model() -> nn.Module:
    return initialise(lambda: mlp([6, 8, 3]), 0)


def own_records(context: Context) -> TensorDataset:
    draws = torch.Generator().manual_seed(int(str(context.node_config["partition-id"])))
    features = torch.randn(90, 6, generator=draws)
    return TensorDataset(features, features[:, :3].argmax(dim=1))


def test_the_code_of_the_page_trains_and_is_charged() -> None:
    client, server = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    app: dict[str, Any] = {"build_model": build_model, "own_records": own_records}
    exec(compile(client, str(PAGE), "exec"), app)
    exec(compile(server, str(PAGE), "exec"), app)
    arrays = {name: Array(array) for name, array in get_arrays(build_model()).items()}
    start = ArrayRecord(arrays)
    result = run_strategy(app["strategy"], app["app"], nodes=3, arrays=start, num_rounds=2)
    assert [release.charge.count for release in app["strategy"].releases] == [20, 20]
    assert 7.8 < app["strategy"].card().epsilon("rdp") <= 8
    moved = [(result.arrays[name].numpy() != start[name].numpy()).any() for name in start]
    assert all(moved)
