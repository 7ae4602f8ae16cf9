"""Central DP passes what every scheme that wraps an app must pass, with either kind of noise."""

from typing import Any, ClassVar

import pytest
from apps import record, run_strategy
from central_training import SEED
from conformance import WrapsConformance
from flwr.serverapp.strategy import Strategy

from flwr_privacy.clients import CentralDPClient
from flwr_privacy.errors import ProtocolError
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import CentralDP


class TestShares(WrapsConformance):
    strategy = CentralDP
    client = CentralDPClient
    options: ClassVar[dict[str, Any]] = {"rounds": 3, "experiment_id": "e", "quantile": 0.5}
    engine: ClassVar[dict[str, Any]] = {"insecure_seed": SEED}
    exact_cohorts = True
    codes = True
    registered = False  # tests/secure_sum/test_app.py runs the app, in cohorts on Ray
    no_noise: ClassVar[dict[str, Any]] = {"noise": "server"}

    def test_it_works_under_a_users_own_start(self) -> None:
        class Own(CentralDP):
            start = Strategy.start

        with pytest.raises(ProtocolError, match="secure_sum: works only where this strategy's own"):
            run_strategy(Own(rounds=3), self.app(), arrays=record())


class TestTrustedServer(WrapsConformance):
    strategy = CentralDP
    client = CentralDPClient
    options: ClassVar[dict[str, Any]] = {
        "rounds": 3,
        "experiment_id": "e",
        "noise": "server",
        "insecure_seed": SEED,
    }
    exact_cohorts = True
    codes = True
    registered = False  # the same scheme as above
    ledgers = False
    no_noise: ClassVar[dict[str, Any]] = {"secure_sum": SecureSum()}  # a sum has no noise either
