"""The client half."""

from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from numpy_app.task import Net, get_weights, load_data, set_weights, test, train


class MyClient(NumPyClient):
    """One node with its data."""

    def __init__(self, net, train_data, validation_data, config):
        self.net = net
        self.train_data = train_data
        self.validation_data = validation_data
        self.config = config

    def fit(self, parameters, config):
        """Train the global model on the node's data."""
        set_weights(self.net, parameters)
        epochs, learning_rate = self.config["local-epochs"], self.config["learning-rate"]
        loss = train(self.net, self.train_data, epochs, learning_rate)
        return get_weights(self.net), len(self.train_data.dataset), {"train_loss": loss}

    def evaluate(self, parameters, config):
        """Evaluate the global model on the node's data."""
        set_weights(self.net, parameters)
        loss, accuracy = test(self.net, self.validation_data)
        return loss, len(self.validation_data.dataset), {"accuracy": accuracy}


def client_fn(context: Context):
    """Return the client of a node."""
    partition, partitions = (context.node_config[k] for k in ("partition-id", "num-partitions"))
    train_data, validation_data = load_data(partition, partitions, context.run_config["batch-size"])
    return MyClient(Net(), train_data, validation_data, context.run_config).to_client()


app = ClientApp(client_fn)
