"""M2FDP passes what every scheme that wraps an app must pass."""

from typing import Any, ClassVar

import pytest
from conformance import WrapsConformance

from flwr_privacy.clients import M2FDPClient
from flwr_privacy.strategies import M2FDP, DeviceNoise, NoNoise

pytestmark = pytest.mark.usefixtures("no_settling")


class TestM2FDP(WrapsConformance):
    strategy = M2FDP
    client = M2FDPClient
    options: ClassVar[dict[str, Any]] = {
        "fanouts": (2, 2),
        "p": 0.5,
        "steps": 4,
        "events": 2,
        "min_children": 1,
        "privacy": DeviceNoise(epsilon=100.0),
        "insecure_seed": 5,
        "experiment_id": "e",
    }
    engine: ClassVar[dict[str, Any]] = {"insecure_seed": 5}
    app_options: ClassVar[dict[str, Any]] = {
        "fanouts": "2,2",
        "p": 0.5,
        "unit": "none",
        "clipping_norm": 0.5,
        "min_children": 1,
    }
    exact_cohorts = True
    codes = True
    no_noise: ClassVar[dict[str, Any]] = {
        "privacy": NoNoise(clipping_norm=1.0),
        "insecure_seed": None,
    }
    own_start = "only where this strategy's own start runs the rounds"
