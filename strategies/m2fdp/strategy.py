"""M2FDP on the server: averages over a tree of aggregators, with noise where trust ends.

"Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation". The
devices of a round are asked once per segment of its schedule; after each answer the models of the
tree meet in an event. The server simulates the aggregators, or passes sealed messages on between
aggregators that are nodes of their own (`relay`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.errors import (
    InvalidParameterError,
    ProtocolError,
    check_choice,
    check_flag,
    check_integer,
)
from flwr_privacy.evaluation import PrivateEvaluation
from flwr_privacy.keywords import check_options, checked_keywords
from flwr_privacy.m2fdp import (
    AdaptiveControl,
    DeviceNoise,
    EventSchedule,
    Exchange,
    M2FDPRoundPlan,
    NoNoise,
    PaperNoise,
    RecordNoise,
    ResourceModel,
    TierCohorts,
    TierSums,
    TierTree,
    TreeModels,
    guarantee_of,
)
from flwr_privacy.m2fdp.forecast import forecast_of
from flwr_privacy.m2fdp.plan import STEP_RULES
from flwr_privacy.m2fdp.terms import RECORD
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.forecast import Forecast
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.privacy.updates import released_names
from flwr_privacy.strategies.budget import budget_metrics
from flwr_privacy.strategies.loop.base import SchemeStrategy
from flwr_privacy.strategies.private_evaluation import (
    EvaluationRequest,
    PrivateEvaluations,
    check_evaluation,
)
from flwr_privacy.strategies.requests.messenger import Assigned, only
from flwr_privacy.strategies.requests.request_log import arrays_of
from flwr_privacy.strategies.state.experiment import to_record
from flwr_privacy.wire.layout import Layout
from flwr_privacy.wire.message import EVALUATE, TRAIN

from .calibrated import check_calibrated, check_evaluated, plain, tree_of
from .participants import TierParticipants
from .relay import Relay, tell_zone_epsilon
from .simulated_aggregators import SimulatedAggregators
from .tier_charges import TierCharges
from .tier_requests import WEIGHT, TierRequests, taken
from .tier_schedule import TierSchedule
from .tiers import TierLog
from .tree_members import (
    MIN_CHILDREN,
    any_trusted,
    check_leaves,
    check_min_children,
    check_relayed,
    devices_among,
    members,
    settled,
)

__all__ = ["M2FDP"]


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class M2FDP(SchemeStrategy):
    """Multi-tier federated learning with noise at the trust boundary (M2FDP).

    Devices train, a tree of aggregators averages, at several time scales. Noise enters each path
    from a device to the cloud once: at the highest node that everybody below it trusts, or at the
    device. The higher that is, the more has been averaged before, and the less noise it takes.

    The clients' app is wrapped in `flwr_privacy.clients.M2FDPClient`. The configuration that the
    user's training gets has ``local-steps``, ``learning-rate-scale`` and ``segment``, the number of
    the exchange in its round; a training that ignores them does the same in every exchange.

    Parameters
    ----------
    fraction_train, ..., loop, inner, secure_sum
        FedAvg's and those of `flwr_privacy.strategies.loop.base.SchemeStrategy`. `fraction_train`
        (or `min_train_nodes`, as a share of the devices) is the share of the devices under each
        lowest aggregator that take part in a round. Clients are asked to evaluate with
        `evaluation` only.
    tree : TierTree
        The aggregators and who is trusted: ``TierTree.of_fanouts((10, 5), p=0.5)``, where the
        clients are the leaves in the order of their names, or ``TierTree.read(file)``.
    privacy : DeviceNoise, RecordNoise, PaperNoise or NoNoise
        What is protected, with its budget and its noise: `DeviceNoise`, all data of a device,
        around any training; `RecordNoise`, one record, with
        `flwr_privacy.clients.torch.train_poisson` inside the training; `PaperNoise`, Proposition 1
        as printed; or `NoNoise`, for comparisons.
    schedule : EventSchedule, optional
        Local steps of a round, and after which of them the tiers aggregate; by default one step.
    step_rule : {"constant", "inv_sqrt", "theorem"}, default "constant"
        Whether step and clipping fall as ``1 / sqrt(t + 1)``; by Theorem 1 as that over all local
        steps, for a training whose own step is 1 / beta. It is told by ``learning-rate-scale``.
    min_children : int, default 2
        A secure node with fewer answers hands nothing on. Not where no aggregator is trusted.
    control : AdaptiveControl, optional
        Adaptive control of K and of who takes part, before every round.
    relay : bool, default False
        Whether secure aggregators are nodes of their own (``m2fdp-role`` in their configuration),
        named as in the tree. The server passes sealed messages on then.
    perturb_reg : bool, default False
        Whether the training is told a noise for its last layer (``classifier-noise``), as in a
        baseline of the paper.
    resources : ResourceModel, optional
        What a step and an upload cost; by default the paper's figures.
    client_sampling : {"balanced", "fixed"}, default "balanced"
        Whether the devices of each lowest aggregator take turns, those that have waited longest
        first, or every round draws a random set of them. A device's budget has to suffice for the
        rounds in which it takes part: in turns that is its share of them, and at random as many as
        99 % of the devices take part in at most (`flwr_privacy.m2fdp.control.cohorts`). One that
        was charged for so many is not asked any more. Where all devices take part in every round
        it has no effect.
    keep_back : sequence of str, optional
        Arrays that are not sent, beside integers and what torch calls running statistics of
        normalisation layers, which never are: the model keeps the server's values of them.
        Where it is left out and arrays that came as a list look like statistics, the first round is
        refused: see `flwr_privacy.clients.torch.statistics_of`; [] says that there are none.
    insecure_seed : int, optional
        Seed of the noise of aggregators that the server simulates, for tests: protects nobody. Not
        where the server adds no noise.
    evaluation : PrivateEvaluation, optional
        Has devices evaluate the model, with `DeviceNoise` or `RecordNoise`, a part of the budget
        set aside for it. By default they are not asked to evaluate.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or two do not go together.

    Notes
    -----
    In an evaluation each device adds all of the noise to its counts and sends them to the server,
    also one that has an aggregator that it trusts: aggregators have no part in it, whether the
    server simulates them or not. `fraction_evaluate` of the devices are asked; under `RecordNoise`
    those of them that have trained before, so that one accountant has the whole budget of a device.

    Guarantee
    ---------
    Adversary: everyone above the point in the tree where a device's noise is added, the cloud first
    of all; it sees noised models. With `relay` the server is among them, and what it passes
    on is sealed (`flwr_privacy.wire.channel`). Without, the server simulates the secure aggregators
    and is trusted: for simulations. Against messages that do not follow the protocol: see
    `flwr_privacy.clients.M2FDPClient`; a server is bound by the policies of all these nodes.
    Neighbours: all data of one device replaced, or with `RecordNoise` one record more.
    Covered: everything that leaves the zone in the whole training and its evaluations together,
    (epsilon, delta) per device, by
    Gaussian differential privacy (by a Renyi filter with `RecordNoise`) over the releases that each
    device charges to its own ledger: those of the rounds in which it was asked, wherever the noise
    is added. What other rounds release does not depend on its data. Not covered: members of one
    zone from each other; who takes part; with `PaperNoise` the budget that was asked for; with
    `SmoothDrift` or `LemmaDrift` losses that are not what was declared.

    Examples
    --------
    >>> from flwr_privacy.m2fdp import EventSchedule, TierTree
    >>> from flwr_privacy.strategies import M2FDP, DeviceNoise
    >>> strategy = M2FDP(
    ...     tree=TierTree.of_fanouts((10, 5), p=0.5),
    ...     privacy=DeviceNoise(epsilon=8.0, clipping_norm=0.05),
    ...     schedule=EventSchedule(steps=20, events={1: 5}),
    ... )
    """

    tree: TierTree
    privacy: DeviceNoise | RecordNoise | PaperNoise | NoNoise
    schedule: EventSchedule = EventSchedule()  # noqa: RUF009
    step_rule: Literal["constant", "inv_sqrt", "theorem"] = "constant"
    min_children: int = MIN_CHILDREN
    control: AdaptiveControl | None = None
    relay: bool = False
    perturb_reg: bool = False
    resources: ResourceModel | None = None
    client_sampling: Literal["balanced", "fixed"] = "balanced"
    keep_back: Sequence[str] | None = None
    insecure_seed: int | None = None
    evaluation: PrivateEvaluation | None = None

    scheme: ClassVar[str] = "m2fdp"
    metrics_phases: ClassVar[frozenset[str]] = frozenset()
    keeps_statistics: ClassVar[bool] = True
    not_called: ClassVar[frozenset[str]] = frozenset({"configure_train", "aggregate_train"})
    weight_key = WEIGHT

    def __post_init__(self) -> None:
        check_options(M2FDP, self, "tree", "privacy", "schedule", "control", "evaluation")
        check_evaluated(self.privacy, self.evaluation)
        check_evaluation(self, self.evaluation)
        super().__post_init__()
        if self.evaluation is None:
            self.fraction_evaluate = 0.0  # what devices say of their data has no noise
        for name in ("relay", "perturb_reg"):
            check_flag(name, getattr(self, name))
        check_choice("step_rule", self.step_rule, STEP_RULES)
        check_integer("min_children", self.min_children, minimum=1)
        if self.insecure_seed is not None:
            check_integer("insecure_seed", self.insecure_seed, minimum=0)
            if not self._adds_noise():
                allowed = "None: the server adds no noise here, so that there is nothing to seed"
                raise InvalidParameterError("insecure_seed", self.insecure_seed, allowed)
        self._given_tree = self.tree
        self._cohorts = self._cohorts_of()
        self._keep_back_given = self.keep_back
        self._kept_back = list(self.keep_back or ())
        # Whatever can be refused before there are clients is refused here.
        self.schedule.check_depth(self.tree.depth)
        if self.relay:
            check_relayed(self.privacy, self._virtual_clients)
        if self.control is not None and isinstance(self.privacy, RecordNoise):
            raise InvalidParameterError("control", self.control, "None with RecordNoise: it plans")
        for tier in range(1, self.tree.depth + 1):
            self.privacy.alpha_of(tier, self.tree.depth)
        check_min_children(self.tree, self.min_children)
        if self._virtual_clients is not None:
            check_leaves(self.tree, self._virtual_clients, named=self.tree.named)
        if not self.tree.named and self._virtual_clients is None:
            # A tree without names has as many leaves as there are clients: wait for all of them.
            needed = members(self.tree, relayed=self.relay)
            self.min_available_nodes = max(self.min_available_nodes, needed)
            self._build()

    def _adds_noise(self) -> bool:
        """Tell whether the server draws noise: that of aggregators that it simulates."""
        simulated = any_trusted(self.tree) and not self.relay
        return self.privacy.noised and (simulated or self.privacy.edge_noise)

    def _build(self) -> None:
        super()._build()
        self._devices: list[str] | None = None
        self._steps_left: int | None = None  # of a checkpoint
        self._plan: M2FDPRoundPlan | None = None
        self._relay: Relay | None = None
        self._chosen: dict[str, list[str]] = {}
        self._participants = TierParticipants(self.client_sampling)
        self._trained = False
        self._evaluations: PrivateEvaluations | None = None
        if self.evaluation is not None:
            self._evaluations = PrivateEvaluations(self, self.evaluation)

    # -- Before the first round --------------------------------------------------------------

    def setup(self, grid: Grid) -> None:
        """Assign clients to the leaves of the tree; check that all aggregator nodes are connected.

        Raises
        ------
        InvalidParameterError
            If the clients are not the leaves of the tree.
        ProtocolError
            If an aggregator is missing, or a node has no key.
        """
        introductions = self.federation.introductions
        self.tree = settled(
            self.tree,
            devices_among(self.federation.clients(), introductions),
            named=self._given_tree.named,
            devices=self._devices,
            least=self.min_train_nodes,
        )
        self._devices = list(self.tree.devices)
        self._cohorts = self._cohorts_of()
        self._layout = Layout.of(self._template, released_names(self._template, self._kept_back))
        first = self.first_plan(self.planned_rounds or 1)
        size, resources = self._layout.size, self.resources or ResourceModel()
        self._tier_schedule = TierSchedule(
            first,
            control=self.control,
            parameters=size,
            resources=resources,
            cohorts=self._cohorts,
        )
        if self._steps_left is not None:
            self._tier_schedule.resume(self._steps_left, lost_rounds=self.experiment.lost_rounds)
        self._tiers = TierLog(self.tree, resources, size)
        if self.relay:
            self._relay = Relay(
                self.messenger, self.tree, introductions, self._tiers, least=self.min_children
            )
        self._plan = self._tier_schedule.plan(1)
        self.plan.check(size)
        if self.relay:
            tell_zone_epsilon(self.plan)
        self._write_tree()

    def first_plan(self, rounds: int) -> M2FDPRoundPlan:
        """Return the plan of the first of so many rounds, without control."""
        alike = [(self.schedule, None)] * rounds
        return M2FDPRoundPlan(
            tree=self.tree,
            schedule=self.schedule,
            privacy=self.privacy,
            server_round=1,
            total_steps=self.schedule.steps * rounds,
            rounds=rounds,
            participations=self._cohorts.participations(alike),
            min_children=self.min_children,
            step_rule=self.step_rule,
            keep_back=self._kept_back,
            evaluation=self.evaluation,
        )

    def _cohorts_of(self) -> TierCohorts:
        """Return how many devices of the tree a round asks."""
        return TierCohorts(
            tree=self.tree,
            sampling=self.client_sampling,
            share=max(self.fraction_train, self.min_train_nodes / len(self.tree.devices)),
            least=self.min_children,
        )

    def stop(self) -> str:
        """Return why the training ends: all planned local steps are done."""
        return self._tier_schedule.ended

    @property
    def plan(self) -> M2FDPRoundPlan:
        """The plan of the current round with its noise; ProtocolError before the first round."""
        if self._plan is None:
            raise ProtocolError("m2fdp: the training has not begun")
        return self._plan

    # -- A learning round --------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Raise ProtocolError: a device's request depends on its place in the tree."""
        raise ProtocolError(
            "m2fdp: what a client is asked depends on its place in the tree, so this works only "
            "where this strategy's own start runs the rounds"
        )

    def train_round(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Train a round: for each segment an exchange with the devices, then an event."""
        self._trained = False
        if self.fraction_train == 0:
            return None, None
        self._plan = self._tier_schedule.plan(server_round)
        self._charges = TierCharges(self.plan)
        self._assigned = self.drawn(grid, server_round)
        self._template = arrays_of(arrays)
        self._tiers.begin(self.plan, self._chosen)
        simulated = self.simulated_aggregators()
        models = TreeModels.of(self.plan, self._template, self._layout, simulated.at_the_edge)
        if self._relay is not None:
            self._relay.begin(self._template)
        model: NDArray[np.float64] | None = None
        metrics: MetricRecord | None = None
        answered = 0
        for exchange in self.plan.exchanges:
            if not exchange.leaves:
                continue
            self._tiers.next_event()
            mean, said = self._asked(grid, server_round, exchange, models, config)
            metrics = said or metrics
            answered = max(answered, 0 if mean is None else int(mean.weight))
            released = {}
            if self._relay is not None:
                taking_part = self._taking_part(exchange)
                released = self._relay.event(grid, server_round, exchange, self.plan, taking_part)
            else:
                simulated.warn_of_small_zones(exchange, mean, least=self.min_children)
            if mean is not None:
                self._tiers.answered(self.plan, exchange, mean)
            model = models.event(exchange, taken(mean), simulated.noised, released)
            self._insecure |= simulated.insecure
        self._tier_schedule.take(self.plan)
        self._write_tree()
        if model is None:
            return None, None
        self._trained = True
        metrics, average = metrics or MetricRecord(), self._layout.arrays(model)
        return self.renewed(server_round, average, metrics, float(answered)), metrics

    def simulated_aggregators(self) -> SimulatedAggregators:
        """Return the aggregators of a round that the server simulates."""
        seed = self.insecure_seed
        return SimulatedAggregators(self.plan, self._tiers, self.experiment.id, seed)

    def drawn(self, grid: Grid, server_round: int) -> Assigned:
        """Draw the devices of a round, and record them by their parent."""
        everybody = self.messenger.sample(grid, server_round, TRAIN, fraction=1.0, minimum=0)
        seed = self.experiment.seed
        self._chosen = self._participants.drawn(
            {client for clients in everybody.values() for client in clients},
            plan=self.plan,
            sizes=self._tier_schedule.sizes(server_round, seed=seed),
            releases=self.releases,
            seed=seed,
        )
        return only(everybody, {device for devices in self._chosen.values() for device in devices})

    def _forecast(self, asked: int) -> Forecast:
        # Not of `asked`: with `relay` aggregators are clients too.
        devices = sum(map(len, self._chosen.values()))
        return forecast_of(self.plan, weights=self._layout.size, devices=devices)

    def _taking_part(self, exchange: Exchange) -> dict[str, list[str]]:
        """Return the devices that are asked in an exchange, by their parent."""
        return {leaf: devices for leaf, devices in self._chosen.items() if leaf in exchange.leaves}

    def _asked(
        self,
        grid: Grid,
        server_round: int,
        exchange: Exchange,
        models: TreeModels,
        config: ConfigRecord,
    ) -> tuple[TierSums | None, MetricRecord | None]:
        """Send the requests of an exchange; return the sums of the answers."""
        drawn = self._taking_part(exchange)
        requests = TierRequests(self.plan, exchange, drawn, models, self._relay)
        devices = set(requests.groups)
        shared = ConfigRecord({**config, "server-round": server_round})
        arrays = to_record(dict(models.start))
        arrays, shared = self.model_step.configure(server_round, arrays, shared)
        told = {}
        if self.perturb_reg:
            told["classifier_noise"] = self._tiers.planned_deviation(self.plan)
        of_group = requests.of_groups(self.configrecord_key, self.arrayrecord_key, **told)
        instruction = requests.instruction(
            self._charges,
            of_group,
            self._settled_statistics(),
            self._template,
            self._layout,
            self._forecast if self.privacy.noised else None,
        )
        self.announce()
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: shared})
        assigned = self.messenger.free(grid, only(self._assigned, devices))
        mean, metrics = self.ask(
            grid, server_round, TRAIN, content, assigned, instruction, quorum=self.quorum
        )
        self._charges.pay(exchange, self.messenger.request_log(TRAIN))
        return (mean if isinstance(mean, TierSums) else None), metrics

    # -- An evaluation -----------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask devices for noised counts, if they evaluate; otherwise ask nobody."""
        if self._evaluations is None:
            return []
        due = self._evaluations.due(server_round, rounds=self.plan.rounds)
        self._evaluations.trained = self._trained and due
        without = self._evaluations.used_up(self.plan.evaluations)
        if self.privacy.unit == RECORD:
            without |= set(self.tree.devices) - self._that_trained()
        # Under a relay aggregators are clients too, which have no data.
        request = EvaluationRequest(
            terms=self.plan.evaluation_terms(), without=without, among=self.tree.devices
        )
        return self._evaluations.configure(grid, server_round, arrays, config, request)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the metrics of an evaluation, with their intervals."""
        if self._evaluations is None:
            return None
        return self._evaluations.aggregate(server_round, replies)

    def _that_trained(self) -> set[str]:
        """Return the devices that have answered in a training: their ledgers begin with it."""
        # The phase of a training's charge says where its answer went.
        trainings = (release for release in self.releases if release.phase != EVALUATE)
        return {c for r in trainings for c in set(r.clients).difference(r.unanswered or ())}

    # -- What it promises --------------------------------------------------------------------

    def guarantee(self) -> Guarantee:
        """Return the guarantee of this training."""
        kept = [] if self._plan is None else set(self._template) - set(self._layout.parts)
        return guarantee_of(
            self.privacy,
            self.tree,
            self.schedule,
            plan=self._plan,
            relay=self.relay,
            kept_back=kept,
            insecure=self._insecure,
        )

    def round_metrics(self, card: PrivacyCard) -> dict[str, float]:
        """Return steps, noise, energy and delay of the last round, and what is spent."""
        return {**self._tiers.metrics(), **budget_metrics(card)}

    def _write_tree(self) -> None:
        if self.experiment.run_dir is not None:
            self._tiers.write(self.experiment.run_dir, self.plan)

    def state_dict(self) -> dict[str, Any]:
        """Return the leaf of each client, the queue, the steps left, and what noise is for."""
        return {
            "devices": self._devices,
            "calibrated": self._calibrated(),
            "noised": self.privacy.noised,
            "steps_left": self._tier_schedule.steps_left,
            "insecure": self._insecure,
            "trained": self._trained,
            "participants": self._participants.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises
        ------
        CheckpointError
            If the noise so far was calibrated for something else.
        """
        if self.privacy.noised or state["noised"]:
            check_calibrated(self._calibrated(), state["calibrated"])
        self._devices = list(state["devices"])
        self._steps_left = int(state["steps_left"])
        self._insecure = state["insecure"]
        self._trained = state.get("trained", False)
        self._participants.load(state.get("participants", {}))

    def _calibrated(self) -> dict[str, Any]:
        """Return what the noise of all rounds depends on."""
        names = ("privacy", "schedule", "step_rule", "min_children", "control", "evaluation")
        parts = {name: plain(getattr(self, name)) for name in names}
        # What steps and uploads cost has a say in the choices of a controller, in nothing else.
        costs = None if self.control is None else plain(self.resources or ResourceModel())
        return {
            **parts,
            "resources": costs,
            "num_rounds": self.planned_rounds,
            "client_sampling": self.client_sampling,
            "share": self._cohorts.share,
            **tree_of(self.tree),
        }
