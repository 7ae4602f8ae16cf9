"""Computes how many workers a machine has room for, and which share of a GPU each gets.

A worker is a process that runs clients one after another. Beside torch and Flower it needs room
for the model several times: the request, the model, its gradient, what the client has learnt, and
a sum over clients in float64.
"""

import os
import sys
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from flwr_privacy.errors import InvalidParameterError, check_integer

from .ray_engine import RayResources

__all__ = ["Machine", "Placement", "check_gpus", "crowded", "suggest"]

_MEGABYTE = 1 << 20
_PROCESS = 500 * _MEGABYTE  # `python -m benchmarks.simulators.scale` prints what a worker takes
_CONTEXT = 600 * _MEGABYTE  # of a GPU's memory, for CUDA and its libraries
_COPIES = 10  # of a float32 model, sums in float64 counted twice
_SPARE = 0.8  # of what is free; the rest is for data and activations


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The free resources of a machine.

    Parameters
    ----------
    cores : int
        Processors that this process may use.
    memory : int
        Free memory, in bytes.
    gpus : tuple of int
        Free memory of each GPU, in bytes.
    """

    cores: int
    memory: int
    gpus: tuple[int, ...] = ()

    @classmethod
    def here(cls, *, gpus: bool = True) -> "Machine":
        """Measure this machine; its GPUs only on request, because that imports torch."""
        return cls(cores=_cores(), memory=_free_memory(), gpus=_free_gpus() if gpus else ())


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A number of workers, with the reason for it.

    Parameters
    ----------
    workers : int
        Processes.
    gpus_per_worker : float
        Share of a GPU for each; 0 without GPUs.
    reason : str
        What limits them.
    """

    workers: int
    gpus_per_worker: float
    reason: str

    def __str__(self) -> str:
        share = f" --gpus-per-client {self.gpus_per_worker:g}" if self.gpus_per_worker else ""
        return f"--workers {self.workers}{share} ({self.reason})"


def suggest(machine: Machine, *, model_bytes: int, clients: int) -> Placement:
    """Suggest how many workers run the clients of a simulation.

    Parameters
    ----------
    machine : Machine
        What is free.
    model_bytes : int
        Size of the model in float32.
    clients : int
        Clients that train in a round.

    Examples
    --------
    >>> small = Machine(cores=16, memory=8 << 30)
    >>> print(suggest(small, model_bytes=100 << 20, clients=50))
    --workers 4 (1500 MB each of 8192 MB memory)
    >>> with_gpu = Machine(cores=16, memory=64 << 30, gpus=(16 << 30,))
    >>> print(suggest(with_gpu, model_bytes=100 << 20, clients=50))
    --workers 8 --gpus-per-client 0.12 (1600 MB each of 16384 MB GPU memory)
    """
    check_integer("model_bytes", model_bytes, minimum=0)
    check_integer("clients", clients, minimum=1)
    each = _PROCESS + _COPIES * model_bytes
    limits = {
        max(1, machine.cores): f"{machine.cores} cores",
        clients: f"{clients} clients in a round",
        max(1, int(_SPARE * machine.memory / each)): (
            f"{_megabytes(each)} each of {_megabytes(machine.memory)} memory"
        ),
    }
    if not machine.gpus:
        return Placement(workers=min(limits), gpus_per_worker=0.0, reason=limits[min(limits)])
    own = _on_gpu(model_bytes)
    fit = sum(int(_SPARE * free / own) for free in machine.gpus)
    if fit == 0:
        reason = f"a worker needs {_megabytes(own)} of a GPU, and none has it: on the CPU"
        return Placement(workers=min(limits), gpus_per_worker=0.0, reason=reason)
    limits[fit] = f"{_megabytes(own)} each of {_megabytes(sum(machine.gpus))} GPU memory"
    workers = min(limits)
    on_each = ceil(workers / len(machine.gpus))
    share = int(100 / on_each) / 100  # rounded down, or the last one would not fit
    return Placement(workers=workers, gpus_per_worker=share, reason=limits[workers])


def crowded(workers: int, machine: Machine) -> str | None:
    """Return a warning if there are more workers than cores."""
    if workers <= machine.cores:
        return None
    return (
        f"WARNING: {workers} workers on {machine.cores} cores take turns, and need more memory "
        f"than --workers {machine.cores}"
    )


def check_cpus(resources: RayResources, processors: int) -> None:
    """Refuse more CPUs for a client than there are; Ray would wait for them, or break off.

    Parameters
    ----------
    resources : RayResources
        What a client is to get. Of a cluster that runs elsewhere nothing is known here.
    processors : int
        Those that Ray has.

    Raises
    ------
    InvalidParameterError
        If there are not as many.
    """
    there = processors if resources.total_cpus is None else resources.total_cpus
    if resources.ray_address is None and resources.cpus_per_client > there:
        allowed = f"at most the {there} CPUs of this machine"
        raise InvalidParameterError("cpus_per_client", resources.cpus_per_client, allowed)


def check_gpus(resources: RayResources, machine: Machine, *, model_bytes: int) -> None:
    """Refuse a share of a GPU that does not exist here or in which the model does not fit.

    Parameters
    ----------
    resources : RayResources
        What a client is to get. Of a cluster that runs elsewhere nothing is known here.
    machine : Machine
        What is free.
    model_bytes : int
        Size of the model in float32.

    Raises
    ------
    InvalidParameterError
        If it does not fit; the text has the numbers.
    """
    share = resources.gpus_per_client
    if share == 0 or resources.ray_address is not None:
        return
    if share > len(machine.gpus):
        allowed = f"at most the {len(machine.gpus)} GPUs of this machine"
        raise InvalidParameterError("gpus_per_client", share, allowed)
    own, free = _on_gpu(model_bytes), min(1.0, share) * max(machine.gpus)
    if own > free:
        least = ceil(100 * own / max(machine.gpus)) / 100
        raise InvalidParameterError(
            "gpus_per_client",
            share,
            f"at least {least:g}: a client of this model needs {_megabytes(own)}, and "
            f"{share:g} of what is free is {_megabytes(int(free))}",
        )


def _on_gpu(model_bytes: int) -> int:
    return _CONTEXT + _COPIES * model_bytes


def _megabytes(size: int) -> str:
    return f"{size / _MEGABYTE:.0f} MB"


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _free_memory() -> int:
    table = Path("/proc/meminfo")
    if table.is_file():
        lines = dict(line.split(":", 1) for line in table.read_text(encoding="ascii").splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # all, where nobody knows more


def _free_gpus() -> tuple[int, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))
