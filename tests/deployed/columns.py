"""Three clients with two columns each of a dozen rows, and FedVS on them."""

from functools import partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from flwr_privacy.clients import VerticalData
from flwr_privacy.strategies import ColumnFeatures, LagrangeCoding
from flwr_privacy.wire.identity import derive_seed

ROWS = 12
LABELS = np.arange(ROWS) % 2


def columns_of(client: str) -> VerticalData:
    """Return what a client has: noise, and a little of the label."""
    draws = np.random.default_rng(derive_seed(0, "columns", client))
    features = draws.uniform(-0.5, 0.5, (ROWS, 2)) + 0.4 * LABELS[:, None]
    return VerticalData(train=features)


def parameters() -> dict[str, Any]:
    """Return the parameters of the strategy; torch is imported here, on the server only."""
    from flwr_privacy.clients.torch import TorchServerModel, linear

    return {
        "labels": LABELS,
        "server_model": TorchServerModel(partial(linear, 4, 2)),
        "embedding": 4,
        "data": ColumnFeatures(order=1),
        "batch_size": 6,
        "learning_rate": 0.5,
        "client_learning_rate": 3.0,
        "parties": 3,
        "coding": LagrangeCoding(K=1),
    }


def initial() -> ArrayRecord:
    """Return the server model to start from."""
    arrays = parameters()["server_model"].initial()
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})
