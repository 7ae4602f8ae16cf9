"""What a server finds in its view of a round: `flwr-privacy attack`.

A real round runs inline, and the attack gets what the server gets. Each client trains one step on
all of its few records: an update says most of a record where it is of few.
"""

import logging
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.table import Table

from flwr_privacy.arrays import Arrays
from flwr_privacy.attacks.inversion import Matches, Recovery, best_matches, invert_linear
from flwr_privacy.clients import FedAvgClient, SchemeClient, SecureSumClient, as_mod
from flwr_privacy.clients.torch import get_arrays, initialise, set_arrays, train
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer
from flwr_privacy.identity import derive_seed, stream
from flwr_privacy.packing import unpack
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.secure_sum.masked import MASKED, values_of
from flwr_privacy.simulations import tasks
from flwr_privacy.simulations.data import load
from flwr_privacy.simulations.inline import InlineGrid
from flwr_privacy.simulations.inline.flower_internals import acting_as_server
from flwr_privacy.strategies import FedAvg
from flwr_privacy.updates import Update
from flwr_privacy.wire import RECORD, TRAIN, Header

__all__ = [
    "TASKS",
    "Finding",
    "Scene",
    "View",
    "attack_secure_sum",
    "draw",
    "legend",
    "observe",
    "read_codes",
    "table",
    "verdict",
]

TASKS = ("digits-linear", "digits-mlp", "mnist-mlp")
"""Tasks on square images whose first layer is linear and sees all of an image."""

SUMS = (2, 5, 10, 20)
"""Numbers of clients whose sum is attacked, beside all."""

