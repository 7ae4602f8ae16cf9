"""A stock server of Flower's older API."""

import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp

results = []


def save(arrays):
    results.append(arrays)


def initial_model():
    return [np.zeros((2, 2), np.float32), np.ones(3, np.float32)]


def server_fn(context):
    strategy = FedAvg(initial_parameters=ndarrays_to_parameters(initial_model()))
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))


app = ServerApp(server_fn=server_fn)
