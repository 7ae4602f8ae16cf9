"""The server, in Flower's older interface."""

from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp

from tabular.task import get_weights, network


def server_fn(context: Context):
    strategy = FedAvg(initial_parameters=ndarrays_to_parameters(get_weights(network())))
    config = ServerConfig(num_rounds=context.run_config["num-server-rounds"])
    return ServerAppComponents(strategy=strategy, config=config)


app = ServerApp(server_fn=server_fn)
