from typing import Any

import pytest
from apps import make, message_app, record, run_strategy, same
from flwr.serverapp.strategy import Strategy

from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import UDP, LoopOptions, UserLevel


def test_it_is_refused_under_a_users_own_start() -> None:
    class Own(UDP):
        start = Strategy.start

    app = message_app([as_mod(UDPClient)])
    with pytest.raises(ProtocolError, match="secure_sum: works only where this strategy's own"):
        run_strategy(
            Own(privacy=UserLevel(), secure_sum=SecureSum(), rounds=3), app, arrays=record()
        )


@pytest.mark.parametrize("cohort", [{}, {"clients": 4}])
def test_the_model_is_the_one_without_a_secure_sum(cohort: dict[str, Any]) -> None:
    results = []
    for secure_sum in (None, SecureSum()):
        strategy = make(UDP, seed=3, experiment_id="e", secure_sum=secure_sum, **cohort)
        app = message_app([as_mod(UDPClient)])
        nodes = 2 if cohort else 4
        options = {"arrays": record(), "nodes": nodes, "insecure_seed": 5}
        results.append(run_strategy(strategy, app, **options))
    clear, summed = results
    assert same(clear.arrays, summed.arrays)
    assert clear.guarantee.void == summed.guarantee.void != ""
    assert clear.guarantee.spent == summed.guarantee.spent
    assert summed.history[1]["train"] == {"insecure-noise": 1.0}
    assert set(clear.history[1]["train"]) == {"insecure-noise", "sigma"}


def test_at_user_level_codes_take_no_room_for_weights() -> None:
    strategy = UDP(privacy=UserLevel(), loop=LoopOptions(seed=3), secure_sum=SecureSum())
    app = message_app([as_mod(UDPClient)])
    result = run_strategy(strategy, app, arrays=record(), nodes=4)
    assert result.history[1]["scheme"]["sum_modulus_bits"] == 31 + 1 + 2


def test_a_quorum_below_the_threshold_is_refused() -> None:
    strategy = UDP(privacy=UserLevel(), loop=LoopOptions(seed=3, quorum=2), secure_sum=SecureSum())
    with pytest.raises(InvalidParameterError, match="quorum = 2: expected at least the threshold"):
        run_strategy(strategy, message_app([as_mod(UDPClient)]), arrays=record(), nodes=4)
