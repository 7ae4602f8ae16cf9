import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.guarantee import APPS, Guarantee

FULL = Guarantee(
    scheme="udp",
    protects="one record of a client",
    adversary="the server",
    neighbours="one record differs",
    epsilon=8.0,
    delta=1e-5,
    spent=3.25,
    accountant="gdp",
    not_protected=("timing", "the number of records"),
    assumptions=("a clock",),
    evidence=("tests/udp",),
)


def test_the_text_says_all_of_it_in_order():
    assert FULL.text() == (
        "udp protects one record of a client against the server: (8, 1e-05)-differential privacy "
        "over the whole training, for data sets where one record differs. Spent so far: epsilon "
        "3.25 (gdp). Not protected: timing; the number of records. Assumed: a clock. Checked by: "
        "tests/udp."
    )


def test_what_is_not_known_is_not_said():
    text = Guarantee(scheme="fedavg", protects="nothing", adversary="nobody").text()
    assert text == "fedavg protects nothing."


def test_that_nothing_was_spent_is_said():
    assert "Spent so far: epsilon 0 (gdp)" in dataclasses.replace(FULL, spent=0.0).text()


def test_a_promise_says_that_the_server_may_send_any_app_to_a_node_that_runs_any():
    assert FULL.assuming_apps().assumptions == ("a clock", APPS)
    nothing = Guarantee(scheme="fedavg", protects="nothing", adversary="nobody")
    assert nothing.assuming_apps() == nothing


def test_a_void_promise_says_so_first_and_wherever_it_is_shown():
    void = dataclasses.replace(FULL, void="noise from a seed")
    assert void.text().startswith("VOID: noise from a seed. udp protects")


words = st.text(max_size=8)
lists = st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple)
numbers = st.none() | st.floats(0, 1e6) | st.just(math.inf)


@st.composite
def promises(draw):
    values = {name: draw(words.filter(bool)) for name in ("scheme", "protects", "adversary")}
    values |= {name: draw(words) for name in ("neighbours", "accountant", "void")}
    values |= {name: draw(lists) for name in ("not_protected", "assumptions", "evidence")}
    values |= {name: draw(numbers) for name in ("epsilon", "spent")}
    known = values["epsilon"] is not None or values["spent"] is not None
    deltas = st.floats(1e-12, 0.999)
    return Guarantee(**values, delta=draw(deltas if known else st.none() | deltas))


@given(promises())
def test_it_survives_a_file(promise):
    values = promise.to_dict()
    assert Guarantee.from_dict(json.loads(json.dumps(values))) == promise
    assert not any(value in (None, "", ()) for value in values.values())
    # What is 0 is known, and not left out.
    for name in ("epsilon", "delta", "spent"):
        assert (name in values) == (getattr(promise, name) is not None)


def test_it_is_as_it_was_made():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.epsilon = 1.0  # type: ignore[misc]
    assert hash(Guarantee.from_dict(FULL.to_dict())) == hash(FULL)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"scheme": "s", "protects": "p"},
        {"scheme": "s", "protects": "p", "adversary": "a", "epsilom": 1.0},
    ],
)
def test_values_that_are_missing_or_unknown_are_an_error(values):
    with pytest.raises(TypeError):
        Guarantee.from_dict(values)


@pytest.mark.parametrize(
    "change",
    [
        {"scheme": 5},
        {"protects": None},
        {"void": True},
        {"not_protected": ["timing"]},
        {"assumptions": ("a", 1)},
        {"evidence": "tests"},
        {"epsilon": -1.0},
        {"epsilon": math.nan},
        {"epsilon": "8"},
        {"epsilon": True},
        {"spent": -1e-9},
        {"spent": math.nan},
        {"delta": 0.0},
        {"delta": 1.0},
        {"delta": math.nan},
        {"delta": "1e-5"},
    ],
)
def test_a_value_that_is_not_allowed_is_named(change):
    (name,) = change
    with pytest.raises(InvalidParameterError, match=f"{name} = "):
        dataclasses.replace(FULL, **change)


@pytest.mark.parametrize("name", ["epsilon", "spent"])
def test_an_epsilon_needs_its_delta(name):
    with pytest.raises(InvalidParameterError, match="the delta that epsilon is for"):
        Guarantee(scheme="s", protects="p", adversary="a", **{name: 1.0})


def test_an_epsilon_without_a_bound_is_said():
    endless = dataclasses.replace(FULL, epsilon=math.inf, spent=math.inf)
    assert "(inf, 1e-05)-differential privacy" in endless.text()
