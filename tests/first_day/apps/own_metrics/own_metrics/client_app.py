"""Reports metrics of its own."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take a step towards the node's own number; report its distance."""
    target = float(context.node_config["partition-id"])
    old = {name: array.numpy() for name, array in message.content["arrays"].items()}
    new = {n: Array(np.asarray(a + 0.1 * (target - a), np.float32)) for n, a in old.items()}
    distance = float(max(np.abs(array - target).max() for array in old.values()))
    metrics = {"records": 10, "distance": distance, "per_class": [distance, 1.0]}
    content = {"arrays": ArrayRecord(new), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Report the node's own number."""
    metrics = {"records": 10, "target": float(context.node_config["partition-id"])}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
