"""The attack on federated averaging: single uploads, masked vectors, sums of more and more clients.

A real round runs inline, and the attack gets what the server gets. Each client trains one step on
all of its few records: an update says most of a record where it is of few.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from flwr_privacy.clients import FedAvgClient, SecureSumClient
from flwr_privacy.coding.packing import unpack
from flwr_privacy.errors import check_choice
from flwr_privacy.privacy.updates import Update
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.secure_sum.masked import MASKED, values_of
from flwr_privacy.simulations.research.attacks.inversion import Matches, Recovery, invert_linear
from flwr_privacy.simulations.research.attacks.pictures import Row, draw
from flwr_privacy.simulations.research.attacks.setup import (
    AttackOptions,
    AttackSetup,
    Report,
    listen,
)
from flwr_privacy.simulations.runner.complete_settings import DEFAULT_CLIENTS
from flwr_privacy.simulations.tasks import tasks
from flwr_privacy.strategies import FedAvg
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import TRAIN

__all__ = [
    "TASKS",
    "View",
    "ViewFinding",
    "attack_secure_sum",
    "invert",
    "observe",
    "read_codes",
    "report",
    "setup_of",
]

TASKS = ("digits-linear", "digits-mlp", "mnist-mlp")
"""Tasks on square images whose first layer is linear and sees all of an image."""

SUMS = (2, 5, 10, 20)
"""Numbers of clients whose sum is attacked, beside all."""


def report(options: AttackOptions) -> Report:
    """Attack the views of a round with and without the secure sum, and draw what was found.

    By default 20 clients have 1 record each. The seed draws the records and the model. Masks are
    secret: it does not give them.

    Raises
    ------
    InvalidParameterError, DataError
        As `AttackSetup.of`; also if the picture cannot be written.
    """
    task, clients, records = options.chosen(task=TASKS[0], clients=DEFAULT_CLIENTS, records=1)
    setup = setup_of(
        task, clients=clients, records=records, seed=options.seed, data_root=options.data_root
    )
    findings = attack_secure_sum(setup)
    picture = draw(
        _rows(setup, findings),
        options.out / f"secure-sum-{task}.png",
        title="below each image: similarity to the record",
        recovered=Recovery.meaning,
        step=records,
    )
    return Report(
        tables=[_table(setup, findings)],
        legend=_legend(setup),
        pictures=[picture],
        verdict=_verdict(findings),
    )


def setup_of(
    task: str, *, clients: int, records: int, seed: int, data_root: str | Path | None
) -> AttackSetup:
    """Return the clients of a task of `TASKS`, and as many guesses as the first layer has units.

    Parameters and errors are those of `AttackSetup.of`.
    """
    chosen = tasks.task(check_choice("task", task, TASKS))
    units = len(next(iter(tasks.initial_arrays(chosen, seed).values())))
    return AttackSetup.of(
        chosen, clients=clients, records=records, seed=seed, data_root=data_root, candidates=units
    )


def invert(setup: AttackSetup, update: Arrays) -> NDArray[np.float64]:
    """Return what an update of the model, in any unit, says of records.

    The model's first two arrays are weight and bias of the layer that sees the records.
    """
    weight, bias = list(setup.start)[:2]
    return invert_linear(update[weight], update[bias])


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """What an honest-but-curious server sees of a round.

    Parameters
    ----------
    uploads : list of dict
        What it reads in the reply of each client, as an update of the model: in the unit of the
        weights or, under a secure sum, in codes.
    mean : dict of str to ndarray
        What the round adds to the model: the mean update. The clients see it too.
    """

    uploads: list[Arrays]
    mean: Arrays


def observe(setup: AttackSetup, *, clients: int, secure_sum: SecureSum | None = None) -> View:
    """Run a round of federated averaging with the first clients, and return what the server has.

    Parameters
    ----------
    setup : AttackSetup
        The clients.
    clients : int
        How many of them take part.
    secure_sum : SecureSum, optional
        By default the server sees every upload.
    """
    client = FedAvgClient if secure_sum is None else SecureSumClient
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_train_nodes=clients,
        min_available_nodes=clients,
        secure_sum=secure_sum,
    )
    exchanges, model = listen(setup, strategy, client, clients=clients)
    replies = [next(e.arrays for e in own if e.phase == TRAIN) for own in exchanges]
    if secure_sum is None:
        uploads = [_difference(reply, setup.start) for reply in replies]
    else:
        bits = secure_sum.bounds(clients).modulus_bits
        uploads = [read_codes(reply[MASKED], bits, setup.start) for reply in replies]
    return View(uploads=uploads, mean=_difference(model, setup.start))


def read_codes(vector: NDArray[np.uint8], bits: int, model: Arrays) -> Arrays:
    """Return the codes that a vector of a secure sum has, or would have without its masks.

    Parameters
    ----------
    vector : ndarray of uint8
        The vector, packed, as a client sends it.
    bits : int
        Bits of the modulus.
    model : Mapping of str to ndarray
        Gives names and shapes. The vector has the arrays in the order of their names and then the
        weight, with which the codes are multiplied.
    """
    names = sorted(model)
    ends = np.cumsum([model[name].size for name in names])
    values = values_of(unpack(vector, bits, int(ends[-1]) + 1), bits)
    parts = np.split(values, ends)[:-1]
    return {n: part.reshape(model[n].shape) for n, part in zip(names, parts, strict=True)}


@dataclass(frozen=True, kw_only=True, eq=False)
class ViewFinding:
    """What the attack found in one view.

    Parameters
    ----------
    view : str
        What was seen.
    recovery : Recovery
        How near it came to each record, beside a guess.
    found : ndarray, shape (records, features)
        The candidate nearest to each record.
    """

    view: str
    recovery: Recovery
    found: NDArray[np.float64]


def attack_secure_sum(setup: AttackSetup) -> list[ViewFinding]:
    """Attack single uploads, masked vectors, and the sums of more and more clients.

    Returns
    -------
    list of Finding
        Single uploads of all clients without a secure sum, single masked vectors of all clients,
        then sums; the sum of all clients last.
    """
    clients = len(setup.labels)
    plain = observe(setup, clients=clients)
    sizes = [*(size for size in SUMS if size < clients), clients]
    sums = {size: observe(setup, clients=size, secure_sum=SecureSum()) for size in sizes}
    findings = [
        _one_by_one(setup, "one upload, no secure sum", plain.uploads),
        _one_by_one(setup, "one masked vector", sums[clients].uploads),
    ]
    for size, view in sums.items():
        matches = setup.matches(invert(setup, view.mean), 0, size)
        findings.append(_finding(setup, f"sum of {size} clients", [matches]))
    return findings


def _table(setup: AttackSetup, findings: Sequence[ViewFinding]) -> Table:
    """Return the findings as a table."""
    clients, records = setup.labels.shape
    lines = Table(title=f"{setup.task.name}, {clients} clients, records of each: {records}")
    lines.add_column("what the server sees")
    for name in ("recovered", "similarity", "largest", "by guessing"):
        lines.add_column(name, justify="right")
    for finding in findings:
        one = finding.recovery
        numbers = (one.similarities.mean(), one.similarities.max(), one.guessed.mean())
        lines.add_row(
            finding.view,
            f"{one.recovered.sum()} of {one.recovered.size}",
            *(f"{number:.3f}" for number in numbers),
        )
    return lines


def _legend(setup: AttackSetup) -> str:
    """Return what the columns of `table` are."""
    return (
        "similarity: cosine of a record and the candidate nearest to it, the mean test record\n"
        "  taken off both; mean over the records, and the largest\n"
        f"by guessing: the mean where the candidates are {len(setup.guesses)} test records and "
        "means of classes\n"
        f"recovered: similarity of {Recovery.level} or more, and more than by guessing; a better "
        "attack may\n  recover others, since without noise nothing bounds what a sum says"
    )


def _verdict(findings: Sequence[ViewFinding]) -> str:
    """Return in a line how many records the views with and without the secure sum gave away."""
    upload, masked, *_, total = (int(finding.recovery.recovered.sum()) for finding in findings)
    return (
        f"single upload: recovered {upload} of {findings[0].recovery.recovered.size}; masked "
        f"vector: recovered {masked}; {findings[-1].view}: recovered {total}"
    )


def _rows(setup: AttackSetup, findings: Sequence[ViewFinding]) -> list[Row]:
    """Return the records, what three views say of them, and the best guesses."""
    clients = len(setup.labels)
    guess = setup.matches(setup.guesses, 0, clients)
    return [
        Row(name="record", images=setup.records(0, clients)),
        *(
            Row(
                name=finding.view,
                images=finding.found,
                notes=_two_digits(finding.recovery.similarities),
                recovered=finding.recovery.recovered,
            )
            for finding in (*findings[:2], findings[-1])
        ),
        Row(name="guess", images=guess.found, notes=_two_digits(guess.similarities)),
    ]


def _difference(trained: Arrays, start: Arrays) -> Arrays:
    update = Update.between(start, trained, list(start))
    return update.arrays(update.vector)


def _one_by_one(setup: AttackSetup, view: str, uploads: Sequence[Arrays]) -> ViewFinding:
    """Return what each upload says of the records of its own client."""
    matches = [
        setup.matches(invert(setup, upload), index, index + 1)
        for index, upload in enumerate(uploads)
    ]
    return _finding(setup, view, matches)


def _finding(setup: AttackSetup, view: str, matches: Sequence[Matches]) -> ViewFinding:
    """Join the matches of the first clients, and put guesses beside them."""
    similarities = np.concatenate([one.similarities for one in matches])
    clients = len(similarities) // setup.labels.shape[1]
    guessed = setup.matches(setup.guesses, 0, clients).similarities
    return ViewFinding(
        view=view,
        recovery=Recovery(similarities=similarities, guessed=guessed),
        found=np.concatenate([one.found for one in matches]),
    )


def _two_digits(numbers: NDArray[np.float64]) -> list[str]:
    return [f"{number:.2f}" for number in numbers]
