"""Accounts for the devices: equal budgets for all of them, and the true cost of the paper's noise.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
Proposition 1, and what is missing there. Nothing leaves a trusted zone in a local step; what is
released is the boundary node's average, once a round or more often, about all local steps since the
last release. With one noise rule for all tiers the devices therefore get unequal privacy, and none
gets what the rule is named after (`paper_figures`).

Here a *class* of devices is those whose boundary nodes are at the same tier; each class is
calibrated by itself.

``device``
    Neighbours differ in all data of one device. A release about k of tau local steps gets the share
    k / tau of the budget, in Gaussian DP, where shares add up (`multiplier`).
``record``
    Neighbours differ in one record, which one of them does not have; every local step draws its
    batch with Poisson sampling at rate q, which nobody sees. A release about k steps has the record
    with probability ``1 - (1 - q)^k`` (`record_multiplier`).
``paper``
    The rule of the paper (`flwr_privacy.m2fdp.noise`).
``none``
    No noise.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from flwr_privacy.accounting import Charge, new_accountant, noise_multiplier, spent
from flwr_privacy.accounting.gaussian import check_delta, mu_of
from flwr_privacy.accounting.roots import root
from flwr_privacy.errors import (
    InvalidParameterError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from flwr_privacy.m2fdp.tree.tree import TierTree

from . import noise
from .schedule import EventSchedule, Segment
from .sensitivity import sensitivity, sensitivity_worst_case
from .terms import any_batch

__all__ = [
    "CALIBRATIONS",
    "RELEASE_STEPS",
    "BoundaryClass",
    "PaperFigures",
    "boundary_classes",
    "largest_weights",
    "multiplier",
    "paper_figures",
    "record_multiplier",
    "true_epsilon",
]

CALIBRATIONS = ("device", "record", "paper", "none")
"""The names of the ways to choose the noise."""

RELEASE_STEPS = ("round", "segment")
"""Local steps that the paper's sensitivity counts: all of the round, or those since a release."""

_SMALLEST = math.ulp(0.0)
_MARGIN = 1 + 1e-9  # for the rounding of whoever adds the releases up one by one
_PRECISION = 1e-7  # relative, of a noise multiplier that is searched for
_STEEPEST = 3.0  # the searched function is cut off there: it may be infinite
_BRACKET = 1.001  # about which it is searched: more than an accountant is off by


