"""The shared test app under a name that worker processes can import."""

from apps import message_app

from flwr_privacy.clients import FedAvgClient, as_mod

app = message_app([as_mod(FedAvgClient)])
