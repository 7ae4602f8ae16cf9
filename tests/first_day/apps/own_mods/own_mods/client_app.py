"""A linear model in NumPy, behind a mod of the app and one of Flower's."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import arrays_size_mod


def counted_mod(message, context, call_next):
    """Count the node's trainings in a metric."""
    reply = call_next(message, context)
    for record in reply.content.metric_records.values():
        record["trainings"] = 1
    return reply


app = ClientApp(
    mods=[
        counted_mod,  # the outermost
        arrays_size_mod,
    ],
)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take a step towards the node's own number."""
    target = float(context.node_config["partition-id"])
    arrays = {
        name: Array(np.asarray(array.numpy() + 0.1 * (target - array.numpy()), np.float32))
        for name, array in message.content["arrays"].items()
    }
    metrics = MetricRecord({"num-examples": 10, "distance": target})
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
    return Message(content, reply_to=message)
