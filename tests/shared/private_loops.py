"""Private training loops outside of a server: what is in each step is the test's choice."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_privacy.clients.certificates.private_steps import (
    PrivateStepsPlan,
    PrivateStepsRequest,
    _request,
)
from flwr_privacy.clients.certificates.request import opened
from flwr_privacy.clients.torch import private_training
from flwr_privacy.udp import PrivateStepsTerms

CLIENT = "7"


def terms(**changes: Any) -> PrivateStepsTerms:
    """Terms without noise, of one step on all records."""
    usual: dict[str, Any] = {
        "steps": 1,
        "sampling_rate": 1.0,
        "clipping_norm": 1.0,
        "noise_multiplier": 0.0,
        "epsilon": 8.0,
        "delta": 1e-5,
        "gap": 1e-3,
        "grid": -27,
    }
    return PrivateStepsTerms(**{**usual, **changes})


def context(client: str = CLIENT) -> Context:
    config: dict[str, Any] = {"partition-id": int(client), "num-partitions": 10}
    return Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})


class Watched(PrivateStepsRequest):
    """A request that says what is in each batch, and keeps the sums before their noise."""

    def __init__(
        self,
        asked: PrivateStepsTerms,
        batches: Sequence[Sequence[int]] | None = None,
        records: int | None = None,
    ) -> None:
        super().__init__(PrivateStepsPlan(terms=asked, client=CLIENT, records=records))
        self._batches = None if batches is None else iter(batches)
        self.drawn: list[list[int]] = []
        self.totals: list[NDArray[np.float64]] = []

    def draw(self, records: int) -> NDArray[np.intp]:
        places = (
            super().draw(records)
            if self._batches is None
            else np.array(next(self._batches), np.intp)
        )
        self.drawn.append(places.tolist())
        return places

    def noised(self, total: NDArray[np.float64], records: int) -> NDArray[np.float64]:
        self.totals.append(total.copy())
        return super().noised(total, records)


def loop(
    request: Watched,
    model: nn.Module,
    features: Tensor,
    labels: Tensor,
    *,
    optimizer: Callable[..., Any] = torch.optim.SGD,
    criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
    after_step: Callable[[nn.Module, Any], None] = lambda model, optimizer: None,
    epochs: int = 1000,
    **options: Any,
) -> Watched:
    """Train as an app does, for as long as there are batches."""
    criterion = criterion or nn.CrossEntropyLoss()
    loader: Any = DataLoader(TensorDataset(features, labels), batch_size=4)
    inner = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with opened(_request, request):
        net, private, loader = private_training(model, inner, loader, context(), **options)
        for _ in range(epochs):
            seen = 0
            for x, y in loader:
                seen += 1
                private.zero_grad()
                criterion(net(x), y).backward()
                private.step()
                after_step(net, private)
            if not seen:
                break
    return request
