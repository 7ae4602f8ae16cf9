"""Where the time of a simulated client goes: ``python -m benchmarks.simulators.phases``.

Each column is a row of `simulators` or `large_models`, run with the profiler: milliseconds of a
client of a round, by phase (docs/simulation.md names them), of the workers and then of the server.
The lines below the table say what a round would be at best where everything but some phases was
free: where a target is beyond that, it cannot be met by what this library does around them. On Ray
a round lasts a multiple of `TICK`, so these lines have its rounds. (The server's ledger has the
calibration of the noise, once a run.)

The profiler makes calls of Python functions slower, so phases are compared with each other here;
`simulators` measures seconds.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flwr_privacy.clients.profiling import PROFILE_VARIABLE
from flwr_privacy.simulations.engines.profiling.phases import CLIENTS, PHASES
from flwr_privacy.simulations.engines.profiling.report import Side, read_profile

from .. import large_models
from ..own_process import measured
from .app.simulated import work
from .rows import NAMES, ROUNDS, SCHEME_PLANS
from .sides import Sides, ray_sides

__all__ = ["main"]

OWN = {"udp": ("noise",), "m2fdp": ("noise", "scheme"), "mspdq": ("scheme",)}
"""What a scheme does beyond averaging by its definition."""

PLAIN = ("fedavg", "central-dp")
INLINE = [(part, "S") for part in (*PLAIN, *OWN)] + [(part, "L") for part in PLAIN]
ON_RAY = [("fedavg", "S"), ("fedavg", "L")]
LARGE_VALUES, LARGE_CLIENTS, _ = large_models.SIZES[0]
LARGE = [(side, f"{LARGE_VALUES:.0e}") for side in ("fedavg", "shares")]
ONCE = ("start", "profiler")
USERS = ("training", "own code", "records", "evaluation")
"""Phases of the app's own code, and of Flower's records around it."""

TICK = 0.1
"""Seconds between two looks of Flower's simulation engine for new messages (its ``vce_api``)."""


@dataclass(frozen=True)
class Column:
    """A profiled run: milliseconds of a client of a round, by phase; and seconds of its rounds."""

    name: str
    workers: dict[str, float]
    server: dict[str, float]
    rounds: list[float]

    @property
    def work(self) -> float:
        """All that the workers do for a client; they wait in none of it."""
        return self.of([phase for phase in PHASES if phase != "wait"])

    @property
    def everything(self) -> float:
        """The same and what the server does for it, for clients in the server's process."""
        own = [phase for phase in PHASES if phase not in ("wait", CLIENTS)]
        return self.work + sum(self.server[phase] for phase in own)

    def of(self, phases: Sequence[str]) -> float:
        """What some phases take of the workers' work."""
        return sum(self.workers[phase] for phase in phases)


def main() -> None:
    """Profile all, and print the table and the bounds."""
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as name:
        folder = Path(name)
        inline = [_inline(folder, part, size) for part, size in INLINE]
        large = [_large(folder, side) for side, _ in LARGE]
        on_ray = [_on_ray(folder, part, size) for part, size in ON_RAY]
    columns = [*inline, *large, *on_ray]
    print("| ms of a client | " + " | ".join(column.name for column in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for side in ("workers", "server"):
        for phase in PHASES:
            row = [getattr(column, side)[phase] for column in columns]
            if any(number >= 0.005 for number in row):
                cells = " | ".join(f"{number:.2f}" for number in row)
                print(f"| {'server: ' * (side == 'server')}{phase} | {cells} |")
    print()
    print("\n".join(_bounds(dict(zip(INLINE, inline, strict=True)))))
    plain, shares = large
    least = (plain.everything + shares.of(("noise", "masks"))) / plain.everything
    print(
        f"{shares.name}: as FedAvg, and in addition noise and masks of the clients alone: "
        f"{least:.2f}x of FedAvg on one thread (target {large_models.MOST_TIME:g}x)"
    )
    for column in on_ray:
        ticks = Counter(round(seconds / TICK, 1) for seconds in column.rounds)
        counted = ", ".join(f"{many} of {number:g}" for number, many in sorted(ticks.items()))
        print(f"{column.name}: rounds in ticks of {TICK:g} s: {counted}")


def _bounds(columns: dict[tuple[str, str], Column]) -> Iterator[str]:
    for (part, size), column in columns.items():
        if part in PLAIN:
            faster = column.work / column.of(USERS)
            yield (
                f"{column.name}: with training, own code and records alone, a client of {size} "
                f"takes {faster:.2f}x less than now"
            )
    plain = columns["fedavg", "S"]
    for part, own in OWN.items():
        least = (plain.work + columns[part, "S"].of(own)) / plain.work
        yield (
            f"{NAMES[part]}: as FedAvg, and in addition {' and '.join(own)} alone: {least:.2f}x of "
            f"FedAvg (target {SCHEME_PLANS['S'].targets[part]:g}x)"
        )


@contextmanager
def _profiled(folder: Path) -> Iterator[Path]:
    """Let the processes that are started keep samples in a new folder."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        os.environ[PROFILE_VARIABLE] = name
        try:
            yield Path(name)
        finally:
            os.environ.pop(PROFILE_VARIABLE, None)


def _inline(folder: Path, part: str, size: str) -> Column:
    with _profiled(folder) as profile:
        [report] = Sides(folder).inline(part, size, rounds=ROUNDS[size])
        return _column(f"{part} {size}", profile, _trainings(size), report.seconds)


def _on_ray(folder: Path, part: str, size: str) -> Column:
    with _profiled(folder) as profile:
        with ray_sides(folder) as ray:
            report = ray.ours(size, rounds=ROUNDS[size], private=part == "central-dp")
        return _column(f"{part} {size}, Ray", profile, _trainings(size), report.seconds)


def _large(folder: Path, side: str) -> Column:
    with _profiled(folder) as profile:
        # One thread: the profiler sees what the first one does, and not what it waits for.
        sizes = (str(LARGE_VALUES), str(LARGE_CLIENTS))
        measured(large_models.__name__, side, *sizes, OMP_NUM_THREADS="1")
        trainings = large_models.ROUNDS * LARGE_CLIENTS
        return _column(f"{side} {LARGE_VALUES:.0e}", profile, trainings, [])


def _column(name: str, folder: Path, trainings: int, rounds: list[float]) -> Column:
    profile = read_profile(folder)

    def each(side: Side) -> dict[str, float]:
        return {
            phase: 0.0 if phase in ONCE else 1000 * side.phases[phase] / trainings
            for phase in PHASES
        }

    return Column(name, each(profile.workers), each(profile.server), rounds)


def _trainings(size: str) -> int:
    return ROUNDS[size] * work.TASKS[size].cohort


if __name__ == "__main__":
    main()
