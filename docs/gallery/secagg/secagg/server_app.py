"""The server, with Flower's SecAgg+ workflow."""

from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp

from secagg.task import Net, get_weights

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(initial_parameters=ndarrays_to_parameters(get_weights(Net())))
    config = ServerConfig(num_rounds=context.run_config["num-server-rounds"])
    legacy = LegacyContext(context=context, config=config, strategy=strategy)
    summed = SecAggPlusWorkflow(num_shares=5, reconstruction_threshold=4, max_weight=1000)
    DefaultWorkflow(fit_workflow=summed)(grid, legacy)
