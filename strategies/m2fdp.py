"""M2FDP on the server: a tree of aggregators, noise where trust ends.

"Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation". The
devices of a round are asked once per segment of its schedule; after each answer the models of the
tree meet in an event. The server plays the aggregators, or passes sealed messages on between
aggregators that are nodes of their own (`relay`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.accounting import Charge
from flwr_privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.card import PrivacyCard
from flwr_privacy.errors import (
    InvalidParameterError,
    ProtocolError,
    check_flag,
    check_integer,
)
from flwr_privacy.fields import write
from flwr_privacy.grid import saturated
from flwr_privacy.guarantee import Guarantee
from flwr_privacy.keywords import checked_keywords
from flwr_privacy.layout import Layout
from flwr_privacy.m2fdp import (
    EVENT,
    Asked,
    EventSchedule,
    Exchange,
    ResourceModel,
    RoundPlan,
    Terms,
    TierSums,
    TierTree,
    TreeModels,
    Upload,
    Wish,
    boundary_tier,
    noised,
    promise,
)
from flwr_privacy.randomness import SecureRandom
from flwr_privacy.updates import released_names
from flwr_privacy.wire import RECORD, TRAIN

from .base import SchemeStrategy
from .conversation import Assigned, only
from .experiment import to_record
from .instruction import Instruction, to_each
from .relay import Relay
from .round import ClientReply, Round
from .tier_course import TierCourse
from .tiers import TierLog
from .tree_members import check_min_children, drawn, members, settled

__all__ = ["M2FDP"]

logger = logging.getLogger("flwr.privacy")

_WEIGHT = "num-examples"


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
        FedAvg's and those of `flwr_privacy.strategies.base.SchemeStrategy`. `fraction_train` (or
        `min_train_nodes`, as a share of the devices) is the share of the devices under each lowest
        aggregator that take part in a round. Clients are not asked to evaluate.
    tree : TierTree
        The aggregators and who is trusted: ``TierTree.of_fanouts((10, 5), p=0.5)``, where the
        clients are the leaves in the order of their names, or ``TierTree.read(file)``.
    steps : int, default 1
        Local steps of a round, K.
    events : int or mapping, optional
        Local events: a period in steps, at tier 1, or for each tier a period or a list of steps.
        By default there is only the global one.
    epsilon, delta : float, defaults 8.0 and 1e-5
        Budget of a device over the whole training. All devices have the same, wherever their noise
        enters.
    calibration : {"device", "record", "paper", "none"}, default "device"
        ``device``: all data of a device are protected; noise as in `flwr_privacy.m2fdp.multiplier`.
        ``record``: one record, where the training takes Poisson batches
        (`flwr_privacy.clients.torch.train_poisson`). ``paper``: Proposition 1 as printed, with
        `alpha`; the guarantee then has what it really costs. ``none``: no noise, no promise.
    drift : {"worst", "smooth", "lemma"}, default "worst"
        What is assumed of models that went apart inside a zone, see `flwr_privacy.m2fdp.Drift`.
        ``smooth`` takes `smoothness`, ``lemma`` takes ``convex=True``.
    smoothness : float, optional
        Smoothness of the losses times the step size of the training.
    convex : bool, default False
        Whether the losses are convex and smooth.
    clean_events : bool, default False
        Whether secure subtrees average inside, without noise, at local events. Without them, what
        a zone hands out depends on a device by its own update alone (Lemma 1 holds as printed), and
        its devices are asked once between two noised releases. With `paper` they do.
    clipping_norm : float, default 1.0
        Largest L2 norm of the update of one local step, ``eta G`` in the paper; k steps may have k
        times that. None, only without noise: no clipping.
    step_rule : {"constant", "inv_sqrt"}, default "constant"
        Whether step and clipping fall as ``1 / sqrt(t + 1)``; the training is told by
        ``learning-rate-scale`` in its configuration.
    sampling_rate : float, optional
        Share of a device's records in a batch, with ``record`` and ``paper``.
    alpha : float or sequence of float, optional
        Constant of the paper's noise, for all tiers or for each of tier 1 to L; with ``paper``,
        where it has no default: the paper gives none.
    release_steps : {"round", "segment"}, default "round"
        Whose local steps the paper's sensitivity counts at a release.
    min_children : int, default 2
        A secure node with fewer answers hands nothing on.
    control : mapping, optional
        Adaptive control of K and of who takes part, before every round: the parameters of
        `flwr_privacy.m2fdp.AdaptiveController` beyond tree, model, schedule and budget;
        ``total_steps`` and ``max_steps`` at least. The training ends when the steps are used up.
    relay : bool, default False
        Whether secure aggregators are nodes of their own (``m2fdp-role`` in their configuration),
        named as in the tree. The server passes sealed messages on then.
    edge_noise : bool, default False
        Whether insecure nodes of tier 1 add noise too, as in a baseline of the paper.
    perturb_reg : bool, default False
        Whether the training is told a noise for its last layer (``classifier-noise``), as in
        another one.
    resources : ResourceModel, optional
        What a step and an upload cost; by default the paper's figures.
    keep_back : sequence of str, optional
        Arrays that are not sent, beside integers and what torch calls running statistics of
        normalisation layers, which never are: the model keeps the server's values of them.
        Where it is left out and arrays that came as a list look like statistics, the first round is
        refused: see `flwr_privacy.clients.torch.statistics_of`; [] says that there are none.
    insecure_seed : int, optional
        Seed of the noise of aggregators that the server plays, for tests: protects nobody.
    paper : bool, default False
        The scheme as printed: ``calibration="paper"``, ``drift="lemma"``, ``clean_events=True``.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Guarantee
    ---------
    Adversary: everybody beyond the boundary of a device's trusted zone, the cloud first of all; it
    sees noised models. With `relay` the server is beyond it, and what it passes on is sealed
    (`flwr_privacy.channel`); without, the server plays the secure aggregators and is trusted: for
    simulations. Against a server that does not follow the protocol: see
    `flwr_privacy.clients.M2FDPClient`; what binds it is the policy of each node, of the aggregators
    too.
    Neighbours: all data of one device replaced, or with ``record`` one record more.
    Covered: everything that leaves the zone in the whole training, (epsilon, delta) per device, by
    Gaussian differential privacy (by a Renyi filter with ``record``) over the releases that each
    device charges to its own ledger.
    Not covered: members of one zone from each other; who takes part; with ``paper`` the budget that
    was asked for; with ``drift="smooth"`` or ``"lemma"`` losses that are not what was declared.

    Examples
    --------
    >>> from flwr_privacy.m2fdp import TierTree
    >>> from flwr_privacy.strategies import M2FDP
    >>> strategy = M2FDP(
    ...     tree=TierTree.of_fanouts((10, 5), p=0.5), steps=20, events=5, clipping_norm=0.05
    ... )
    """

    tree: TierTree
    steps: int = 1
    events: int | Mapping[Any, Any] | None = None
    epsilon: float = 8.0
    delta: float = 1e-5
    calibration: Literal["device", "record", "paper", "none"] | None = None
    drift: Literal["worst", "smooth", "lemma"] | None = None
    smoothness: float | None = None
    convex: bool = False
    clean_events: bool | None = None
    clipping_norm: float | None = 1.0
    step_rule: Literal["constant", "inv_sqrt"] = "constant"
    sampling_rate: float | None = None
    alpha: float | Sequence[float] | None = None
    release_steps: Literal["round", "segment"] | None = None
    min_children: int = 2
    control: Mapping[str, Any] | None = None
    relay: bool = False
    edge_noise: bool = False
    perturb_reg: bool = False
    resources: ResourceModel | None = None
    keep_back: Sequence[str] | None = None
    insecure_seed: int | None = None
    paper: bool = False

    scheme: ClassVar[str] = "m2fdp"
    keeps_statistics: ClassVar[bool] = True
    weight_key = _WEIGHT

    def __post_init__(self) -> None:
        self._devices: list[str] | None = None
        self._resumed: dict[str, int] | None = None
        self._plan: RoundPlan | None = None
        self._relay: Relay | None = None
        super().__post_init__()
        self.fraction_evaluate = 0.0  # what devices say of their data has no noise
        if not isinstance(self.tree, TierTree):
            allowed = "a TierTree, such as TierTree.of_fanouts((10, 5), p=0.5)"
            raise InvalidParameterError("tree", self.tree, allowed)
        for name, value in (
            ("relay", self.relay),
            ("edge_noise", self.edge_noise),
            ("paper", self.paper),
            ("perturb_reg", self.perturb_reg),
        ):
            check_flag(name, value)
        self._given_tree = self.tree
        self._schedule = EventSchedule(steps=self.steps, events=_events(self.events))
        self._wish = Wish(
            epsilon=self.epsilon,
            delta=self.delta,
            calibration=self.calibration or ("paper" if self.paper else "device"),
            drift=self.drift or ("lemma" if self.paper else "worst"),
            smoothness=self.smoothness,
            convex=self.convex,
            clean_events=self.paper if self.clean_events is None else self.clean_events,
            clipping_norm=self.clipping_norm,
            step_rule=self.step_rule,
            sampling_rate=self.sampling_rate,
            alpha=self.alpha,
            release_steps=self.release_steps or "round",
            keep_back=list(self.keep_back or ()),
        )
        self._keep_back_given = self.keep_back
        self._least = check_integer("min_children", self.min_children, minimum=1)
        self._control = dict(self.control) if self.control else None
        self._resources = self.resources or ResourceModel()
        if self.insecure_seed is not None:
            check_integer("insecure_seed", self.insecure_seed, minimum=0)
        self._insecure_seed = self.insecure_seed
        # Whatever can be refused before there are clients is refused here.
        self._schedule.check_depth(self.tree.depth)
        if self.relay and self._virtual_clients is not None:
            raise InvalidParameterError("clients", self._virtual_clients, "None with `relay`")
        if self.relay and not self._wish.noised:
            allowed = "false without noise: an aggregator of its own has nothing to add"
            raise InvalidParameterError("relay", True, allowed)
        if self.edge_noise and not self._wish.noised:
            raise InvalidParameterError("edge_noise", True, "false where there is no noise")
        if self._wish.calibration == "paper":
            for tier in range(1, self.tree.depth + 1):
                self._wish.alpha_of(tier, self.tree.depth)
        check_min_children(self.tree, self._least)
        if not self.tree.named and self._virtual_clients is None:
            # A tree without names has as many leaves as there are clients: wait for all of them.
            needed = members(self.tree, relayed=self.relay)
            self.min_available_nodes = max(self.min_available_nodes, needed)
            self._build()

    # -- Before the first round --------------------------------------------------------------

    def setup(self, grid: Grid) -> None:
        """Settle who is which leaf, and check that the aggregators that are nodes are there.

        Raises
        ------
        InvalidParameterError
            If the clients are not the leaves of the tree.
        ProtocolError
            If an aggregator is missing, or a node has no key.
        """
        introductions = self.federation.introductions
        devices = [
            client
            for client in self.federation.clients()
            if introductions.get(client, {}).get("role", "device") == "device"
        ]
        named = self._given_tree.named
        self.tree = settled(self.tree, devices, named=named, devices=self._devices)
        self._devices = list(self.tree.devices)
        if self.min_train_nodes > max(2, len(self._devices)):
            allowed = f"at most {len(self._devices)}, the devices of the tree"
            raise InvalidParameterError("min_train_nodes", self.min_train_nodes, allowed)
        names = released_names(self._template, self._wish.keep_back)
        self._layout = Layout.of(self._template, names)
        self._course = TierCourse(
            self.tree,
            self._schedule,
            self._wish,
            control=self._control,
            parameters=self._layout.size,
            min_children=self._least,
            resources=self._resources,
            rounds=self.planned_rounds or 1,
        )
        if self._resumed is not None:
            self._course.resume(**self._resumed)
        self._tiers = TierLog(self.tree, self._resources, self._layout.size)
        self._relay = Relay(self.conversation, self.tree, introductions) if self.relay else None
        self._plan = self._course.plan(1)
        self.plan.check(self._layout.size)
        self._write_tree()

    def stop(self) -> str:
        """Return why the training ends: all local steps that were planned are used up."""
        if self._course.over:
            return f"the {self._course.total_steps} local steps are used up"
        return ""

    @property
    def plan(self) -> RoundPlan:
        """The round at hand, with its noise.

        Raises
        ------
        ProtocolError
            Before there is one.
        """
        if self._plan is None:
            raise ProtocolError("m2fdp: the training has not begun")
        return self._plan

    # -- A learning round --------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Refuse: who is asked what depends on where it is in the tree.

        Raises
        ------
        ProtocolError
            Always.
        """
        raise ProtocolError(
            "m2fdp: what a client is asked depends on its place in the tree, so this works only "
            "where this strategy's own start runs the rounds"
        )

    def train_round(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Train a round: for each segment an exchange with the devices, then an event."""
        if self.fraction_train == 0:
            return None, None
        self._plan = self._course.plan(server_round)
        self._paid: dict[str, int] = {}
        self._assigned = self.drawn(grid, server_round)
        start = {name: np.asarray(array.numpy()) for name, array in arrays.items()}
        self._template = start
        models = TreeModels(
            self.tree,
            start,
            self._layout,
            grids=self.plan.grids,
            drift=self._wish.law,
            min_children=self._least,
            bound=self.plan.bound,
            edge_noise=partial(self._at_the_edge, server_round) if self.edge_noise else None,
        )
        self._tiers.begin(self.plan, self._chosen)
        if self._relay is not None:
            self._relay.begin()
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
            released = self._released(grid, server_round, exchange)
            if mean is not None:
                self._tiers.answered(self.plan, exchange, mean)
            self._warn_of_small_zones(server_round, exchange, mean)
            model = models.event(
                exchange, _taken(mean), partial(self._noised, server_round, exchange), released
            )
        self._course.take(self.plan)
        self._write_tree()
        if model is None:
            return None, None
        metrics = metrics if metrics is not None else MetricRecord()
        average = self._layout.arrays(model)
        return self.renewed(server_round, average, metrics, float(answered)), metrics

    def _warn_of_small_zones(
        self, server_round: int, exchange: Exchange, sums: TierSums | None
    ) -> None:
        if self._relay is not None:
            return  # aggregators that are nodes say so themselves
        small = [
            leaf
            for leaf in exchange.leaves
            if self.tree.secure(leaf)
            and (0 if sums is None else len(sums.answered(leaf))) < self._least
        ]
        if small:
            logger.warning(
                "round %d: fewer than min_children = %d answered under %s: nothing of them is used",
                *(server_round, self._least, ", ".join(small[:10])),
            )

    def _released(
        self, grid: Grid, server_round: int, exchange: Exchange
    ) -> dict[str, NDArray[np.int32]]:
        """Have aggregators that are nodes of their own take an event; return what they noised."""
        if self._relay is None:
            return {}
        released = self._relay.event(
            grid,
            server_round,
            exchange,
            self.plan,
            self._taking_part(exchange),
            least=self._least,
            size=self._layout.size,
        )
        for node in released:
            self._tiers.noised(node, self._relay.sigmas[node])
        return released

    def drawn(self, grid: Grid, server_round: int) -> Assigned:
        """Draw the devices of a round; note them by their parent."""
        everybody = self.conversation.sample(grid, server_round, TRAIN, fraction=1.0, minimum=0)
        self._chosen = drawn(
            self.tree,
            {client for clients in everybody.values() for client in clients},
            share=max(self.fraction_train, self.min_train_nodes / len(self.tree.devices)),
            decision=self._course.decision,
            least=self._least,
            seed=self.experiment.seed,
            server_round=server_round,
        )
        return only(everybody, {device for devices in self._chosen.values() for device in devices})

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
        """Put the question of an exchange; return the sums of what was answered."""
        self._current = exchange
        drawn = self._taking_part(exchange)
        devices = {device for clients in drawn.values() for device in clients}
        self._groups = {device: leaf for leaf, clients in drawn.items() for device in clients}
        shared = ConfigRecord({**config, "server-round": server_round})
        arrays = to_record(dict(models.start))
        arrays, shared = self.model_step.configure(server_round, arrays, shared)
        records: dict[int, ArrayRecord] = {}
        of_group = {
            leaf: self._question(leaf, exchange, models, records, clients)
            for leaf, clients in drawn.items()
        }
        own = {} if self._relay is None else self._relay.starts(devices)
        # What a node that plays several devices must know to add their codes up.
        kept = list(self._wish.keep_back)
        shared_terms = {**self._settled_statistics(), **({"keep-back": kept} if kept else {})}
        instruction = Instruction(
            fields=shared_terms,
            own=to_each(own),
            groups=self._groups,
            of_group=of_group,
            accumulator=partial(TierSums, self._template, list(self._layout.parts), self._groups),
            take=self._take_codes,
            adds_up=not self.relay,
            cost=self._costs(exchange),
            charged=self._charged,
        )
        self.announce()
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: shared})
        assigned = self.conversation.free(grid, only(self._assigned, devices))
        mean, metrics = self.ask(
            grid, server_round, TRAIN, content, assigned, instruction, quorum=self.quorum
        )
        for device in self.conversation.book(TRAIN).released():
            if device in self._groups:
                self._paid[device] = exchange.leaves[self._groups[device]].period
        return (mean if isinstance(mean, TierSums) else None), metrics

    def _question(
        self,
        leaf: str,
        exchange: Exchange,
        models: TreeModels,
        records: dict[int, ArrayRecord],
        siblings: list[str],
    ) -> RecordDict:
        """Return what goes to the devices of one lowest aggregator alone."""
        asked, plan = exchange.leaves[leaf], self.plan
        sealed = self._relay is not None and self.tree.secure(leaf)
        terms = self._terms(leaf, exchange, siblings if sealed else [])
        fields = write(terms)
        if sealed and self._relay is not None:
            fields |= self._relay.keys_for(leaf)
        told: dict[str, Any] = {
            "local-steps": asked.steps,
            "learning-rate-scale": plan.scale,
            "segment": exchange.index,
        }
        if self.perturb_reg:
            told["classifier-noise"] = self._tiers.planned_deviation(plan)
        content = RecordDict(
            {RECORD: ConfigRecord(fields), self.configrecord_key: ConfigRecord(told)}
        )
        place = models.places[leaf]
        # Whoever has a zone of its own knows how far it has come since its public start.
        if place.start is not models.start or (place.offset is not None and not sealed):
            if id(place) not in records:
                model = place.start if sealed else models.model(leaf)
                records[id(place)] = to_record(dict(model))
            content[self.arrayrecord_key] = records[id(place)]
        return content

    def _terms(self, leaf: str, exchange: Exchange, siblings: list[str]) -> Terms:
        asked, plan, wish = exchange.leaves[leaf], self.plan, self._wish
        release = plan.release_of(leaf, exchange)
        return Terms(
            unit=wish.unit,
            noise_multiplier=float(release.multiplier),
            epsilon=float(plan.epsilon(boundary_tier(self.tree, leaf))),
            delta=float(wish.delta),
            grid=release.grid.exponent,
            period=asked.period,
            law=wish.law.law,
            growth=wish.law.growth,
            depth=self.tree.depth,
            sampling=float(release.sampling),
            keep_back=list(wish.keep_back),
            clipping_norm=plan.bound(asked.steps),
            steps=asked.steps,
            parent=leaf,
            noised=wish.noised and not self.tree.secure(leaf),
            sealed=bool(siblings),
            event=exchange.index,
            tier=exchange.tier,
            siblings=siblings,
            sampling_rate=float(wish.sampling_rate or 1.0) if wish.unit == "record" else 1.0,
        )

    # -- Answers -----------------------------------------------------------------------------

    def _take_codes(self, mean: WeightedMean, reply: ClientReply) -> None:
        """Take a device's codes, or what it sealed for its parent.

        Raises
        ------
        ReplyRefusedError
            If the reply is malformed.
        """
        leaf = self._groups.get(reply.client_id, "")
        if self._relay is not None and leaf and self.tree.secure(leaf):
            if not isinstance(mean, TierSums) or reply.arrays():
                raise ReplyRefusedError("malformed", "arrays beside a sealed answer")
            mean.count(reply.client_id)
            self._relay.take(reply.client_id, reply.fields.get("sealed"))
            return
        mean.take(reply.client_id, reply.arrays(), reply.metrics(), _WEIGHT)

    def _noised(
        self, server_round: int, exchange: Exchange, node: str, upload: Upload, asked: Asked
    ) -> NDArray[np.int32]:
        """Noise what an aggregator that the server plays hands out."""
        release = self.plan.release(self.tree.tier(node), asked.end)
        if release.multiplier == 0:
            return saturated(upload.codes)
        sigma = release.multiplier * upload.reach.total
        self._tiers.noised(node, sigma)
        random = self._random("noise", node, server_round, asked.period)
        return noised(upload.codes, sigma=sigma, grid=release.grid, random=random)

    def _at_the_edge(self, server_round: int, node: str, model: NDArray[np.float64]) -> None:
        """Add the noise of an insecure node of tier 1, which a baseline has beside the devices'."""
        devices = self.plan.release(self.tree.depth, self.plan.exchanges[-1].index)
        sigma = devices.multiplier * 2 * self.plan.bound(devices.steps)
        sigma /= len(self.tree.leaves(node))
        random = self._random("edge noise", node, server_round, 0)
        codes = np.zeros(model.size, np.int64)
        model += devices.grid.step * noised(codes, sigma=sigma, grid=devices.grid, random=random)
        self._tiers.noised(node, sigma)

    def _random(self, purpose: str, node: str, server_round: int, period: int) -> SecureRandom:
        if self._insecure_seed is None:
            return SecureRandom()
        self._insecure = True
        # As the node itself would draw it, see `flwr_privacy.clients.custody.Custody.random`.
        return SecureRandom.insecure(
            self._insecure_seed,
            purpose,
            node,
            self.experiment.id,
            EVENT,
            server_round,
            period,
        )

    # -- What it costs -----------------------------------------------------------------------

    def _costs(self, exchange: Exchange) -> Callable[[str], Charge | None] | None:
        """Return what an answer costs each device: that of the release that it goes into."""
        if not self._wish.noised:
            return None
        devices = set(self.tree.devices)
        costs = {leaf: self.plan.release_of(leaf, exchange).charge() for leaf in exchange.leaves}
        # Also one that a server asked before it was resumed, and that is not there any more.
        return lambda client: costs.get(self.tree.parent(client)) if client in devices else None

    def _charged(self, book: Round) -> set[str]:
        """Return the devices that pay: each once for every release that its answers go into."""
        return {
            device
            for device in book.released()
            if self._paid.get(device) != self._current.leaves[self._groups[device]].period
        }

    def guarantee(self) -> Guarantee:
        """Return the promise of this training."""
        wish = self._wish
        epsilon, kept = wish.epsilon, []
        if self._plan is not None:
            kept = [name for name in self._template if name not in self._layout.parts]
            if wish.noised:
                epsilon = max(self.plan.epsilon(tier) for tier in self.plan.boundaries)
        return promise(
            calibration=wish.calibration,
            unit=wish.unit,
            epsilon=epsilon,
            delta=wish.delta,
            nominal=wish.epsilon,
            secure=sum(self.tree.secure(n) for tier in self.tree.tiers[1:-1] for n in tier),
            relay=self.relay,
            law=wish.law.law,
            clean_events=wish.clean_events and bool(self._schedule.events),
            kept_back=kept,
            insecure=self._insecure,
        )

    def round_metrics(self, card: PrivacyCard) -> dict[str, float]:
        """Return steps, noise, energy and delay of the last round."""
        return self._tiers.metrics()

    def _write_tree(self) -> None:
        if self.experiment.run_dir is not None:
            self._tiers.write(self.experiment.run_dir, self.plan)

    def _build(self) -> None:
        super()._build()
        self._devices, self._resumed, self._plan, self._relay = None, None, None, None

    def state_dict(self) -> dict[str, Any]:
        """Return who is which leaf, and the local steps that are left."""
        return {
            "devices": self._devices,
            "total_steps": self._course.total_steps,
            "steps_left": self._course.steps_left,
            "insecure": self._insecure,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self._devices = list(state["devices"])
        self._resumed = {key: int(state[key]) for key in ("total_steps", "steps_left")}
        self._insecure = state["insecure"]


def _taken(sums: TierSums | None) -> Callable[[str], tuple[NDArray[Any], int] | None]:
    """Return what gives the sum of a lowest aggregator away, once."""
    return (lambda leaf: None) if sums is None else sums.taken


def _events(events: int | Mapping[Any, Any] | None) -> dict[int, Any]:
    """Return local events by tier; a table of settings has its tiers as text."""
    if events is None:
        return {}
    if isinstance(events, Mapping):
        try:
            return {int(tier): steps for tier, steps in events.items()}
        except ValueError:
            raise InvalidParameterError("events", dict(events), "numbers of tiers") from None
    return {1: check_integer("events", events, minimum=1)}
