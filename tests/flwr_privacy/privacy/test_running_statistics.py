"""Running statistics in models whose names do not tell: what is asked about, and what is not."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.running_statistics import SETTLED, check_question, is_statistic, suspected

COUNTER = np.array(0)


def vectors(*values: float, length: int = 3) -> list[Any]:
    return [np.full(length, value, np.float32) for value in values]


def matrix(value: float = 0.5, length: int = 3) -> np.ndarray:
    return np.full((length, length), value, np.float32)


def listed(arrays: list[Any]) -> dict[str, Any]:
    return {str(place): np.asarray(array) for place, array in enumerate(arrays)}


NEW = vectors(1, 0, 0, 1)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ([*NEW], [2, 3]),
        ([*NEW, COUNTER], [2, 3]),
        ([matrix(), *vectors(0), *NEW, matrix()], [4, 5]),
        ([*NEW, *NEW], [2, 3, 6, 7]),
        (vectors(0, 0, 0, 1), [2, 3]),  # the weight of a branch may start at zero
        (vectors(0.9, 0, 0, 1, 1, 0), [2, 3]),  # another layer follows
        # Trained, as far as there is a counter; without weight and bias too.
        ([*vectors(0.7, 0.1, 0.3, 2.0), np.array(17)], [2, 3]),
        ([*vectors(0, 1), COUNTER], [0, 1]),
        ([*vectors(0, 1), np.array(0, np.uint8)], [0, 1]),
        # Eleven arrays: "10" does not come after "1".
        ([matrix()] * 8 + [*vectors(0.2, 0.7), np.array(3)], [8, 9]),
    ],
)
def test_statistics_of_a_list_of_arrays_are_found(arrays: list[Any], expected: list[int]) -> None:
    model = listed(arrays)
    assert suspected(model) == [str(place) for place in expected]
    shuffled = {name: model[name] for name in sorted(model, reverse=True)}
    assert suspected(shuffled) == suspected(model)


@pytest.mark.parametrize(
    "arrays",
    [
        [],
        [COUNTER],
        [*vectors(0), COUNTER],
        [*vectors(1, 0), matrix(), COUNTER],  # not directly after them
        [matrix(), *vectors(1), COUNTER],
        [*vectors(1), *vectors(0, length=4), COUNTER],  # of another length
        [*vectors(1, 0), np.array(0.0)],  # a float is a weight
        [*vectors(1, 0), np.array([0])],  # not 0-d
        [*vectors(1, 0), np.array(True)],
        [np.zeros(3, int), np.ones(3, int), COUNTER],
        [*vectors(1, 0, 0), *vectors(1, length=4)],
        vectors(1, 0, 0, 0.9),
        vectors(1, 0, 0.1, 1),
        vectors(1, 0.1, 0, 1),  # a bias that has been trained: two norms may look like it
        vectors(1, 0, 1, 0, 1, 0),
        vectors(1, 0, 0, 1, 0),  # a shift that starts at zero between two norms
        [np.zeros(0)] * 4,
    ],
)
def test_weights_are_not_taken_for_statistics(arrays: list[Any]) -> None:
    assert suspected(listed(arrays)) == []


def test_names_that_tell_are_believed() -> None:
    names = ("norm.weight", "norm.bias", "shift", "scale", "steps")
    assert suspected(dict(zip(names, [*NEW, COUNTER], strict=True))) == []
    assert suspected({**listed(NEW), "head": matrix()}) == []


@pytest.mark.parametrize("name", ["running_mean", "bn.running_var", "a.b.num_batches_tracked"])
def test_names_of_torch_are_known(name: str) -> None:
    assert is_statistic(name)
    assert not is_statistic(f"{name}_of_mine")


LENGTHS = st.integers(1, 3)
BIASES = st.sampled_from([0.0, 0.0, 0.25])


@st.composite
def ordinary_layer(draw: st.DrawFn) -> list[Any]:
    """Return the arrays of a layer without statistics, as torch lists them when it is new."""
    n, bias = draw(LENGTHS), draw(BIASES)
    return draw(
        st.sampled_from(
            [
                [matrix(length=n), *vectors(bias, length=n)],  # linear, convolution
                [matrix(length=n)],  # embedding, linear without bias
                vectors(1, 0, length=n),  # LayerNorm, GroupNorm
                vectors(1, length=n),  # RMSNorm
                [matrix(length=n), matrix(0, length=n)],  # LoRA
                vectors(0, 1, 0, length=n),  # a shift that starts at zero before a norm
                [*vectors(1e-5, length=n), matrix(length=n), *vectors(bias, length=n)],  # a scale
                [matrix(length=n), *vectors(bias, bias, length=n), matrix(length=n)],  # recurrent
                vectors(0.25, length=1),  # PReLU
            ]
        )
    )


@given(st.lists(ordinary_layer(), max_size=12))
def test_stacks_of_layers_without_statistics_are_not_asked_about(layers: list[list[Any]]) -> None:
    assert suspected(listed([array for layer in layers for array in layer])) == []


@given(
    st.lists(ordinary_layer(), max_size=6),
    st.lists(ordinary_layer(), max_size=6),
    LENGTHS,
    st.integers(0, 2**31),
)
def test_statistics_are_found_anywhere_and_nothing_else_is(
    before: list[list[Any]], after: list[list[Any]], length: int, batches: int
) -> None:
    first = [array for layer in before for array in layer]
    last = [array for layer in after for array in layer]
    norm = [*vectors(1, 0, 0, 1, length=length), np.array(batches)]
    place = len(first)
    assert suspected(listed([*first, *norm, *last])) == [str(place + 2), str(place + 3)]


def test_a_question_is_refused_until_somebody_says_what_the_arrays_are() -> None:
    model = listed([matrix(), *NEW, COUNTER])
    for fields in ({}, {"keep-back": ["3"]}, {SETTLED: False}, {SETTLED: 1}, {"keep-back": "34"}):
        with pytest.raises(InvalidParameterError) as refusal:
            check_question(model, fields)
        left = "['4']" if fields.get("keep-back") == ["3"] else "['3', '4']"
        assert f"arrays {left} look like those of normalisation layers" in str(refusal.value)
        assert "statistics_of(model, positions=True)" in str(refusal.value)
        assert "keep_back=[]" in str(refusal.value)
    check_question(model, {SETTLED: True})
    check_question(model, {"keep-back": ["3", "4"]})
    check_question(listed([matrix(), *vectors(1, 0)]), {})
