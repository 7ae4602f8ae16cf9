"""A stock Message-API client, as Flower's own quickstarts write it."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    partition = int(context.node_config["partition-id"])
    arrays = {
        name: Array(np.asarray(array.numpy() + partition, np.float32))
        for name, array in msg.content["arrays"].items()
    }
    metrics = {"num-examples": 10 * (partition + 1), "train_loss": 1.0}
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": 5, "eval_acc": 0.5})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
