"""The nodes of a deployed run: their identities, and the files that each of them owns."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tomli_w

from flwr_privacy.central_dp.sensitivity import SERVER
from flwr_privacy.clients.node.context_store import ALLOW_UNPROTECTED
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp import CLOUD, TierTree
from flwr_privacy.privacy.policy import Policy
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.wire.pins import Identity

__all__ = ["DeployedNode", "check_policy", "members_of", "prepare", "tree_of"]

Config = dict[str, str | int]


@dataclass(frozen=True, kw_only=True)
class DeployedNode:
    """A node and its role in the training.

    Parameters
    ----------
    client_id : str
        Who it is.
    partition : int, optional
        Its part of the task's data; an aggregator has none.
    partitions : int
        Number of parts.
    aggregator : bool, default False
        Whether it is an aggregator of its own, in a scheme with tiers.
    trusted_parent : str, optional
        Aggregator that its policy trusts.
    allow_unprotected : str, default ""
        Scheme in which the server is trusted with its answers without noise. A policy of the node
        has to list it by itself.
    """

    client_id: str
    partition: int | None
    partitions: int
    aggregator: bool = False
    trusted_parent: str | None = None
    allow_unprotected: str = ""


def members_of(settings: Settings, nodes: int) -> list[DeployedNode]:
    """Return the nodes of a run: the clients first, then aggregators that are nodes of their own.

    Clients are called by their numbers, as in a simulation, or as the tree calls them. Under
    ``central-dp`` with ``noise = "server"`` they trust the server; whoever wants answers without
    noise in another way has to write a policy that allows them.

    Raises
    ------
    InvalidParameterError
        If a scheme with tiers has another number of devices, or trusts aggregators that the server
        would have to simulate.
    """
    from flwr_privacy.simulations.tasks.tasks import check_data

    trusted_server = settings.scheme == "central-dp" and settings.strategy.get("noise") == SERVER
    plain = [
        DeployedNode(
            client_id=str(i),
            partition=i,
            partitions=nodes,
            allow_unprotected=settings.scheme if trusted_server else "",
        )
        for i in range(nodes)
    ]
    tree = tree_of(settings)
    if tree is None:
        return plain
    secure = [node for tier in tree.tiers[1:-1] for node in tier if tree.secure(node)]
    if settings.clients is not None:
        if secure:
            allowed = (
                f"true: the devices trust aggregators ({', '.join(secure[:3])}), which a server "
                "that is deployed must not simulate"
            )
            raise InvalidParameterError("relay", False, allowed)
        return plain
    if len(tree.devices) != nodes:
        allowed = (
            f"{len(tree.devices)}, the devices of the tree (aggregators are nodes beside them)"
        )
        raise InvalidParameterError("--nodes", nodes, allowed)
    check_data(replace(settings, clients=nodes))
    members = []
    for index, name in enumerate([*tree.devices, *secure]):
        parent = tree.parent(name)
        trusted = parent != CLOUD and tree.secure(parent)
        members.append(
            DeployedNode(
                client_id=name,
                partition=index if index < nodes else None,
                partitions=nodes,
                aggregator=index >= nodes,
                trusted_parent=parent if trusted else None,
            )
        )
    return members


def check_policy(policy: Path, members: Sequence[DeployedNode]) -> None:
    """Check that a policy for all nodes does not say what the tree says for each of them.

    Raises
    ------
    InvalidParameterError
        If it has trusted parents and a node has one of its own.
    """
    if Policy.read(policy).trusted_parents is not None and any(m.trusted_parent for m in members):
        allowed = "a policy without trusted_parents: the tree says whom each node trusts"
        raise InvalidParameterError("--policy", str(policy), allowed)


def tree_of(settings: Settings) -> TierTree | None:
    """Return the tree of a scheme with tiers, with names of its own; None for other schemes."""
    # Imported late: torch takes seconds, which `--help` need not wait for.
    from flwr_privacy.simulations.app.server_app import build_strategy

    if settings.scheme != "m2fdp":
        return None
    tree: TierTree = build_strategy(settings, None).tree  # type: ignore[attr-defined]
    return tree


def prepare(
    members: Sequence[DeployedNode], folder: Path, *, policy: Path | None, test_seed: int | None
) -> list[Config]:
    """Write the files that each node owns, and return the configurations of the nodes.

    In ``node-0``, ``node-1``, ... below `folder`: ``identity.pem`` (the client's long-term key),
    ``pins.toml`` (the public keys of all clients), ``policy.toml`` and the folder ``state`` for
    ledgers and kept replies. What is there of an earlier start is kept.
    """
    homes = [folder / f"node-{index}" for index in range(len(members))]
    publics = {}
    for member, home in zip(members, homes, strict=True):
        (home / "state").mkdir(mode=0o700, parents=True, exist_ok=True)
        key = home / "identity.pem"
        if not key.exists():
            Identity.generate().write(key)
        publics[member.client_id] = Identity.read(key).public
    allowed = {} if policy is None else tomllib.loads(policy.read_text(encoding="utf-8"))
    configs = []
    for member, home in zip(members, homes, strict=True):
        (home / "pins.toml").write_text(tomli_w.dumps({"clients": publics}), encoding="utf-8")
        rules = dict(allowed)
        if member.trusted_parent is not None:
            rules["trusted_parents"] = [member.trusted_parent]
        if rules and not (home / "policy.toml").exists():
            (home / "policy.toml").write_text(tomli_w.dumps(rules), encoding="utf-8")
        configs.append(_config(member, home, test_seed))
    return configs


def _config(member: DeployedNode, home: Path, test_seed: int | None) -> Config:
    config: Config = {
        "client-id": member.client_id,
        "privacy-state": str(home / "state"),
        "privacy-identity": str(home / "identity.pem"),
        "privacy-pins": str(home / "pins.toml"),
    }
    if member.partition is not None:
        config |= {"partition-id": member.partition, "num-partitions": member.partitions}
    if member.aggregator:
        config["m2fdp-role"] = "aggregator"
    if (home / "policy.toml").exists():
        config["privacy-policy"] = str(home / "policy.toml")
    elif member.allow_unprotected:
        config[ALLOW_UNPROTECTED] = member.allow_unprotected
    if test_seed is not None:
        config["insecure-seed"] = test_seed
    return config
