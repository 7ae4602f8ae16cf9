"""The client, in Flower's NumPy interface."""

from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from quickstart_numpy.task import Net, get_weights, load_data, set_weights, test, train


class PictureClient(NumPyClient):
    def __init__(self, loaders, run_config):
        self.net = Net()
        self.train_loader, self.test_loader = loaders
        self.run_config = run_config

    def fit(self, parameters, config):
        set_weights(self.net, parameters)
        train(self.net, self.train_loader, self.run_config["local-epochs"], self.run_config["lr"])
        return get_weights(self.net), len(self.train_loader.dataset), {}

    def evaluate(self, parameters, config):
        set_weights(self.net, parameters)
        loss, accuracy = test(self.net, self.test_loader)
        return loss, len(self.test_loader.dataset), {"accuracy": accuracy}


def client_fn(context: Context):
    loaders = load_data(
        context.node_config["partition-id"],
        context.node_config["num-partitions"],
        context.run_config["batch-size"],
    )
    return PictureClient(loaders, context.run_config).to_client()


app = ClientApp(client_fn=client_fn)
