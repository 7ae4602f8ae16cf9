"""Where the time of a simulated client goes: ``python -m benchmarks.simulators.phases``.

Each column is a row of `simulators`, run with the profiler: milliseconds of a client of a round, by
phase (docs/simulation.md names them), of the workers and then of the server. The lines below the
table say what a round would be at best where everything but some phases was free: where a target is
beyond that, it cannot be met by what this library does around them. On Ray a round lasts a multiple
of `TICK`, so these lines have its rounds. (The server's ledger has the calibration of the noise,
once a run.)

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
from flwr_privacy.simulations.engines.profiling.phases import PHASES
from flwr_privacy.simulations.engines.profiling.report import Side, read_profile

from .app.simulated import work
from .rows import ROUNDS, SCHEMES
from .sides import Report, Sides, ray_sides

__all__ = ["main"]

INLINE = [*((part, "S") for part in ("fedavg", "central-dp", *SCHEMES))]
INLINE += [("fedavg", "L"), ("central-dp", "L")]
ON_RAY = [("fedavg", "S"), ("fedavg", "L")]
ONCE = ("start", "profiler")
USERS = ("training", "own code", "records", "evaluation")
"""Phases of the app's own code, and of Flower's records around it."""

TICK = 0.1
"""Seconds between two looks of Flower's simulation engine for new messages (its ``vce_api``)."""

LOCAL_NOISE = {"udp": ("noise",), "m2fdp": ("noise", "scheme"), "mspdq": ("scheme",)}
"""What a scheme does on top of averaging by its definition."""


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
        return sum(self.workers.values()) - self.workers["wait"]

    def of(self, phases: Sequence[str]) -> float:
        """What some phases take of that."""
        return sum(self.workers[phase] for phase in phases)


def main() -> None:
    """Profile all, and print the table and the bounds."""
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as name:
        folder = Path(name)
        inline = [_inline(folder, part, size) for part, size in INLINE]
        on_ray = [_on_ray(folder, part, size) for part, size in ON_RAY]
    columns = [*inline, *on_ray]
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
    for column in on_ray:
        ticks = Counter(round(seconds / TICK, 1) for seconds in column.rounds)
        counted = ", ".join(f"{many} of {number:g}" for number, many in sorted(ticks.items()))
        print(f"{column.name}: rounds in ticks of {TICK:g} s: {counted}")


def _bounds(columns: dict[tuple[str, str], Column]) -> Iterator[str]:
    for (_, size), column in columns.items():
        if column.name.startswith(("fedavg", "central-dp")):
            faster = column.work / column.of(USERS)
            yield (
                f"{column.name}: with training, own code and records alone, a client of {size} "
                f"takes {faster:.2f}x less than now"
            )
    plain = columns["fedavg", "S"]
    for part, (name, at_most) in SCHEMES.items():
        least = (plain.work + columns[part, "S"].of(LOCAL_NOISE[part])) / plain.work
        yield (
            f"{name}: as FedAvg, and in addition {' and '.join(LOCAL_NOISE[part])} alone: "
            f"{least:.2f}x of FedAvg (target {at_most:g}x)"
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
        return _column(f"{part} {size}", profile, size, report)


def _on_ray(folder: Path, part: str, size: str) -> Column:
    with _profiled(folder) as profile:
        with ray_sides(folder) as ray:
            report = ray.ours(size, rounds=ROUNDS[size], private=part == "central-dp")
        return _column(f"{part} {size}, Ray", profile, size, report)


def _column(name: str, folder: Path, size: str, report: Report) -> Column:
    profile = read_profile(folder)
    trainings = ROUNDS[size] * work.TASKS[size].cohort

    def each(side: Side) -> dict[str, float]:
        return {
            phase: 0.0 if phase in ONCE else 1000 * side.phases[phase] / trainings
            for phase in PHASES
        }

    return Column(name, each(profile.workers), each(profile.server), report.seconds)


if __name__ == "__main__":
    main()
