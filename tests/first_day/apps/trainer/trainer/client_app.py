"""Trains with a trainer."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .task import LitNet, Trainer, loader_of

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the module."""
    module = LitNet()
    module.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader = loader_of(context.node_config["partition-id"])
    trainer = Trainer(max_epochs=1)
    trainer.fit(module, loader)
    metrics = {"num-examples": len(loader.dataset), **trainer.callback_metrics}
    content = RecordDict(
        {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord(metrics)}
    )
    return Message(content=content, reply_to=msg)
