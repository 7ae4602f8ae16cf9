"""Estimates the machine-hours of experiments at the paper's size.

``python -m flwr_privacy.simulations.research.machine_hours NAME ... --data-root DATA``

`flwr_privacy.simulations.research.experiments.paper_size` estimates those that NumPy simulates. Of
the others two rounds of the first curve are trained with the paper's clients, records and model.
All rounds of all runs are taken to be as long as these, so a curve with more or dearer messages
makes the estimate too low, and a run that ends before its last planned round makes it too high.
Experiments with the same task, clients and local training share the timed rounds, whatever their
scheme. The hours are CPU time of one core, so that other work on the machine moves them little.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.runner.jobs import Engine, carry_out
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.tasks.lookup import task
from flwr_privacy.simulations.tasks.tasks import client_sizes

from .experiments.description import ExperimentDescription
from .experiments.files import experiment
from .experiments.paper_size import SEEDS, simulated_hours
from .points import in_digits

__all__ = ["Estimate", "estimate"]

_TIMED = 2  # rounds


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What an experiment takes at the paper's size.

    Parameters
    ----------
    runs, rounds : int
        Of all curves and seeds, with those of searches.
    seconds : float
        Processor time of one round.
    times : float
        How many times as many records the clients train on as they do scaled down.
    """

    runs: int
    rounds: int
    seconds: float
    times: float

    @property
    def hours(self) -> float:
        """Hours of one core."""
        return self.rounds * self.seconds / 3600

    def __str__(self) -> str:
        hours, seconds, times = (in_digits(n, 2) for n in (self.hours, self.seconds, self.times))
        return (
            f"{hours} hours of a core ({self.runs} runs, {self.rounds} rounds of {seconds} s), "
            f"{times} times the scaled-down records"
        )


def estimate(
    chosen: ExperimentDescription,
    *,
    seeds: Sequence[int] = range(SEEDS),
    data_root: Path | None = None,
    timed: dict[str, float] | None = None,
) -> Estimate:
    """Train a few rounds at the paper's size, inline, and say what the experiment takes.

    Parameters
    ----------
    chosen : ExperimentDescription
        An experiment that trains.
    seeds : Sequence of int, default 0 to 4
        Those of the experiment.
    data_root : Path, optional
        Folder with the data sets that no library brings.
    timed : dict of str to float, optional
        Seconds of rounds of earlier experiments, which this one may share; its own are added.

    Raises
    ------
    InvalidParameterError
        If the experiment draws a function.
    DataError
        If data is missing.
    """
    if chosen.function:
        raise InvalidParameterError("experiment", chosen.name, "one that trains")
    planned = {full: _planned(chosen, full=full, data_root=data_root) for full in (True, False)}
    at_size, small = planned[True], planned[False]
    alike = _alike(at_size[0])
    timed = {} if timed is None else timed
    if alike not in timed:
        timed[alike] = _seconds(at_size[0])
    return Estimate(
        runs=len(seeds) * len(at_size),
        rounds=len(seeds) * sum(settings.rounds for settings in at_size),
        seconds=timed[alike],
        times=_trained(at_size) / _trained(small),
    )


def _alike(settings: Settings) -> str:
    """Name what the length of a round depends on most."""
    usual = Settings()
    return replace(
        settings,
        rounds=1,
        scheme=usual.scheme,
        strategy=usual.strategy,
        secure_sum=usual.secure_sum,
        partition=usual.partition,
    ).to_toml()


def _seconds(settings: Settings) -> float:
    """Return the processor time of a round."""
    with TemporaryDirectory() as folder:
        _train(settings, 1, Path(folder, "first"))  # what is read or compiled once is not a round
        started = time.process_time()
        _train(settings, _TIMED, Path(folder, "timed"))
        return (time.process_time() - started) / _TIMED


def _train(settings: Settings, rounds: int, path: Path) -> None:
    engine, few = Engine(name="inline"), replace(settings, rounds=rounds)
    carry_out([RunFolder.create(path, few, engine=engine.name, nodes=engine.nodes(few))], engine)


def _planned(
    chosen: ExperimentDescription, *, full: bool, data_root: Path | None
) -> list[Settings]:
    """Return the settings of all runs of one seed; curves may share some."""
    runs = (
        chosen.settings(
            plan.curve, seed=0, full=full, data_root=data_root, x=plan.x, candidate=plan.candidate
        )
        for plan in chosen.planned(full=full)
    )
    return list({settings.to_toml(): settings for settings in runs}.values())


def _trained(runs: Sequence[Settings]) -> float:
    """Return how many records the clients train on in all runs, each pass counted."""
    sizes: dict[str, float] = {}
    total = 0.0
    for settings in runs:
        data = replace(settings, rounds=1, strategy={}, scheme=runs[0].scheme).to_toml()
        if data not in sizes:
            each = client_sizes(task(settings.task), settings).values()
            sizes[data] = sum(each) / len(each)
        drawn = settings.per_round or settings.clients or 0
        total += settings.rounds * drawn * settings.training.epochs * sizes[data]
    return total


def main() -> None:
    """Print the estimate of each experiment that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--data-root", type=Path)
    given = parser.parse_args()
    timed: dict[str, float] = {}
    for name in given.names:
        chosen = experiment(name)
        if chosen.function:
            hours = simulated_hours(chosen, data_root=given.data_root)
            print(f"{name}: {in_digits(hours, 2)} hours of a core ({SEEDS} seeds)", flush=True)
        else:
            found = estimate(chosen, data_root=given.data_root, timed=timed)
            print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main()
