"""Deployed nodes that know each other by their long-term keys."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr_privacy.wire.pins import Identity


def pinned_nodes(
    folder: Path, clients: Sequence[str], *, pinned: bool = True, policy: str = ""
) -> list[dict[str, Any]]:
    """Return the configurations of nodes, each with a long-term key, a policy and all pins."""
    lines = ["[clients]"]
    configs: list[dict[str, Any]] = []
    for index, client in enumerate(clients):
        key = folder / f"{client}.pem"
        if not key.exists():
            Identity.generate().write(key)
        lines.append(f'"{client}" = "{Identity.read(key).public}"')
        config = {"client-id": client, "partition-id": index, "num-partitions": len(clients)}
        config["privacy-simulated"] = False  # they stand for deployed ones
        configs.append({**config, "privacy-identity": str(key)})
    pins, rules = folder / "pins.toml", folder / "pinned-policy.toml"
    pins.write_text("\n".join(lines))
    rules.write_text(policy)
    for config in configs:
        config |= {"privacy-policy": str(rules)} if policy else {}
        config |= {"privacy-pins": str(pins)} if pinned else {}
    return configs
