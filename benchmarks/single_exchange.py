"""The rows of a node's time: an exchange beside Flower's own, and the imports of a client half."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flwr_privacy.simulations.deployment.processes import Deployment

from .report import Comparison

__all__ = ["imports", "single_exchange"]

NODES, ROUNDS, TURNS = 2, 3, 2
APP = Path(__file__).parent / "node_app"
SCHEMES = ("fedavg", "udp", "central-dp")
TARGET = 1.3
HALVES = (
    *("FedAvgClient", "SecureSumClient", "UDPClient", "CentralDPClient"),
    *("MSPDQClient", "ACFLClient", "M2FDPClient", "FedVSClient"),
)
REPEATS = 3
MOST_CPU = 0.5  # seconds beyond Flower's own

_CLOCK = """
import time
import flwr.supernode.cli, flwr.supernode.runtime.run_clientapp, flwr.clientapp, flwr.client
theirs = time.process_time()
from flwr_privacy.clients import {half}, as_mod
as_mod({half})
print(theirs, time.process_time() - theirs)
"""


def single_exchange() -> Iterator[Comparison]:
    """Compare an exchange of each scheme that has one a round with one of Flower's FedAvg."""
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as name:
        folder = Path(name)
        nodes = []
        for index in range(NODES):
            state = folder / f"state-{index}"
            state.mkdir(mode=0o700)
            own = {"client-id": f"node-{index}", "partition-id": index, "num-partitions": NODES}
            nodes.append({**own, "privacy-state": str(state)})
        allowed = {"FLWR_PRIVACY_ALLOW_UNPROTECTED": "central-dp"}  # its noise is the server's
        seconds: dict[str, list[float]] = {scheme: [] for scheme in ("flower", *SCHEMES)}
        with Deployment(nodes=nodes, folder=folder, node_environment=allowed) as deployment:
            for _ in range(TURNS):
                for scheme, measured in seconds.items():
                    measured += _rounds(deployment, folder / f"{scheme}.json", scheme)
    for scheme in SCHEMES:
        yield Comparison(
            what=f"an exchange of {scheme}, {NODES} nodes",
            rival="Flower's FedAvg, the same nodes in turns",
            ours=seconds[scheme],
            theirs=seconds["flower"],
            at_most=TARGET,
        )


def _rounds(deployment: Deployment, out: Path, scheme: str) -> list[float]:
    config = {"scheme": scheme, "rounds": ROUNDS, "nodes": NODES, "out": str(out)}
    deployment.run(APP, run_config=config, timeout=None)
    seconds: list[float] = json.loads(out.read_text(encoding="utf-8"))
    return seconds


def imports() -> Iterator[Comparison]:
    """Compare the CPU seconds of importing a client half with those of Flower's own process."""
    for half in HALVES:
        measured = [_imported(half) for _ in range(REPEATS)]
        theirs = [flowers for flowers, _ in measured]
        yield Comparison(
            what=f"CPU to import {half} beyond Flower's own",
            rival="what flwr-clientapp imports",
            ours=[own for _, own in measured],
            theirs=theirs,
            at_most=MOST_CPU / min(theirs),
        )


def _imported(half: str) -> tuple[float, float]:
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _CLOCK.format(half=half)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    theirs, own = map(float, done.stdout.split())
    return theirs, own
