"""A stock server with Flower's SecAgg+ workflow, as in Flower's own example."""

import numpy as np
from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp

app = ServerApp()
results = []


def initial_model():
    return [np.zeros((2, 2), np.float32), np.ones(3, np.float32)]


def evaluate(server_round, parameters, config):
    results.append(parameters)
    return float(parameters[0].mean()), {"accuracy": 0.5}


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(
        fraction_fit=1.0,
        fraction_evaluate=0.0,
        min_fit_clients=4,
        min_available_clients=4,
        initial_parameters=ndarrays_to_parameters(initial_model()),
        evaluate_fn=evaluate,
    )
    config = ServerConfig(num_rounds=2)
    context = LegacyContext(context=context, config=config, strategy=strategy)
    fit_workflow = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, max_weight=1000)
    workflow = DefaultWorkflow(fit_workflow=fit_workflow)
    workflow(grid, context)
