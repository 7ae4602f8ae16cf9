import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.wire.identity import (
    check_client_id,
    client_id_from,
    derive_seed,
    fingerprints,
    new_experiment_id,
    places,
)


@pytest.mark.parametrize("bad", ["", "a b", "a/b", "..", "ä", "x" * 65, "a\n"])
def test_a_client_id_must_fit_a_file_name(bad):
    with pytest.raises(InvalidParameterError, match="client-id"):
        check_client_id(bad)


def test_identity_comes_from_the_node():
    assert client_id_from({"client-id": "ward-7", "partition-id": 2}) == "ward-7"
    assert client_id_from({"partition-id": 2}) == "2"
    with pytest.raises(InvalidParameterError, match="'client-id' or 'partition-id'"):
        client_id_from({"region": "north"})


parts = st.lists(st.text() | st.integers(), max_size=4)


@given(st.integers(min_value=0), parts, parts)
def test_seeds_of_different_purposes_differ(root, one, other):
    seeds = derive_seed(root, *one), derive_seed(root, *other)
    assert (seeds[0] == seeds[1]) == (one == other)
    assert 0 <= seeds[0] < 2**63


def test_a_number_and_its_text_are_different_purposes():
    assert derive_seed(0, 1) != derive_seed(0, "1")
    assert derive_seed(1) != derive_seed("1")


def test_experiments_differ():
    assert len({new_experiment_id() for _ in range(100)}) == 100


def test_places_make_all_orders_equally_often_and_independent_of_other_seeds():
    prints = fingerprints(str(i) for i in range(4))
    orders = np.array([np.argsort(places(derive_seed(1, i), prints)) for i in range(24_000)])
    counts = np.unique(orders @ (64, 16, 4, 1), return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - 1000) ** 2 / 1000).sum() < 49.7  # chi-square, 23 degrees, p = 0.001
    first = orders[:, 0]
    pairs = np.unique(first[:-1] * 4 + first[1:], return_counts=True)[1]
    assert ((pairs - 1500) ** 2 / 1500).sum() < 37.7  # 15 degrees, p = 0.001


def test_the_place_of_one_does_not_depend_on_who_else_is_there():
    names = [str(i) for i in range(1000)]
    everybody = places(3, fingerprints(names))
    np.testing.assert_array_equal(places(3, fingerprints(names[::7])), everybody[::7])
    assert len(set(everybody.tolist())) == 1000
