"""A stock server of Flower's older API."""

import numpy as np
from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp

results = []


def initial_model():
    return [np.zeros((2, 2), np.float32), np.ones(3, np.float32)]


def evaluation(context):
    def evaluate(server_round, parameters, config):
        results.append(parameters)
        loss, accuracy = float(parameters[0].mean()), 0.5
        return loss, {"accuracy": accuracy}

    return evaluate


def server_fn(context: Context) -> ServerAppComponents:
    strategy = FedAvg(
        fraction_fit=1.0,
        min_available_clients=4,
        initial_parameters=ndarrays_to_parameters(initial_model()),
        evaluate_fn=evaluation(context),
    )
    config = ServerConfig(num_rounds=2)
    return ServerAppComponents(strategy=strategy, config=config)


app = ServerApp(server_fn=server_fn)
