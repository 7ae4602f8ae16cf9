"""Averages the clients' models, and weighs their metrics by their records."""

import torch
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

from batchnorm_numpy.model import Net, data_of, get_weights, set_weights, test

results = []
rounds = []


def weighted_average(metrics):
    """Return the accuracy of all records."""
    examples = sum(number for number, _ in metrics)
    return {"accuracy": sum(number * m["accuracy"] for number, m in metrics) / examples}


def step(server_round):
    """Return what the clients are told of a round."""
    rounds.append(server_round)
    return {"step": 0.1 / server_round}


def evaluate(server_round, parameters, config):
    """Evaluate on data of the server."""
    net = Net()
    set_weights(net, parameters)
    loss, accuracy = test(net, *data_of(100))
    results.append([array.copy() for array in parameters])
    return loss, {"accuracy": accuracy}


def server_fn(context: Context):
    """Return the components of the server."""
    num_rounds = context.run_config["num-server-rounds"]
    torch.manual_seed(0)
    parameters = ndarrays_to_parameters(get_weights(Net()))

    strategy = FedAvg(
        fraction_fit=1.0,
        fraction_evaluate=0.5,
        min_fit_clients=3,
        min_available_clients=4,
        on_fit_config_fn=step,
        evaluate_metrics_aggregation_fn=weighted_average,
        initial_parameters=parameters,
        evaluate_fn=evaluate,
    )
    config = ServerConfig(num_rounds=num_rounds)

    return ServerAppComponents(strategy=strategy, config=config)


# The app that Flower runs.
app = ServerApp(server_fn=server_fn)
