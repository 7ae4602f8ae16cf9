"""Strategies written as flat keys: what comes back from the keys is the same strategy."""

from typing import Any

import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.settings.flat_options import strategy_of
from flwr_privacy.simulations.settings.flat_values import budget_of, flat_values
from flwr_privacy.strategies import (
    ACFL,
    DPSGD,
    MSPDQ,
    UDP,
    AdaptiveClipping,
    BandedMF,
    CentralDP,
    Discounting,
    DistributedNoise,
    FedAvg,
    JoPEQFedAvg,
    LoopOptions,
    NbAFL,
    PrivateEvaluation,
    RecordLevel,
    SchemeStrategy,
    ServerNoise,
    UserLevel,
)

SAME: list[tuple[SchemeStrategy, dict[str, Any]]] = [
    (FedAvg(), {}),
    (FedAvg(trainable=["*.bias"]), {"trainable": ["*.bias"]}),
    (MSPDQ(), {}),
    (ACFL(), {}),
    (JoPEQFedAvg(), {}),
    (NbAFL(clipping_norm=3.0, smallest_data=5), {"clipping_norm": 3.0, "smallest_data": 5}),
    (UDP(privacy=UserLevel(epsilon=2.0)), {"unit": "user", "epsilon": 2.0}),
    (UDP(privacy=UserLevel(epsilon={"0": 2.0})), {"unit": "user", "epsilon": {"0": 2.0}}),
    (
        UDP(privacy=RecordLevel(learning_rate=0.1)),
        {"unit": "record", "learning_rate": 0.1},
    ),
    (
        UDP(privacy=DPSGD(sampling_rate=0.1, steps=3), evaluation=PrivateEvaluation(every=2)),
        {"unit": "dp-sgd", "sampling_rate": 0.1, "steps": 3, "every": 2, "evaluation": "private"},
    ),
    (CentralDP(privacy=ServerNoise()), {"noise": "server"}),
    (
        CentralDP(privacy=ServerNoise(correlated=BandedMF(bands=4))),
        {"noise": "server", "correlated": "banded-mf", "bands": 4},
    ),
    (
        CentralDP(privacy=DistributedNoise(epsilon=3.0), secure_sum=SecureSum()),
        {"epsilon": 3.0},
    ),
]


@pytest.mark.parametrize(("strategy", "keys"), SAME, ids=lambda one: type(one).__name__)
def test_a_strategy_comes_back_from_its_keys(
    strategy: SchemeStrategy, keys: dict[str, Any]
) -> None:
    values = flat_values(strategy)
    for key, value in keys.items():
        assert values.pop(key) == value
    assert set(values) <= {"participation"}  # of the last one: what it found out by itself
    again = strategy_of(type(strategy), {**keys, "secure_sum": strategy.secure_sum})
    assert flat_values(again, defaults=True) == flat_values(strategy, defaults=True)


def test_options_that_are_optional_come_back_with_their_defaults() -> None:
    strategy = CentralDP(privacy=ServerNoise(), clipping=AdaptiveClipping(quantile=0.5))
    again = strategy_of(CentralDP, flat_values(strategy))
    assert again.clipping == strategy.clipping


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (FedAvg(fraction_train=0.5), "fraction_train = 0.5: expected its default"),
        (FedAvg(loop=LoopOptions(seed=1)), "loop = .*expected its default"),
        (
            UDP(
                privacy=RecordLevel(learning_rate=0.1),
                schedule=Discounting(validation=lambda server_round, arrays: 0.0),
            ),
            "validation = 'function': expected a number, text, a list or a table",
        ),
    ],
)
def test_what_no_run_folder_can_keep_is_refused(strategy: SchemeStrategy, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        flat_values(strategy)


def test_a_budget_is_found_where_it_is() -> None:
    assert budget_of(CentralDP(privacy=ServerNoise(epsilon=3))) == 3.0
    assert budget_of(JoPEQFedAvg(epsilon=2.0)) == 2.0
    assert budget_of(FedAvg()) is None
    assert budget_of(UDP(privacy=UserLevel(epsilon={"0": 1.0}))) is None
