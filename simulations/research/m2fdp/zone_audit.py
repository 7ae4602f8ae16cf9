"""Audits of M2FDP's paths, by the mathematics alone and through the real strategy and client.

The mathematics takes many coins (`flwr_privacy.simulations.research.m2fdp.trusted_path`). Through
the real halves a tree has many edges, each with a coin of its own that decides the data of its
first device; the other devices are crafted, as in
`flwr_privacy.simulations.research.m2fdp.trusted_path`. One round is trained inline, and the cloud
reads each coin in what crosses from a trusted edge, or in what the device of an edge sends that is
not trusted. What it proves stands beside what the devices' ledgers say.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_privacy.clients import M2FDPClient, as_mod
from flwr_privacy.errors import check_integer
from flwr_privacy.m2fdp import Asked, Drift, EventSchedule, TierTree, Upload
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.simulations.engines.quiet import quiet
from flwr_privacy.simulations.research.attacks.audit import GaussianAudit, gaussian_audit
from flwr_privacy.strategies import M2FDP, DeviceNoise, LemmaDrift, LoopOptions, WorstDrift
from flwr_privacy.strategies.m2fdp.simulated_aggregators import SimulatedAggregators
from flwr_privacy.strategies.requests.instruction import Instruction, noting
from flwr_privacy.strategies.requests.request_log import ClientReply
from flwr_privacy.wire.identity import client_id_from, stream

from .trusted_path import PathAudit, ZonePath, audit_path

__all__ = [
    "CONFIDENCE",
    "FEW",
    "PERIOD",
    "ROUND",
    "STEPS",
    "WARD",
    "EdgeAudit",
    "audit_edges",
    "audits",
    "edge_audits",
]

CONFIDENCE = 0.99
ROUND, PERIOD, WARD = 20, 5, 5  # steps, and those to an event; devices of an edge: the paper's
STEPS, FEW = 4, 4  # through the real halves: steps, an event after each; devices of an edge
_DELTA, _EPSILON = 1e-5, 8.0
_EPSILONS = (1.0, 4.0)
_RUNS = 20_000
_DIMENSION = 16
_LAWS: dict[str, WorstDrift | LemmaDrift] = {"worst": WorstDrift(), "lemma": LemmaDrift()}

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class EdgeAudit:
    """The result of an audit of one round.

    Parameters
    ----------
    name : str
        What ran.
    law : str
        The law of drift by which its noise was made.
    releases : int
        Noised releases of each audited device.
    ledger : float
        Epsilon by the charges.
    gaussian : GaussianAudit
        What the cloud proves.
    """

    name: str
    law: str
    releases: int
    ledger: float
    gaussian: GaussianAudit

    @property
    def flagged(self) -> bool:
        """Whether the audit refutes the ledger."""
        return self.gaussian.epsilon > self.ledger


def audit_edges(
    *,
    children: int,
    epsilon: float,
    law: Literal["worst", "smooth", "lemma"] = "worst",
    clean_events: bool = False,
    edges: int = 60,
    seed: int = 0,
    insecure_seed: int | None = None,
) -> EdgeAudit:
    """Audit a round with many edges.

    Parameters
    ----------
    children : int
        Devices of each edge, all of which trust it; 1 for edges that nobody trusts.
    epsilon : float
        Budget, at delta 1e-5.
    law : {"worst", "lemma"}, default "worst"
        The law of drift; ``lemma`` is declared to be for convex losses, which these are not.
    clean_events : bool, default False
        Whether the trusted edges average after every step.
    edges : int, default 60
        Coins.
    seed : int, default 0
        Root of the coins.
    insecure_seed : int, optional
        Seed of the noise, for tests.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.
    """
    check_integer("edges", edges, minimum=2)
    check_integer("children", children, minimum=1)
    coins = stream(seed, "coins").random(edges) < 0.5
    direction = stream(seed, "direction").normal(size=_DIMENSION)
    direction /= np.linalg.norm(direction)
    clients = edges * children
    strategy = _Listening(
        tree=TierTree.of_fanouts((edges, children), p=None if children == 1 else 1.0),
        privacy=DeviceNoise(
            epsilon=epsilon,
            delta=_DELTA,
            clipping_norm=1.0,
            clean_events=_LAWS[law] if clean_events else None,
        ),
        schedule=EventSchedule(steps=STEPS, events={1: 1}),
        loop=LoopOptions(
            clients=clients, seed=seed, experiment_id=f"edges-{seed}", write_card=False
        ),
        min_train_nodes=clients,
        min_available_nodes=1,  # it runs all of them
        # With one child each, devices add the noise by themselves.
        insecure_seed=None if children == 1 else insecure_seed,
    )

    def crafted(client: int, model: Vector, steps: int) -> Vector:
        edge, member = divmod(client, children)
        own = 1.0 if coins[edge] else -1.0
        return model + steps * direction * (np.sign(model @ direction) if member else own)

    nodes = [{"partition-id": 0, "num-partitions": 1, "cohorts": True}]
    grid = InlineGrid(_client_app(crafted), nodes, insecure_seed=insecure_seed)
    start = ArrayRecord({"w": Array(np.zeros(_DIMENSION))})
    with closing(grid), quiet(logging.ERROR), acting_as_server(grid.run_id):
        strategy.start(grid, start, num_rounds=1)
    scores = np.array([strategy.released[f"t1-{edge}"] @ direction for edge in range(edges)])
    return EdgeAudit(
        name=_name(children, clean_events),
        law=law,
        releases=STEPS if children == 1 else 1,
        ledger=float(strategy.card(final=True).guarantee.spent or 0.0),
        gaussian=gaussian_audit(scores, coins, threshold=0, delta=_DELTA, confidence=CONFIDENCE),
    )


def audits(
    *, seed: int, epsilons: Sequence[float] = _EPSILONS, runs: int = _RUNS
) -> list[PathAudit]:
    """Audit the kinds of paths, each against its own ledger.

    Parameters
    ----------
    seed : int
        Root of the coins; the noise is secret.
    epsilons : sequence of float
        Budgets.
    runs : int
        Coins of each audit.

    Returns
    -------
    list of PathAudit
        For each budget a secure edge with clean events, one whose devices train through, an
        insecure edge, and the first one again with noise for Lemma 1.
    """
    check_integer("seed", seed, minimum=0)
    tree = TierTree.of_fanouts((2, WARD), p=0.5)
    schedule = EventSchedule(steps=ROUND, events={1: PERIOD})
    secure, insecure = tree.devices[0], tree.devices[-1]
    clean = ZonePath.of("secure edge, clean events", tree, schedule, secure)
    paths = [
        (clean, "worst"),
        (ZonePath.of("secure edge", tree, schedule, secure, clean_events=False), "worst"),
        (ZonePath.of("insecure edge", tree, schedule, insecure), "worst"),
        (clean, "lemma"),
    ]
    return [
        audit_path(
            path,
            drift=Drift(law=law),
            epsilon=epsilon,
            delta=_DELTA,
            runs=runs,
            confidence=CONFIDENCE,
            seed=seed,
        )
        for epsilon in epsilons
        for path, law in paths
    ]


def edge_audits(*, seed: int, edges: int = 60) -> list[EdgeAudit]:
    """Audit the kinds of paths through the real strategy and client.

    Parameters
    ----------
    seed : int
        Root of the coins; the noise is secret.
    edges : int
        Coins of each audit.

    Returns
    -------
    list of EdgeAudit
        As `audits`, in the same order.
    """
    kinds: list[dict[str, Any]] = [
        {"children": FEW, "clean_events": True},
        {"children": FEW},
        {"children": 1},
        {"children": FEW, "clean_events": True, "law": "lemma"},
    ]
    return [audit_edges(epsilon=_EPSILON, edges=edges, seed=seed, **kind) for kind in kinds]


class _Listening(M2FDP):
    """Keeps what the cloud sees of each edge: all its noised codes, summed up."""

    def _build(self) -> None:
        super()._build()
        self.released: dict[str, Vector] = {}

    def put(
        self,
        server_round: int,
        phase: str,
        content: RecordDict,
        assigned: Any,
        instruction: Instruction,
        *,
        quorum: int | None = None,
    ) -> list[Message]:
        """Ask for every answer by itself, and note those of devices that add the noise."""
        told = noting(instruction, self.take, self._hear)
        return super().put(server_round, phase, content, assigned, told, quorum=quorum)

    def _hear(self, reply: ClientReply) -> None:
        edge = self.tree.parent(reply.client_id)
        if not self.tree.secure(edge):
            (codes,) = reply.arrays().values()
            self.note(edge, codes)

    def simulated_aggregators(self) -> SimulatedAggregators:
        """Return aggregators of whom the cloud notes what they hand out."""
        return _Heard(self, self.plan, self._tiers, self.experiment.id, self.insecure_seed)

    def note(self, node: str, codes: NDArray[Any]) -> None:
        self.released[node] = self.released.get(node, 0.0) + codes.astype(np.float64)


class _Heard(SimulatedAggregators):
    def __init__(self, strategy: _Listening, *given: Any) -> None:
        super().__init__(*given)
        self._strategy = strategy

    def noised(self, node: str, upload: Upload, asked: Asked) -> NDArray[np.int32]:
        codes = super().noised(node, upload, asked)
        self._strategy.note(node, codes)
        return codes


def _client_app(crafted: Callable[[int, Vector, int], Vector]) -> ClientApp:
    app = ClientApp(mods=[as_mod(M2FDPClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content = message.content
        model = np.asarray(content.array_records["arrays"]["w"].numpy(), np.float64)
        steps = int(str(content.config_records["config"]["local-steps"]))
        trained = crafted(int(client_id_from(context.node_config)), model, steps)
        metrics = MetricRecord({"num-examples": 1})
        arrays = ArrayRecord({"w": Array(trained)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def _name(children: int, clean_events: bool) -> str:
    if children == 1:
        return "insecure edges"
    return f"secure edges{', clean events' * clean_events}"
