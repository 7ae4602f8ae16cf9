"""Runs the sides, each in processes of its own with one thread each, and reads what they report."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flwr_privacy.central_dp.plan import CentralDPNoisePlan
from flwr_privacy.central_dp.sensitivity import sensitivity
from flwr_privacy.clients.node.context_store import STATE_VARIABLE
from flwr_privacy.simulations.engines.ray_engine import RayResources, RaySession

from .app.simulated import work
from .environment import pfl_environment

__all__ = ["Report", "Sides", "check_alike", "ray_sides"]

HERE = Path(__file__).parent
APP = HERE / "app"
WORKERS = 2
TIMEOUT = 400.0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a side measured.

    Parameters
    ----------
    part : str
        The side, or what it ran.
    first : float
        Seconds from its start to the end of the first round.
    rounds : list of float
        Seconds of each round from the second on.
    cpu : float
        CPU seconds of all its processes in a round, on average from the third round on.
    losses : list of float
        Loss of the model to start from, and after each of the first rounds.
    moved : float
        Standard deviation of what the first round added to a weight.
    """

    part: str
    first: float
    rounds: list[float]
    cpu: float
    losses: list[float]
    moved: float

    @property
    def seconds(self) -> list[float]:
        """Seconds of the rounds after the first two."""
        return self.rounds[1:]

    @property
    def learnt(self) -> float:
        """How much the loss fell in the first rounds."""
        return self.losses[0] - self.losses[-1]


def check_alike(reports: list[Report], *, learnt: bool, apart: float = 0.1) -> None:
    """Raise unless all sides have moved the weights alike and, if it is asked for, learnt alike.

    Raises
    ------
    RuntimeError
        If a side has not done the work of the first one.
    """
    first, *others = reports
    for other in others:
        fell, moved = other.learnt / first.learnt, other.moved / first.moved
        if not (abs(moved - 1) < apart and (not learnt or 0.75 < fell < 1.33)):
            raise RuntimeError(f"not the same work: {other} and {first}")


class _Sides:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._out = folder / "reports.jsonl"

    def _data(self, size: str) -> Path:
        """Return the file with the images of a task."""
        path = self._folder / f"{size}.npz"
        if not path.exists():
            work.write_images(path, size)
        return path

    def _reports(self) -> list[Report]:
        lines = self._out.read_text(encoding="utf-8").splitlines()
        self._out.unlink()
        return [Report(**json.loads(line)) for line in lines]


class Sides(_Sides):
    """The sides that are a process with two workers each."""

    def loop(self, size: str, *, rounds: int, private: bool) -> Report:
        """Run a loop in plain PyTorch."""
        command = [sys.executable, "-m", f"{__package__}.loop_side"]
        [report] = self._run(command, size, rounds, sigma=_sigma(size, private=private))
        return report

    def pfl(self, size: str, *, rounds: int, private: bool) -> Report:
        """Run pfl-research as its guide to distributed simulations has it."""
        torchrun = str(pfl_environment() / "bin" / "torchrun")
        command = [torchrun, "--standalone", "--nnodes=1", f"--nproc_per_node={WORKERS}"]
        command += [str(HERE / "pfl_side.py")]
        [report] = self._run(command, size, rounds, sigma=_sigma(size, private=private))
        return report

    def inline(self, plan: str, size: str, *, rounds: int) -> list[Report]:
        """Run parts of this library inline, in this order."""
        command = [sys.executable, "-m", f"{__package__}.inline_side"]
        return self._run(command, size, rounds, plan=plan)

    def _run(self, command: list[str], size: str, rounds: int, **more: float | str) -> list[Report]:
        asked = {
            "started": time.time(),
            "data": self._data(size),
            "out": self._out,
            "size": size,
            "rounds": rounds,
            **more,
        }
        _run([*command, *(f"--{name}={value}" for name, value in asked.items())])
        return self._reports()


class RaySides(_Sides):
    """The sides that `flwr run` starts on Ray with two workers."""

    def __init__(self, folder: Path, session: RaySession) -> None:
        super().__init__(folder)
        self._session = session

    def flower(self, size: str, *, rounds: int, private: bool) -> Report:
        """Run Flower's own strategy on a SuperNode per client."""
        part = "flower-dp" if private else "flower"
        nodes = work.TASKS[size].clients
        return self._ray(part, size, rounds, nodes=nodes, sigma=_sigma(size, private=private))

    def ours(self, size: str, *, rounds: int, private: bool) -> Report:
        """Run ours on two SuperNodes, which play all clients."""
        part = "central-dp" if private else "fedavg"
        return self._ray(part, size, rounds, nodes=WORKERS, sigma=0.0)

    def _ray(self, part: str, size: str, rounds: int, *, nodes: int, sigma: float) -> Report:
        config: dict[str, str | int | float | bool] = {
            "plan": part,
            "size": size,
            "rounds": rounds,
            "sigma": sigma,
            "virtual": nodes != work.TASKS[size].clients,
            "data": str(self._data(size)),
            "out": str(self._out),
            "started": time.time(),
        }
        self._session.run(APP, nodes=nodes, run_config=config, timeout=TIMEOUT)
        [report] = self._reports()
        return report


@contextmanager
def ray_sides(folder: Path) -> Iterator[RaySides]:
    """Open a Ray session of two workers, on any machine."""
    before = dict(os.environ)
    os.environ.update(ONE_THREAD)
    os.environ["FLWR_PRIVACY_COHORTS"] = "1"  # the nodes let a server say which clients they play
    try:
        with tempfile.TemporaryDirectory() as state:
            os.environ[STATE_VARIABLE] = state
            with RaySession(resources=RayResources(total_cpus=WORKERS)) as session:
                yield RaySides(folder, session)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _sigma(size: str, *, private: bool) -> float:
    """Return the standard deviation of the noise that our server adds to a sum of updates."""
    if not private:
        return 0.0
    schedule = CentralDPNoisePlan(
        noise="server",
        sampling="fixed",
        epsilon=work.EPSILON,
        delta=work.DELTA,
        rounds=work.BUDGETED_ROUNDS,
        q=work.TASKS[size].cohort / work.TASKS[size].clients,
    )
    return schedule.update_noise_multiplier * sensitivity(
        work.CLIPPING_NORM, neighbours=schedule.relation
    )


def _run(command: list[str]) -> None:
    """Run a side; nothing that it started is left behind."""
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(APP)}
    environment[work.COMPARES] = str(os.getpid())
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{output[-4000:]}")
