"""A step towards the node's own number."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train."""
    target = float(context.node_config["partition-id"])
    step = message.content["config"]["step"]
    arrays = {
        name: Array(np.asarray(array.numpy() + step * (target - array.numpy()), np.float32))
        for name, array in message.content["arrays"].items()
    }
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 10})}
    return Message(RecordDict(content), reply_to=message)
