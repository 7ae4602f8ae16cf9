"""UDP passes what every scheme that wraps an app must pass."""

from typing import Any, ClassVar

from conformance import WrapsConformance

from flwr_privacy.clients import UDPClient
from flwr_privacy.strategies import UDP


class TestUDP(WrapsConformance):
    strategy = UDP
    client = UDPClient
    options: ClassVar[dict[str, Any]] = {"rounds": 3, "experiment_id": "e"}
    engine: ClassVar[dict[str, Any]] = {"insecure_seed": 7}
    alone_on_ray = True
    exact_cohorts = True
    codes = True
    # Three rounds with three of four clients at an epsilon without meaning: little noise is left.
    app_options: ClassVar[dict[str, Any]] = {"unit": "user", "epsilon": 1e6}
    noise = 0.05
    no_noise: ClassVar[dict[str, Any]] = {"noise": "none"}
