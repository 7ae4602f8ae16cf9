"""How the cost of a simulated round grows: ``python -m benchmarks.simulators.growth``.

For each scheme one number is varied at a time: clients of the population, clients of a round,
values of the model, rounds, worker processes. A line has the seconds of a round (the median, from
the third on), the memory of the server's process and of the largest worker after the last round,
and the files of the clients. The slope is that of a line through the logarithms: 1 where twice as
many take twice as long, 0 where they take as long.

Clients add a constant to the model in place of a training, so all of it is the simulation's own.
Each setting is measured in a process of its own, once for all lines that have it.
"""

import argparse
import json
import logging
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from functools import cache
from itertools import pairwise
from pathlib import Path

from ..own_process import measured
from .scale import resident, strategy_of

__all__ = ["main"]

SCHEMES = ("fedavg", "central-dp", "udp")
BASE = {"clients": 10_000, "per-round": 200, "values": 10_000, "rounds": 5, "workers": 2}
AXES = {
    "clients": (10_000, 100_000, 1_000_000),
    "per-round": (50, 200, 800),
    "values": (1_000, 10_000, 100_000, 1_000_000),
    "rounds": (5, 20, 80),
    "workers": tuple(2**power for power in range((os.cpu_count() or 1).bit_length())),
}
NAMED = {
    "clients": "clients",
    "per-round": "clients of a round",
    "values": "values of the model",
    "rounds": "rounds",
    "workers": "workers",
}
CLIENT_APP = "benchmarks.simulators.growth_app:app"


def main() -> None:
    """Measure all lines and print them as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES, help="all by default")
    asked = parser.parse_args()
    if len(asked.schemes) == 1 and asked.schemes[0].startswith("{"):  # one line, in this process
        print(json.dumps(_measured(**json.loads(asked.schemes[0]))))
        return
    began = time.monotonic()
    print("| scheme | what grows | seconds of a round | slope | server, worker MB | files |")
    print("|---|---|---|---|---|---|")
    for scheme in asked.schemes:
        for axis in asked.axes:
            _print_axis(scheme, axis, AXES[axis])
    print(f"{time.monotonic() - began:.0f} s in all")


@cache
def _line(settings: str) -> dict[str, float]:
    return measured(__spec__.name, settings, OMP_NUM_THREADS="1")


def _print_axis(scheme: str, axis: str, values: tuple[int, ...]) -> None:
    lines = [
        _line(json.dumps({"scheme": scheme, "settings": {**BASE, axis: value}})) for value in values
    ]
    seconds = [line["seconds"] for line in lines]
    logarithms = ([math.log(number) for number in row] for row in (values, seconds))
    slope = statistics.linear_regression(*logarithms).slope if len(values) > 1 else math.nan
    grown = " / ".join(f"{value:,}" for value in values)
    times = " / ".join(f"{second:.3g}" for second in seconds)
    memory = " / ".join(f"{line['server']:.0f}, {line['worker']:.0f}" for line in lines)
    files = " / ".join(f"{line['files']:,}" for line in lines)
    line = f"| {scheme} | {NAMED[axis]}: {grown} | {times} | {slope:.2f} | {memory} | {files} |"
    print(line, flush=True)


def _measured(scheme: str, settings: dict[str, int]) -> dict[str, float]:
    # Not above: the workers, which import this file, have no use for it.
    import numpy as np
    from flwr.app import ArrayRecord, Context
    from flwr.serverapp import Grid, ServerApp

    from flwr_privacy.simulations.engines.inline import run_inline
    from flwr_privacy.strategies import LoopOptions

    logging.getLogger("flwr").setLevel(logging.ERROR)
    ends: list[float] = []
    memory = {"server": 0.0, "worker": 0.0}
    server_app = ServerApp()

    @server_app.main()
    def train(grid: Grid, context: Context) -> None:
        def note(server_round: int, arrays: ArrayRecord) -> None:
            ends.append(time.perf_counter())
            if server_round == settings["rounds"]:
                workers = [resident(child.pid) for child in multiprocessing.active_children()]
                memory.update(server=resident(os.getpid()), worker=max(workers))

        strategy = strategy_of(
            scheme,
            loop=LoopOptions(clients=settings["clients"], write_card=False),
            fraction_train=settings["per-round"] / settings["clients"],
            fraction_evaluate=0.0,
            min_available_nodes=settings["workers"],
        )
        model = ArrayRecord([np.zeros(settings["values"], np.float32)])
        strategy.start(grid, model, num_rounds=settings["rounds"], evaluate_fn=note)

    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as folder:
        run_inline(
            server_app,
            CLIENT_APP,
            nodes=settings["workers"],
            workers=settings["workers"],
            state=folder,
        )
        files = sum(path.is_file() for path in Path(folder).rglob("*"))
    rounds = [end - begin for begin, end in pairwise(ends[2:])]
    return {"seconds": statistics.median(rounds), **memory, "files": files}


if __name__ == "__main__":
    main()
