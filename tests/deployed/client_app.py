"""The client half: doubles the numbers and adds the `shift` of the node's configuration.

Under FedVS the node has columns of its own instead.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from columns import columns_of
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hostile import hostile
from mischief import mischief

from flwr_privacy.clients import (
    CentralDPClient,
    FedAvgClient,
    FedVSClient,
    M2FDPClient,
    MSPDQClient,
    SchemeClient,
    SecureSumClient,
    UDPClient,
    as_mod,
)
from flwr_privacy.clients.node.adapters import OwnClient
from flwr_privacy.wire.identity import client_id_from

CLIENTS: dict[str, type[SchemeClient]] = {
    "fedavg": FedAvgClient,
    "secure-sum": SecureSumClient,
    "mspdq": MSPDQClient,
    "udp": UDPClient,
    "central-dp": CentralDPClient,
    "m2fdp": M2FDPClient,
}


def scheme_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    # Mods are made at import, when there is no run configuration yet.
    if context.run_config["scheme"] == "fedvs":
        own = OwnClient(FedVSClient, lambda c: columns_of(client_id_from(c.node_config)))
        return own(message, context)
    return as_mod(CLIENTS[str(context.run_config["scheme"])])(message, context, call_next)


def misbehaving(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Answer through the scheme and what goes wrong around it: a scheme must be the first mod."""
    scheme = partial(scheme_mod, call_next=call_next)
    return hostile(message, context, partial(mischief, call_next=scheme))


app = ClientApp(mods=[misbehaving])


@app.train()
def train(message: Message, context: Context) -> Message:
    shift = float(context.node_config["shift"])
    arrays = {
        name: Array(np.asarray(2 * array.numpy() + shift, np.float32))
        for name, array in message.content.array_records["arrays"].items()
    }
    metrics = MetricRecord({"num-examples": int(context.node_config["examples"])})
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
    return Message(content, reply_to=message)
