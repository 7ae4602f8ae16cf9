"""Checks the hosts of a running Ray cluster before a simulation joins it.

A client of a simulation may run on any host, in each round on another. So every host needs the same
packages, the same answer to whether it runs cohorts, and the same folder for the clients' ledgers
and caches: with a folder for each host, a client would lose its ledger when it moves.

The check joins the cluster in a process of its own, `ray_probe`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr_privacy.clients.node.context_store import STATE_VARIABLE
from flwr_privacy.clients.node.node_settings import COHORTS_VARIABLE
from flwr_privacy.errors import EngineError

__all__ = ["HostNeeds", "check_hosts"]

PROBE = Path(__file__).with_name("ray_probe.py")
PACKAGES = ("flwr-privacy", "flwr")
TIMEOUT = 120.0


@dataclass(frozen=True, kw_only=True)
class HostNeeds:
    """What runs need on every host of their cluster.

    Parameters
    ----------
    cohorts : bool
        Whether a node runs several clients.
    folders : sequence of Path
        Where the clients keep their state if the environment of a host names no other folder; none
        if they keep none.
    """

    cohorts: bool
    folders: Sequence[Path]


def check_hosts(ray_address: str, needs: HostNeeds) -> None:
    """Refuse a Ray cluster with a host that cannot run the clients of a simulation.

    Parameters
    ----------
    ray_address : str
        ``host:port`` of the cluster; this host is one of its nodes.
    needs : HostNeeds
        What each of its hosts must have.

    Raises
    ------
    EngineError
        If a host lacks something; the text says what, and how it gets it.
    """
    asked = {
        "address": ray_address,
        "cohorts": COHORTS_VARIABLE,
        "state": STATE_VARIABLE,
        "folders": [str(folder.resolve()) for folder in needs.folders],
        "packages": PACKAGES,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(PROBE), json.dumps(asked)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env={**os.environ, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        output = error.stderr or ""
        text = output if isinstance(output, str) else output.decode(errors="replace")
        raise EngineError(
            f"the hosts of the Ray cluster {ray_address} could not be checked: {error}\n"
            f"{text.strip()[-2000:]}"
        ) from error
    hosts = json.loads(done.stdout.splitlines()[-1])
    if wrong := list(_wrong(hosts, needs)):
        what = f"the Ray cluster {ray_address} cannot run the clients of this simulation"
        raise EngineError("\n  ".join([what, *wrong]))


def _wrong(hosts: list[dict[str, Any]], needs: HostNeeds) -> Iterator[str]:
    """Yield what is wrong with the hosts, each with its remedy."""
    here = {name: version(name) for name in PACKAGES}
    everywhere = {host["name"] for host in hosts}
    for host in hosts:
        name, packages = host["name"], host["packages"]
        for package, wanted in here.items():
            if (found := packages[package]) != wanted:
                yield f"{name}: {package} {found or 'is missing'}, expected {wanted} as here"
        if needs.cohorts and host["cohorts"] != "1":
            yield (
                f"{name}: {COHORTS_VARIABLE} is not 1 there: set it before `ray start`, or use as "
                "many workers as clients"
            )
        for folder, found in host["folders"].items():
            if error := found["error"]:
                yield f"{name}: the folder for the clients' state cannot be used: {error}"
            elif unseen := sorted(everywhere - set(found["seen"])):
                yield (
                    f"{name}: its folder for the clients' state, {folder}, is not the one of "
                    f"{', '.join(unseen)}: all hosts need the same shared folder, the run folder "
                    f"or the one that {STATE_VARIABLE} names before each `ray start`"
                )
