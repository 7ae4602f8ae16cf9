"""States the guarantee of M2FDP, by the calibration of its noise and the place of aggregators."""

from collections.abc import Collection

from flwr_privacy.m2fdp.tree.tree import TierTree
from flwr_privacy.privacy.guarantee import Guarantee

from .options import PaperNoise, TierPrivacy
from .plan import M2FDPRoundPlan
from .schedule import EventSchedule
from .terms import RECORD

__all__ = ["guarantee_of"]

_NEIGHBOURS = {
    "user": "all data of one device are replaced by any others",
    "record": "one record of a device is there or not",
}
_PROTECTS = {"user": "all data of a device", "record": "one record of a device"}


def guarantee_of(
    privacy: TierPrivacy,
    tree: TierTree,
    schedule: EventSchedule,
    *,
    plan: M2FDPRoundPlan | None,
    relay: bool,
    kept_back: Collection[str],
    insecure: bool,
) -> Guarantee:
    """Return the guarantee of a training.

    Parameters
    ----------
    privacy : TierPrivacy
        What is protected, with which noise.
    tree : TierTree
        Who there is.
    schedule : EventSchedule
        When the tiers aggregate.
    plan : M2FDPRoundPlan, optional
        The round at hand; None before the first.
    relay : bool
        Whether secure aggregators are nodes of their own.
    kept_back : collection of str
        Arrays of the model that are not sent.
    insecure : bool
        Whether noise came from a seed.

    Examples
    --------
    >>> from flwr_privacy.m2fdp import DeviceNoise, EventSchedule, TierTree
    >>> guarantee_of(
    ...     DeviceNoise(), TierTree.of_fanouts((2, 3), p=1.0), EventSchedule(),
    ...     plan=None, relay=False, kept_back=[], insecure=False,
    ... ).neighbours
    'all data of one device are replaced by any others'
    """
    if not privacy.noised:
        return Guarantee(
            scheme="m2fdp",
            protects="nothing",
            adversary="nobody",
            not_protected=("the update of a device: there is no noise",),
            evidence=("tests of M2FDP's trees, sums and charges",),
        )
    epsilon = privacy.epsilon
    if plan is not None:
        epsilon = max(plan.epsilon(tier) for tier in plan.boundaries)
    secure = any(tree.secure(node) for tier in tree.tiers[1:-1] for node in tier)
    clean_events = privacy.clean and bool(schedule.events)
    not_protected = [
        "who takes part (no amplification by it is counted), and whether and when a device fails "
        "or declines",
        "what the user's own code sends elsewhere, and timing",
    ]
    assumptions = []
    if secure:
        not_protected.insert(
            0,
            "members of one trusted zone from each other and from its aggregators: they see "
            "averages without noise; of two children each knows the other's answer"
            if clean_events
            else "devices of a trusted zone from its aggregators, which see their answers",
        )
        assumptions += _of_zones(relay)
    evaluated = plan is not None and plan.evaluation is not None
    if evaluated and privacy.unit == RECORD:
        assumptions.append(
            "the accuracy that the app's evaluation returns is the share of its records that are "
            "right, each by itself"
        )
    if kept_back:
        not_protected.append(f"(not sent at all: {', '.join(sorted(kept_back))})")
    law = privacy.law.law
    if clean_events and law != "worst" and secure:
        assumptions.append(
            "losses are convex and smooth, and stay so under clipping: nobody checks it"
            if law == "lemma"
            else "losses are as smooth as declared: nobody checks it"
        )
    if isinstance(privacy, PaperNoise):
        not_protected.insert(
            0,
            f"the (epsilon = {privacy.epsilon:g}) that the paper's noise is named after: what it "
            f"costs, all data of a device replaced, is epsilon {epsilon:.4g}",
        )
    return Guarantee(
        scheme="m2fdp",
        protects=_PROTECTS[privacy.unit],
        adversary=(
            "everyone above the point in the tree where the device's noise is added: the cloud, "
            "aggregators that are not trusted, other zones"
            + (", and who relays the messages" if relay else "")
        ),
        neighbours=_NEIGHBOURS[privacy.unit],
        epsilon=epsilon,
        delta=privacy.delta,
        not_protected=tuple(not_protected),
        assumptions=tuple(assumptions),
        evidence=(
            "tests of M2FDP: how far one device moves a model, the noise, what devices charge",
            "the attack that flwr-privacy attack m2fdp runs",
            "tests of the accountants against closed formulas and against each other",
        ),
        void="noise came from an insecure seed, for tests" if insecure else "",
    )


def _of_zones(relay: bool) -> list[str]:
    if relay:
        return [
            "a trusted aggregator follows the protocol: it adds the noise of its zone and keeps "
            "what it sees to itself",
            "the keys that a device or an aggregator pins are the others'",
        ]
    return [
        "the server is trusted: it simulates the secure aggregators, sees the updates of their "
        "devices without noise, and adds the noise (a simulation; `relay` makes them nodes of "
        "their own)",
    ]
