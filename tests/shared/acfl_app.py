"""A small linear regression under ACFL: its data and apps, a node to ask, and the plain descent."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import record, run_strategy
from conformance import Killed
from flwr.app import Context, Message, RecordDict
from flwr.serverapp.strategy import Strategy
from grid_tap import tapped
from numpy.typing import NDArray
from pinned import pinned_nodes

from flwr_privacy.acfl.plan import ACFLOptions, ACFLPlan
from flwr_privacy.acfl.terms import GradientTerms, SetupTerms
from flwr_privacy.clients import acfl_client_app
from flwr_privacy.clients.acfl import ACFLClient
from flwr_privacy.clients.node.context_store import ContextStore
from flwr_privacy.privacy.grid import CODE_LIMIT
from flwr_privacy.privacy.ledger import Entry, Ledger
from flwr_privacy.simulations.settings.flat_options import keywords_of
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import ACFL
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.message import RECORD

Array = NDArray[np.float64]

FEATURES, LABELS, RECORDS = 3, 2, 12

# Fact F7 of the specification: two devices, their noise, and what must come out.
GOLDEN = {
    "0": (np.array([[1, 0], [0, 1], [0.5, 0.5]]), np.array([[1], [0], [0.5]])),
    "1": (np.array([[0.5, -0.5], [1, 1], [0, 0.5]]), np.array([[0], [1], [-0.5]])),
}
GOLDEN_NOISE = {
    "0": (np.array([[0.1, -0.2], [0.3, 0.05]]), np.array([[0.2], [-0.1]])),
    "1": (np.array([[-0.05, 0.1], [0, 0.2]]), np.array([[-0.3], [0.15]])),
}

NOISY = {"noise": "variances", "sigma1_sq": 0.4, "sigma2_sq": 0.1, "max_records": 20}
NOISED_RECORDS = {"epsilon": 20.0, "max_records": 20, "clipping_norm": 2.0}


def data_of(client: int | str) -> tuple[Array, Array]:
    """Return data that no two clients share and no model fits."""
    draws = np.random.default_rng(int(client) + 10)
    return draws.uniform(-1, 1, (RECORDS, FEATURES)), draws.uniform(-1, 1, (RECORDS, LABELS))


def moments_of(clients: Any) -> tuple[Array, Array]:
    data = [data_of(client) for client in clients]
    return sum(X.T @ X for X, _ in data), sum(X.T @ Y for X, Y in data)


def name_of(context: Context) -> str:
    return str(context.node_config["partition-id"])


APP = acfl_client_app(lambda context: data_of(name_of(context)))


def run(
    strategy: ACFL, app: Any = APP, *, start: Any = None, nodes: Any = 4, **options: Any
) -> Any:
    """Train from zeros, or from `start`, on nodes 0, 1, ..."""
    start = np.zeros((FEATURES, LABELS)) if start is None else start
    return run_strategy(strategy, app, nodes=nodes, arrays=record({"W": start}), **options)


def model_after(result: Any) -> Array:
    model: Array = result.arrays["W"].numpy()
    return model


def keep_models(models: list[Array]) -> Callable[[int, Any], None]:
    """Return an ``evaluate_fn`` that keeps the model before the first round and after each."""
    return lambda _, arrays: models.append(arrays["W"].numpy().copy())


def of_phase(messages: list[Message], phase: str) -> list[Message]:
    return [m for m in messages if m.has_content() and m.content[RECORD]["phase"] == phase]


class OwnStart(ACFL):
    """Trained by Flower's own loop, as under a `start` that a user wrote."""

    start = Strategy.start


def kill_after(server_round: int) -> Callable[[dict[str, Any]], None]:
    """Return an ``on_round`` that ends a training after a round."""

    def on_round(line: dict[str, Any]) -> None:
        if line["round"] == server_round:
            raise Killed

    return on_round


def connect(grid: Any, client: int) -> None:
    """Connect a node that plays a client, with what nodes of its name have kept."""
    contexts = grid._contexts
    other = next(iter(contexts.values()))
    contexts[1000 + client] = Context(
        run_id=other.run_id,
        node_id=1000 + client,
        node_config={**other.node_config, "partition-id": client},
        state=RecordDict(),
        run_config={},
    )


def disconnect(grid: Any, client: int) -> None:
    contexts = grid._contexts
    del contexts[next(n for n, c in contexts.items() if name_of(c) == str(client))]


class Nodes:
    """Nodes that come and go between rounds: to be passed as ``before`` and as ``evaluate_fn``.

    `asked` and `said` have the messages that were exchanged.
    """

    def __init__(
        self, *, comes: Mapping[int, int] | None = None, goes: Mapping[int, int] | None = None
    ) -> None:
        self._comes, self._goes = comes or {}, goes or {}  # after which round: who
        self.asked: list[Message] = []
        self.said: list[Message] = []
        self.grid: Any = None

    def before(self, grid: Any) -> None:
        self.grid = grid
        tapped(self.asked.append, self.said.append)(grid)

    def after(self, server_round: int, _: Any) -> None:
        if server_round in self._goes:
            disconnect(self.grid, self._goes[server_round])
        if server_round in self._comes:
            connect(self.grid, self._comes[server_round])


class _Late(StragglerModel):
    when: Mapping[int, Iterable[str]] = {}

    def race(self, clients: Any, *, server_round: int, phase: str, **_: Any) -> Any:
        late = self.when.get(server_round, ()) if phase == "train" else ()
        return set(clients).intersection(late), 1.0


