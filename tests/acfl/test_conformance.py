"""ACFL passes what every scheme that brings its own client must pass."""

from typing import Any, ClassVar

import numpy as np
from apps import record
from conformance import OwnClientConformance
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp

from flwr_privacy.clients import acfl_client_app
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import ACFL

FEATURES, LABELS = 4, 2
TRUTH = np.random.default_rng(7).uniform(-0.2, 0.2, (FEATURES, LABELS))


def data_fn(context: Context) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(int(context.node_config["partition-id"]))
    features = draws.uniform(-1, 1, (30, FEATURES))
    return features, features @ TRUTH


class _Conformance(OwnClientConformance):
    strategy = ACFL
    on_ray: ClassVar[bool] = False
    app_task = "digits-rff"
    engine: ClassVar[dict[str, Any]] = {"insecure_seed": 5}
    steps_alone = True

    def app(self) -> ClientApp:
        return acfl_client_app(data_fn)

    def run(self, **changes: Any) -> Any:
        if "run_dir" in changes:  # a resumed run meets nodes that remember the setup
            state = changes["run_dir"] / "nodes"
            state.mkdir(exist_ok=True)
            changes["state"] = state
        return super().run(**changes)

    def arrays(self) -> ArrayRecord:
        return record({"weights": np.zeros((FEATURES, LABELS))})


class TestNoisedRecords(_Conformance):
    options: ClassVar[dict[str, Any]] = {"max_records": 40, "experiment_id": "e"}
    codes = True
    exact_cohorts = True


class TestExact(_Conformance):
    """Without noise: the same on every engine, to rounding."""

    options: ClassVar[dict[str, Any]] = {"noise": "none", "alpha": 0.5}
    no_noise: ClassVar[dict[str, Any]] = {"alpha": 0.5}
    on_ray = True
    alone_on_ray = True
    app_options: ClassVar[dict[str, Any]] = {"noise": "none", "alpha": 0.5}


class TestRescaled(_Conformance):
    options: ClassVar[dict[str, Any]] = {"noise": "none", "alpha": 0.0, "learning_rate": 0.01}
    no_noise: ClassVar[dict[str, Any]] = {"alpha": 0.0}  # there is no setup
    steps_alone = False


class TestSummed(_Conformance):
    options: ClassVar[dict[str, Any]] = {
        "max_records": 40,
        "experiment_id": "e",
        "secure_sum": SecureSum(),
    }
    codes = True
    exact_cohorts = True
