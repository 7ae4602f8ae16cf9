import numpy as np
import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.stragglers import StragglerModel

CLIENTS = [str(i) for i in range(4000)]


def times(model: StragglerModel, server_round: int = 1) -> np.ndarray:
    return np.array(
        [
            model.finish_time(seed=7, server_round=server_round, client_id=c, phase="train")
            for c in CLIENTS
        ]
    )


def test_laws_have_their_moments():
    # Bounds of five standard errors of 4000 draws.
    exponential = times(StragglerModel(kind="exponential", seconds=2.0, spread=0.5))
    assert exponential.min() >= 2.0
    assert abs(exponential.mean() - 3.0) < 5 * 1.0 / np.sqrt(4000)
    logs = np.log(times(StragglerModel(kind="lognormal", seconds=1.0, spread=0.8)))
    assert abs(logs.mean()) < 5 * 0.8 / np.sqrt(4000)
    assert abs(logs.std() - 0.8) < 5 * 0.8 / np.sqrt(2 * 4000)
    slow = times(StragglerModel(kind="constant", slow_fraction=0.3, slowdown=4.0)) == 4.0
    assert abs(slow.mean() - 0.3) < 5 * np.sqrt(0.3 * 0.7 / 4000)


def test_persistent_stragglers_stay():
    model = StragglerModel(kind="constant", slow_fraction=0.3, persistent=True)
    np.testing.assert_array_equal(times(model, 1), times(model, 2))
    fresh = StragglerModel(kind="constant", slow_fraction=0.3)
    assert (times(fresh, 1) != times(fresh, 2)).any()


def test_race_ends_at_the_quorum_or_the_deadline():
    model = StragglerModel(seconds=1.0)
    asked = CLIENTS[:10]
    one = {"seed": 7, "server_round": 1, "phase": "train"}
    finish = sorted(model.finish_time(client_id=c, **one) for c in asked)
    assert model.race(asked, **one) == (set(), finish[-1])
    late, end = model.race(asked, **one, quorum=4)
    assert (len(late), end) == (6, finish[3])
    middle = (finish[6] + finish[7]) / 2
    late, end = model.race(asked, **one, deadline=middle)
    assert (len(late), end) == (3, middle)
    assert model.race(asked, **one, quorum=4, deadline=finish[1])[1] == finish[1]
    assert model.race(asked, **one, quorum=99) == (set(), finish[-1])


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("kind", "expontial"),
        ("seconds", 0.0),
        ("spread", -1.0),
        ("slow_fraction", 1.5),
        ("slowdown", 0.5),
        ("seconds", float("nan")),
    ],
)
def test_bad_parameters_are_named(parameter, value):
    with pytest.raises(InvalidParameterError, match=rf"stragglers\.{parameter} = "):
        StragglerModel(**{parameter: value})