_IMAGES = 8  # in a row of the picture


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """Clients with a few records each, and what anybody knows beforehand.

    Parameters
    ----------
    task : Task
        What is trained.
    seed : int
        Root of all draws.
    start : dict of str to ndarray
        The model that the server sends; its first two arrays are weight and bias of the layer that
        sees the records.
    features : ndarray, shape (clients, records, ...)
        Records of each client.
    labels : ndarray, shape (clients, records)
        Their classes.
    known : ndarray, shape (features,)
        Mean of the test records.
    guesses : ndarray, shape (guesses, features)
        The mean test record of each class, and a test record for each unit of the layer: more than
        the attack has candidates.
    """

    task: tasks.Task
    seed: int
    start: dict[str, NDArray[Any]]
    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    known: NDArray[np.float64]
    guesses: NDArray[np.float64]

    @classmethod
    def of(
        cls, task: str, *, clients: int, records: int, seed: int, data_root: str | Path | None
    ) -> "Scene":
        """Draw the records of the clients from a task's training data.

        Raises
        ------
        InvalidParameterError
            If a value is out of range.
        DataError
            If the data set is missing or damaged.
        """
        chosen = tasks.task(check_choice("task", task, TASKS))
        check_integer("seed", seed, minimum=0)
        data = load(chosen.dataset, data_root=data_root)
        check_integer("clients", clients, minimum=2, maximum=len(data.labels))
        check_integer("records", records, minimum=1, maximum=len(data.labels) // clients)
        draws = stream(seed, "attack")
        own = draws.permutation(len(data.labels))[: clients * records].reshape(clients, records)
        start = tasks.initial_arrays(chosen, seed)
        units = len(next(iter(start.values())))
        public = data.test_features.reshape(len(data.test_labels), -1).astype(np.float64)
        means = [public[data.test_labels == label].mean(axis=0) for label in range(data.classes)]
        return cls(
            task=chosen,
            seed=seed,
            start=start,
            features=data.features[own],
            labels=data.labels[own],
            known=public.mean(axis=0),
            guesses=np.concatenate([means, public[draws.permutation(len(public))[:units]]]),
        )

    def records(self, first: int, end: int) -> NDArray[np.float64]:
        """Return the records of the clients from `first` to `end` (exclusive), (records, features).

        They are in the order of the clients.
        """
        features = self.features[first:end]
        return features.reshape(features.shape[0] * features.shape[1], -1).astype(np.float64)

    def invert(self, update: Arrays) -> NDArray[np.float64]:
        """Return what an update of the model, in any unit, says of records."""
        weight, bias = list(self.start)[:2]
        return invert_linear(update[weight], update[bias])

    def matches(self, candidates: NDArray[np.float64], first: int, end: int) -> Matches:
        """Compare candidates with the records of some clients."""
        return best_matches(candidates, self.records(first, end), known=self.known)


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """What a server that follows the protocol has of a round.

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


def observe(scene: Scene, *, clients: int, secure_sum: SecureSum | None = None) -> View:
    """Run a round of federated averaging with the first clients, and return what the server has.

    Parameters
    ----------
    scene : Scene
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
    start = ArrayRecord({name: Array(array) for name, array in scene.start.items()})
    grid = _ListeningGrid(_client_app(scene, client), clients)
    try:
        with _quiet(), acting_as_server(grid.run_id):
            model = strategy.start(grid, start, num_rounds=1).arrays
    finally:
        grid.close()
    replies = [_arrays(grid.replies[str(index)]) for index in range(clients)]
    if secure_sum is None:
        uploads = [_difference(reply, scene.start) for reply in replies]
    else:
        bits = secure_sum.bounds(clients).modulus_bits
        uploads = [read_codes(reply[MASKED], bits, scene.start) for reply in replies]
    return View(uploads=uploads, mean=_difference(_arrays(model), scene.start))


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
class Finding:
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


def attack_secure_sum(scene: Scene) -> list[Finding]:
    """Attack single uploads, masked vectors, and the sums of more and more clients.

    Returns
    -------
    list of Finding
        Single uploads of all clients without a secure sum, single masked vectors of all clients,
        then sums; the sum of all clients last.
    """
    clients = len(scene.labels)
    plain = observe(scene, clients=clients)
    sizes = [*(size for size in SUMS if size < clients), clients]
    sums = {size: observe(scene, clients=size, secure_sum=SecureSum()) for size in sizes}
    findings = [
        _one_by_one(scene, "one upload, no secure sum", plain.uploads),
        _one_by_one(scene, "one masked vector", sums[clients].uploads),
    ]
    for size, view in sums.items():
        matches = scene.matches(scene.invert(view.mean), 0, size)
        findings.append(_finding(scene, f"sum of {size} clients", [matches]))
    return findings


def table(scene: Scene, findings: Iterable[Finding]) -> Table:
    """Return the findings as a table."""
    clients, records = scene.labels.shape
    lines = Table(title=f"{scene.task.name}, {clients} clients, records of each: {records}")
    lines.add_column("what the server sees")
    for name in ("recovered", "similarity", "largest", "by guessing"):
        lines.add_column(name, justify="right")
    for finding in findings:
        recovery = finding.recovery
        numbers = (
            recovery.similarities.mean(),
            recovery.similarities.max(),
            recovery.guessed.mean(),
        )
        lines.add_row(
            finding.view,
            f"{recovery.recovered.sum()} of {recovery.recovered.size}",
            *(f"{number:.3f}" for number in numbers),
        )
    return lines


def legend(scene: Scene) -> str:
    """Return what the columns of `table` are."""
    return (
        "similarity: cosine of a record and the candidate nearest to it, the mean test record\n"
        "  taken off both; mean over the records, and the largest\n"
        f"by guessing: the mean where the candidates are {len(scene.guesses)} test records and "
        "means of classes\n"
        f"recovered: similarity of {Recovery.level} or more, and more than by guessing; a better "
        "attack may\n  recover others, since without noise nothing bounds what a sum says"
    )


def verdict(findings: Sequence[Finding]) -> str:
    """Return in a line how many records the views with and without the secure sum gave away."""
    upload, masked, *_, total = (finding.recovery.recovered for finding in findings)
    return (
        f"single upload: recovered {upload.sum()} of {upload.size}; masked vector: recovered "
        f"{masked.sum()}; {findings[-1].view}: recovered {total.sum()}"
    )


def draw(scene: Scene, findings: Sequence[Finding], path: Path) -> Path:
    """Draw a record of each of the first clients and what was found of it.

    Each image has a grey scale of its own.

    Parameters
    ----------
    scene, findings
        What `attack_secure_sum` took and returned.
    path : Path
        File for the PNG; its folder is made if need be.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    InvalidParameterError
        If it cannot be written.
    """
    clients, records = scene.labels.shape
    guess = scene.matches(scene.guesses, 0, clients)
    rows: list[tuple[str, NDArray[np.float64], NDArray[np.float64] | None]] = [
        ("record", scene.records(0, clients), None),
        *((f.view, f.found, f.recovery.similarities) for f in (*findings[:2], findings[-1])),
        ("guess", guess.found, guess.similarities),
    ]
    columns = min(_IMAGES, clients)
    side = math.isqrt(scene.known.size)
    figure = Figure(figsize=(1.1 * columns + 1.3, 1.3 * len(rows)), layout="constrained")
    figure.suptitle("below each image: similarity to the record", fontsize="small")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for axes, (name, images, similarities) in zip(grid, rows, strict=True):
        axes[0].set_ylabel(textwrap.fill(name, 12))
        for column, place in enumerate(axes):
            index = column * records  # the first record of each client
            place.imshow(images[index].reshape(side, side), cmap="gray")
            place.set_xticks([])
            place.set_yticks([])
            if similarities is not None:
                place.set_xlabel(f"{similarities[index]:.2f}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InvalidParameterError(
            "picture", str(path), f"a file that can be written ({error.strerror})"
        ) from error
    return path


class _ListeningGrid(InlineGrid):
    """Keeps the clients' replies to the question to train, by client."""

    def __init__(self, client_app: ClientApp, nodes: int) -> None:
        super().__init__(client_app, nodes)
        self.replies: dict[str, ArrayRecord] = {}

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        messages = list(super().pull_messages(message_ids))
        for message in messages:
            header, _ = Header.read(message.content.config_records[RECORD])
            if header.phase == TRAIN:
                (self.replies[header.client_id],) = message.content.array_records.values()
        return messages


def _client_app(scene: Scene, client: type[SchemeClient]) -> ClientApp:
    app = ClientApp(mods=[as_mod(client)])

    @app.train()
    def train_one_step(message: Message, context: Context) -> Message:
        index = int(context.node_config["partition-id"])
        features, labels = scene.features[index], scene.labels[index]
        model = initialise(scene.task.model, scene.seed)
        set_arrays(model, _arrays(message.content.array_records["arrays"]))
        train(
            model,
            features,
            labels,
            batch_size=len(labels),
            learning_rate=scene.task.training.learning_rate,
            seed=derive_seed(scene.seed, "train", index),
        )
        arrays = ArrayRecord({name: Array(array) for name, array in get_arrays(model).items()})
        metrics = MetricRecord({"num-examples": len(labels)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def _arrays(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    return {name: array.numpy() for name, array in record.items()}


def _difference(trained: Arrays, start: Arrays) -> Arrays:
    update = Update.between(start, trained, list(start))
    return update.arrays(update.vector)


def _one_by_one(scene: Scene, view: str, uploads: Sequence[Arrays]) -> Finding:
    """Return what each upload says of the records of its own client."""
    matches = [
        scene.matches(scene.invert(upload), index, index + 1)
        for index, upload in enumerate(uploads)
    ]
    return _finding(scene, view, matches)


def _finding(scene: Scene, view: str, matches: Sequence[Matches]) -> Finding:
    """Join the matches of the first clients, and put guesses beside them."""
    similarities = np.concatenate([one.similarities for one in matches])
    clients = len(similarities) // scene.labels.shape[1]
    guessed = scene.matches(scene.guesses, 0, clients).similarities
    return Finding(
        view=view,
        recovery=Recovery(similarities=similarities, guessed=guessed),
        found=np.concatenate([one.found for one in matches]),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the rounds' log from between the results."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
