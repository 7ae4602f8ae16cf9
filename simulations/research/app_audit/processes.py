"""Starts the processes of an audit, and ends those that take too long."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .target import Target
from .transcript import Transcript

__all__ = ["run_module", "run_probe"]

_PACKAGE = "flwr_privacy.simulations.research.app_audit"


def run_module(
    name: str, asked: Mapping[str, Any], *, target: Target, seconds: float, log: Path
) -> bool:
    """Run a module of this package in a process of its own; tell whether it ended in time.

    Parameters
    ----------
    name : str
        The module, as "probe".
    asked : mapping
        What it reads from its input, as JSON.
    target : Target
        The app, whose modules it can import.
    seconds : float
        Its time. Then it is killed, with the processes that it started.
    log : Path
        File for what it prints.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{_PACKAGE}.{name}"],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=log.parent,
            env=target.environment(),
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(asked), timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False
    return True


def run_probe(
    target: Target,
    folder: Path,
    *,
    seconds: float,
    seed: int,
    rounds: int | None = None,
    records: Sequence[int] = (),
    **more: Any,
) -> Transcript:
    """Run the app once, and return what was said.

    Parameters
    ----------
    target : Target
        The app.
    folder : Path
        Gets the transcript and ``log.txt``.
    seconds : float
        Time for the run; what was said until then counts.
    seed, rounds, records
        As in `flwr_privacy.simulations.research.app_audit.probe.probe`.
    **more
        Further settings of that function.
    """
    asked = {
        "server": target.app.server,
        "client": target.app.client,
        "config": dict(target.app.config),
        "nodes": target.clients,
        "seed": seed,
        "out": str(folder.resolve()),
        "rounds": rounds,
        "records": list(records),
        **more,
    }
    run_module("probe", asked, target=target, seconds=seconds, log=folder / "log.txt")
    return Transcript(folder)
