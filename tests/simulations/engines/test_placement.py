"""How many workers fit on a machine."""

import os

import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.engines.placement import Machine, check_gpus, crowded, suggest
from flwr_privacy.simulations.engines.ray_engine import RayResources

GB, MB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("machine", "clients", "workers", "share", "reason"),
    [
        (Machine(cores=2, memory=24 * GB), 50, 2, 0.0, "2 cores"),
        (Machine(cores=64, memory=24 * GB), 5, 5, 0.0, "5 clients in a round"),
        (Machine(cores=64, memory=3 * GB), 50, 4, 0.0, "600 MB each of 3072 MB memory"),
        (Machine(cores=64, memory=100 * MB), 50, 1, 0.0, "600 MB each of 100 MB memory"),
        (
            Machine(cores=64, memory=99 * GB, gpus=(8 * GB, 8 * GB)),
            50,
            18,
            0.11,
            "700 MB each of 16384 MB GPU memory",
        ),
        (Machine(cores=4, memory=99 * GB, gpus=(8 * GB, 8 * GB)), 50, 4, 0.5, "4 cores"),
        (Machine(cores=1, memory=99 * GB, gpus=(8 * GB, 8 * GB)), 50, 1, 1.0, "1 cores"),
        (
            Machine(cores=4, memory=99 * GB, gpus=(100 * MB,)),
            50,
            4,
            0.0,
            "a worker needs 700 MB of a GPU, and none has it: on the CPU",
        ),
    ],
)
def test_what_is_scarcest_decides(
    machine: Machine, clients: int, workers: int, share: float, reason: str
) -> None:
    placement = suggest(machine, model_bytes=10 * MB, clients=clients)
    assert (placement.workers, placement.gpus_per_worker) == (workers, share)
    assert placement.reason == reason
    if machine.gpus and share:
        assert -(-workers // len(machine.gpus)) * share <= 1


def test_more_workers_than_cores_are_told_of() -> None:
    machine = Machine(cores=2, memory=GB)
    assert crowded(2, machine) is None
    assert str(crowded(3, machine)).startswith("WARNING: 3 workers on 2 cores take turns")


@pytest.mark.parametrize(
    ("share", "gpus", "text"),
    [
        (0.5, (), "gpus_per_client = 0.5: expected at most the 0 GPUs of this machine"),
        (2.0, (8 * GB,), "gpus_per_client = 2.0: expected at most the 1 GPUs of this machine"),
        (
            0.05,
            (8 * GB,),
            "gpus_per_client = 0.05: expected at least 0.09: a client of this model needs 700 MB, "
            "and 0.05 of what is free is 410 MB",
        ),
    ],
)
def test_a_share_that_does_not_fit_is_refused_with_the_numbers(
    share: float, gpus: tuple[int, ...], text: str
) -> None:
    machine = Machine(cores=2, memory=GB, gpus=gpus)
    with pytest.raises(InvalidParameterError) as refused:
        check_gpus(RayResources(gpus_per_client=share), machine, model_bytes=10 * MB)
    assert str(refused.value) == text


def test_a_share_that_fits_or_is_of_another_machine_is_not() -> None:
    machine = Machine(cores=2, memory=GB, gpus=(8 * GB,))
    check_gpus(RayResources(gpus_per_client=0.09), machine, model_bytes=10 * MB)
    check_gpus(RayResources(), Machine(cores=2, memory=GB), model_bytes=10 * MB)
    elsewhere = RayResources(gpus_per_client=4.0, ray_address="host:1")
    check_gpus(elsewhere, Machine(cores=2, memory=GB), model_bytes=10 * MB)


def test_this_machine_has_cores_and_memory() -> None:
    machine = Machine.here()
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert machine.memory > 100 * MB
