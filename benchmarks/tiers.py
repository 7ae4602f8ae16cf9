"""One event of a tree of three tiers: 1000 devices hand in a model of a million parameters each.

Ours sums the codes of each lowest aggregator's devices as they arrive and takes the event on the
sums; the rival calls Flower's FedAvg for every aggregator, tier by tier. Both get each answer from
a generator that makes it when it is asked for, as a stream does.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from numpy.typing import NDArray

from flwr_privacy.m2fdp import Drift, EventSchedule, TierSums, TierTree, TreeModels
from flwr_privacy.m2fdp.tree.exchanges import exchanges
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.strategies.requests.request_log import arrays_of
from flwr_privacy.wire.layout import Layout

from .report import Comparison

__all__ = ["tiers"]

TREE = TierTree.of_fanouts((10, 10, 10))
PARAMETERS = 1_000_000
REPETITIONS = 3
VARIANTS = 5  # different models among the answers
GRID = CodeGrid(-24)
RIVAL = "Flower's FedAvg.aggregate_train for each aggregator, tier by tier"

START = {"layer": np.zeros(PARAMETERS, np.float32)}


def tiers() -> Iterator[Comparison]:
    """Compare an event with nested calls of Flower's FedAvg."""
    results: list[Comparison] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        results.extend(_measure(grid))

    run_inline(server_app, ClientApp(), nodes=1)
    yield from results


def _measure(grid: Grid) -> list[Comparison]:
    draws = np.random.default_rng(0)
    codes = [draws.integers(-(2**20), 2**20, PARAMETERS, dtype=np.int32) for _ in range(VARIANTS)]
    stream = _Stream(grid, codes)
    sides: tuple[Callable[[], NDArray[np.floating]], ...] = (
        lambda: _ours(stream),
        lambda: _nested(stream),
    )
    np.testing.assert_allclose(sides[0](), sides[1](), rtol=1e-4, atol=1e-6)
    seconds: tuple[list[float], list[float]] = ([], [])
    for repetition in range(REPETITIONS):
        for index in (0, 1)[:: 1 if repetition % 2 else -1]:
            gc.collect()  # nobody pays for what the other side left behind
            began = time.perf_counter()
            sides[index]()
            seconds[index].append(time.perf_counter() - began)
    gc.collect()
    tracemalloc.start()
    sides[0]()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    open_nodes = len(TREE.tiers[TREE.depth - 1])
    shape = f"{len(TREE.devices)} x {PARAMETERS:.0e}, 3 tiers"
    return [
        Comparison(
            what=f"event {shape}, time",
            rival=RIVAL,
            ours=seconds[0],
            theirs=seconds[1],
            at_least=3.0,
        ),
        Comparison(
            what=f"event {shape}, peak",
            rival=f"two models for each of {open_nodes} open aggregators",
            ours=[float(peak)],
            theirs=[2.0 * 4 * PARAMETERS * open_nodes],
            unit="B",
            at_most=1.0,
        ),
    ]


class _Stream:
    """The answers of the devices: codes on our side, models on the rival's."""

    def __init__(self, grid: Grid, codes: list[NDArray[np.int32]]) -> None:
        (node,) = grid.get_node_ids()
        self._question = Message(RecordDict({"config": ConfigRecord()}), node, "train")
        self._codes = [_record(array) for array in codes]
        models = [(array * GRID.step).astype(np.float32) for array in codes]
        self._models = [_record(model) for model in models]

    def codes(self, index: int) -> ArrayRecord:
        return _copy(self._codes[index % VARIANTS])

    def model(self, index: int) -> ArrayRecord:
        return _copy(self._models[index % VARIANTS])

    def message(self, arrays: ArrayRecord) -> Message:
        content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=self._question)


def _ours(stream: _Stream) -> NDArray[np.floating]:
    groups = {device: TREE.parent(device) for device in TREE.devices}
    sums = TierSums(START, ["layer"], groups)
    for index, device in enumerate(TREE.devices):
        sums.accumulate(device, arrays_of(stream.codes(index)), weight=1)
    models = TreeModels(
        TREE,
        START,
        Layout.of(START, ["layer"]),
        grids=dict.fromkeys(TREE.tiers[TREE.depth - 1], GRID),
        drift=Drift(),
        min_children=1,
        bound=lambda steps: 1.0,
    )
    (exchange,) = exchanges(TREE, EventSchedule(), clean_events=False)
    model = models.event(exchange, sums.taken, _no_noise)
    if model is None:
        raise RuntimeError("nobody handed anything on")
    return model


def _no_noise(*_: object) -> NDArray[np.int32]:
    raise RuntimeError("no aggregator of this tree is trusted")


def _nested(stream: _Stream) -> NDArray[np.floating]:
    rival = FlowerFedAvg()
    places = {device: index for index, device in enumerate(TREE.devices)}

    def model_of(node: str) -> ArrayRecord:
        if node in places:
            return stream.model(places[node])
        replies = (stream.message(model_of(child)) for child in TREE.children(node))
        arrays, _ = rival.aggregate_train(1, replies)
        if arrays is None:
            raise RuntimeError("Flower used no reply")
        return arrays

    return np.asarray(model_of(TREE.tiers[0][0])["layer"].numpy())


def _record(array: NDArray[np.generic]) -> ArrayRecord:
    return ArrayRecord({"layer": Array(array)})


def _copy(record: ArrayRecord) -> ArrayRecord:
    """Return arrays with bytes of their own, as those of a received message are."""
    return ArrayRecord(
        {
            name: Array(array.dtype, array.shape, array.stype, bytes(memoryview(array.data)))
            for name, array in record.items()
        }
    )
