import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.runner.complete_settings import settings_of
from flwr_privacy.simulations.settings.run_settings import Settings, parse_assignments


def test_round_trip_with_everything_set() -> None:
    settings = Settings(
        clients=7, per_round=3, quorum=2, deadline=1.5, data_root="a b"
    ).with_values(
        {
            "stragglers.slow_fraction": 0.25,
            "partition": {"kind": "label-sets", "alpha": 0.3, "sizes": [40, 60]},
            "validation_records": 20,
            "strategy.bits": [4, 8],
            "training.learning_rate": 1,
        }
    )
    assert Settings.from_toml(settings.to_toml()) == settings
    assert settings.stragglers is not None
    assert settings.stragglers.slow_fraction == 0.25
    assert settings.strategy == {"bits": [4, 8]}
    assert settings.partition.sizes == (40, 60)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"rounds": 0}, "rounds = 0: expected an integer of at least 1"),
        ({"rounds": "3"}, "rounds = '3': expected an integer"),
        ({"clients": 4, "per_round": 5}, "per_round = 5: expected an integer from 1 to 4"),
        ({"clients": 4, "quorum": 5}, "quorum = 5: expected an integer from 1 to 4"),
        ({"partition.kind": "dirichle"}, r"nearest: 'dirichlet'\)"),
        ({"validation_records": 0}, "validation_records = 0: expected an integer of at least 1"),
        ({"partition.sizes": [4, 0.5]}, "partition.sizes = 0.5: expected an integer"),
        ({"partition": "iid"}, "partition = 'iid': expected a table of settings"),
        ({"stragglers.slow_fraction": 2}, "stragglers.slow_fraction = 2: expected a finite number"),
        ({"training.lerning_rate": 1}, r"nearest: 'training.learning_rate'"),
        ({"rounds": 3, "rounds.x": 2}, "rounds = 3: expected a table of settings"),
        ({"secure_sum": False, "secure_sum.bits": 9}, "secure_sum = False: expected a table"),
        ({"ronds": 3}, r"--set = 'ronds': expected a known key.*nearest: 'rounds'"),
        ({"task": 3}, "task = 3: expected text"),
        ({"stragglers.persistent": 1}, "stragglers.persistent = 1: expected true or false"),
    ],
)
def test_a_bad_setting_is_named(values: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        Settings().with_values(values)


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_turned_on_may_have_settings_too(order: int) -> None:
    values = {"secure_sum": True, "secure_sum.bits": 9}
    settings = Settings().with_values(dict(list(values.items())[::order]))
    assert settings.secure_sum is not None
    assert settings.secure_sum.bits == 9


def test_text_that_is_no_toml() -> None:
    with pytest.raises(InvalidParameterError, match="settings = 'rounds = '"):
        Settings.from_toml("rounds = ")


def test_assignments() -> None:
    assert parse_assignments(["a=1", "b.c=[1.5, 2]", "d=some text", "e=true", "f=x=y"]) == {
        "a": 1,
        "b.c": [1.5, 2],
        "d": "some text",
        "e": True,
        "f": "x=y",
    }
    with pytest.raises(InvalidParameterError, match="--set = 'rounds': expected key=value"):
        parse_assignments(["rounds"])


def test_noise_before_aggregation_is_for_the_client_with_the_fewest_records() -> None:
    iid = {"scheme": "mspdq-ldp", "clients": 20}
    assert settings_of(iid).strategy["smallest_data"] == 71
    split = {**iid, "partition.kind": "dirichlet", "partition.alpha": 0.3}
    assert settings_of(split).strategy["smallest_data"] < 71
    chosen = {**iid, "strategy.smallest_data": 5}
    assert settings_of(chosen).strategy["smallest_data"] == 5
