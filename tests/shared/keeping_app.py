"""An app that keeps an array in its state, and another hold on it beside, as it is told."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

_held: list[ArrayRecord] = []


@app.query("state")
def state(message: Message, context: Context) -> Message:
    work, _, number = str(message.content["config"]["work"]).partition(" ")
    if work == "keep":
        values = np.full(20_000, float(number))
        context.state["kept"] = ArrayRecord({"values": Array(values)})
    elif work == "drop":
        del context.state["kept"]
    elif work == "hold":
        _held[:] = [context.state["kept"]]
    elif work == "put":
        context.state["kept"] = _held[0]
    kept = context.state.get("kept", ArrayRecord())
    total = sum(float(array.numpy().sum()) for array in kept.values())
    return Message(RecordDict({"metrics": MetricRecord({"sum": total})}), reply_to=message)
