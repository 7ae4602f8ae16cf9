"""A stock NumPyClient app."""

from flwr.client import NumPyClient
from flwr.clientapp import ClientApp


class MyClient(NumPyClient):
    def __init__(self, context):
        self.partition = int(context.node_config["partition-id"])

    def fit(self, parameters, config):
        return [p + self.partition for p in parameters], 10 * (self.partition + 1), {"loss": 1.0}

    def evaluate(self, parameters, config):
        return 0.7, 5, {"eval_acc": 0.5}


def client_fn(context):
    return MyClient(context).to_client()


app = ClientApp(client_fn)
