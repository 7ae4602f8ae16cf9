"""What the insecure parent reads in the releases of a trusted path of M2FDP.

The boundary node noises what leaves its zone, and the noise is for the *sensitivity*: how far the
data of one device can move the release. After a clean event all members of the zone train on from a
model that these data have moved, and what they do then is theirs. The crafted members here
(`crafted_release`) wait until the model that they receive has moved, and then jump to the full
clipping norm in the direction of the move. They attain the worst case of
`flwr_privacy.m2fdp.Drift`, and `audit_path` reads the coin of the device from what such a zone
releases. It refutes a ledger that charges Lemma 1 of the paper where there are clean events in the
zone, and none that charges ``drift="worst"``.

Audits are lower bounds, which need not agree between paths: each path is audited against its own
ledger. That secure and insecure paths have equal privacy is a matter of the ledgers, which say it
by construction: a release is given the share of the budget that its local steps are of all.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
Lemma 1; where it fails is not in the paper.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.accounting import REPLACE_ONE, Charge, spent
from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.m2fdp.calibration import multiplier
from flwr_privacy.m2fdp.schedule import EventSchedule, Segment
from flwr_privacy.m2fdp.sensitivity import Drift, Reach
from flwr_privacy.m2fdp.tree.tree import TierTree
from flwr_privacy.m2fdp.zone_average import GAP, Upload, averaged, noised
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import clip
from flwr_privacy.simulations.research.attacks.audit import (
    GaussianAudit,
    OneRunAudit,
    gaussian_audit,
    one_run_audit,
)
from flwr_privacy.wire.identity import stream

__all__ = ["PathAudit", "ZonePath", "audit_path", "crafted_release"]

Vector = NDArray[np.float64]

_ONE_RUN = 4000  # coins
_GRID_BITS = 20  # steps up to the clipping norm of a local step: rounding is far below the noise


@dataclass(frozen=True, kw_only=True)
class ZonePath:
    """The path of a device to the cloud, as far as it is trusted.

    Parameters
    ----------
    name : str
        What it is, for tables.
    boundary : int
        Tier of the boundary node, which adds the noise.
    fanouts : tuple of int
        Children of the boundary node, of each of these, and so on down to the devices; empty if
        the boundary node is the device itself.
    periods : tuple of tuple of Segment
        What happens in a round between two noised releases
        (`flwr_privacy.m2fdp.schedule.EventSchedule.periods`): segments of local training, each with
        a clean event after it, but the last, which ends in the release.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.
    """

    name: str
    boundary: int
    fanouts: tuple[int, ...]
    periods: tuple[tuple[Segment, ...], ...]

    def __post_init__(self) -> None:
        check_integer("boundary", self.boundary, minimum=1)
        for children in self.fanouts:
            check_integer("fanouts", children, minimum=1)
        if not self.periods or not all(self.periods):
            raise InvalidParameterError("periods", self.periods, "segments in each of them")

    @classmethod
    def of(
        cls,
        name: str,
        tree: TierTree,
        schedule: EventSchedule,
        device: str,
        *,
        clean_events: bool = True,
    ) -> "ZonePath":
        """Return the path of a device of a tree.

        Parameters
        ----------
        name : str
            What to call it.
        tree : TierTree
            The tree.
        schedule : EventSchedule
            Events of a round.
        device : str
            A device of the tree.
        clean_events : bool, default True
            Whether there are events inside of the zone; without, its devices train through.

        Raises
        ------
        InvalidParameterError
            If the nodes of a tier in the device's zone have different numbers of children.
        """
        node = tree.boundary(device)
        tier, nodes = tree.tier(node), [node]
        fanouts: list[int] = []
        while nodes[0] not in tree.devices:
            below = [tree.children(node) for node in nodes]
            if len({len(children) for children in below}) > 1:
                raise InvalidParameterError("tree", node, "a zone with equal fan-outs")
            fanouts.append(len(below[0]))
            nodes = [child for children in below for child in children]
        periods = schedule.periods(tier)
        if not clean_events:
            periods = tuple((_through(period),) for period in periods)
        return cls(name=name, boundary=tier, fanouts=tuple(fanouts), periods=periods)

    @property
    def steps(self) -> int:
        """Local steps of a round."""
        return sum(segment.steps for period in self.periods for segment in period)


def crafted_release(
    path: ZonePath,
    period: Sequence[Segment],
    *,
    coin: bool,
    direction: ArrayLike,
    drift: Drift,
    clipping_norm: float = 1.0,
    grid: CodeGrid,
) -> Upload:
    """Return what a boundary node holds before the noise, in a zone of crafted members.

    The device trains with all its might in a direction or against it, by its coin. The others do
    nothing until the model that they receive has moved; then they follow the move, as far as they
    may. Updates are clipped, truncated to the grid and averaged as the scheme does it.

    Parameters
    ----------
    path : ZonePath
        The zone.
    period : sequence of Segment
        One of the path's periods.
    coin : bool
        Which data the device has.
    direction : array_like, shape (d,)
        A direction, of any length but zero.
    drift : Drift
        The law by which the zone states how far a device can move the release.
    clipping_norm : float, default 1.0
        Largest L2 norm of a local step.
    grid : CodeGrid
        Where the codes live.

    Returns
    -------
    Upload
        The codes, as distance from where the period started, and the stated reach.

    Raises
    ------
    InvalidParameterError
        If the direction is no vector, or zero.
    """
    towards = np.asarray(direction, np.float64)
    length = float(np.linalg.norm(towards))
    if towards.ndim != 1 or not 0 < length < math.inf:
        raise InvalidParameterError("direction", length, "a finite vector that is not zero")
    depth = path.boundary + len(path.fanouts)
    slack = grid.step * math.sqrt(towards.size)
    still = Upload(np.zeros(towards.size, np.int64), Reach(anchor=depth))
    models = [still] * math.prod(path.fanouts)  # of the devices; the first one has the coin
    for segment in period:
        bound = segment.steps * clipping_norm
        update = towards * (bound / length)
        clip(update, bound)
        jump = grid.encode(update)
        signs = [int(np.sign(model.codes @ towards)) for model in models]
        signs[0] = 1 if coin else -1
        nodes = [
            Upload(
                model.codes + sign * jump,
                drift.trained(model.reach, bound=bound, steps=segment.steps, slack=slack),
            )
            for model, sign in zip(models, signs, strict=True)
        ]
        top = max(segment.tier, path.boundary)
        for tier in range(depth - 1, top - 1, -1):
            size = path.fanouts[tier - path.boundary]
            nodes = [
                averaged(nodes[first : first + size], drift, tier=tier, grid=grid)
                for first in range(0, len(nodes), size)
            ]
        below = len(models) // len(nodes)
        models = [
            Upload(node.codes, drift.broadcast(node.reach, tier=top))
            for node in nodes
            for _ in range(below)
        ]
    return nodes[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class PathAudit:
    """What an audit read in the releases of a path, beside the epsilon of its ledger.

    Parameters
    ----------
    path : ZonePath
        The path.
    law : str
        The law of drift by which its noise was made.
    delta, ledger : float
        Delta, and epsilon of all releases by the charges.
    releases : int
        How many releases there were.
    stated, attained : tuple of float
        The sensitivity that was charged for each release of a round, and how far the coin moved it.
    scores, coins : ndarray, shape (runs,)
        What the parent makes of the releases of each run, in units of the stated sensitivities:
        the larger, the likelier is heads; and the coins.
    one_run : OneRunAudit
        What holds for any mechanism.
    gaussian : GaussianAudit
        What holds if the channels are Gaussian, as these are.
    """

    path: ZonePath
    law: str
    delta: float
    ledger: float
    releases: int
    stated: tuple[float, ...]
    attained: tuple[float, ...]
    scores: Vector
    coins: NDArray[np.bool_]
    one_run: OneRunAudit
    gaussian: GaussianAudit

    @property
    def flagged(self) -> bool:
        """Whether an audit refutes the ledger."""
        return max(self.one_run.epsilon, self.gaussian.epsilon) > self.ledger


def audit_path(
    path: ZonePath,
    *,
    drift: Drift,
    epsilon: float,
    delta: float = 1e-5,
    rounds: int = 1,
    runs: int = 20_000,
    guesses: int = 1000,
    confidence: float = 0.99,
    clipping_norm: float = 1.0,
    dimension: int = 16,
    seed: int = 0,
    random: SecureRandom | None = None,
) -> PathAudit:
    """Run trainings with a coin each and read the coins from what the path releases.

    Each run is a whole training of a zone with crafted members (`crafted_release`), with a coin of
    its own that decides the data of one device, and discrete Gaussian noise on every release. The
    reader is the parent outside: it knows everything but the coin and the noise.

    Parameters
    ----------
    path : ZonePath
        The path.
    drift : Drift
        The law by which the sensitivities are stated that the noise is made for.
    epsilon, delta : float
        Budget of the device for all rounds.
    rounds : int, default 1
        Rounds of a training.
    runs : int, default 20_000
        Trainings: coins of the audit.
    guesses : int, default 1000
        How many coins the one-run audit guesses, of the first 4000 runs: with more, the term of
        delta in its bound grows faster than what there is to guess.
    confidence : float, default 0.99
        Chance with which each bound holds.
    clipping_norm : float, default 1.0
        Largest L2 norm of a local step.
    dimension : int, default 16
        Length of a model.
    seed : int, default 0
        Root of the coins and of the direction.
    random : SecureRandom, optional
        Where the noise comes from; by default a stream of its own.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Notes
    -----
    The runs are independent, and each has one coin: what both audits assume. By each of them a
    correct path is flagged with a chance of at most ``1 - confidence``.
    """
    check_integer("rounds", rounds, minimum=1)
    check_integer("runs", runs, minimum=1)
    check_integer("dimension", dimension, minimum=1)
    random = SecureRandom() if random is None else random
    coins = stream(seed, "coins").random(runs) < 0.5
    direction = stream(seed, "direction").normal(size=dimension)
    direction /= np.linalg.norm(direction)
    grid = CodeGrid.below(clipping_norm, bits=_GRID_BITS)
    scores = np.zeros(runs)
    charges, stated, attained = [], [], []
    for period in path.periods:
        heads, tails = (
            crafted_release(
                path,
                period,
                coin=coin,
                direction=direction,
                drift=drift,
                clipping_norm=clipping_norm,
                grid=grid,
            )
            for coin in (True, False)
        )
        stated.append(heads.reach.total)
        apart = heads.codes - tails.codes
        attained.append(float(np.linalg.norm(apart)) * grid.step)
        steps = sum(segment.steps for segment in period)
        z = multiplier(epsilon=epsilon, delta=delta, steps=steps, total_steps=rounds * path.steps)
        charges.append(Charge(noise_multiplier=z, neighbours=REPLACE_ONE, gap=GAP, count=rounds))
        sigma = z * stated[-1]
        clean = np.where(coins[:, None], heads.codes, tails.codes)
        for _ in range(rounds):
            released = noised(clean.reshape(-1).copy(), sigma=sigma, grid=grid, random=random)
            # The log-likelihood ratio of heads to tails.
            beside = released.reshape(clean.shape) - (heads.codes + tails.codes) / 2
            scores += beside @ apart * (grid.step / sigma) ** 2
    return PathAudit(
        path=path,
        law=drift.law,
        delta=delta,
        ledger=spent(charges, delta=delta),
        releases=rounds * len(path.periods),
        stated=tuple(stated),
        attained=tuple(attained),
        scores=scores,
        coins=coins,
        one_run=one_run_audit(
            scores[:_ONE_RUN],
            coins[:_ONE_RUN],
            guesses=guesses,
            delta=delta,
            confidence=confidence,
        ),
        gaussian=gaussian_audit(scores, coins, threshold=0, delta=delta, confidence=confidence),
    )


def _through(period: Sequence[Segment]) -> Segment:
    """Return a period without the events inside of it."""
    return replace(period[0], steps=sum(segment.steps for segment in period), tier=period[-1].tier)
