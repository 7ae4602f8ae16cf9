"""Inline nodes that stand for deployed ones, with keys, pins and policies in files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from flwr_privacy.clients.node.context_store import SIMULATED
from flwr_privacy.m2fdp import CLOUD, TierTree
from flwr_privacy.wire.pins import Identity

__all__ = ["pinned_nodes", "tree_nodes"]


def pinned_nodes(folder: Path, clients: Sequence[str]) -> list[dict[str, Any]]:
    """Return the configurations of nodes that pin each other's long-term keys.

    Parameters
    ----------
    folder : Path
        Gets ``<client>.pem`` for each client and ``pins.toml`` for all of them.
    clients : sequence of str
        The clients, one for each node. A client's place is its part of the data.
    """
    pins, publics, nodes = folder / "pins.toml", {}, []
    for index, client in enumerate(clients):
        identity, key = Identity.generate(), folder / f"{client}.pem"
        identity.write(key)
        publics[client] = identity.public
        nodes.append(
            {
                "client-id": client,
                "partition-id": index,
                "num-partitions": len(clients),
                SIMULATED: False,
                "privacy-identity": str(key),
                "privacy-pins": str(pins),
            }
        )
    pins.write_text(tomli_w.dumps({"clients": publics}), encoding="utf-8")
    return nodes


def tree_nodes(
    folder: Path, tree: TierTree, *, trusted: Mapping[str, Sequence[str]] | None = None
) -> list[dict[str, Any]]:
    """Return the nodes of a tree: its devices, then the aggregators that their children trust.

    Parameters
    ----------
    folder : Path
        Gets what `pinned_nodes` writes, and ``<client>.policy`` for each client.
    tree : TierTree
        The tree. A policy trusts the parent of the client if the tree says that it is trusted.
    trusted : mapping, optional
        For some clients, the aggregators that their policies trust in place of that parent.
    """
    secure = [node for tier in tree.tiers[1:-1] for node in tier if tree.secure(node)]
    nodes = pinned_nodes(folder, [*tree.devices, *secure])
    for node in nodes:
        name = node["client-id"]
        parent = tree.parent(name)
        parents = [parent] if parent != CLOUD and tree.secure(parent) else []
        policy = folder / f"{name}.policy"
        rules = {"trusted_parents": list((trusted or {}).get(name, parents))}
        policy.write_text(tomli_w.dumps(rules), encoding="utf-8")
        node["privacy-policy"] = str(policy)
        node["m2fdp-role"] = "aggregator" if name in secure else "device"
    return nodes
