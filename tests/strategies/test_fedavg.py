"""FedAvg passes the conformance class and is Flower's FedAvg on the same replies."""

import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import make, message_app, record, run_strategy, same
from conformance import WrapsConformance
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from flwr_privacy.clients import FedAvgClient, as_mod
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies import FedAvg, LoopOptions


class TestFedAvg(WrapsConformance):
    strategy = FedAvg
    client = FedAvgClient

    @pytest.mark.smoke
    @pytest.mark.ray
    def test_the_app_trains_alike_on_ray_inline_and_in_cohorts(
        self, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        super().test_the_app_trains_alike_on_ray_inline_and_in_cohorts(tmp_path, request)


FLOATS = {
    "a": np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4),
    "b": np.array(0.25, np.float32),
}


@pytest.mark.parametrize("order", range(5))
def test_it_equals_flowers_fedavg_in_any_order_of_arrival(order: int) -> None:
    """The very same reply messages go to both."""
    grid = InlineGrid(message_app([as_mod(FedAvgClient)]), 20)
    ours, flowers = FedAvg(loop=LoopOptions(seed=1), min_available_nodes=20), FlowerFedAvg()
    with acting_as_server(grid.run_id):
        messages = ours.configure_train(1, record(FLOATS), ConfigRecord(), grid)
        replies = list(grid.send_and_receive(messages))
    random.Random(order).shuffle(replies)
    expected, expected_metrics = flowers.aggregate_train(
        1, [Message(_without_record(reply), reply_to=reply) for reply in replies]
    )
    arrays, metrics = ours.aggregate_train(1, iter(replies))
    assert arrays is not None
    assert metrics is not None
    for name in FLOATS:
        np.testing.assert_allclose(arrays[name].numpy(), expected[name].numpy(), rtol=2e-6)
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-12)
    # Against exact arithmetic ours has a single rounding.
    weights = range(1, 21)
    exact = sum(w * reply_arrays(w - 1)["a"].astype(float) for w in weights) / sum(weights)
    np.testing.assert_allclose(arrays["a"].numpy(), exact, rtol=6e-8)


def reply_arrays(client: int) -> dict[str, np.ndarray]:
    from apps import step

    return {name: step(array, client) for name, array in FLOATS.items()}


def _without_record(reply: Message) -> RecordDict:
    return RecordDict({k: v for k, v in reply.content.items() if k != "flwr-privacy"})


def test_a_server_optimiser_gets_the_aggregate_as_one_reply() -> None:
    floats = record(FLOATS)
    result = run_strategy(FedAvg(inner=FedAdam(eta=0.2)), arrays=floats)
    strategy = FedAdam(eta=0.2, min_available_nodes=4)
    expected = run_strategy(strategy, arrays=floats)
    for name in FLOATS:
        np.testing.assert_allclose(
            result.arrays[name].numpy(), expected.arrays[name].numpy(), rtol=1e-5
        )
        assert result.arrays[name].dtype == "float32"


def test_a_server_optimiser_resumes(tmp_path: Any) -> None:
    floats = record(FLOATS)

    def run(**options: Any) -> Any:
        strategy = make(FedAvg, seed=1, inner=FedAdam(eta=0.2), run_dir=tmp_path, **options)
        return strategy

    unbroken = run_strategy(FedAvg(loop=LoopOptions(seed=1), inner=FedAdam(eta=0.2)), arrays=floats)
    run_strategy(run(), arrays=floats, num_rounds=2)
    resumed = run_strategy(run(resume=True), arrays=floats, num_rounds=3)
    assert same(unbroken.arrays, resumed.arrays)


def test_custom_metric_functions_see_every_reply_with_and_without_cohorts() -> None:
    def spread(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
        values = [float(next(iter(c.metric_records.values()))["loss"]) for c in contents]
        return MetricRecord({"spread": max(values) - min(values), "replies": len(values)})

    for nodes, clients in ((4, None), (2, 4)):
        strategy = FedAvg(
            train_metrics_aggr_fn=spread,
            loop=LoopOptions(clients=clients),
            min_available_nodes=nodes,
        )
        result = run_strategy(strategy, nodes=nodes)
        assert result.train_metrics_clientapp[1] == {"spread": 1.5, "replies": 4}
        assert result.evaluate_metrics_clientapp[1] == {"accuracy": pytest.approx(0.2)}


def test_memory_does_not_grow_with_the_number_of_clients() -> None:
    """Peak memory of a round is that of a few models, not of one per client."""
    size = 200_000
    big = ArrayRecord({"w": Array(np.zeros(size, np.float32))})

    def peak(clients: int) -> int:
        tracemalloc.start()
        run_strategy(
            FedAvg(min_available_nodes=clients, fraction_evaluate=0.0),
            nodes=clients,
            arrays=big,
            num_rounds=1,
            timeout=60,
        )
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(40) < 1.5 * peak(4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fraction_train": 1.5}, "fraction_train = 1.5: expected a finite number from 0 to 1"),
        ({"quorum": 0}, "quorum = 0: expected an integer of at least 1"),
        ({"deadline": -1}, "deadline = -1: expected a finite number of at least"),
        ({"clients": 0}, "clients = 0: expected an integer of at least 1"),
        ({"resume": True}, "run_dir = None: expected the folder to resume from"),
    ],
)
def test_bad_parameters_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(FedAvg, **options)
