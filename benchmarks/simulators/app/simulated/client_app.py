"""The client app of all sides that are Flower's: a training in plain PyTorch."""

from collections.abc import Callable
from functools import lru_cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from flwr_privacy.clients import (
    CentralDPClient,
    FedAvgClient,
    M2FDPClient,
    MSPDQClient,
    SecureSumClient,
    UDPClient,
    as_mod,
)
from flwr_privacy.clients.torch import train as train_by_library
from flwr_privacy.secure_sum.messages import JOIN, KEYS, SHARES
from flwr_privacy.wire.message import RECORD

from . import work

__all__ = ["app"]

SCHEMES = (FedAvgClient, CentralDPClient, UDPClient, MSPDQClient, M2FDPClient)
MODS = {client.scheme: as_mod(client) for client in SCHEMES}
SUMMED = as_mod(SecureSumClient)


def scheme_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Wrap the app in the scheme that the message names; Flower's own messages go straight on.

    For benchmarks only: an app with something to protect does not leave that to the server.
    """
    if RECORD not in message.content:
        return call_next(message, context)
    record = message.content.config_records[RECORD]
    scheme = str(record["scheme"])
    in_sum = JOIN in message.content or record["phase"] in (KEYS, SHARES)
    # FedAvg has a client half of its own for sums; the other schemes have one for both.
    mod = SUMMED if in_sum and scheme == SecureSumClient.scheme else MODS[scheme]
    return mod(message, context, call_next)


app = ClientApp(mods=[scheme_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this client's images for one epoch."""
    size = str(context.run_config["size"])
    task, model = work.TASKS[size], _model(size)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = _data(str(context.run_config["data"]))
    client = int(context.node_config["partition-id"])
    images, labels = data.of(client)
    train_by_library(
        model,
        images,
        labels,
        batch_size=task.batch,
        learning_rate=task.learning_rate,
        seed=client,
        device="cpu",
    )
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(labels)}),
        }
    )
    return Message(content, reply_to=message)


@lru_cache(maxsize=1)
def _model(size: str) -> nn.Module:
    torch.set_num_threads(1)
    return work.model_of(size)


@lru_cache(maxsize=1)
def _data(path: str) -> work.Data:
    return work.Data(path)
