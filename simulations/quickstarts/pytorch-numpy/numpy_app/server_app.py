"""The server half."""

import torch
from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp

from numpy_app.task import Net, get_weights, load_test_data, set_weights, test


def initial_model():
    """Return the weights to start from."""
    torch.manual_seed(0)
    return get_weights(Net())


def evaluation(context: Context):
    """Return the function that evaluates and saves the global model after each round."""

    def evaluate(server_round, parameters, config):
        net = Net()
        set_weights(net, parameters)
        loss, accuracy = test(net, load_test_data())
        torch.save(net.state_dict(), context.run_config["model-path"])
        return loss, {"accuracy": accuracy}

    return evaluate


def server_fn(context: Context) -> ServerAppComponents:
    """Return what the server needs."""
    strategy = FedAvg(
        fraction_fit=1.0,
        min_available_clients=4,
        initial_parameters=ndarrays_to_parameters(initial_model()),
        evaluate_fn=evaluation(context),
    )
    config = ServerConfig(num_rounds=context.run_config["num-server-rounds"])
    return ServerAppComponents(strategy=strategy, config=config)


app = ServerApp(server_fn=server_fn)
