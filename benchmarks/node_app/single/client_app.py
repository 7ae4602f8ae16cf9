"""The client app of all sides: a step on a small model, in numpy alone.

Without a scheme the process imports nothing of this library: that is what a scheme costs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

__all__ = ["app"]


def scheme_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Wrap the app in the scheme of the run."""
    scheme = str(context.run_config["scheme"])
    if scheme == "flower":
        return call_next(message, context)
    from flwr_privacy import clients

    halves: dict[str, Any] = {
        "fedavg": lambda: clients.FedAvgClient,
        "udp": lambda: clients.UDPClient,
        "central-dp": lambda: clients.CentralDPClient,
    }
    return clients.as_mod(halves[scheme]())(message, context, call_next)


app = ClientApp(mods=[scheme_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Move the model by one step."""
    arrays = {
        name: Array(array.numpy() * np.float32(0.9))
        for name, array in message.content["arrays"].items()
    }
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)
