"""Aggregation on the server: time and peak memory for 50 replies of a million parameters.

Both sides get the replies of a generator that makes each when it is asked for, as a stream does. It
does the least that a stream can do, a copy of the bytes. That costs more where the memory for all
replies must be fetched, so it is part of the time; the sums alone are shown beside it.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.strategies import FedAvg
from flwr_privacy.wire.message import RECORD

from .report import Comparison

__all__ = ["aggregate"]

CLIENTS = 50
PARAMETERS = 1_000_000
REPETITIONS = 25
VARIANTS = 5  # different models among the replies

RIVAL = "Flower's FedAvg.aggregate_train on the same stream"

Aggregate = Callable[[Iterator[Message]], ArrayRecord | None]


def aggregate() -> Iterator[Comparison]:
    """Compare `FedAvg.aggregate_train` with Flower's."""
    for arrays in (1, 10):
        yield from _compare(arrays)


def _compare(arrays: int) -> Iterator[Comparison]:
    results: list[Comparison] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        results.extend(_measure(grid, arrays))

    run_inline(server_app, ClientApp(), nodes=CLIENTS)
    yield from results


def _measure(grid: Grid, arrays: int) -> list[Comparison]:
    draws = np.random.default_rng(0)
    models = [_model(draws, arrays) for _ in range(VARIANTS)]
    ours = FedAvg()
    rival = FlowerFedAvg()

    def questions() -> list[Message]:
        # They open the book in which our strategy counts the replies.
        return ours.configure_train(1, models[0], ConfigRecord(), grid)

    def by_us(replies: Iterator[Message]) -> ArrayRecord | None:
        return ours.aggregate_train(1, replies)[0]

    def by_flower(replies: Iterator[Message]) -> ArrayRecord | None:
        return rival.aggregate_train(1, replies)[0]

    sides = (by_us, by_flower)
    _check_same(*(side(_Stream(questions(), models)) for side in sides))
    peaks = [_peak(side, _Stream(questions(), models)) for side in sides]
    seconds: dict[Aggregate, list[float]] = {side: [] for side in sides}
    sums: dict[Aggregate, list[float]] = {side: [] for side in sides}
    for repetition in range(REPETITIONS):
        for side in sides[:: 1 if repetition % 2 else -1]:
            stream = _Stream(questions(), models)
            gc.collect()  # nobody pays for what the other side left behind
            began = time.perf_counter()
            side(stream)
            seconds[side].append(time.perf_counter() - began)
            sums[side].append(seconds[side][-1] - stream.seconds)
    shape = f"{CLIENTS} x {PARAMETERS:.0e} in {arrays} array{'s' * (arrays > 1)}"
    return [
        Comparison(
            what=f"aggregate {shape}, time",
            rival=RIVAL,
            ours=seconds[by_us],
            theirs=seconds[by_flower],
            at_most=1.0,
        ),
        Comparison(
            what=f"aggregate {shape}, sums alone",
            rival=RIVAL,
            ours=sums[by_us],
            theirs=sums[by_flower],
        ),
        Comparison(
            what=f"aggregate {shape}, peak",
            rival=RIVAL,
            ours=peaks[:1],
            theirs=peaks[1:],
            unit="B",
            at_least=10.0,
        ),
    ]


class _Stream(Iterator[Message]):
    """Replies to the questions, each made when it is asked for; `seconds` is what that took."""

    def __init__(self, questions: Sequence[Message], models: Sequence[ArrayRecord]) -> None:
        self._questions = enumerate(questions)
        self._models = models
        self.seconds = 0.0

    def __next__(self) -> Message:
        began = time.perf_counter()
        try:
            return self._reply(*next(self._questions))
        finally:
            self.seconds += time.perf_counter() - began

    def _reply(self, index: int, question: Message) -> Message:
        header = question.content.config_records[RECORD]
        content = RecordDict(
            {
                "arrays": _copy(self._models[index % len(self._models)]),
                "metrics": MetricRecord({"num-examples": index + 1, "loss": 0.5}),
                RECORD: ConfigRecord({**header, "client-id": str(index)}),
            }
        )
        return Message(content, reply_to=question)


def _model(draws: np.random.Generator, arrays: int) -> ArrayRecord:
    return ArrayRecord(
        {
            f"layer{index}": Array(draws.normal(size=PARAMETERS // arrays).astype(np.float32))
            for index in range(arrays)
        }
    )


def _copy(record: ArrayRecord) -> ArrayRecord:
    """Return arrays with bytes of their own, as those of a received message are."""
    return ArrayRecord(
        {
            name: Array(array.dtype, array.shape, array.stype, bytes(memoryview(array.data)))
            for name, array in record.items()
        }
    )


def _peak(side: Aggregate, stream: _Stream) -> float:
    gc.collect()
    tracemalloc.start()
    try:
        side(stream)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _check_same(one: ArrayRecord | None, other: ArrayRecord | None) -> None:
    if one is None or other is None:
        raise RuntimeError("a side used no reply")
    for name, array in one.items():
        np.testing.assert_allclose(array.numpy(), other[name].numpy(), rtol=1e-4, atol=1e-5)
