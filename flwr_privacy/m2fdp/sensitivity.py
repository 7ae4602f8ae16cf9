"""Bounds how far one device's data can move the values that a trusted node passes on.

Source: "Differentially-Private Multi-Tier Federated Learning: A Formal Analysis and Evaluation",
Lemma 1, and what it leaves out. Neighbours differ in all data of one device j. A local step moves a
model by at most ``eta * G`` (the gradient is clipped to G), so k steps of j move it by at most
``2 eta k G`` between neighbours, and an average in which j has weight w by w times that. Lemma 1
has no more. It is exact while only j's own steps differ. After a *clean event*, an average without
noise that a trusted node hands back to its devices, all of them train on from a model that
differs, and how far their steps drift apart is a matter of the loss. The laws of drift:

``worst``
    nothing is assumed but the clipping: steps from different models may differ by ``2 eta G``.
``smooth``
    a step from another model with the same data stretches the distance of the two by at most
    ``1 + eta beta``. So it is with beta-smooth losses, plain gradient steps without momentum or
    state, and a clipping of each batch's gradient, or of the update of all steps together: neither
    stretches. The two runs draw the same batches. Never more than ``worst``.
``lemma``
    such a step does not stretch at all. So it is for convex beta-smooth losses with
    ``eta <= 2 / beta`` as long as the clipping does not undo it, which an active clipping of a
    batch's gradient may. It gives Lemma 1 whatever the clean events.

Guarantee
---------
`Drift` follows two runs that differ in all data of one device, from one noised release to the next:
what is released is common to both, so both go on from it. The batches of equal data are equal too.
A `Reach` bounds the distance of the two runs for every device j of the trusted zone at once, so
noise that is drawn for it does not depend on whose data are protected. By induction:

- Training. Before it, a leaf's models are as far apart as the moves of the tiers at which it has
  the ancestor that j has. With equal models and equal data they stay equal. Otherwise updates of
  length at most ``bound`` add at most ``2 bound``; where the data are equal, the law may have less.
- Average. The weights sum to one, so all children together bring in at most the largest of the
  moves of the tiers that they share. Only the child above j brings in more, times its weight.
- Clean event. All devices below the node start from its average: what it was moved by one of its
  branches has become a move of all of them.

Rounding to a grid moves each of two results, hence `slack`. Who takes part may not depend on the
data; and all bounds rest on clipping by the devices of the zone, which trust each other.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.m2fdp.tree.tree import TierTree

__all__ = [
    "DRIFTS",
    "Drift",
    "Reach",
    "largest_weights",
    "sensitivity_worst_case",
]

DRIFTS = ("worst", "smooth", "lemma")
"""The names of the laws of drift."""

_LARGEST_EXPONENT = 700.0  # of e, in a float
_ROUNDING = 1e-9  # by which rounded weights may pass a sum of one


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How far the data of one device of a trusted zone can move a model of the zone (L2 norms).

    It belongs to a leaf's or a node's model, and is for two runs in which all data of one device
    differ.

    Parameters
    ----------
    anchor : int
        Tier of the farthest ancestor under which a device can move this model; the device's own
        tier L at first.
    shared : float, default 0.0
        How far a device under the ancestor at tier `anchor` can move it, wherever it is there.
    nearer : tuple of (int, float), default ()
        How much farther, if the device also is under the ancestor at a tier below `anchor`
        (a larger number): tiers, in order, and lengths.
    own : float, default 0.0
        How much farther, if the device is this leaf, or under this node.

    Raises
    ------
    InvalidParameterError
        If a length is negative or not finite, or the tiers are out of order.
    """

    anchor: int
    shared: float = 0.0
    nearer: tuple[tuple[int, float], ...] = ()
    own: float = 0.0

    def __post_init__(self) -> None:
        check_integer("anchor", self.anchor, minimum=0)
        check_number("shared", self.shared, minimum=0)
        check_number("own", self.own, minimum=0)
        previous = self.anchor
        for tier, length in self.nearer:
            check_integer("nearer", tier, minimum=previous + 1)
            check_number("nearer", length, minimum=0)
            previous = tier

    @property
    def common(self) -> float:
        """How far the model can be moved, if not by what is its `own`."""
        return self.shared + sum(length for _, length in self.nearer)

    @property
    def total(self) -> float:
        """How far any device can move the model: the sensitivity, if it is released now."""
        return self.common + self.own


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The law by which models drift apart, applied to a `Reach`.

    Parameters
    ----------
    law : {"worst", "smooth", "lemma"}, default "worst"
        See the top of this module.
    growth : float, default 1.0
        For ``smooth``: by how much a local step may stretch a distance, ``1 + eta * beta``.

    Raises
    ------
    InvalidParameterError
        If the law is unknown, or `growth` is below 1.

    Examples
    --------
    Five devices, events after 5, 10, 15 of 20 steps of length 1, the last one noised:

    >>> drift = Drift()
    >>> reach = Reach(anchor=2)
    >>> for tier in (1, 1, 1, 0):
    ...     trained = drift.trained(reach, bound=5.0, steps=5)
    ...     reach = drift.averaged([(trained, 0.2)] * 5, tier=1)
    ...     sensitivity = reach.total
    ...     reach = drift.broadcast(reach, tier=1)
    >>> sensitivity, sensitivity / (2 * 20 / 5)  # the second: over that of Lemma 1
    (32.0, 4.0)
    """

    law: str = "worst"
    growth: float = 1.0

    def __post_init__(self) -> None:
        check_choice("law", self.law, DRIFTS)
        check_number("growth", self.growth, minimum=1)

    def trained(self, reach: Reach, *, bound: float, steps: int, slack: float = 0.0) -> Reach:
        """Return the reach of a device's model after local training.

        Parameters
        ----------
        reach : Reach
            That of the model that it started from.
        bound : float
            Largest L2 norm of the update: ``steps * eta * G``.
        steps : int
            Local steps, at least 1.
        slack : float, default 0.0
            By how much rounding an update may move the difference of two of them.

        Raises
        ------
        InvalidParameterError
            If a value is out of range.
        """
        check_number("bound", bound, minimum=0)
        check_integer("steps", steps, minimum=1)
        check_number("slack", slack, minimum=0)
        apart = 2 * bound
        moves = _moves(reach)
        if not moves:  # the two runs start from the same model: only the device's own data differ
            return Reach(anchor=reach.anchor, own=reach.own + apart)
        if self.law != "worst":
            stretch = self._stretch(steps)
            stretched = {tier: length * stretch for tier, length in moves.items()}
            stretched[min(moves)] += slack
            added = sum(stretched.values()) - reach.common
            if added < apart:  # what the device's own data add comes to `apart` in all
                return _reach(stretched, tier=reach.anchor, own=reach.own + apart - added)
        moves[min(moves)] += apart
        return _reach(moves, tier=reach.anchor, own=reach.own)

    def averaged(
        self, children: Sequence[tuple[Reach, float]], *, tier: int, slack: float = 0.0
    ) -> Reach:
        """Return the reach of the average that a node forms.

        Parameters
        ----------
        children : sequence of (Reach, float)
            Reach and weight of every child that took part. The weights are above 0 and sum to one;
            of several children with the same reach and weight one is enough.
        tier : int
            Tier of the node.
        slack : float, default 0.0
            By how much rounding the average may move the difference of two of them.

        Raises
        ------
        InvalidParameterError
            If a value is out of range.
        """
        check_integer("tier", tier, minimum=0)
        check_number("slack", slack, minimum=0)
        total = sum(check_number("weight", w, minimum=math.ulp(0.0)) for _, w in children)
        if not 0 < total <= 1 + _ROUNDING:
            raise InvalidParameterError("weights", total, "weights that sum to one at most")
        moves: dict[int, float] = {}  # of the tiers that the children share
        own = 0.0
        for reach, weight in children:
            branch = reach.own
            for at, length in _moves(reach).items():
                if at <= tier:
                    moves[at] = max(moves.get(at, 0.0), length)
                else:
                    branch += length
            own = max(own, weight * branch)
        if moves:
            moves[min(moves)] += slack
        elif own > 0:
            own += slack
        return _reach(moves, tier=tier, own=own)

    def broadcast(self, reach: Reach, *, tier: int) -> Reach:
        """Return the reach of the devices' models after a clean event.

        Parameters
        ----------
        reach : Reach
            That of the average which the event's top node hands out.
        tier : int
            Tier of this node.

        Raises
        ------
        InvalidParameterError
            If a value is out of range.
        """
        check_integer("tier", tier, minimum=0)
        moves: dict[int, float] = {tier: reach.own}
        for at, length in _moves(reach).items():
            moves[min(at, tier)] = moves.get(min(at, tier), 0.0) + length
        return _reach(moves, tier=tier)

    def _stretch(self, steps: int) -> float:
        """Return by what factor steps may stretch a distance."""
        if self.law == "lemma":
            return 1.0
        exponent = steps * math.log(self.growth)
        return math.exp(exponent) if exponent < _LARGEST_EXPONENT else math.inf


def sensitivity_worst_case(
    segments: Iterable[tuple[int, int]], *, weights: Mapping[int, float], eta: float, G: float
) -> float:
    """Return the L2 sensitivity of a noised release under the bound of the gradients alone.

    The devices whose models differ are j at first, and after a clean event at tier l all leaves
    under j's ancestor at tier l too. The result is ``2 eta G`` times the sum, over the steps since
    the last noised release, of their weight in the average of the boundary node (not in the paper).

    Parameters
    ----------
    segments : iterable of (int, int)
        What happened since the last noised release: local steps, at least 1, and the tier of the
        event after them; the last event is the release.
    weights : Mapping of int to float
        By tier, the largest weight that a node of this tier has in the boundary node's average,
        above 0 and at most 1: from the boundary's tier (where it is 1) to L, the devices'.
    eta : float
        Step size, at least 0.
    G : float
        Bound of the gradients' L2 norms, at least 0.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(sensitivity_worst_case([(5, 1), (5, 1), (5, 1), (5, 0)], weights={1: 1.0, 2: 0.2},
    ...     eta=0.01, G=1.0), 6)
    0.32
    """
    if not weights:
        raise InvalidParameterError("weights", weights, "a weight by tier")
    largest = {tier: _weight(weight) for tier, weight in weights.items()}
    boundary, farthest = min(largest), max(largest)
    steps_weighted = 0.0
    for steps, event in segments:
        steps_weighted += check_integer("steps", steps, minimum=1) * largest[farthest]
        if event >= boundary:
            if event not in largest:
                raise InvalidParameterError("weights", weights, f"a weight for tier {event}")
            farthest = min(farthest, event)
    check_number("eta", eta, minimum=0)
    check_number("G", G, minimum=0)
    return 2 * eta * G * steps_weighted


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


def _weight(weight: float) -> float:
    if not 0 < check_number("weight", weight) <= 1:
        raise InvalidParameterError("weight", weight, "a number above 0 and at most 1")
    return weight


def _moves(reach: Reach) -> dict[int, float]:
    """Return by tier how far a device under the same ancestor moves a model; only if it does."""
    moves = {reach.anchor: reach.shared, **dict(reach.nearer)}
    return {tier: length for tier, length in moves.items() if length > 0}


def _reach(moves: Mapping[int, float], *, tier: int, own: float = 0.0) -> Reach:
    """Return the reach of a model with such moves; its anchor is `tier` if there are none."""
    first, *nearer = sorted((at, length) for at, length in moves.items() if length > 0) or [
        (tier, 0.0)
    ]
    return Reach(anchor=first[0], shared=first[1], nearer=tuple(nearer), own=own)
