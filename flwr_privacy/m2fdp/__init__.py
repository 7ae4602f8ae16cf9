"""Differentially private federated learning over a tree of aggregators (M2FDP).

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation".
Devices train, a tree of aggregators averages their models at several time scales, and noise enters
each path to the cloud once, where trust ends. The modules, from the tree upwards: `tree` and
`schedule` say who is where and when what is averaged; `sensitivity`, `noise`, `privacy` how much
noise that takes; `bounds` the paper's theorems; `resources` and `control` what a round costs and
how long it should be; `zone`, `sums` and `models` do what the nodes do, `plan` and `terms` what the
server settles and asks, `options` what a user chooses.
"""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

from .sensitivity import (
    Drift,
    Reach,
    sensitivity,
    sensitivity_node,
    sensitivity_smooth,
    sensitivity_worst_case,
    smooth_factor,
)

if TYPE_CHECKING:
    from flwr_privacy.m2fdp.control.bounds import (
        abc_terms,
        corollary_gap,
        stationarity_gap,
        step_size,
        theorem1_bound,
    )
    from flwr_privacy.m2fdp.control.controller import AdaptiveController, Decision
    from flwr_privacy.m2fdp.control.resources import Cost, Link, ResourceModel
    from flwr_privacy.m2fdp.tree.counts import TierCounts
    from flwr_privacy.m2fdp.tree.tree import CLOUD, TierTree

    from .guarantee import guarantee_of
    from .models import TreeModels, ZonePlace, moved
    from .noise import noise_multiplier, one_shot_sigma, sigma, tree_noise_var, variance_by_tier
    from .options import (
        AdaptiveControl,
        DeviceNoise,
        LemmaDrift,
        NoNoise,
        PaperNoise,
        RecordNoise,
        SmoothDrift,
        TierNoise,
        TierPrivacy,
        WorstDrift,
    )
    from .plan import Asked, Exchange, RoundPlan, ZoneRelease, boundary_tier, exchanges
    from .privacy import (
        BoundaryClass,
        boundary_classes,
        multiplier,
        paper_figures,
        record_multiplier,
        true_epsilon,
    )
    from .release import DeviceUpdate, SealedUpdate, ZoneAverage
    from .schedule import EventSchedule, Segment
    from .sums import TierSums
    from .terms import (
        AGGREGATE,
        CODES,
        DELIVER,
        DOWN,
        EVENT,
        NOISED,
        SCHEME,
        UP,
        VALUE_RANGE,
        Delivery,
        Duty,
        M2FDPTerms,
        any_batch,
    )
    from .zone import Upload, averaged, noised, trained
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "AGGREGATE",
    "CLOUD",
    "CODES",
    "DELIVER",
    "DOWN",
    "EVENT",
    "NOISED",
    "SCHEME",
    "UP",
    "VALUE_RANGE",
    "AdaptiveControl",
    "AdaptiveController",
    "Asked",
    "BoundaryClass",
    "Cost",
    "Decision",
    "Delivery",
    "DeviceNoise",
    "DeviceUpdate",
    "Drift",
    "Duty",
    "EventSchedule",
    "Exchange",
    "LemmaDrift",
    "Link",
    "M2FDPTerms",
    "NoNoise",
    "PaperNoise",
    "Reach",
    "RecordNoise",
    "ResourceModel",
    "RoundPlan",
    "SealedUpdate",
    "Segment",
    "SmoothDrift",
    "TierCounts",
    "TierNoise",
    "TierPrivacy",
    "TierSums",
    "TierTree",
    "TreeModels",
    "Upload",
    "WorstDrift",
    "ZoneAverage",
    "ZonePlace",
    "ZoneRelease",
    "abc_terms",
    "any_batch",
    "averaged",
    "boundary_classes",
    "boundary_tier",
    "corollary_gap",
    "exchanges",
    "guarantee_of",
    "moved",
    "multiplier",
    "noise_multiplier",
    "noised",
    "one_shot_sigma",
    "paper_figures",
    "record_multiplier",
    "sensitivity",
    "sensitivity_node",
    "sensitivity_smooth",
    "sensitivity_worst_case",
    "sigma",
    "smooth_factor",
    "stationarity_gap",
    "step_size",
    "theorem1_bound",
    "trained",
    "tree_noise_var",
    "true_epsilon",
    "variance_by_tier",
]
