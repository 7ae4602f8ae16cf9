"""A stock NumPyClient app with Flower's SecAgg+ mod."""

from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp


class MyClient(NumPyClient):
    def __init__(self, context):
        self.partition = int(context.node_config["partition-id"])

    def fit(self, parameters, config):
        return [p + self.partition for p in parameters], 10 * (self.partition + 1), {}

    def evaluate(self, parameters, config):
        return 0.7, 5, {"eval_acc": 0.5}


def client_fn(context):
    return MyClient(context).to_client()


app = ClientApp(client_fn=client_fn, mods=[secaggplus_mod])
