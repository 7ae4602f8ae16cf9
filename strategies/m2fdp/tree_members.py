"""Assigns clients to the leaves of a tree."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp import TierPrivacy, TierTree
from flwr_privacy.wire.message import Fields

__all__ = [
    "MIN_CHILDREN",
    "any_trusted",
    "check_leaves",
    "check_min_children",
    "check_relayed",
    "devices_among",
    "fitting_fanouts",
    "members",
    "settled",
]

logger = logging.getLogger("flwr.privacy")

MIN_CHILDREN = 2
"""Fewest answers that a trusted aggregator averages, unless the user says otherwise."""


def members(tree: TierTree, *, relayed: bool) -> int:
    """Return the number of Flower nodes in a tree: devices, and trusted aggregators."""
    aggregators = sum(tree.secure(node) for tier in tree.tiers[1:-1] for node in tier)
    return len(tree.devices) + (aggregators if relayed else 0)


def check_relayed(privacy: TierPrivacy, virtual_clients: int | None) -> None:
    """Refuse aggregators with nodes of their own if the options do not support them.

    Raises
    ------
    InvalidParameterError
        If clients are simulated, or there is no noise that aggregators could add.
    """
    if virtual_clients is not None:
        raise InvalidParameterError("clients", virtual_clients, "None with `relay`")
    if not privacy.noised:
        allowed = "false without noise: an aggregator of its own has nothing to add"
        raise InvalidParameterError("relay", True, allowed)


def devices_among(clients: Iterable[str], introductions: Mapping[str, Fields]) -> list[str]:
    """Return the clients that introduced themselves as devices."""
    return [c for c in clients if introductions.get(c, {}).get("role", "device") == "device"]


def any_trusted(tree: TierTree) -> bool:
    """Tell whether some aggregator of a tree is trusted."""
    return any(tree.secure(node) for tier in tree.tiers[1:-1] for node in tier)


def check_min_children(tree: TierTree, least: int) -> None:
    """Refuse a number of children without effect, or with which nothing would be passed on.

    Raises
    ------
    InvalidParameterError
        If no aggregator is trusted and it is not the usual one, or a trusted one has fewer.
    """
    if least != MIN_CHILDREN and not any_trusted(tree):
        raise InvalidParameterError(
            "min_children",
            least,
            f"{MIN_CHILDREN} where no aggregator of the tree is trusted: nobody averages before "
            "the noise",
        )
    for tier in tree.tiers[1:-1]:
        for node in filter(tree.secure, tier):
            children = len(tree.children(node))
            if children < least:
                raise InvalidParameterError(
                    "min_children",
                    least,
                    f"at most {children}, the children of '{node}', which is trusted and would "
                    "hand nothing on",
                )


def check_leaves(tree: TierTree, clients: int, *, named: bool) -> None:
    """Refuse a tree that has no leaf for some clients, whose data would be left out.

    Parameters
    ----------
    tree : TierTree
        The tree.
    clients : int
        Number of the devices that are there.
    named : bool
        Whether the tree says which client is which leaf; some of those may not be there.

    Raises
    ------
    InvalidParameterError
        If there are more clients than leaves, or fewer in a tree without names; it says what fits.
    """
    leaves = len(tree.devices)
    if clients == leaves or (named and clients < leaves):
        return
    if named:
        allowed = f"at most {leaves}, the leaves of the tree: another client would be left out"
        raise InvalidParameterError("clients", clients, allowed)
    fanouts = [max(tree.fanouts(tier)) for tier in range(tree.depth)]
    fitting = ",".join(map(str, fitting_fanouts(clients, fanouts)))
    raise InvalidParameterError(
        "fanouts",
        ",".join(map(str, fanouts)),
        f"a tree with a leaf for each of the {clients} clients, such as fanouts={fitting}; this "
        f"one has {leaves} leaves, for clients={leaves}",
    )


def fitting_fanouts(clients: int, like: Sequence[int]) -> tuple[int, ...]:
    """Return fanouts with a leaf for each client, as many as others and as near as can be.

    Tiers in which a node has one child are left out.

    Examples
    --------
    >>> fitting_fanouts(20, (5, 3))
    (5, 4)
    >>> fitting_fanouts(7, (3, 2))
    (7,)
    """
    if len(like) == 1:
        return (clients,)
    divisors = [n for n in range(2, clients) if clients % n == 0]
    found = [(first, *fitting_fanouts(clients // first, like[1:])) for first in divisors]

    def distance(fanouts: tuple[int, ...]) -> tuple[int, float]:
        pairs = zip(fanouts, like, strict=False)
        return len(like) - len(fanouts), sum(abs(math.log(own / other)) for own, other in pairs)

    return min(found, key=distance, default=(clients,))


def settled(
    tree: TierTree,
    clients: Sequence[str],
    *,
    named: bool,
    devices: Sequence[str] | None,
    least: int,
) -> TierTree:
    """Assign the clients to the leaves of the tree, and return it.

    Parameters
    ----------
    tree : TierTree
        The tree, with names of its own for its leaves unless it is `named`.
    clients : sequence of str
        The devices that are there.
    named : bool
        Whether the tree says which client is which leaf. Otherwise they are the leaves in the order
        of their names, shorter ones first.
    devices : sequence of str, optional
        The leaves of the training that is gone on with.
    least : int
        Fewest devices of a round (``min_train_nodes``).

    Raises
    ------
    InvalidParameterError
        If there are more or fewer clients than leaves without a name, none of those that are named,
        or fewer leaves than a round takes.
    """
    if devices is not None:
        tree = tree.with_devices(devices)
    elif not named:
        ordered = sorted(clients, key=lambda name: (len(name), name))
        check_leaves(tree, len(ordered), named=False)
        tree = tree.with_devices(ordered)
    if missing := sorted(set(tree.devices) - set(clients)):
        logger.warning("devices of the tree that are not there: %s", missing[:10])
        if len(missing) == len(tree.devices):
            allowed = f"leaves that are there, such as {list(clients)[:5]}"
            raise InvalidParameterError("tree", missing[:5], allowed)
    if strange := sorted(set(clients) - set(tree.devices)):
        logger.warning("clients that are no leaf of the tree are not asked: %s", strange[:10])
    if tree.withdrawn:
        logger.warning(
            "not trusted, because a child of theirs is not: %s", ", ".join(tree.withdrawn)
        )
    if least > max(2, len(tree.devices)):
        allowed = f"at most {len(tree.devices)}, the devices of the tree"
        raise InvalidParameterError("min_train_nodes", least, allowed)
    return tree
