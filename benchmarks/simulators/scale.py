"""How a simulation costs when its population is large: `make bench-scale`.

100,000 clients with 60 images each (a thousand sets of images, over and over), of which 1000 train
the model S in a round, inline with two worker processes. After each round: its seconds, those of
a client, the memory of the server's process and of the workers, the files of the clients and what
they hold.
"""

import argparse
import logging
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from .app.simulated import work

__all__ = ["main", "resident", "strategy_of"]

SIZE, WORKERS = "S", 2
CLIENT_APP = "benchmarks.simulators.app.simulated.client_app:app"
MEGABYTE = 1 << 20


def main() -> None:
    """Run the schemes that are asked for, and print a line for each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemes", nargs="*", default=["fedavg", "central-dp", "udp"])
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--per-round", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args()
    print(f"{asked.clients} clients, {asked.per_round} a round, {WORKERS} workers, model {SIZE}")
    for scheme in asked.schemes:
        print(f"\n{scheme:<9}round   seconds  ms a client  server MB  workers MB   files  files MB")
        _run(scheme, asked.clients, asked.per_round, asked.rounds)


def _run(scheme: str, clients: int, per_round: int, rounds: int) -> None:
    # Not above: the workers, which import this file, have no use for it.
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp

    from flwr_privacy.simulations.engines.inline import run_inline
    from flwr_privacy.strategies import LoopOptions

    logging.getLogger("flwr").setLevel(logging.ERROR)
    asked: dict[str, Any] = {
        "loop": LoopOptions(clients=clients, write_card=False),
        "fraction_train": per_round / clients,
        "fraction_evaluate": 0.0,
        "min_available_nodes": WORKERS,
    }
    server_app = ServerApp()

    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as name:
        folder = Path(name)
        (folder / "state").mkdir()
        work.write_images(folder / "images.npz", SIZE)

        @server_app.main()
        def train(grid: Any, context: Any) -> None:
            began = time.perf_counter()

            def note(server_round: int, arrays: ArrayRecord) -> None:
                nonlocal began
                seconds = time.perf_counter() - began
                if server_round > 0:
                    line = _line(server_round, seconds, per_round, folder / "state")
                    print(f"{'':<9}{line}", flush=True)
                began = time.perf_counter()

            model = ArrayRecord(work.model_of(SIZE).state_dict())
            strategy_of(scheme, **asked).start(grid, model, num_rounds=rounds, evaluate_fn=note)

        run_inline(
            server_app,
            CLIENT_APP,
            nodes=WORKERS,
            workers=WORKERS,
            state=folder / "state",
            run_config={"size": SIZE, "data": str(folder / "images.npz")},
        )


def strategy_of(scheme: str, **asked: Any) -> Any:
    """Return the strategy of a scheme, with these arguments."""
    # Not above, as in `_run`.
    from flwr_privacy.strategies import UDP, CentralDP, FedAvg, ServerNoise, UserLevel

    if scheme == "udp":
        return UDP(privacy=UserLevel(epsilon=8.0), **asked)
    if scheme == "central-dp":
        return CentralDP(privacy=ServerNoise(epsilon=8.0), **asked)
    if scheme == "fedavg":
        return FedAvg(**asked)
    raise ValueError(f"unknown scheme {scheme!r}")


def _line(server_round: int, seconds: float, per_round: int, state: Path) -> str:
    workers = [resident(child.pid) for child in multiprocessing.active_children()]
    sizes = [path.stat().st_size for path in state.rglob("*") if path.is_file()]
    return (
        f"{server_round:>5}{seconds:>10.2f}{1000 * seconds / per_round:>13.2f}"
        f"{resident(os.getpid()):>11.0f}{max(workers):>12.0f}{len(sizes):>8}"
        f"{sum(sizes) / MEGABYTE:>10.0f}"
    )


def resident(pid: int | None) -> float:
    """Return the megabytes of a process that are in memory (Linux)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MEGABYTE


if __name__ == "__main__":
    main()
