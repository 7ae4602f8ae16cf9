"""The server, in Flower's older interface."""

from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp

from quickstart_numpy.task import Net, get_weights


def server_fn(context: Context):
    strategy = FedAvg(
        fraction_fit=0.5, initial_parameters=ndarrays_to_parameters(get_weights(Net()))
    )
    config = ServerConfig(num_rounds=context.run_config["num-server-rounds"])
    return ServerAppComponents(strategy=strategy, config=config)


app = ServerApp(server_fn=server_fn)
