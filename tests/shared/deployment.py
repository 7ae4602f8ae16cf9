"""A real deployment on this machine, as `flwr-privacy deploy` starts it."""

import time

from flwr_privacy.simulations.deployment.processes import Deployment, DeploymentError
from flwr_privacy.simulations.engines.flower_processes import HOST

__all__ = ["HOST", "PATIENCE", "Deployment", "DeploymentError", "wait_until_online"]

PATIENCE = 60.0  # seconds for a process to begin or to end by itself


def wait_until_online(deployment: Deployment, nodes: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while deployment.online() != nodes:
        assert time.monotonic() < deadline
