"""A node with two columns: it answers with embeddings, and takes gradients."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query("embeddings")
def embeddings(message: Message, context: Context) -> Message:
    """Return the embeddings of the node's columns."""
    columns = np.ones((5, 2), np.float32) * float(context.node_config["partition-id"])
    content = RecordDict({"embeddings": ArrayRecord({"values": Array(columns)})})
    return Message(content, reply_to=message)


@app.train("gradients")
def gradients(message: Message, context: Context) -> Message:
    """Take the gradients of the embeddings."""
    return Message(RecordDict(), reply_to=message)
