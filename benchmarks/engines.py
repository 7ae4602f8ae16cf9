"""Runs on Flower's Ray engine, and on ours where there is one to compare."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr_privacy.clients.node.context_store import STATE_VARIABLE
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.engines.ray_engine import RayResources, RaySession

__all__ = ["Engines", "Seconds", "engines"]

APP = Path(__file__).parent / "app"
WORKERS = 2
IMAGES = 60  # of each client
TIMEOUT = 400.0

Seconds = list[tuple[str, list[float]]]
"""The parts of a plan, each with the seconds of its rounds."""


class Engines:
    """Runs the plans of ``app/rivals/server_app.py``."""

    def __init__(self, session: RaySession, folder: Path) -> None:
        self._session = session
        self._out = folder / "seconds.jsonl"

    def ray(
        self, plan: str, *, nodes: int, rounds: int, clients: int = 0, images: int = IMAGES
    ) -> Seconds:
        """Run a plan with ``flwr run``."""
        config = self._config(plan, rounds, clients, images)
        self._session.run(APP, nodes=nodes, run_config=config, timeout=TIMEOUT)
        return self._read()

    def inline(self, plan: str, *, nodes: int, rounds: int, clients: int = 0) -> Seconds:
        """Run a plan in this process."""
        from .app.rivals import client_app, server_app

        config = self._config(plan, rounds, clients, IMAGES)
        run_inline(server_app.app, client_app.app, nodes=nodes, run_config=config)
        return self._read()

    def _config(
        self, plan: str, rounds: int, clients: int, images: int
    ) -> dict[str, str | int | float | bool]:
        return {
            "plan": plan,
            "rounds": rounds,
            "clients": clients,
            "images": images,
            "out": str(self._out),
        }

    def _read(self) -> Seconds:
        lines = [json.loads(line) for line in self._out.read_text(encoding="utf-8").splitlines()]
        self._out.unlink()
        return [(line["part"], line["seconds"]) for line in lines]


@contextmanager
def engines() -> Iterator[Engines]:
    """Open a Ray session of two workers, on any machine."""
    os.environ["FLWR_PRIVACY_COHORTS"] = "1"  # the nodes let a server say which clients they play
    resources = RayResources(total_cpus=WORKERS)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as state:
        os.environ[STATE_VARIABLE] = state  # for the ledgers of the clients
        with RaySession(resources=resources) as session:
            yield Engines(session, Path(folder))
