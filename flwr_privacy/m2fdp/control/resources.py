"""Energy and delay of a round of M2FDP, from public counts alone.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation".
Only uploads and local steps are charged; broadcasts are free, as in the paper. The paper counts one
message for each hop, however large the tree is, and takes all constants as given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.m2fdp.tree.counts import TierCounts

__all__ = ["DELAY_MODES", "STAR_LINKS", "Cost", "Link", "ResourceModel"]

DELAY_MODES = ("paper_sum", "tdma", "parallel")
"""How the uploads of an event share the time: see `ResourceModel`."""

STAR_LINKS = ("wired", "wireless")
"""How a device without an aggregator reaches the cloud."""

_TINY = 1e-300  # the least positive number that is allowed


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link: its transmit power and rate.

    Parameters
    ----------
    dbm : float
        Power of the sender in decibels over a milliwatt.
    rate : float
        Bits per second, above 0.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> link = Link(dbm=30, rate=1e6)
    >>> link.watts, link.seconds(2e6), link.joules(2e6)
    (1.0, 2.0, 2.0)
    """

    dbm: float
    rate: float

    def __post_init__(self) -> None:
        check_number("dbm", self.dbm, minimum=-1000, maximum=1000)
        check_number("rate", self.rate, minimum=_TINY)

    @property
    def watts(self) -> float:
        """Power in watts."""
        return float(10 ** ((self.dbm - 30) / 10))

    def seconds(self, bits: float) -> float:
        """Return the seconds that a number of bits takes."""
        return bits / self.rate

    def joules(self, bits: float) -> float:
        """Return the energy in joules that a number of bits costs the sender."""
        return self.watts * bits / self.rate


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a round: joules of all nodes together, and seconds.

    Raises
    ------
    InvalidParameterError
        If a value is negative or no number.
    """

    energy: float
    seconds: float

    def __post_init__(self) -> None:
        check_number("energy", self.energy, minimum=0)
        check_number("seconds", self.seconds, minimum=0)


@dataclass(frozen=True, kw_only=True)
class ResourceModel:
    """Energy and delay of local steps and of uploads.

    Parameters
    ----------
    bits : int, default 32
        Bits of one parameter on a link; the paper does not give it.
    wireless : Link
        Every hop below the cloud, 24 dBm and 35 Mbit/s by default, as in the paper.
    wired : Link
        From tier 1 to the cloud, 38 dBm and 100 Mbit/s by default, as in the paper.
    step_energy : float, default 1e-3
        Joules of one local step of one device.
    step_seconds : float, default 0.2
        Seconds of one local step; devices step at the same time.
    delay_mode : {"paper_sum", "tdma", "parallel"}, default "paper_sum"
        ``paper_sum``: all uploads one after the other, also those of different subtrees, as the
        paper's formula has it. ``tdma``: the children of a node one after the other, nodes of a
        tier at the same time, tiers one after the other, and one upload over the wired link.
        ``parallel``: one upload for each tier.
    star_link : {"wired", "wireless"}, default "wired"
        The link of devices that stand under the cloud themselves; the paper does not say. Under
        ``tdma`` the cloud hears wired children at the same time, wireless ones in turn.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> counts = TierCounts.of_fanouts((10, 5))
    >>> cost = ResourceModel().round(counts, steps=20, events={1: 3}, parameters=7840)
    >>> round(cost.energy, 7), round(cost.seconds, 6)
    (1.5183986, 5.458688)
    """

    bits: int = 32
    wireless: Link = field(default_factory=lambda: Link(dbm=24.0, rate=35e6))
    wired: Link = field(default_factory=lambda: Link(dbm=38.0, rate=100e6))
    step_energy: float = 1e-3
    step_seconds: float = 0.2
    delay_mode: str = "paper_sum"
    star_link: str = "wired"

    def __post_init__(self) -> None:
        check_integer("bits", self.bits, minimum=1)
        for name, link in (("wireless", self.wireless), ("wired", self.wired)):
            if not isinstance(link, Link):
                raise InvalidParameterError(name, link, "a Link")
        check_number("step_energy", self.step_energy, minimum=0)
        check_number("step_seconds", self.step_seconds, minimum=0)
        check_choice("delay_mode", self.delay_mode, DELAY_MODES)
        check_choice("star_link", self.star_link, STAR_LINKS)

    def round(
        self,
        counts: TierCounts,
        *,
        steps: int,
        parameters: int,
        events: Mapping[int, int] | None = None,
        participants: Sequence[int] | None = None,
    ) -> Cost:
        """Return the cost of one round, its global event included.

        Parameters
        ----------
        counts : TierCounts
            The tree.
        steps : int
            Local steps of each device that takes part, at least 1.
        parameters : int
            Parameters of the model, at least 1.
        events : mapping from int to int, optional
            For a tier from 1 to L-1 the number of local events that reach up to it. None: no
            local events.
        participants : sequence of int, optional
            Devices that take part under each lowest aggregator, in the order of
            ``counts.lowest``, none more than there are. None: all.

        Raises
        ------
        InvalidParameterError
            If a value is not allowed.
        """
        check_integer("steps", steps, minimum=1)
        check_integer("parameters", parameters, minimum=1)
        events = checked_events(events or {}, counts.depth)
        taking = counts.lowest if participants is None else tuple(participants)
        if len(taking) != len(counts.lowest):
            allowed = f"{len(counts.lowest)} counts, one for each lowest aggregator"
            raise InvalidParameterError("participants", participants, allowed)
        for count, most in zip(taking, counts.lowest, strict=True):
            check_integer("participants", count, minimum=0, maximum=most)
        work: dict[str, Any] = {"steps": steps, "parameters": parameters, "events": events}
        energy = self.energy(counts, devices=sum(taking), **work)
        seconds = self.seconds(counts, devices=sum(taking), most=max(taking), **work)
        return Cost(energy=float(energy), seconds=float(seconds))

    def energy(
        self,
        counts: TierCounts,
        *,
        steps: ArrayLike,
        devices: ArrayLike,
        events: Mapping[int, Any],
        parameters: int,
    ) -> NDArray[np.float64]:
        """Return joules of rounds; arrays of `steps`, `devices` and events are broadcast.

        Parameters
        ----------
        counts : TierCounts
            The tree.
        steps, devices : array of int
            Local steps, and devices that take part.
        events : mapping from int to array of int
            Local events by tier.
        parameters : int
            Parameters of the model.
        """
        bits = self.bits * parameters
        hop, top = self.wireless.joules(bits), self._top(counts).joules(bits)
        taking = np.asarray(devices, dtype=np.float64)
        total: NDArray[np.float64] = taking * np.asarray(steps) * self.step_energy
        for tier, number in events.items():
            total = total + np.asarray(number) * _uploads(counts, taking, tier) * hop
        total = total + _uploads(counts, taking, 1) * hop + _at_the_cloud(counts, taking) * top
        return total

    def seconds(
        self,
        counts: TierCounts,
        *,
        steps: ArrayLike,
        devices: ArrayLike,
        most: ArrayLike,
        events: Mapping[int, Any],
        parameters: int,
    ) -> NDArray[np.float64]:
        """Return seconds of rounds, like `energy`.

        Parameters
        ----------
        counts : TierCounts
            The tree.
        steps, devices, most : array of int
            Local steps, devices that take part, and the most of them under one aggregator.
        events : mapping from int to array of int
            Local events by tier.
        parameters : int
            Parameters of the model.
        """
        bits = self.bits * parameters
        hop, top = self.wireless.seconds(bits), self._top(counts).seconds(bits)
        taking, largest = np.asarray(devices, dtype=np.float64), np.asarray(most)
        total = (
            np.asarray(steps) * self.step_seconds + self._turns(counts, taking, largest, 1) * hop
        )
        for tier, number in events.items():
            total = total + np.asarray(number) * self._turns(counts, taking, largest, tier) * hop
        at_the_cloud = np.ones_like(taking)
        wireless_star = counts.depth == 1 and self.star_link == "wireless"
        if self.delay_mode == "paper_sum" or (self.delay_mode == "tdma" and wireless_star):
            at_the_cloud = _at_the_cloud(counts, taking)
        total = total + at_the_cloud * top
        return total

    def _top(self, counts: TierCounts) -> Link:
        """Return the link of the cloud's children."""
        wireless = counts.depth == 1 and self.star_link == "wireless"
        return self.wireless if wireless else self.wired

    def _turns(
        self, counts: TierCounts, devices: NDArray[Any], most: NDArray[Any], tier: int
    ) -> NDArray[Any]:
        """Return how many wireless uploads follow each other in an event up to `tier`."""
        if self.delay_mode == "paper_sum":
            return _uploads(counts, devices, tier)
        if counts.depth == 1:
            return np.zeros_like(most)
        receiving = counts.children[tier:]
        if self.delay_mode == "parallel":
            return np.full_like(most, len(receiving))
        return most + sum(max(tier_children) for tier_children in receiving[:-1])


def checked_events(events: Mapping[int, Any], depth: int) -> dict[int, int]:
    """Return the number of local events by tier.

    Raises
    ------
    InvalidParameterError
        If a tier is not one of the aggregators, or a number is negative.
    """
    checked = {}
    for tier, number in events.items():
        if depth == 1:
            raise InvalidParameterError(
                "events", events, "none in a star, which has no aggregators"
            )
        check_integer("events: tier", tier, minimum=1, maximum=depth - 1)
        checked[tier] = check_integer(f"events[{tier}]", number, minimum=0)
    return checked


def _uploads(counts: TierCounts, devices: NDArray[Any], tier: int) -> NDArray[Any]:
    """Return the uploads below the nodes of `tier`: devices and the aggregators in between."""
    if counts.depth == 1:  # what reaches the cloud itself is counted apart
        return np.zeros_like(devices)
    return devices + sum(counts.nodes[tier:-1])


def _at_the_cloud(counts: TierCounts, devices: NDArray[Any]) -> NDArray[Any]:
    """Return the uploads that reach the cloud."""
    return devices if counts.depth == 1 else np.full_like(devices, counts.nodes[0])
