"""Differentially private federated learning over a tree of aggregators (M2FDP).

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation".
Devices train, a tree of aggregators averages their models at several time scales, and noise enters
each path to the cloud once, where trust ends. The modules, from the tree upwards: `tree` and
`schedule` say who is where and when what is averaged; `sensitivity`, `calibration` and
`paper_noise` how much noise that takes; `control` what a round costs and how long it should be;
`zone_average`, `sums` and `models` do what the nodes do, `plan` and `terms` what the server
settles and asks, `options` what a user chooses. The paper's theorems are in
`flwr_privacy.simulations.research.m2fdp`.
"""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from flwr_privacy.m2fdp.control.cohorts import TierCohorts
    from flwr_privacy.m2fdp.control.controller import AdaptiveController, Decision
    from flwr_privacy.m2fdp.control.options import AdaptiveControl
    from flwr_privacy.m2fdp.control.resources import ResourceModel
    from flwr_privacy.m2fdp.tree.counts import TierCounts
    from flwr_privacy.m2fdp.tree.exchanges import Asked, Exchange
    from flwr_privacy.m2fdp.tree.tree import CLOUD, TierTree

    from .guarantee import guarantee_of
    from .models import TreeModels
    from .options import (
        DeviceNoise,
        LemmaDrift,
        NoNoise,
        PaperNoise,
        RecordNoise,
        SmoothDrift,
        TierPrivacy,
        WorstDrift,
    )
    from .plan import M2FDPRoundPlan
    from .release import DeviceUpdate, SealedUpdate, ZoneAverage
    from .schedule import EventSchedule
    from .sensitivity import Drift
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
        Delivery,
        Duty,
        M2FDPTerms,
    )
    from .zone_average import Upload, averaged, noised
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
    "AdaptiveControl",
    "AdaptiveController",
    "Asked",
    "Decision",
    "Delivery",
    "DeviceNoise",
    "DeviceUpdate",
    "Drift",
    "Duty",
    "EventSchedule",
    "Exchange",
    "LemmaDrift",
    "M2FDPRoundPlan",
    "M2FDPTerms",
    "NoNoise",
    "PaperNoise",
    "RecordNoise",
    "ResourceModel",
    "SealedUpdate",
    "SmoothDrift",
    "TierCohorts",
    "TierCounts",
    "TierPrivacy",
    "TierSums",
    "TierTree",
    "TreeModels",
    "Upload",
    "WorstDrift",
    "ZoneAverage",
    "averaged",
    "guarantee_of",
    "noised",
]
