"""Options of MSP and MSPDQ that the command line makes of flat keys and of the data."""

from typing import Any

import numpy as np
import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.mspdq import TheorySteps
from flwr_privacy.simulations.app.server_app import build_strategy
from flwr_privacy.simulations.runner.complete_settings import settings_of
from flwr_privacy.simulations.settings.run_settings import parse_assignments
from flwr_privacy.simulations.tasks import tasks
from flwr_privacy.strategies import MSP, MSPDQ

UNLIKE = ["partition.kind=dirichlet", "task=digits-linear", "clients=5"]


def strategy_of(scheme: str, *assignments: str) -> Any:
    values = parse_assignments([f"scheme={scheme}", *UNLIKE, *assignments])
    return build_strategy(settings_of(values), None)


def test_the_theorys_steps() -> None:
    strategy = strategy_of("msp", "mixing_rounds=theory", "convexity=0.5", "local_steps=3")
    assert isinstance(strategy, MSP)
    assert strategy.mixing_rounds == TheorySteps(convexity=0.5, local_steps=3)


@pytest.mark.parametrize(("scheme", "kind"), [("msp", MSP), ("mspdq", MSPDQ)])
def test_the_shares_of_the_data(scheme: str, kind: type[MSP]) -> None:
    settings = settings_of(parse_assignments([f"scheme={scheme}", *UNLIKE, "shares=data"]))
    strategy = build_strategy(settings, None)
    assert isinstance(strategy, kind)
    chosen = tasks.task("digits-linear")
    sizes = [len(tasks.client_data(chosen, settings, index, 5)[1]) for index in range(5)]
    assert len(set(sizes)) > 1
    assert strategy.shares == {str(index): size for index, size in enumerate(sizes)}
    strategy._draws = {1: dict.fromkeys(strategy.shares, 1)}
    weights = np.array(list(strategy.weights(1).values()))
    np.testing.assert_allclose(weights / weights.sum(), np.array(sizes) / sum(sizes))


def test_the_nodes_of_a_deployment_have_data_of_their_own() -> None:
    settings = settings_of(parse_assignments(["scheme=msp", *UNLIKE, "shares=data"]))
    chosen = tasks.task("digits-linear")
    with pytest.raises(InvalidParameterError, match="clients = None: expected the number of sim"):
        tasks.client_sizes(chosen, settings.with_values({"clients": None}))
