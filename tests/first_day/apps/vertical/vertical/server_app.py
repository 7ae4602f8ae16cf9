"""Sums embeddings of columns; there is no strategy."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()
results = []


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train."""
    for _ in range(context.run_config["num-server-rounds"]):
        asked = [
            Message(RecordDict(), message_type="query.embeddings", dst_node_id=node)
            for node in grid.get_node_ids()
        ]
        replies = list(grid.send_and_receive(asked))
        total = sum(reply.content["embeddings"]["values"].numpy() for reply in replies)
        gradient = ArrayRecord({"values": Array(np.asarray(total, np.float32))})
        content = RecordDict({"gradients": gradient})
        grid.send_and_receive(
            [
                Message(content, message_type="train.gradients", dst_node_id=node)
                for node in grid.get_node_ids()
            ]
        )
        results.append([total])
