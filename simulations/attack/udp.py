"""The attack on UDP at record level: an audit of its noise by canaries, and membership inference.

Everything goes through the real strategy and the real client, inline.

**Audit.** A client has m canaries, each one of two opposite records, by a coin. The model is linear
and its loss is its output, so the gradient of a record is the record: canary j pulls at weight j
alone, with all that the clipping allows, and the server reads +1 or -1 there, plus noise. It is the
worst case of a replaced record. What the guesses prove (`flwr_privacy.attacks.audit`) stands beside
what the client's ledger says. A client that adds a third of the noise and charges for all of it has
to be flagged, and the correct one to pass:

- The confidence is 99 %. A correct mechanism is flagged with a chance of at most 1 % by each of the
  two audits: in 1000 simulated runs each at epsilon 1, 2 and 4 (delta 1e-5), never by the one-run
  audit, whose bound is far from tight for Gaussian noise, and 31 times of 3000 by the Gaussian one.
- Of 4000 canaries the 1000 that stand out most are guessed. With a third of the noise the one-run
  audit flagged 995, 1000 and 1000 of these runs, and the Gaussian one all. At larger epsilon the
  one-run audit sees too little: its ceiling is 5.4, and noise takes from it. Only the Gaussian
  audit, which assumes independent Gaussian channels, goes on.

**Membership.** Every place in the clients' data is one of two records, by a coin; the attack gets
the final model and says which of the records were in the training.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from flwr_privacy.accounting import Charge
from flwr_privacy.arrays import Arrays
from flwr_privacy.attacks.audit import (
    GaussianAudit,
    OneRunAudit,
    gaussian_audit,
    largest_epsilon,
    one_run_audit,
)
from flwr_privacy.attacks.membership import (
    Membership,
    judge,
    likelihood_ratio,
    logit_confidence,
    loss_threshold,
    roc,
)
from flwr_privacy.averaging import WeightedMean
from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.clients.base import Train
from flwr_privacy.clients.custody import Custody
from flwr_privacy.clients.release import PlannedRelease
from flwr_privacy.clients.torch import get_arrays, initialise, set_arrays, train_per_record
from flwr_privacy.errors import check_choice, check_integer
from flwr_privacy.grid import Grid
from flwr_privacy.identity import stream
from flwr_privacy.ledger import Question
from flwr_privacy.simulations import tasks
from flwr_privacy.simulations.data import load
from flwr_privacy.simulations.inline import InlineGrid
from flwr_privacy.simulations.inline.flower_internals import acting_as_server
from flwr_privacy.strategies import UDP
from flwr_privacy.strategies.round import ClientReply
from flwr_privacy.udp import LossTerms, Terms
from flwr_privacy.wire import TRAIN, Fields

from .pictures import save
from .scene import Report, _quiet

__all__ = [
    "BROKEN",
    "TASKS",
    "Audited",
    "Inferred",
    "WeakNoiseUDPClient",
    "audit",
    "infer",
    "report",
]

TASKS = ("digits-mlp", "digits-linear")
"""Tasks for membership inference."""

BROKEN = 3.0
"""How many times too small the broken client's noise is."""

_EPSILONS = (1.0, 4.0, 16.0)
_DELTA = 1e-5
_CONFIDENCE = 0.99
_CANARIES, _GUESSES, _ROUNDS = 4000, 1000, 20
_OTHERS = 64  # records of a client without canaries
_PICTURED = 4.0  # epsilon of the audits in the picture

_CLIENTS = 2
_RECORDS = 50  # of each client in the membership attack
_SHADOWS = 16
_MEMBERSHIP_ROUNDS = 100
_MEMBERSHIP_EPSILON = 4.0
_STEP = 2.0  # learning rate there
_FEW_ALARMS = (0.01, 0.1)

Loss = Callable[[Tensor, Tensor], Tensor]
Records = tuple[NDArray[np.float32], NDArray[np.int64]]


