"""A tree as a TOML file: one table for every aggregator."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr_privacy.errors import InvalidParameterError, check_choice, check_flag

from .shape import CLOUD, check_name, check_names

__all__ = ["read_nodes", "read_tables"]

_KEYS = ("parent", "trusted", "devices")


def read_tables(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises
    ------
    InvalidParameterError
        If the file cannot be read or is no TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        allowed = f"a file that can be read ({error.strerror})"
        raise InvalidParameterError("tree", str(path), allowed) from error
    except ValueError as error:  # no UTF-8, or no TOML
        raise InvalidParameterError("tree", str(path), f"a TOML file ({error})") from error


def read_nodes(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a tree from the tables of a file.

    Raises
    ------
    InvalidParameterError
        If a key is unknown or a value not allowed; the message names the node.
    """
    for key in tables:
        check_choice("key", key, ["nodes"])
    nodes = tables.get("nodes")
    if not isinstance(nodes, dict) or not nodes:
        raise InvalidParameterError("nodes", nodes, "a table [nodes.NAME] for every aggregator")
    parents: dict[str, str] = {}
    below: dict[str, str] = {}
    trusted: set[str] = set()
    for node, table in nodes.items():
        where = f"nodes.{node}"
        if not isinstance(table, dict):
            raise InvalidParameterError(where, table, "a table")
        for key in table:
            check_choice(f"{where}: key", key, _KEYS if node != CLOUD else ["devices"])
        if node != CLOUD:
            parents[node] = check_name(
                f"{where}: parent", table.get("parent", CLOUD), or_cloud=True
            )
            if parents[node] != CLOUD and parents[node] not in nodes:
                allowed = f"'{CLOUD}' or a node of the file"
                raise InvalidParameterError(f"{where}: parent", parents[node], allowed)
        if check_flag(f"{where}: trusted", table.get("trusted", False)):
            trusted.add(node)
        if "devices" in table:
            for device in check_names(f"{where}: devices", table["devices"]):
                if device in below or device in nodes:
                    other = f"a device of {below[device]!r}" if device in below else "an aggregator"
                    allowed = f"a name that is not yet {other}"
                    raise InvalidParameterError(f"{where}: devices", device, allowed)
                below[device] = node
    return {"parents": parents | below, "devices": tuple(below), "trusted": frozenset(trusted)}