@dataclass(frozen=True, kw_only=True)
class BoundaryClass:
    """Devices whose noise enters at the same tier.

    Parameters
    ----------
    tier : int
        That tier; L where the devices add noise themselves.
    devices : tuple of str
        Their names, in the order of the tree.
    releases : int
        Noised releases of each in a round.
    periods : tuple of tuple of Segment
        What each release is about.
    """

    tier: int
    devices: tuple[str, ...]
    releases: int
    periods: tuple[tuple[Segment, ...], ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """Local steps that each release is about."""
        return tuple(sum(segment.steps for segment in period) for period in self.periods)


def boundary_classes(tree: TierTree, schedule: EventSchedule) -> tuple[BoundaryClass, ...]:
    """Return the classes of devices, those whose noise enters next to the cloud first.

    Raises
    ------
    InvalidParameterError
        If the tree lacks a tier of the schedule's events.

    Examples
    --------
    >>> tree = TierTree.of_fanouts((10, 5), p=0.5)
    >>> for found in boundary_classes(tree, EventSchedule(steps=20, events={1: 5})):
    ...     print(found.tier, len(found.devices), found.steps)
    1 25 (20,)
    2 25 (5, 5, 5, 5)
    """
    schedule.check_depth(tree.depth)
    devices: dict[int, list[str]] = {}
    for device in tree.devices:
        devices.setdefault(tree.tier(tree.boundary(device)), []).append(device)
    return tuple(
        BoundaryClass(
            tier=tier,
            devices=tuple(members),
            releases=schedule.releases(tier, tree.depth),
            periods=schedule.periods(tier),
        )
        for tier, members in sorted(devices.items())
    )


def multiplier(*, epsilon: float, delta: float, steps: int, total_steps: int) -> float:
    """Return the noise over the sensitivity of a release, for a budget of all data of a device.

    ``sqrt(total_steps / steps) / mu`` (not in the paper).

    Parameters
    ----------
    epsilon, delta : float
        The budget of the whole training: epsilon above 0, delta strictly between 0 and 1.
    steps : int
        Local steps that the release is about, from 1 to `total_steps`.
    total_steps : int
        Local steps of the whole training, tau.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Notes
    -----
    Guarantee: (epsilon, delta)-DP for all data of a device replaced, if the noise is Gaussian and
    every sensitivity is that of `Drift` or larger. Such a release is mu_r-GDP with ``mu_r^2 = mu^2
    steps / total_steps``, and the squares of all releases of a device add up to at most mu^2,
    however rounds and periods divide the steps: the total is the budget less a relative 1e-9.
    Without amplification by sampling. Where the schedule is chosen on the way, it must be so from
    what is public; the cap then holds too (see `flwr_privacy.accounting.accountants`).

    Examples
    --------
    200 rounds of 20 local steps, with one release a round or with four:

    >>> for steps in (20, 5):
    ...     print(round(multiplier(epsilon=1, delta=1e-5, steps=steps, total_steps=4000), 2))
    52.76
    105.52
    """
    check_integer("total_steps", total_steps, minimum=1)
    check_integer("steps", steps, minimum=1, maximum=total_steps)
    return math.sqrt(total_steps / steps) / mu_of(epsilon, delta) * _MARGIN


def record_multiplier(
    *,
    epsilon: float,
    delta: float,
    rate: float,
    periods: Sequence[int],
    rounds: int,
    accountant: str | None = None,
) -> float:
    """Return the noise over the sensitivity of all releases of a class, for a budget of a record.

    Parameters
    ----------
    epsilon, delta : float
        The budget of the whole training: epsilon above 0, delta strictly between 0 and 1.
    rate : float
        Rate q at which a local step samples a record, above 0 and at most 1.
    periods : sequence of int
        For each noised release of a round, the local steps that it is about, at least 1.
    rounds : int
        Rounds, at least 1.
    accountant : {"gdp", "rdp", "pld"}, optional
        Who adds up. Default: the tightest whose cap is proven, ``rdp``, or ``gdp`` where every
        record is in every release.

    Returns
    -------
    float
        Never too small; too large by a relative 1e-6, and where the periods differ by what the
        accountant's cap loses on unequal releases (far below 1 % of epsilon).

    Raises
    ------
    InvalidParameterError
        If a value is out of range, or no noise multiplier up to 1e9 is enough.

    Notes
    -----
    Guarantee: (epsilon, delta)-DP for one record that is there or not, if batches are Poisson
    samples that nobody sees, and every sensitivity is that of `Drift` or larger: with the record
    outside all batches of a period, nothing differs; otherwise as much may as if all data of the
    device did. (The gradient of a *batch* is clipped, so one record can move a step by 2 G.)

    Examples
    --------
    >>> round(record_multiplier(epsilon=8, delta=1e-3, rate=0.1, periods=[5, 5], rounds=10), 2)
    1.18
    """
    check_number("epsilon", epsilon, minimum=_SMALLEST)
    check_delta(delta)
    check_number("rate", rate, minimum=_SMALLEST, maximum=1)
    check_integer("rounds", rounds, minimum=1)
    if not periods:
        raise InvalidParameterError("periods", list(periods), "the steps of at least one release")
    counts: dict[float, int] = {}  # releases by the probability that they have the record
    for steps in periods:
        sampling = any_batch(rate, check_integer("periods", steps, minimum=1))
        counts[sampling] = counts.get(sampling, 0) + rounds
    if accountant is None:
        accountant = "gdp" if min(counts) == 1 else "rdp"
    return _least(epsilon, delta, tuple(counts.items()), accountant)


@lru_cache(maxsize=2**10)
def _least(
    epsilon: float, delta: float, counts: tuple[tuple[float, int], ...], accountant: str
) -> float:
    """Return the least noise multiplier for releases by sampling rate."""
    releases = sum(count for _, count in counts)

    def equal(sampling: float) -> float:
        return noise_multiplier(
            epsilon=epsilon,
            delta=delta,
            releases=releases,
            sampling=sampling,
            accountant=accountant,
        )

    if len(counts) == 1:
        return equal(counts[0][0])

    def charges(z: float) -> list[Charge]:
        return [Charge(noise_multiplier=z, sampling=q, count=count) for q, count in counts]

    def fits(z: float) -> bool:
        *before, last = charges(z)
        if new_accountant(accountant, before).would_exceed(last, epsilon=epsilon, delta=delta):
            return False
        return spent(charges(z), delta=delta, accountant=accountant) <= epsilon

    def excess(log_z: float) -> float:
        ratio = spent(charges(math.exp(log_z)), delta=delta, accountant=accountant) / epsilon
        return min(_STEEPEST, math.log(max(ratio, math.exp(-_STEEPEST))))

    # As if all had the record as often as the release that has it least often, and most often.
    rates = [sampling for sampling, _ in counts]
    low, high = equal(min(rates)) / _BRACKET, equal(max(rates)) * _BRACKET
    z = math.exp(root(excess, math.log(low), math.log(high), absolute=_PRECISION))
    step = _PRECISION
    while not fits(z):  # rounding, and what the cap loses
        z *= 1 + step
        step *= 2
    return z * _MARGIN


def true_epsilon(
    tree: TierTree,
    schedule: EventSchedule,
    tier: int,
    *,
    multiplier: float,
    rounds: int,
    delta: float,
    release_steps: str = "round",
    clean_events: bool = True,
) -> float:
    """Return the epsilon of all data of a device, for the paper's noise and the true sensitivity.

    That is, in a whole training, by Gaussian DP, with the worst drift and without credit for
    sampling (not in the paper).

    Parameters
    ----------
    tree : TierTree
        The tree; everybody takes part.
    schedule : EventSchedule
        The events of every round.
    tier : int
        Tier at which the devices' noise enters.
    multiplier : float
        The noise over the paper's sensitivity (`flwr_privacy.m2fdp.noise.noise_multiplier`), above
        0.
    rounds : int
        Rounds, at least 1.
    delta : float
        Strictly between 0 and 1.
    release_steps : {"round", "segment"}, default "round"
        The local steps in the paper's sensitivity: all of the round as printed, or those since the
        last noised release.
    clean_events : bool, default True
        Whether trusted nodes hand averages back inside a round, as the paper does.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, or no noise enters at that tier.

    Examples
    --------
    >>> tree = TierTree.of_fanouts((10, 5), p=0.5)
    >>> schedule = EventSchedule(steps=20, events={1: 5})
    >>> for tier in (1, 2):
    ...     print(round(true_epsilon(tree, schedule, tier, multiplier=10.73, rounds=200,
    ...         delta=1e-5), 2))
    35.65
    2.72
    """
    check_number("multiplier", multiplier, minimum=_SMALLEST)
    check_integer("rounds", rounds, minimum=1)
    found = _class_of(tree, schedule, tier)
    ratios = _drift_ratios(tree, schedule, found, release_steps, clean_events)
    return _device_epsilon(multiplier, ratios, rounds, delta)


@dataclass(frozen=True, kw_only=True)
class PaperFigures:
    """The epsilon of the paper's noise, by several readings; tables are by the tier of the noise.

    Parameters
    ----------
    multipliers : Mapping of int to float
        Noise over the paper's sensitivity.
    idealised : float
        Epsilon of the paper's reading: every local step is a release at rate q.
    record : Mapping of int to float
        Epsilon of a record in the real mechanism, with the paper's sensitivity (Lemma 1).
    drifted : Mapping of int to float
        The same with the sensitivity of the worst drift.
    device : Mapping of int to float
        Epsilon of all data of a device with the worst drift (`true_epsilon`).
    """

    multipliers: Mapping[int, float]
    idealised: float
    record: Mapping[int, float]
    drifted: Mapping[int, float]
    device: Mapping[int, float]


def paper_figures(
    *,
    tree: TierTree,
    schedule: EventSchedule,
    q: float,
    rounds: int,
    epsilon: float,
    delta: float,
    alpha: float | Sequence[float] = 1.0,
    n_comp: int | None = None,
    release_steps: str = "round",
    clean_events: bool = True,
    accountant: str = "pld",
) -> PaperFigures:
    """Return the epsilon of the paper's noise, for one record added or removed and for a device.

    Parameters
    ----------
    tree, schedule, rounds, release_steps, clean_events
        As in `true_epsilon`.
    q : float
        Rate at which a local step samples a record, above 0 and at most 1.
    epsilon, delta : float
        What the rule promises for the whole training.
    alpha : float or sequence of float, default 1.0
        The constants of the rule: one, or ``alpha_1, ..., alpha_L``; above 0.
    n_comp : int, optional
        Compositions in the rule. Default: all local steps.
    accountant : {"pld", "rdp"}, default "pld"
        Who adds up a record's cost.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.
    """
    steps = schedule.steps * check_integer("rounds", rounds, minimum=1)
    alphas = [alpha] * tree.depth if isinstance(alpha, int | float) else list(alpha)
    if len(alphas) != tree.depth:
        raise InvalidParameterError("alpha", alpha, f"one number, or {tree.depth} of them")

    def cost(charges: Iterable[Charge]) -> float:
        return spent(charges, delta=delta, accountant=accountant)

    multipliers, record, drifted, device = {}, {}, {}, {}
    for found in boundary_classes(tree, schedule):
        z = noise.noise_multiplier(
            q=q,
            n_comp=steps if n_comp is None else n_comp,
            eps=epsilon,
            delta=delta,
            alpha=alphas[found.tier - 1],
        )
        rates = [any_batch(q, count) for count in found.steps]
        lemma = [count / _counted(count, schedule, release_steps) for count in found.steps]
        worst = _drift_ratios(tree, schedule, found, release_steps, clean_events)
        multipliers[found.tier] = z
        record[found.tier] = cost(_charges(z, lemma, rates, rounds))
        drifted[found.tier] = cost(_charges(z, worst, rates, rounds))
        device[found.tier] = _device_epsilon(z, worst, rounds, delta)
    least = Charge(noise_multiplier=min(multipliers.values()), sampling=q, count=steps)
    return PaperFigures(
        multipliers=multipliers,
        idealised=cost([least]),
        record=record,
        drifted=drifted,
        device=device,
    )


def _charges(
    z: float, ratios: Iterable[float], rates: Iterable[float], rounds: int
) -> list[Charge]:
    """Return the charges of releases with such true sensitivities over those of the noise."""
    return [
        Charge(noise_multiplier=z / ratio, sampling=rate, count=rounds)
        for ratio, rate in zip(ratios, rates, strict=True)
    ]


def _device_epsilon(z: float, ratios: Sequence[float], rounds: int, delta: float) -> float:
    """Return the epsilon of all data of a device, without credit for sampling."""
    return spent(_charges(z, ratios, [1.0] * len(ratios), rounds), delta=delta, accountant="gdp")


def _class_of(tree: TierTree, schedule: EventSchedule, tier: int) -> BoundaryClass:
    classes = {found.tier: found for found in boundary_classes(tree, schedule)}
    if tier not in classes:
        raise InvalidParameterError("tier", tier, f"one at which noise enters: {sorted(classes)}")
    return classes[tier]


def _drift_ratios(
    tree: TierTree,
    schedule: EventSchedule,
    found: BoundaryClass,
    release_steps: str,
    clean_events: bool,
) -> list[float]:
    """Return for each release of a round: the worst sensitivity over the paper's."""
    check_flag("clean_events", clean_events)
    weights = largest_weights(tree, found.tier)
    fanouts = tree.smallest_fanouts()
    ratios = []
    for period, steps in zip(found.periods, found.steps, strict=True):
        parts = [(segment.steps, segment.tier) for segment in period]
        if not clean_events:
            parts = [(steps, period[-1].tier)]
        worst = sensitivity_worst_case(parts, weights=weights, eta=1.0, G=1.0)
        counted = _counted(steps, schedule, release_steps)
        ratios.append(worst / sensitivity(found.tier, eta=1.0, K=counted, G=1.0, fanouts=fanouts))
    return ratios


def _counted(steps: int, schedule: EventSchedule, release_steps: str) -> int:
    """Return the local steps that the paper's sensitivity of a release counts."""
    check_choice("release_steps", release_steps, RELEASE_STEPS)
    return schedule.steps if release_steps == "round" else steps


def largest_weights(tree: TierTree, boundary: int) -> dict[int, float]:
    """Return by tier the largest weight that a node has in the average of a boundary node.

    Parameters
    ----------
    tree : TierTree
        The tree.
    boundary : int
        Tier of the nodes that add the noise; there are some.
    """
    nodes = [node for node in tree.injectors() if tree.tier(node) == boundary]
    weights = {boundary: 1.0}
    level = [(node, 1.0) for node in nodes]
    for tier in range(boundary + 1, tree.depth + 1):
        level = [
            (child, weight / len(children))
            for node, weight in level
            for children in [tree.children(node)]
            for child in children
        ]
        weights[tier] = max(weight for _, weight in level)
    return weights