class WeakNoiseUDPClient(UDPClient):
    """A client with a defect: it adds a third of the noise that it was asked for and charges for.

    It serves to show that the audit finds such a thing.
    """

    def handle(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        """Answer with too little noise."""
        weak = {**fields, "noise-multiplier": fields["noise-multiplier"] / BROKEN}
        return super().handle(phase, arrays, weak, train)

    def _release(
        self, custody: Custody, question: Question, terms: Terms | LossTerms, charge: Charge
    ) -> PlannedRelease:
        charge = replace(charge, noise_multiplier=charge.noise_multiplier * BROKEN)
        return super()._release(custody, question, terms, charge)


@dataclass(frozen=True, kw_only=True, eq=False)
class Audited:
    """What an audit found in a run.

    Parameters
    ----------
    mechanism : str
        What ran.
    ledger : float
        Epsilon by the ledger, infinite where there is no noise.
    scores : ndarray, shape (m,)
        What the server read of each canary, in units of a canary: the coin, 1 or -1, plus noise.
    coins : ndarray of bool, shape (m,)
        The coins.
    one_run : OneRunAudit
        What holds for any mechanism.
    gaussian : GaussianAudit
        What holds if the channels of the canaries are independent and Gaussian.
    """

    mechanism: str
    ledger: float
    scores: NDArray[np.float64]
    coins: NDArray[np.bool_]
    one_run: OneRunAudit
    gaussian: GaussianAudit

    @property
    def flagged(self) -> bool:
        """Whether an audit refutes the ledger."""
        return max(self.one_run.epsilon, self.gaussian.epsilon) > self.ledger

    @property
    def verdict(self) -> str:
        """The same in words."""
        if math.isinf(self.ledger):
            return "nothing promised"
        if not self.flagged:
            return "passes"
        return "FLAGGED" if self.one_run.epsilon > self.ledger else "FLAGGED (Gaussian)"


def audit(
    epsilon: float | None,
    *,
    client: type[UDPClient] = UDPClient,
    seed: int = 0,
    canaries: int = _CANARIES,
    guesses: int = _GUESSES,
    rounds: int = _ROUNDS,
    clients: int = _CLIENTS,
) -> Audited:
    """Audit a training at record level.

    Parameters
    ----------
    epsilon : float, optional
        Budget, at delta 1e-5; None for no noise.
    client : type, default UDPClient
        The client half.
    seed : int, default 0
        Root of the coins; the noise is secret.
    canaries, guesses, rounds : int
        Coins, those that the one-run audit guesses, and rounds of the training.
    clients : int, default 2
        Clients; the first has the canaries, the others have ordinary records.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.
    """
    check_integer("clients", clients, minimum=2)
    coins = stream(seed, "coins").random(canaries) < 0.5
    signs = np.where(coins, 1, -1).astype(np.float32)
    data: list[Records] = [(np.diag(signs), np.zeros(canaries, np.int64))]
    for other in range(1, clients):
        features = stream(seed, "others", other).normal(size=(_OTHERS, canaries))
        data.append((features.astype(np.float32), np.zeros(_OTHERS, np.int64)))
    strategy = _ListeningUDP(**_budget(epsilon), **_full(clients), rounds=rounds)
    _train(strategy, client, lambda: _Pull(canaries), data, _own_output, rounds)
    # A step goes against the gradient, by 1 / m for a canary.
    scores = -np.mean(strategy.updates, axis=0) * canaries
    return Audited(
        mechanism=_mechanism(epsilon, client),
        ledger=_spent(strategy),
        scores=scores,
        coins=coins,
        one_run=one_run_audit(scores, coins, guesses=guesses, delta=_DELTA, confidence=_CONFIDENCE),
        gaussian=gaussian_audit(scores, coins, threshold=0, delta=_DELTA, confidence=_CONFIDENCE),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Inferred:
    """What membership inference found in a run.

    Parameters
    ----------
    mechanism : str
        What ran.
    ledger : float
        Epsilon by the ledger, infinite where there is no noise.
    accuracy : float
        The model's, on test records.
    members : ndarray of bool, shape (n,)
        Which records were in the training.
    scores : dict of str to ndarray
        Scores of the records, by attack.
    found : dict of str to Membership
        How well they tell members from others.
    one_run : dict of str to OneRunAudit
        What guesses between the two records of each place prove.
    """

    mechanism: str
    ledger: float
    accuracy: float
    members: NDArray[np.bool_]
    scores: dict[str, NDArray[np.float64]]
    found: dict[str, Membership]
    one_run: dict[str, OneRunAudit]


def infer(
    epsilon: float | None,
    *,
    task: str = TASKS[0],
    seed: int = 0,
    clients: int = _CLIENTS,
    records: int = _RECORDS,
    data_root: Path | None = None,
    rounds: int = _MEMBERSHIP_ROUNDS,
    shadows: int = _SHADOWS,
) -> Inferred:
    """Train a task, and infer from its final model which records it was trained on.

    Parameters
    ----------
    epsilon : float, optional
        Budget, at delta 1e-5; None for no noise.
    task : str, default "digits-mlp"
        One of `TASKS`.
    seed : int, default 0
        Root of the draws; the noise is secret.
    clients, records : int, default 2 and 50
        Clients, and records of each.
    data_root : Path, optional
        Folder with the data sets that no library brings.
    rounds : int, default 100
        Rounds of the training.
    shadows : int, default 16
        Shadow models, which the attacker trains like the model: half of them on one record of each
        place, half on the other, for every place by itself.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.
    """
    chosen = tasks.task(check_choice("task", task, TASKS))
    data = load(chosen.dataset, data_root=data_root)
    check_integer("clients", clients, minimum=2, maximum=len(data.labels) // 2)
    check_integer("records", records, minimum=1, maximum=len(data.labels) // (2 * clients))
    check_integer("shadows", shadows, minimum=4)
    draws = stream(seed, "membership")
    places = clients * records
    pairs = draws.permutation(len(data.labels))[: 2 * places].reshape(2, places)
    both = pairs.reshape(-1)
    coins = draws.random(places) < 0.5
    order = draws.permuted(np.tile(np.arange(shadows)[:, None] % 2 == 0, places), axis=0)

    def parts(first: NDArray[np.bool_]) -> list[Records]:
        own = np.where(first, pairs[0], pairs[1]).reshape(clients, records)
        return [(data.features[part], data.labels[part]) for part in own]

    def confidences(arrays: Arrays) -> NDArray[np.float64]:
        logits = _outputs(chosen.model, arrays, data.features[both])
        return logit_confidence(logits, data.labels[both])

    strategy = UDP(**_budget(epsilon), **_full(clients, _STEP), rounds=rounds)
    start = partial(initialise, chosen.model, seed)
    model = _train(strategy, UDPClient, start, parts(coins), functional.cross_entropy, rounds)
    sigma = 2 * _STEP / records * strategy.terms.noise_multiplier
    known = [
        confidences(_imitate(start, parts(first), rounds, sigma, stream(seed, "shadow", place)))
        for place, first in enumerate(order)
    ]
    members = np.concatenate([coins, ~coins])
    seen = confidences(model)
    inside = np.concatenate([order, ~order], axis=1)
    scores = {
        "loss threshold": loss_threshold(np.logaddexp(0, -seen)),  # -ln p
        "likelihood ratio": likelihood_ratio(seen, known, inside),
        "offline ratio": likelihood_ratio(seen, known, inside, online=False),
    }
    test = _outputs(chosen.model, model, data.test_features).argmax(axis=1)
    return Inferred(
        mechanism=_mechanism(epsilon, UDPClient),
        ledger=_spent(strategy),
        accuracy=float((test == data.test_labels).mean()),
        members=members,
        scores=scores,
        found={
            name: judge(one, members, delta=_DELTA, limits=_FEW_ALARMS, confidence=_CONFIDENCE)
            for name, one in scores.items()
        },
        one_run={
            name: one_run_audit(
                one[:places] - one[places:],
                coins,
                guesses=places // 2,
                delta=_DELTA,
                confidence=_CONFIDENCE,
            )
            for name, one in scores.items()
        },
    )


def report(
    *,
    task: str | None,
    clients: int | None,
    records: int,
    seed: int,
    data_root: Path | None,
    out: Path,
) -> Report:
    """Audit trainings with and without noise, infer membership, and draw what was found.

    Parameters
    ----------
    task : str, optional
        What the membership attack trains: one of `TASKS`, by default the first.
    clients : int, optional
        Clients of each training, by default 2.
    records : int
        Records of each client in the membership attack; 1 stands for 50.
    seed : int
        Root of the draws, noise excepted.
    data_root : Path, optional
        Folder with the data sets that no library brings.
    out : Path
        Folder for the picture.

    Raises
    ------
    InvalidParameterError, DataError
        If a value is out of range or a data set is missing; also if the picture cannot be written.
    """
    count = _CLIENTS if clients is None else clients
    check_integer("seed", seed, minimum=0)
    name = check_choice("task", TASKS[0] if task is None else task, TASKS)
    kinds: list[tuple[float | None, type[UDPClient]]] = [
        (epsilon, client) for epsilon in _EPSILONS for client in (UDPClient, WeakNoiseUDPClient)
    ]
    audits = [
        audit(epsilon, client=client, seed=seed, clients=count)
        for epsilon, client in [*kinds, (None, UDPClient)]
    ]
    inferred = [
        infer(
            epsilon,
            task=name,
            seed=seed,
            clients=count,
            records=_RECORDS if records == 1 else records,
            data_root=data_root,
        )
        for epsilon in (None, _MEMBERSHIP_EPSILON)
    ]
    return Report(
        tables=[_audit_table(audits), _membership_table(name, inferred)],
        legend=_LEGEND,
        pictures=[_draw(audits, inferred, out / f"udp-{name}.png")],
        verdict=_verdict(audits, inferred),
    )


class _ListeningUDP(UDP):
    """Keeps what the server reads in the uploads of the first client: its updates."""

    def _build(self) -> None:
        super()._build()
        self.updates: list[NDArray[np.float64]] = []

    def fold(self, phase: str, mean: WeightedMean, reply: ClientReply) -> None:
        """Note a reply, and fold it."""
        if phase == TRAIN and reply.client_id == "0":
            (codes,) = reply.arrays().values()
            self.updates.append(np.asarray(codes, np.float64).reshape(-1))
            self.updates[-1] *= Grid(self.terms.grid).step
        super().fold(phase, mean, reply)


class _Pull(nn.Module):
    """A linear map to one number, without a bias, from zero."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features))

    def forward(self, records: Tensor) -> Tensor:
        return records @ self.weight


def _own_output(output: Tensor, _: Tensor) -> Tensor:
    return output.sum()


def _budget(epsilon: float | None) -> dict[str, Any]:
    """Return what a strategy is told of its budget."""
    if epsilon is None:
        return {"noise": "none", "delta": _DELTA}
    return {"epsilon": epsilon, "delta": _DELTA}


def _full(clients: int, step: float = 1.0) -> dict[str, Any]:
    """Return what a strategy is told of its unit and of who takes part."""
    return {
        "unit": "record",
        "learning_rate": step,
        "clipping_norm": 1.0,
        "min_train_nodes": clients,
        "min_available_nodes": clients,
    }


def _mechanism(epsilon: float | None, client: type[UDPClient]) -> str:
    if epsilon is None:
        return "no noise"
    broken = issubclass(client, WeakNoiseUDPClient)
    return f"epsilon {epsilon:g}" + (f", noise {BROKEN:g}x too small" if broken else "")


def _spent(strategy: UDP) -> float:
    spent = strategy.card(final=True).guarantee.spent
    return spent or math.inf


def _train(
    strategy: UDP,
    client: type[UDPClient],
    network: Callable[[], nn.Module],
    data: Sequence[Records],
    loss: Loss,
    rounds: int,
) -> dict[str, NDArray[Any]]:
    """Train inline, one client for each part of the data; return the model."""
    app = ClientApp(mods=[as_mod(client)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        features, labels = data[int(context.node_config["partition-id"])]
        model = network()
        arrays = message.content.array_records["arrays"]
        set_arrays(model, {name: array.numpy() for name, array in arrays.items()})
        train_per_record(model, features, labels, loss=loss)
        metrics = MetricRecord({"num-examples": len(labels)})
        return Message(
            RecordDict({"arrays": _record(get_arrays(model)), "metrics": metrics}),
            reply_to=message,
        )

    with closing(InlineGrid(app, len(data))) as grid, _quiet(), acting_as_server(grid.run_id):
        result = strategy.start(grid, _record(get_arrays(network())), num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}


def _imitate(
    start: Callable[[], nn.Module],
    data: Sequence[Records],
    rounds: int,
    sigma: float,
    draws: np.random.Generator,
) -> dict[str, NDArray[Any]]:
    """Train as the clients of `infer` do, without an engine, with noise of a standard deviation."""
    model = start()
    arrays = get_arrays(model)
    for _ in range(rounds):
        uploads = []
        for features, labels in data:
            set_arrays(model, arrays)
            train_per_record(model, features, labels, clipping_norm=1.0, learning_rate=_STEP)
            uploads.append(get_arrays(model))
        arrays = {
            name: np.mean(
                [one[name] + sigma * draws.normal(size=array.shape) for one in uploads], axis=0
            ).astype(array.dtype)
            for name, array in arrays.items()
        }
    return arrays


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def _outputs(
    network: Callable[[], nn.Module], arrays: Arrays, features: NDArray[np.float32]
) -> NDArray[np.float64]:
    model = network()
    set_arrays(model, arrays)
    with torch.no_grad():
        outputs: NDArray[np.float64] = model(torch.tensor(features)).double().numpy()
    return outputs


def _epsilon(value: float) -> str:
    return "none" if math.isinf(value) else f"{value:.2f}"


def _audit_table(audits: Sequence[Audited]) -> Table:
    one = audits[0]
    lines = Table(
        title=f"audit: epsilon at delta {_DELTA:g}, by {one.one_run.canaries} canaries "
        f"in {_ROUNDS} rounds"
    )
    lines.add_column("mechanism")
    for name in ("ledger: at most", "one run: at least", "Gaussian*: at least"):
        lines.add_column(name, justify="right")
    lines.add_column("right guesses", justify="right")
    lines.add_column("verdict")
    for found in audits:
        lines.add_row(
            found.mechanism,
            _epsilon(found.ledger),
            f"{found.one_run.epsilon:.2f}",
            f"{found.gaussian.epsilon:.2f}",
            f"{found.one_run.correct} of {found.one_run.guesses}",
            found.verdict,
        )
    return lines


def _membership_table(task: str, inferred: Sequence[Inferred]) -> Table:
    lines = Table(
        title=f"membership: {task}, {len(inferred[0].members) // 2} members and as many others"
    )
    lines.add_column("mechanism")
    lines.add_column("attack")
    for name in (
        "AUC",
        "advantage",
        *(f"found at {limit:.0%} alarms" for limit in _FEW_ALARMS),
        "threshold+: at least",
        "one run: at least",
        "ledger: at most",
        "accuracy",
    ):
        lines.add_column(name, justify="right")
    for run in inferred:
        for place, (name, found) in enumerate(run.found.items()):
            lines.add_row(
                "" if place else run.mechanism,
                name,
                f"{found.auc:.3f}",
                f"{found.advantage:.3f}",
                *(f"{r.tpr:.0%} ({r.low:.0%}-{r.high:.0%})" for r in found.rates),
                f"{found.epsilon:.2f}",
                f"{run.one_run[name].epsilon:.2f}",
                "" if place else _epsilon(run.ledger),
                "" if place else f"{run.accuracy:.1%}",
            )
    return lines


_LEGEND = f"""\
ledger: epsilon of the client by its own charges; the mechanism promises no more than that
at least: what the guesses prove, with a confidence of {_CONFIDENCE:.0%}. Above the ledger, the
  mechanism is flagged: a correct one is with a chance of at most 1 % by each bound
one run: holds for every mechanism (Steinke et al. 2023); {_GUESSES} guesses, fixed beforehand. All
  right it would say {largest_epsilon(_GUESSES, confidence=_CONFIDENCE):.1f}: it is meant for \
epsilon up to 4
Gaussian*: assumes that each canary has a channel of its own, independent of the others, and of
  Gaussian shape. That is so for Gaussian noise on canaries at right angles, whatever its size
canary: one of two opposite records of the largest gradient, by a coin: a replaced record at its
  worst. no noise: what is found is only bounded by the number of canaries
members: each place in the data is one of two records, by a coin; the attack has the final model.
  found at ... alarms: members that it names while it names so few others, with the interval
threshold+: the best threshold of one half of the records on the other; it takes records for
  independent. one run, here: guesses between the two records of half of the places
Only record level is audited. At user level a canary would be all data of a client, of which there
  are too few in a run for this"""


def _draw(audits: Sequence[Audited], inferred: Sequence[Inferred], path: Path) -> Path:
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    pictured = [a for a in audits if a.mechanism.startswith(f"epsilon {_PICTURED:g}")]
    reach = max(float(np.abs(one.scores).max()) for one in pictured)
    for axes, one in zip(panels[:2], pictured, strict=True):
        _draw_scores(axes, one, reach)
    _draw_roc(panels[2], inferred)
    return save(figure, path)


def _draw_scores(axes: Axes, one: Audited, reach: float) -> None:
    bins = np.linspace(-reach, reach, 81)
    for coin, colour, name in ((False, "tab:blue", "-1"), (True, "tab:orange", "+1")):
        axes.hist(one.scores[one.coins == coin], bins, alpha=0.6, color=colour, label=name)
    axes.set_title(
        f"{one.mechanism}\nledger at most {one.ledger:.2f}, one run at least "
        f"{one.one_run.epsilon:.2f}, Gaussian at least {one.gaussian.epsilon:.2f}",
        fontsize="small",
    )
    axes.set_xlabel("what the server reads of a canary")
    axes.set_ylabel("canaries")
    axes.legend(title="coin")


def _draw_roc(axes: Axes, inferred: Sequence[Inferred]) -> None:
    least = 1 / (len(inferred[0].members) // 2)
    for run, style in zip(inferred, ("-", "--"), strict=True):
        for (name, scores), colour in zip(
            run.scores.items(), ("tab:blue", "tab:orange", "tab:green"), strict=True
        ):
            alarms, found = roc(scores, run.members)
            axes.loglog(
                np.maximum(alarms, least / 2),
                np.maximum(found, least / 2),
                linestyle=style,
                color=colour,
                drawstyle="steps-post",
                label=f"{run.mechanism}: {name}",
            )
    axes.plot([least / 2, 1], [least / 2, 1], color="black", linestyle=":", label="guessing")
    axes.set_xlim(least / 2, 1)
    axes.set_ylim(least / 2, 1.1)
    axes.set_title("membership", fontsize="small")
    axes.set_xlabel("false alarms")
    axes.set_ylabel("members found")
    axes.legend(fontsize="x-small")


def _verdict(audits: Sequence[Audited], inferred: Sequence[Inferred]) -> str:
    """Return in plain words what the audits and the attack found."""
    promised = [one for one in audits if not math.isinf(one.ledger)]
    lines = [
        f"{one.mechanism}: the ledger says at most {one.ledger:.2f}, the audits prove at least "
        f"{one.one_run.epsilon:.2f}, and {one.gaussian.epsilon:.2f} if the channels are Gaussian: "
        f"{one.verdict}"
        for one in promised
    ]
    for run in inferred:
        name, best = max(run.found.items(), key=lambda item: item[1].auc)
        lines.append(
            f"membership, {run.mechanism}: the best attack ({name}) puts a member above another "
            f"record {best.auc:.0%} of the time; guessing does 50%"
        )
    return "\n".join(lines)
