"""The client half."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from message_app.task import Net, load_data
from message_app.task import test as test_model
from message_app.task import train as train_model

app = ClientApp()


def own_data(context: Context):
    """Return the data of this node."""
    return load_data(
        context.node_config["partition-id"],
        context.node_config["num-partitions"],
        context.run_config["batch-size"],
    )


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the global model on the node's data."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data, _ = own_data(context)
    epochs, learning_rate = context.run_config["local-epochs"], msg.content["config"]["lr"]
    loss = train_model(net, data, epochs, learning_rate)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the global model on the node's data."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, data = own_data(context)
    loss, accuracy = test_model(net, data)
    examples = len(data.dataset)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": examples})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
