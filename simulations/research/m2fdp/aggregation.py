"""One aggregation event on plain models: the reference for the strategy and the client.

This is an aggregation of Algorithm 1 of "Differentially-Private Multi-Tier Federated Learning: A
Formal Analysis and Evaluation" in float64. It draws no noise of its own: whoever calls it says what
noise is, so a test can hand it a stub.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.m2fdp.tree.tree import TierTree

__all__ = ["aggregate_event"]

Vector = NDArray[np.float64]

_NARROW = 16  # entries of a model up to which a call for each of them is faster than for each node


def aggregate_event(
    tree: TierTree,
    models: Mapping[str, Vector] | Vector,
    *,
    event_tier: int,
    noise: Callable[[str], Vector | None] | None = None,
    min_children: int = 1,
    participants: Collection[str] | None = None,
) -> dict[str, Vector]:
    """Average the devices' models tier by tier up to the nodes of one tier.

    A node has the plain mean of what its children send. A secure node or a device with an insecure
    parent adds noise to what it sends; the nodes at `event_tier` keep theirs and send nothing.

    Parameters
    ----------
    tree : TierTree
        The aggregators, and who of them is secure.
    models : Mapping of str to (d,) array, or (N_L, d) array
        Models by device; whoever is missing did not answer. Or one row for every device of the
        tree, in the order of ``tree.devices``. They are not changed.
    event_tier : int
        From 0, the global event, to ``tree.depth - 1``.
    noise : callable, optional
        Takes the name of a node and returns its noise, a (d,) array, or None for none. It is
        called once for each of ``tree.injectors(event_tier)`` that takes part, in that order. By
        default nobody adds anything.
    min_children : int, default 1
        A secure node with fewer children that take part is left out of the event, and with it
        everybody below. Insecure nodes need one: all they get is noised.
    participants : collection of str, optional
        Devices that take part; of `models`, the others do not count. By default everybody with a
        model.

    Returns
    -------
    dict of str to (d,) float64
        Models of the nodes at `event_tier` that take part, in the order of the tree; at 0 that of
        the cloud, or nothing if nobody answered.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, a device is not in the tree, a participant has no model, or a
        model or noise has another shape than the others.

    Notes
    -----
    Weights are 1 over the number of children that take part, at every node: a mean of means.

    Examples
    --------
    >>> tree = TierTree.of_fanouts((2, 2), p=0.5)
    >>> models = np.array([[1.0], [3.0], [5.0], [7.0]])
    >>> stub = {"t1-0": 0.1, "2": 0.2, "3": 0.4}
    >>> aggregate_event(tree, models, event_tier=0, noise=lambda node: np.array([stub[node]]))
    {'cloud': array([4.2])}
    """
    check_integer("event_tier", event_tier, minimum=0, maximum=tree.depth - 1)
    check_integer("min_children", min_children, minimum=1)
    values, answered = _rows(tree, models, participants)
    present = _present(tree, answered, event_tier, min_children)
    noises: dict[int, list[tuple[int, Vector]]] = {}
    if noise is not None:
        noises = _noises(tree, noise, present, event_tier, values.shape[1])
    if not isinstance(models, Mapping) and (tree.depth in noises or not answered.all()):
        values = values.copy()
    for tier in range(tree.depth, event_tier, -1):
        for position, added in noises.get(tier, ()):
            values[position] += added
        values = _means(values, present[tier], tree.fanouts(tier - 1))
    kept = zip(tree.tiers[event_tier], values, present[event_tier], strict=True)
    return {node: model for node, model, is_present in kept if is_present}


def _rows(
    tree: TierTree, models: Mapping[str, Vector] | Vector, participants: Collection[str] | None
) -> tuple[Vector, NDArray[np.bool_]]:
    """Return the models as rows in the order of the tree, and who takes part."""
    count = len(tree.devices)
    if isinstance(models, Mapping):
        values, answered = _stacked(tree, models)
    else:
        values = np.asarray(models, np.float64)
        if values.ndim != 2 or len(values) != count:
            raise InvalidParameterError("models", values.shape, f"the shape ({count}, d)")
        answered = np.ones(count, np.bool_)
    if participants is not None:
        asked = np.zeros(count, np.bool_)
        asked[[_row(tree, "participants", device) for device in participants]] = True
        if np.any(silent := asked & ~answered):
            device = tree.devices[int(np.argmax(silent))]
            raise InvalidParameterError("participants", device, "a device that has a model")
        answered = asked
    return values, answered


def _stacked(tree: TierTree, models: Mapping[str, Vector]) -> tuple[Vector, NDArray[np.bool_]]:
    positions = [_row(tree, "models", device) for device in models]
    answered = np.zeros(len(tree.devices), np.bool_)
    answered[positions] = True
    rows = [np.asarray(model, np.float64) for model in models.values()]
    shape = rows[0].shape if rows else (0,)
    for device, row in zip(models, rows, strict=True):
        if row.ndim != 1 or row.shape != shape:
            found = f"{row.shape} of device {device!r}"
            raise InvalidParameterError("shape of models", found, "one shape (d,) for all")
    values = np.zeros((len(tree.devices), *shape))
    if rows:
        values[positions] = rows
    return values, answered


def _row(tree: TierTree, parameter: str, device: Any) -> int:
    if device not in tree.parents or tree.children(device):
        raise InvalidParameterError(parameter, device, "devices of the tree")
    return tree.position(device)


def _present(
    tree: TierTree, answered: NDArray[np.bool_], event_tier: int, min_children: int
) -> dict[int, NDArray[np.bool_]]:
    """Return by tier, down from the event's, which nodes take part."""
    present = {tree.depth: answered}
    for tier in range(tree.depth - 1, event_tier - 1, -1):
        count = _counts(present[tier + 1], tree.fanouts(tier))
        least: Any = 1
        if min_children > 1:
            secure = np.array([tree.secure(node) for node in tree.tiers[tier]])
            least = np.where(secure, min_children, 1)
        present[tier] = count >= least
    return present


