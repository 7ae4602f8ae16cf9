"""Nodes of a tree with trusted aggregators: identities, pins and policies on disk."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from flwr_privacy.m2fdp import CLOUD, TierTree
from flwr_privacy.wire.pins import Identity

__all__ = ["tree_file", "zone_nodes"]


def tree_file(tree: TierTree) -> str:
    """Return the text of a file that `TierTree.read` reads as this tree."""
    nodes: dict[str, Any] = {}
    for node in (node for tier in tree.tiers[:-1] for node in tier):
        own = (
            {} if node == CLOUD else {"parent": tree.parent(node), "trusted": node in tree.trusted}
        )
        devices = [child for child in tree.children(node) if child in tree.devices]
        nodes[node] = own | ({"devices": devices} if devices else {})
    return tomli_w.dumps({"nodes": nodes})


def zone_nodes(
    tree: TierTree,
    folder: Path,
    *,
    policies: Mapping[str, Mapping[str, Any]] | None = None,
    unpinned: Sequence[str] = (),
    **shared: Any,
) -> list[dict[str, Any]]:
    """Return the configuration of every device and every secure aggregator of a tree.

    Each pins its parent and its children, but for those in `unpinned`, whom nobody pins, and trusts
    its parent in the tree where that is secure; `policies` are put over what a node's has.
    """
    names = [*tree.devices, *(n for tier in tree.tiers[1:-1] for n in tier if tree.secure(n))]
    publics = {}
    for name in names:
        identity = Identity.generate()
        identity.write(folder / f"{name}.pem")
        publics[name] = identity.public
    nodes = []
    for index, name in enumerate(names):
        device = name in tree.devices
        parent = tree.parent(name)
        neighbours = [parent] if parent != CLOUD and tree.secure(parent) else []
        policy: dict[str, Any] = {"trusted_parents": list(neighbours)}
        neighbours += [] if device else tree.children(name)
        pins = {n: publics[n] for n in neighbours if n not in unpinned}
        policy |= (policies or {}).get(name, {})
        (folder / f"{name}.pins").write_text(tomli_w.dumps({"clients": pins}))
        (folder / f"{name}.policy").write_text(tomli_w.dumps(policy))
        nodes.append(
            {
                "client-id": name,
                "privacy-simulated": False,  # they stand for deployed ones
                "partition-id": index,
                "num-partitions": len(names),
                "m2fdp-role": "device" if device else "aggregator",
                "privacy-identity": str(folder / f"{name}.pem"),
                "privacy-pins": str(folder / f"{name}.pins"),
                "privacy-policy": str(folder / f"{name}.policy"),
                **shared,
            }
        )
    return nodes
