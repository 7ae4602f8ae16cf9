"""Computes what the paper's noise costs: the epsilon that its rule is named after is not kept.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
Proposition 1. Nothing leaves a trusted zone in a local step. The boundary node's average is
released, once a round or more often, and it is about all local steps since the last release. With
one noise rule for all tiers the devices get unequal privacy.

Here a *class* of devices is those whose boundary nodes are at the same tier.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flwr_privacy.accounting import ADD_REMOVE, Charge, spent
from flwr_privacy.errors import (
    InvalidParameterError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from flwr_privacy.m2fdp.options import RELEASE_STEPS
from flwr_privacy.m2fdp.paper_noise import noise_multiplier
from flwr_privacy.m2fdp.schedule import EventSchedule, Segment
from flwr_privacy.m2fdp.sensitivity import largest_weights, sensitivity_worst_case
from flwr_privacy.m2fdp.terms import any_batch
from flwr_privacy.m2fdp.tree.tree import TierTree

from .noise_theory import sensitivity

__all__ = [
    "BoundaryClass",
    "PaperEpsilons",
    "boundary_classes",
    "paper_epsilons",
    "true_epsilon",
]

_SMALLEST = math.ulp(0.0)


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
        The noise over the paper's sensitivity, above 0: see
        `flwr_privacy.m2fdp.paper_noise.noise_multiplier`.
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
class PaperEpsilons:
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


def paper_epsilons(
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
) -> PaperEpsilons:
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
        z = noise_multiplier(
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
        # Without a sample an epsilon is that of the multiplier alone, whatever the neighbours.
        device[found.tier] = _device_epsilon(z, worst, rounds, delta)
    least = Charge(
        noise_multiplier=min(multipliers.values()),
        neighbours=ADD_REMOVE,
        sampling=q,
        count=steps,
    )
    return PaperEpsilons(
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
        Charge(noise_multiplier=z / ratio, neighbours=ADD_REMOVE, sampling=rate, count=rounds)
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
