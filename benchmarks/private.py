"""Privacy of whole clients: clip, noise and aggregate 50 updates of a million parameters.

Two rivals, both Flower's. With central privacy the server, which is trusted, clips the updates and
adds noise once, to their mean. With local privacy each client clips and noises its own update, as
with UDP. All clients run in this process, one after the other, when the server asks for their
replies; ours do all that they do in a deployment (policy, ledger on the disk, kept reply).
"""

import gc
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, Strategy
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.strategies import UDP, UserLevel

from .report import Comparison

__all__ = ["private"]

CLIENTS = 50
PARAMETERS = 1_000_000
REPETITIONS = 9
VARIANTS = 5  # different models among the clients
NORM = 1.0
EPSILON, DELTA = 8.0, 1e-5

CENTRAL = "Flower's DifferentialPrivacyServerSideFixedClipping: noise once"
LOCAL = "Flower's LocalDpMod and FedAvg: float noise, no ledger"

ClientFunction = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, ClientFunction], Message]


@dataclass(frozen=True)
class _Side:
    """One way to train privately.

    Parameters
    ----------
    strategy : Strategy
        What the server runs.
    mod : callable, optional
        What the clients run around their training.
    noise : callable
        Returns the standard deviation of the noise on the mean.
    """

    strategy: Strategy
    mod: Mod | None
    noise: Callable[[], float]
    seconds: list[float] = field(default_factory=list)
    server_seconds: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    server_peaks: list[float] = field(default_factory=list)


def private() -> Iterator[Comparison]:
    """Compare UDP at user level with Flower's privacy."""
    sides = {"udp": _udp(), "central": _central(), "local": _local()}
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        _measure(grid, sides)

    run_inline(server_app, _client_app(sides), nodes=CLIENTS)
    udp, central, local = sides.values()
    what = f"private {CLIENTS} x {PARAMETERS:.0e}"
    yield Comparison(
        what=f"{what}, time",
        rival=CENTRAL,
        ours=udp.seconds,
        theirs=central.seconds,
        at_most=1.0,
    )
    yield Comparison(
        what=f"{what}, our server alone",
        rival=CENTRAL,
        ours=udp.server_seconds,
        theirs=central.server_seconds,
    )
    yield Comparison(
        what=f"{what}, peak",
        rival=CENTRAL,
        ours=udp.peaks,
        theirs=central.peaks,
        unit="B",
        at_least=10.0,
    )
    yield Comparison(
        what=f"{what}, peak of the server",
        rival=CENTRAL,
        ours=udp.server_peaks,
        theirs=central.server_peaks,
        unit="B",
    )
    yield Comparison(
        what=f"{what}, noise on all clients",
        rival=LOCAL,
        ours=udp.seconds,
        theirs=local.seconds,
    )


def _udp() -> _Side:
    strategy = UDP(
        privacy=UserLevel(epsilon=EPSILON, delta=DELTA, clipping_norm=NORM), rounds=REPETITIONS + 1
    )
    return _Side(
        strategy,
        as_mod(UDPClient),
        lambda: strategy.terms.noise_multiplier * 2 * NORM / math.sqrt(CLIENTS),
    )


def _central() -> _Side:
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FlowerFedAvg(), noise_multiplier=1.0, clipping_norm=NORM, num_sampled_clients=CLIENTS
    )
    return _Side(strategy, None, lambda: NORM / CLIENTS)


def _local() -> _Side:
    mod = LocalDpMod(clipping_norm=NORM, sensitivity=2 * NORM, epsilon=EPSILON, delta=DELTA)
    sigma = 2 * NORM * math.sqrt(2 * math.log(1.25 / DELTA)) / EPSILON
    return _Side(FlowerFedAvg(), mod, lambda: sigma / math.sqrt(CLIENTS))


def _measure(grid: Grid, sides: dict[str, _Side]) -> None:
    start = _models(np.random.default_rng(0), 1)[0]
    for server_round in range(REPETITIONS + 1):
        for name in list(sides)[:: 1 if server_round % 2 else -1]:
            side = sides[name]
            config = ConfigRecord({"side": name})
            questions = side.strategy.configure_train(1 + server_round, start, config, grid)
            replies = _Replies(grid, list(questions))
            gc.collect()  # nobody pays for what another side left behind
            if server_round == 0:
                _trace(side, replies, start)
                continue
            began = time.perf_counter()
            side.strategy.aggregate_train(1 + server_round, replies)
            side.seconds.append(time.perf_counter() - began)
            side.server_seconds.append(side.seconds[-1] - replies.seconds)


def _trace(side: _Side, replies: "_Replies", start: ArrayRecord) -> None:
    """Find the peaks of the first round, and check that the noise is there."""
    tracemalloc.start()
    try:
        arrays, _ = side.strategy.aggregate_train(1, replies)
        replies.note_server_peak()
    finally:
        tracemalloc.stop()
    side.peaks.append(max(replies.server_peak, replies.client_peak))
    side.server_peaks.append(replies.server_peak)
    if arrays is None:
        raise RuntimeError("a side used no reply")
    moved = arrays["weights"].numpy() - start["weights"].numpy()
    np.testing.assert_allclose(moved.std(), side.noise(), rtol=0.01)


class _Replies(Iterator[Message]):
    """Replies to the questions; a client trains when its reply is asked for.

    Attributes
    ----------
    seconds : float
        What the clients took.
    server_peak, client_peak : float
        Largest memory traced while the server, or a client, ran; 0 without `tracemalloc`.
    """

    def __init__(self, grid: Grid, questions: list[Message]) -> None:
        self._grid = grid
        self._ids = iter(list(grid.push_messages(questions)))
        self.seconds = self.server_peak = self.client_peak = 0.0

    def __next__(self) -> Message:
        self.note_server_peak()
        began = time.perf_counter()
        try:
            [reply] = self._grid.pull_messages([next(self._ids)])
        finally:
            self.seconds += time.perf_counter() - began
            self.client_peak = max(self.client_peak, _peak())
        return reply

    def note_server_peak(self) -> None:
        """Take down the peak since a client ran."""
        self.server_peak = max(self.server_peak, _peak())


def _peak() -> float:
    """Return the peak since the last call."""
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    return float(peak)


def _client_app(sides: dict[str, _Side]) -> ClientApp:
    """Return the app of all sides' clients: a training that takes no time."""
    models = _models(np.random.default_rng(1), VARIANTS)

    def mod(message: Message, context: Context, call_next: ClientFunction) -> Message:
        own = sides[str(message.content["config"]["side"])].mod
        return call_next(message, context) if own is None else own(message, context, call_next)

    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = models[int(context.node_config["partition-id"]) % VARIANTS]
        # Bytes of their own, as those of trained or received arrays are.
        copied = {
            name: Array(array.dtype, array.shape, array.stype, bytes(memoryview(array.data)))
            for name, array in model.items()
        }
        metrics = MetricRecord({"num-examples": 60})
        content = RecordDict({"arrays": ArrayRecord(copied), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def _models(draws: np.random.Generator, count: int) -> list[ArrayRecord]:
    return [
        ArrayRecord({"weights": Array(draws.normal(size=PARAMETERS).astype(np.float32))})
        for _ in range(count)
    ]
