"""A real deployment on this machine, as `flwr-privacy deploy` starts it."""

from flwr_privacy.simulations.deployment import HOST, Deployment, DeploymentError

__all__ = ["HOST", "Deployment", "DeploymentError"]