def late(when: Mapping[int, Iterable[str]]) -> StragglerModel:
    """Return stragglers that are late with their gradients of some rounds."""
    return type("Late", (_Late,), {"when": when})()


def set_noise(
    monkeypatch: pytest.MonkeyPatch,
    noise: Mapping[str, tuple[Array, Array]],
    variances: tuple[float, float],
) -> None:
    """Have clients take given noise instead of drawing it; those without one take zeros.

    Both moments must have different sizes; they tell which of the two is meant.
    """

    def given(size: int, sigma: float, client: str) -> NDArray[np.int64]:
        for values, variance in zip(noise.get(client, ()), variances, strict=False):
            if values.size == size:  # the standard deviation in steps tells the step
                codes = np.rint(values.reshape(-1) * sigma / math.sqrt(variance))
                return codes.astype(np.int64)
        return np.zeros(size, np.int64)

    monkeypatch.setattr(ContextStore, "random", lambda self, question, purpose: self.client_id)
    monkeypatch.setattr("flwr_privacy.acfl.release.discrete_gaussian", given)


def descend(
    W: Array,
    devices: Sequence[tuple[Array, Array]],
    answered: Sequence[Iterable[int]],
    *,
    p: float,
    s1: float = 0.0,
    s2: float = 0.0,
    noise: tuple[Any, Any] = (0.0, 0.0),
    step: Callable[[int], float],
    alpha: float | None = None,
) -> list[Array]:
    """Return the models of the paper's algorithm, (7) to (10) with (42) and (43), as it is printed.

    `answered` has who answers in each round, `noise` the sums N1 and N2, `alpha` a fixed weight.
    """
    d, o = W.shape
    A = sum(X.T @ X for X, _ in devices) + noise[0]
    B = sum(X.T @ Y for X, Y in devices) + noise[1]
    models, beta2 = [W], math.nan
    for t, came in enumerate(answered, start=1):
        gradients = [devices[i][0].T @ (devices[i][0] @ W - devices[i][1]) for i in came]
        if gradients:
            beta2 = sum(float((G**2).sum()) for G in gradients) / len(gradients)
        D = d * s1 * float((W**2).sum()) + o * d * s2
        a = p * beta2 / (p * beta2 + (1 - p) * D) if alpha is None else alpha
        total = a * (A @ W - B)
        for G in gradients:
            total = total + (1 - a) / (1 - p) * G
        W = W - step(t) * total
        models.append(W)
    return models


def setup_terms(*, features: int = FEATURES, labels: int = LABELS, **options: Any) -> SetupTerms:
    """Return the terms of a setup; `parties` as those of a plan."""
    parties, rounds = options.pop("parties", 0), options.pop("rounds", 5)
    asked = wish_of(**{"max_records": 20, **options})
    plan = ACFLPlan(options=asked, features=features, labels=labels, rounds=rounds)
    return plan.setup_terms(parties=parties)


def gradient_terms(*, model: Any = None, **options: Any) -> GradientTerms:
    """Return the terms of a gradient at a model, by default at zeros."""
    parties, rounds = options.pop("parties", 0), options.pop("rounds", 5)
    model = np.zeros((FEATURES, LABELS)) if model is None else model
    features, labels = model.shape
    asked = wish_of(**{"max_records": 20, **options})
    plan = ACFLPlan(options=asked, features=features, labels=labels, rounds=rounds)
    return plan.gradient_terms(model, parties=parties)


def wish_of(**values: Any) -> ACFLOptions:
    """Return what a user asks for, from flat keys; `data_features` is the feature map."""
    if "data_features" in values:
        values["features"] = values.pop("data_features")
    asked = keywords_of(ACFL, values)
    asked.pop("loop")
    return ACFLOptions(**asked)


ALL_ALLOWED = 'allow_unprotected = ["acfl"]'


class Node:
    """One client, asked directly, with what its node keeps of it; by default it allows all."""

    def __init__(
        self, folder: Path, data: Any = None, *, policy: str = ALL_ALLOWED, **options: Any
    ) -> None:
        self.folder = folder
        self.loaded = 0
        self._data = data_of(0) if data is None else data
        self._options = options
        (folder / "policy.toml").write_text(policy)
        pins = folder.with_name(f"{folder.name}-pins")
        pins.mkdir(exist_ok=True)
        (own,) = pinned_nodes(pins, ["a"])
        self.config: dict[str, Any] = {
            **own,
            "privacy-state": str(folder),
            "privacy-policy": str(folder / "policy.toml"),
        }

    def load(self) -> Any:
        self.loaded += 1
        return self._data

    def set_up(self, terms: SetupTerms, **changes: Any) -> Any:
        return self.ask("setup", {}, {**write(terms), "round": 0, **changes})

    def descend(self, terms: GradientTerms, model: Any = None, **changes: Any) -> Any:
        model = np.zeros((terms.features, terms.labels)) if model is None else model
        return self.ask("train", {"W": model}, {**write(terms), "round": 1, **changes})

    def ask(self, phase: str, arrays: Any, fields: Any) -> Any:
        place: dict[str, Any] = {
            "experiment-id": "e",
            "request": 0,
            "summed": 0,
            "code-limit": CODE_LIMIT,
        }
        believed = fields.get("summed", 0)  # that nobody of the secure sum colludes
        place |= {"honest": believed, "certain": believed}
        context = Context(1, 1, self.config, RecordDict(), {})
        client = ACFLClient(self.load, context, **self._options)
        return client.handle(phase, arrays, {**place, **fields}, None)  # type: ignore[arg-type]

    def entries(self) -> list[Entry]:
        return list(Ledger(self.folder / "a.ledger", data_set="a").entries())
