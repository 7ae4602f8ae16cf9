"""Computes, from the plan of a round, the noise of the next model and what it leaves to learn."""

import math

from flwr_privacy.m2fdp.tree.exchanges import Exchange
from flwr_privacy.privacy.forecast import Forecast

from .options import DeviceNoise
from .plan import M2FDPRoundPlan

__all__ = ["device_sigma", "forecast_of"]


def device_sigma(plan: M2FDPRoundPlan, exchange: Exchange, leaf: str) -> float:
    """Return the noise of a device whose aggregator is insecure, in an exchange."""
    asked = exchange.leaves[leaf]
    return plan.release_of(leaf, exchange).multiplier * 2 * plan.bound(asked.steps)


def forecast_of(plan: M2FDPRoundPlan, *, weights: int, devices: int) -> Forecast:
    """Return what the noise of a round's events leaves of a training.

    Parameters
    ----------
    plan : M2FDPRoundPlan
        A round with noise.
    weights : int
        Entries of what is uploaded.
    devices : int
        Devices that take part in a round, the same share of every aggregator's.
    """
    tree = plan.tree
    share = devices / len(tree.devices)
    entered: dict[tuple[int, str], float] = {}  # variances, by exchange and node
    for exchange in plan.exchanges:
        for leaf in filter(exchange.ends, exchange.leaves):
            if tree.secure(leaf):
                node, release = (
                    tree.boundary(tree.children(leaf)[0]),
                    plan.release_of(leaf, exchange),
                )
                variance = (release.multiplier * release.sensitivity / share) ** 2
            else:
                node, count = leaf, len(tree.children(leaf))
                variance = device_sigma(plan, exchange, leaf) ** 2 / (count * share)
            entered[exchange.index, node] = tree.weight(node) ** 2 * variance
    own_noise = any(not tree.secure(leaf) for leaf in tree.tiers[tree.depth - 1])
    return Forecast(
        ratio=math.sqrt(sum(entered.values())) / plan.bound(plan.schedule.steps),
        weights=weights,
        clients=devices,
        rounds=plan.rounds,
        own_noise=own_noise,
        remedies=(
            *(("RecordNoise",) if isinstance(plan.privacy, DeviceNoise) else ()),
            *(("more trusted aggregators",) if own_noise else ()),
        ),
    )
