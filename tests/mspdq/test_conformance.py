from typing import Any, ClassVar

import pytest
from conformance import WrapsConformance

from flwr_privacy.clients import MSPClient, MSPDQClient
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import MSP, MSPDQ


class TestMSP(WrapsConformance):
    strategy = MSP
    client = MSPClient
    options: ClassVar[dict[str, Any]] = {"mixing_rounds": 3, "experiment_id": "e"}
    engine: ClassVar[dict[str, Any]] = {"insecure_seed": 7}
    own_start = "msp: a learning round takes several exchanges"
    registered = False  # the app trains it like MSPDQ, which is tested


class TestMSPDQ(WrapsConformance):
    strategy = MSPDQ
    client = MSPDQClient
    options: ClassVar[dict[str, Any]] = {"mixing_rounds": 3, "experiment_id": "e"}
    engine: ClassVar[dict[str, Any]] = {"insecure_seed": 7}
    own_start = "mspdq: a learning round takes several exchanges"
    exact_cohorts = True
    codes = True
    app_options: ClassVar[dict[str, Any]] = {"mixing_rounds": 2, "bits": 16, "eps_s": 0.9}
    noise = 0.05


class TestSummed(TestMSPDQ):
    options: ClassVar[dict[str, Any]] = {"secure_sum": SecureSum(), "experiment_id": "e"}
    own_start = "secure_sum: works only where this strategy's own"
    registered = False


MODES: dict[str, dict[str, Any]] = {
    "paper": {"paper": True},
    "reference": {"mixing_start": "reference", "replacement": True},
    "global-linf": {"mixing_start": "global", "interval": "linf", "coupling": "harmonic"},
    "random": {"coupling": "random", "m": 2, "mass": "normalized"},
    "sums": {"secure_sum": SecureSum(), "mixing_rounds": 3, "gamma": 0.3, "replacement": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_alike_in_cohorts_and_after_a_resume(mode: str, tmp_path: Any) -> None:
    class Mode(TestMSPDQ):
        options: ClassVar[dict[str, Any]] = {
            "mixing_rounds": 3,
            "experiment_id": "e",
            **MODES[mode],
        }

    Mode().test_cohorts_equal_one_node_per_client(2)
    Mode().test_killed_after_a_round_it_resumes_to_the_same_model(1, tmp_path)
