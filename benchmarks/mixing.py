"""The row of MSPDQ: what a learning round costs beside its training, and what it sends."""

import tempfile
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flwr_privacy.clients import FedAvgClient, MSPDQClient, SchemeClient, as_mod
from flwr_privacy.clients.torch import get_arrays, initialise, mlp, set_arrays, train
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.strategies import MSPDQ, FedAvg, LoopOptions, SchemeStrategy

from .report import Comparison

__all__ = ["mixing"]

CLIENTS, ROUNDS, IMAGES, EPOCHS, BATCH = 10, 4, 600, 10, 10
MODEL = partial(mlp, (784, 256, 10))
WEIGHTS = 784 * 256 + 256 + 256 * 10 + 10


def mixing() -> Iterator[Comparison]:
    """Compare all but the training with the training, and the bytes up with FedAvg's."""
    steps = f"{CLIENTS} clients, {IMAGES} images, {EPOCHS} epochs"
    plain, _, plain_bytes = _run(FedAvg(), FedAvgClient)
    for name, strategy, at_most, bits in (
        ("MSPDQ, 10 steps", MSPDQ(mixing_rounds=10, loop=LoopOptions(seed=1)), 0.5, 88),
        ("MSPDQ, summed", MSPDQ(secure_sum=SecureSum(), loop=LoopOptions(seed=1)), None, 8 + 4),
    ):
        beside, trained, sent = _run(strategy, MSPDQClient)
        yield Comparison(
            what=f"{name}: round but the training",
            rival=f"the training: {steps}",
            ours=beside,
            theirs=trained,
            at_most=at_most,
        )
        yield Comparison(
            what=f"MSPDQ, {name}: round but the training",
            rival="FedAvg's round but the training, same training",
            ours=beside,
            theirs=plain,
        )
        yield Comparison(
            what=f"{name}: bytes up of a client",
            rival=f"FedAvg's: 32 bits a value; the codes have {bits}",
            ours=sent,
            theirs=plain_bytes,
            unit="B",
            # Headers, names and the shares of the secure sum come on top of the codes.
            at_most=bits / 32 * 1.02,
        )


def _run(
    strategy: SchemeStrategy, client: type[SchemeClient]
) -> tuple[list[float], list[float], list[float]]:
    """Return for each round the seconds beside the training and in it, and a client's bytes."""
    strategy.fraction_evaluate = 0.0
    spent: list[float] = []
    app, server_app = ClientApp(mods=[as_mod(client)]), ServerApp()

    @app.train()
    def train_locally(message: Message, context: Context) -> Message:
        began = time.perf_counter()
        draws = np.random.default_rng(int(context.node_config["partition-id"]))
        features = draws.normal(size=(IMAGES, 784)).astype(np.float32)
        labels = draws.integers(10, size=IMAGES)
        model = initialise(MODEL, 0)
        start = message.content.array_records["arrays"]
        set_arrays(model, {name: array.numpy() for name, array in start.items()})
        for epoch in range(EPOCHS):
            train(model, features, labels, batch_size=BATCH, learning_rate=0.01, seed=epoch)
        arrays = ArrayRecord({name: Array(a) for name, a in get_arrays(model).items()})
        spent.append(time.perf_counter() - began)
        metrics = MetricRecord({"num-examples": IMAGES})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    lines = []

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        arrays = get_arrays(initialise(MODEL, 0))
        start = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        lines.extend(strategy.start(grid, start, num_rounds=ROUNDS).history)

    with tempfile.TemporaryDirectory() as state:
        run_inline(server_app, app, nodes=CLIENTS, state=state)
    seconds = np.diff([line["seconds"] for line in lines])[1:]  # the first round warms up
    training = np.array(spent).reshape(ROUNDS, CLIENTS).sum(axis=1)[1:]
    sent = [line["bytes_up"] / CLIENTS for line in lines[2:]]
    return list(seconds - training), list(training), sent
