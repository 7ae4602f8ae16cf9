"""A stock server of Flower's older API with what real apps use."""

import numpy as np
from flwr.app import Context
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp

results = []
saved = {}
seen = {}


def initial_model():
    return [np.zeros((2, 2), np.float32), np.ones(3, np.float32)]


def fit_config(server_round):
    return {"lr": 0.1 / server_round}


def weighted_average(metrics):
    seen.setdefault("examples", []).append(sorted(examples for examples, _ in metrics))
    names = metrics[0][1]
    total = sum(examples for examples, _ in metrics)
    return {name: sum(n * own[name] for n, own in metrics) / total for name in names}


class SavingFedAvg(FedAvg):
    def aggregate_fit(self, server_round, results, failures):
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        if parameters is not None:
            saved[server_round] = parameters_to_ndarrays(parameters)
        return parameters, metrics

    def aggregate_evaluate(self, server_round, results, failures):
        loss, metrics = super().aggregate_evaluate(server_round, results, failures)
        seen[server_round] = metrics
        return loss, metrics

    def evaluate(self, server_round, parameters):
        results.append(parameters_to_ndarrays(parameters))
        return 0.0, {}


def server_fn(context: Context) -> ServerAppComponents:
    strategy = SavingFedAvg(
        fraction_fit=1.0,
        fraction_evaluate=0.5,
        min_fit_clients=4,
        min_evaluate_clients=2,
        min_available_clients=4,
        on_fit_config_fn=fit_config,
        fit_metrics_aggregation_fn=weighted_average,
        evaluate_metrics_aggregation_fn=weighted_average,
        initial_parameters=ndarrays_to_parameters(initial_model()),
    )
    config = ServerConfig(num_rounds=2)
    return ServerAppComponents(strategy=strategy, config=config)


app = ServerApp(server_fn=server_fn)
