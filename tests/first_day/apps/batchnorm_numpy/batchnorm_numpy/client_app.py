"""A NumPyClient around a model with BatchNorm."""

from flwr.app import Context
from flwr.client import ClientApp, NumPyClient

from .model import Net, data_of, get_weights, set_weights, test, train


class FlowerClient(NumPyClient):
    """One node."""

    def __init__(self, partition_id):
        self.net = Net()
        self.data = data_of(partition_id)

    def fit(self, parameters, config):
        """Train on the node's data."""
        set_weights(self.net, parameters)
        loss = train(self.net, *self.data, config["step"])
        results = {"train_loss": loss}
        return get_weights(self.net), len(self.data[1]), results

    def evaluate(self, parameters, config):
        """Evaluate on the node's data."""
        set_weights(self.net, parameters)
        loss, accuracy = test(self.net, *self.data)
        return loss, len(self.data[1]), {"accuracy": accuracy}


def client_fn(context: Context):
    """Return the client of a node."""
    return FlowerClient(context.node_config["partition-id"]).to_client()


app = ClientApp(client_fn=client_fn)
