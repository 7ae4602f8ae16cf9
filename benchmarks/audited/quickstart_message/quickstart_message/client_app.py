"""The client: trains the model that it is sent on its own records."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart_message.task import Net, load_data, test, train

app = ClientApp()


def _start(message: Message, context: Context):
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loaders = load_data(
        context.node_config["partition-id"],
        context.node_config["num-partitions"],
        context.run_config["batch-size"],
    )
    return net, loaders


@app.train()
def train_fn(message: Message, context: Context) -> Message:
    net, (loader, _) = _start(message, context)
    loss = train(net, loader, context.run_config["local-epochs"], context.run_config["lr"])
    content = RecordDict(
        {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)}),
        }
    )
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate_fn(message: Message, context: Context) -> Message:
    net, (_, loader) = _start(message, context)
    loss, accuracy = test(net, loader)
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)}
    content = RecordDict({"metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=message)
