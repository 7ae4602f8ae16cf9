"""What apps do to themselves: it never harms the other clients."""

from typing import Any

import numpy as np
import pytest
from apps import StepClient, make, message_app, record, run_strategy
from flwr.app import Array, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import message_size_mod

from flwr_privacy.clients import FedAvgClient, as_mod, numpy_client_app
from flwr_privacy.strategies import FedAvg, LoopOptions


def test_an_app_that_writes_into_its_question_is_alone_with_it() -> None:
    app = ClientApp(mods=[as_mod(FedAvgClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config = message.content["config"]
        config["lr"] = float(config["lr"]) / 2
        arrays = message.content["arrays"]
        arrays["w"] = Array(arrays["w"].numpy() + np.float32(1))
        metrics = MetricRecord({"num-examples": 1, "lr": config["lr"]})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    start = record({"w": np.zeros(2, np.float32)})
    for options, nodes in (({}, 4), ({"clients": 4}, 2)):
        result = run_strategy(
            make(FedAvg, fraction_evaluate=0, **options),
            app,
            nodes=nodes,
            arrays=start,
            train_config=ConfigRecord({"lr": 1.0}),
        )
        assert [line["train"]["lr"] for line in result.history[1:]] == [0.5, 0.5, 0.5]
        np.testing.assert_array_equal(result.arrays["w"].numpy(), [3.0, 3.0])


@pytest.mark.parametrize("options", [{}, {"clients": 4, "min_available_nodes": 2}])
def test_numpy_numbers_are_metrics(options: dict[str, Any]) -> None:
    class Client(StepClient):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
            return parameters, 1, {"a": np.float64(1), "b": np.float32(2), "c": np.int64(3)}

        def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> Any:
            return 1.0, 1, {"acc": np.mean([0.25, 0.75])}

    app = numpy_client_app(lambda context: FedAvgClient(Client(0), context))
    result = run_strategy(make(FedAvg, **options), app, nodes=2 if options else 4)
    assert result.history[1]["train"] == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert result.history[1]["evaluate"] == {"acc": 0.5, "loss": 1.0}


def test_one_client_of_a_cohort_does_not_take_the_others_down() -> None:
    def client_fn(context: Context) -> Any:
        partition = int(context.node_config["partition-id"])
        if partition == 1:
            raise FileNotFoundError("no data here")
        return FedAvgClient(StepClient(partition), context)

    strategy = FedAvg(loop=LoopOptions(clients=4), min_available_nodes=1)
    result = run_strategy(strategy, numpy_client_app(client_fn), nodes=1)
    assert [line["accumulated"] for line in result.history[1:]] == [3, 3, 3]


def test_clients_of_a_cohort_may_return_the_arrays_of_one_model() -> None:
    model = [np.zeros(2, np.float32)]

    class Client(StepClient):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
            model[0][:] = parameters[0] + np.float32(self.client)
            return model, 1, {}

    def client_fn(context: Context) -> Any:
        return FedAvgClient(Client(int(context.node_config["partition-id"])), context)

    result = run_strategy(
        make(FedAvg, clients=4, min_available_nodes=1, fraction_evaluate=0),
        numpy_client_app(client_fn),
        nodes=1,
        arrays=record({"w": np.zeros(2, np.float32)}),
    )
    np.testing.assert_array_equal(result.arrays["w"].numpy(), [4.5, 4.5])  # 3 times the mean, 1.5


def test_flowers_mods_may_stand_before_a_scheme_that_protects_nothing() -> None:
    for nodes, options in ((4, {}), (2, {"clients": 4})):
        app = message_app([message_size_mod, as_mod(FedAvgClient)])
        result = run_strategy(make(FedAvg, **options), app, nodes=nodes)
        assert [line["accumulated"] for line in result.history[1:]] == [4, 4, 4]
