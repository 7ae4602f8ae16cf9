"""Charges the devices of a tree once for every release that contains their answers."""

from collections.abc import Callable

from flwr_privacy.accounting import Charge
from flwr_privacy.m2fdp import Exchange, M2FDPRoundPlan
from flwr_privacy.strategies.requests.request_log import RequestLog

__all__ = ["TierCharges"]


class TierCharges:
    """The charges of one round.

    Parameters
    ----------
    plan : M2FDPRoundPlan
        The round, with its noise.
    """

    def __init__(self, plan: M2FDPRoundPlan) -> None:
        self._plan = plan
        self._devices = set(plan.tree.devices)
        self._paid: dict[str, int] = {}  # the last period that a device has paid for

    def costs(self, exchange: Exchange) -> Callable[[str], Charge | None] | None:
        """Return the cost of an answer for each device: that of the release that contains it."""
        if not self._plan.privacy.noised:
            return None
        costs = {leaf: self._plan.release_of(leaf, exchange).charge() for leaf in exchange.leaves}
        # Also one that a server asked before it was resumed, and that is not there any more.
        return lambda client: costs.get(self._parent(client))

    def charged(self, exchange: Exchange) -> Callable[[RequestLog], set[str]]:
        """Return a function that gives the devices charged in an exchange."""
        return lambda request_log: {
            device
            for device in request_log.released()
            if self._paid.get(device) != self._period(exchange, device)
        }

    def pay(self, exchange: Exchange, request_log: RequestLog) -> None:
        """Record the devices that were charged for the period of an exchange."""
        for device in request_log.released():
            if (period := self._period(exchange, device)) is not None:
                self._paid[device] = period

    def _period(self, exchange: Exchange, device: str) -> int | None:
        asked = exchange.leaves.get(self._parent(device))
        return None if asked is None else asked.period

    def _parent(self, device: str) -> str:
        """Return the aggregator of a device; nothing for one that is no leaf of the tree."""
        return self._plan.tree.parent(device) if device in self._devices else ""
