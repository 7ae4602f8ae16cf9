"""A stock Message-API client with Flower's mod for adaptive clipping."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod

app = ClientApp(mods=[adaptiveclipping_mod])


@app.train()
def train(msg: Message, context: Context) -> Message:
    partition = int(context.node_config["partition-id"]) + 1  # the mods fail on an update of zero
    arrays = {
        name: Array(np.asarray(array.numpy() + partition, np.float32))
        for name, array in msg.content["arrays"].items()
    }
    metrics = {"num-examples": 10, "train_loss": 1.0}
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": 5, "eval_acc": 0.5})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
