"""Seconds of a round that is profiled, beside the same round as it is."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flwr_privacy.clients.profiling import PROFILE_VARIABLE

from .report import Comparison
from .simulators.sides import Sides

__all__ = ["profile"]

TURNS = 2
ROUNDS = {"S": 22, "L": 7}
PARTS = [("fedavg", "S"), ("udp", "S"), ("fedavg", "L")]


def profile() -> Iterator[Comparison]:
    """Train 50 of 1000 clients x 60 images a round, inline with two workers, in turns."""
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as name:
        sides = Sides(Path(name))
        for part, size in PARTS:
            plain, profiled = list[float](), list[float]()
            for _ in range(TURNS):
                for seconds, folder in ((plain, ""), (profiled, f"{name}/profile")):
                    os.environ[PROFILE_VARIABLE] = folder
                    for report in sides.inline(part, size, rounds=ROUNDS[size]):
                        seconds += report.seconds
            del os.environ[PROFILE_VARIABLE]
            yield Comparison(
                what=f"a profiled round of {size}, {part}",
                rival="the same without a profile",
                ours=profiled,
                theirs=plain,
            )
