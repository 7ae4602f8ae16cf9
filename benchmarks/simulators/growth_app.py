"""The client app of `growth`: it adds a constant to the model in place of a training."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .app.simulated.client_app import scheme_mod

__all__ = ["app"]

app = ClientApp(mods=[scheme_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Add a constant to all values."""
    [model] = message.content["arrays"].to_numpy_ndarrays()
    records = {
        "arrays": ArrayRecord([model + model.dtype.type(1e-6)]),
        "metrics": MetricRecord({"num-examples": 1}),
    }
    return Message(RecordDict(records), reply_to=message)
