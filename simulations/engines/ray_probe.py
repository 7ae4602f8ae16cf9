"""Asks every host of a Ray cluster what it has, as a script that joins the cluster.

It needs Ray and the standard library alone: a host may lack this package, and Ray sends `_on_host`
there as it stands here.
"""

import importlib
import json
import logging
import os
import sys
import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Print what each host has, as JSON."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    ray: Any = importlib.import_module("ray")  # its types know neither options nor arguments
    asked = json.loads(sys.argv[1])
    ray.init(address=asked.pop("address"), log_to_driver=False, logging_level=logging.ERROR)
    # Those that run clients: they are the ones with a processor.
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    names = [f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})" for node in nodes]
    token = uuid.uuid4().hex
    work = ray.remote(num_cpus=0)(_on_host)

    def on_hosts(step: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ray.get(
            [
                work.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote(
                    step, name, token, **asked
                )
                for node, name in zip(nodes, names, strict=True)
            ]
        )
        return found

    # All hosts have left their files before one of them looks for those of the others.
    on_hosts("leave")
    found = on_hosts("look")
    on_hosts("remove")
    print(json.dumps(found))


def _on_host(
    step: str,
    name: str,
    token: str,
    *,
    cohorts: str,
    state: str,
    folders: list[str],
    packages: list[str],
) -> dict[str, Any]:
    """Leave a file in each folder for clients' state, look for those of all hosts, or remove it.

    Returns
    -------
    dict
        What this host has.
    """

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return ""

    def visited(folder: str) -> dict[str, Any]:
        prefix = f".{token} "
        own = Path(folder, prefix + name)
        try:
            if step == "leave":
                own.touch()
            elif step == "remove":
                own.unlink(missing_ok=True)
            files = (path.name for path in Path(folder).iterdir())
            seen = [file.removeprefix(prefix) for file in files if file.startswith(prefix)]
        except OSError as error:
            return {"seen": [], "error": str(error)}
        return {"seen": seen, "error": ""}

    own = os.environ.get(state)
    return {
        "name": name,
        "packages": {package: installed(package) for package in packages},
        "cohorts": os.environ.get(cohorts),
        "folders": {folder: visited(folder) for folder in ([own] if folders and own else folders)},
    }


if __name__ == "__main__":
    main()