def _noises(
    tree: TierTree,
    noise: Callable[[str], Vector | None],
    present: Mapping[int, NDArray[np.bool_]],
    event_tier: int,
    size: int,
) -> dict[int, list[tuple[int, Vector]]]:
    """Ask every injecting node that takes part for its noise; by tier, with its position."""
    noises: dict[int, list[tuple[int, Vector]]] = {}
    for node in tree.injectors(event_tier):
        tier, position = tree.tier(node), tree.position(node)
        if not present[tier][position] or (drawn := noise(node)) is None:
            continue
        added = np.asarray(drawn, np.float64)
        if added.shape != (size,):
            found = f"{added.shape} of node {node!r}"
            raise InvalidParameterError("shape of noise", found, f"({size},)")
        noises.setdefault(tier, []).append((position, added))
    return noises


def _means(values: Vector, present: NDArray[np.bool_], fanouts: tuple[int, ...]) -> Vector:
    """Return the parents' means of those children that take part; 0 where there are none."""
    if not present.all():
        values[~present] = 0  # not a product: what is left out may be infinite
    means = _sums(values, fanouts)
    means /= np.maximum(_counts(present, fanouts), 1)[:, np.newaxis]
    return means


def _counts(present: NDArray[np.bool_], fanouts: tuple[int, ...]) -> NDArray[np.int64]:
    """Return how many children of every node take part."""
    starts = np.cumsum((0, *fanouts[:-1]))
    counts: NDArray[np.int64] = np.add.reduceat(present.astype(np.int64), starts)
    return counts


def _sums(values: Vector, fanouts: tuple[int, ...]) -> Vector:
    """Return the sums over the children of every node, which are rows side by side.

    Both ways add child after child, in the order of the tree, so the last bit is that of a loop.
    """
    sums = np.empty((len(fanouts), values.shape[1]))
    if values.shape[1] <= _NARROW:
        parents = np.repeat(np.arange(len(fanouts)), fanouts)
        for column in range(values.shape[1]):
            sums[:, column] = np.bincount(parents, weights=values[:, column])
        return sums
    start = 0
    for node, count in enumerate(fanouts):
        np.add.reduce(values[start : start + count], axis=0, out=sums[node])
        start += count
    return sums
