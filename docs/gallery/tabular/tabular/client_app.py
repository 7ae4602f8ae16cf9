"""The client, in Flower's NumPy interface."""

import torch
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from torch import nn

from tabular.task import get_weights, load_data, network, set_weights


class TableClient(NumPyClient):
    def __init__(self, loaders, run_config):
        self.net = network()
        self.train_loader, self.test_loader = loaders
        self.run_config = run_config

    def fit(self, parameters, config):
        set_weights(self.net, parameters)
        optimizer = torch.optim.Adam(self.net.parameters(), lr=self.run_config["lr"])
        criterion = nn.CrossEntropyLoss()
        self.net.train()
        for _ in range(self.run_config["local-epochs"]):
            for features, labels in self.train_loader:
                optimizer.zero_grad()
                loss = criterion(self.net(features), labels)
                loss.backward()
                optimizer.step()
        return get_weights(self.net), len(self.train_loader.dataset), {"loss": loss.item()}

    def evaluate(self, parameters, config):
        set_weights(self.net, parameters)
        self.net.eval()
        loss, right = 0.0, 0
        with torch.no_grad():
            for features, labels in self.test_loader:
                outputs = self.net(features)
                loss += nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
                right += (outputs.argmax(1) == labels).sum().item()
        count = len(self.test_loader.dataset)
        return loss / count, count, {"accuracy": right / count}


def client_fn(context: Context):
    loaders = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    return TableClient(loaders, context.run_config).to_client()


app = ClientApp(client_fn=client_fn)
