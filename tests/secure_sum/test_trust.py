"""What a client believes of a server's words about a secure sum."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.secure_sum import Bounds, SecureSum
from flwr_privacy.secure_sum.graph import (
    LARGEST_INSECURITY,
    degree,
    insecurity,
    local_threshold,
    rosters,
)
from flwr_privacy.secure_sum.settings import LARGEST_COHORT
from flwr_privacy.secure_sum.trust import BelievedSum, believed_sum


def words(cohort: int, threshold: int, roster: int, local: int, **limits: Any) -> BelievedSum:
    return believed_sum(
        cohort=cohort, threshold=threshold, roster=roster, local_threshold=local, **limits
    )


@pytest.mark.parametrize(
    ("said", "limits", "clients", "honest"),
    [
        ((5, 3, 5, 3), {}, 3, 2),
        ((5, 5, 5, 5), {"pinned": 5}, 5, 4),
        ((4, 3, 4, 3), {"pinned": 4}, 3, 3),
        ((100, 51, 100, 51), {"pinned": 100}, 51, 31),
        ((100, 51, 80, 51), {"pinned": 100}, 51, 31),  # twenty have no key
        ((5, 3, 5, 3), {"pinned": 1000}, 3, 2),  # no more than the server says
        # A large cohort around a small roster.
        ((1000, 1000, 5, 5), {"pinned": 5}, 5, 4),
        ((1000, 1000, 5, 5), {}, 5, 0),
        ((LARGEST_COHORT, LARGEST_COHORT, 5, 5), {"pinned": 5}, 5, 4),
        ((1000, 501, 5, 3), {"pinned": 5}, 3, 2),
        ((1000, 501, 5, 3), {"pinned": 1000}, 3, 0),
        # Another threshold than the one that opens secrets.
        ((5, 5, 5, 3), {"pinned": 5}, 3, 2),
        ((5, 4, 5, 3), {"pinned": 5}, 3, 2),
        ((1000, 502, 119, 59), {"pinned": 1000}, 59, 0),
        # Clients beyond those that the operator believes in are the server's.
        ((5, 5, 5, 5), {"pinned": 5, "max_cohort": 4}, 4, 4),
        ((5, 5, 5, 5), {"max_cohort": 3}, 3, 3),
        ((5, 3, 5, 3), {"max_cohort": 3}, 1, 1),
        ((20, 11, 20, 11), {"max_cohort": 2}, 1, 0),
        ((5, 3, 5, 3), {"pinned": 4}, 2, 2),
        ((1000, 501, 119, 60), {"pinned": 900}, 401, 221),
        ((1000, 501, 119, 60), {"pinned": 1000, "max_cohort": 700}, 201, 61),
        ((1000, 501, 119, 60), {"pinned": 500}, 1, 0),
    ],
)
def test_what_a_client_counts_on(
    said: tuple[int, int, int, int], limits: dict[str, int], clients: int, honest: int
) -> None:
    believed = words(*said, **limits)
    assert (believed.clients, believed.honest) == (clients, honest)


@pytest.mark.parametrize(
    "said", [(5, 6, 5, 5), (4, 4, 5, 4), (10, 5, 10, 6), (2**31, 5, 5, 5), (0, 0, 0, 0)]
)
def test_a_sum_that_cannot_be_is_refused(said: tuple[int, int, int, int]) -> None:
    with pytest.raises(ProtocolError, match="such a sum there is not"):
        words(*said)


def test_nobody_has_heard_of_a_cohort_of_billions() -> None:
    with pytest.raises(InvalidParameterError, match="cohort = 2147483648"):
        Bounds(cohort=2**31, code_limit=1, largest_weight=1, modulus_bits=64)


@pytest.mark.parametrize(
    ("cohort", "settings"),
    [
        (110, SecureSum()),
        (1000, SecureSum()),
        (1000, SecureSum(threshold=700)),
        (1000, SecureSum(colluders=240)),
        (5000, SecureSum()),
    ],
)
@pytest.mark.parametrize("absent", [0, 0.03])
def test_the_sparse_graph_of_an_honest_server_is_believed(
    cohort: int, settings: SecureSum, absent: float
) -> None:
    there = [f"c{i:04}" for i in range(int(cohort * (1 - absent)))]
    roster = len(rosters(there, settings, seed=1, server_round=1, drawn=cohort)["c0000"])
    assert roster < len(there)
    threshold = settings.threshold_of(cohort)
    local = local_threshold(roster, threshold, len(there))
    believed = words(cohort, threshold, roster, local, pinned=cohort)
    assert believed.clients == threshold
    assert believed.honest == threshold - cohort // 5 >= settings.parties_of(cohort)
    # Its own roster alone is what a server could have made up the rest around.
    assert believed.certain == local - roster // 5


def test_a_graph_that_is_safe_only_without_colluders_is_not_believed() -> None:
    settings = SecureSum(colluders=0)
    few = degree(1000, settings) + 1
    local = local_threshold(few, 501, 1000)
    assert words(1000, 501, few, local) == words(1000, 501, few, local, pinned=1000)
    assert words(1000, 501, few, local).clients == local


numbers = st.integers(2, 3000)


@given(
    cohort=numbers,
    roster=st.integers(2, 255),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    pinned=st.none() | numbers,
    max_cohort=st.none() | numbers,
)
@example(cohort=618, roster=104, shares=(0.0, 0.0), pinned=None, max_cohort=None)
def test_no_more_is_believed_than_operator_and_roster_bear_out(
    cohort: int,
    roster: int,
    shares: tuple[float, float],
    pinned: int | None,
    max_cohort: int | None,
) -> None:
    roster = min(roster, cohort)
    threshold = cohort // 2 + 1 + int(shares[0] * (cohort - cohort // 2 - 1))
    local = roster // 2 + 1 + int(shares[1] * (roster - roster // 2 - 1))
    limits = {"pinned": pinned, "max_cohort": max_cohort}
    believed = words(cohort, threshold, roster, local, **limits)
    known = min(cohort, *(limit for limit in limits.values() if limit is not None), cohort)
    assert 0 <= believed.certain <= believed.honest <= believed.clients <= known
    assert believed.honest <= max(0, threshold - known // 5)
    if believed.clients > local:
        # Only in a sparse graph, of which the roster has its share.
        assert roster < cohort
        assert local * cohort >= threshold * roster
        settings = SecureSum(threshold=threshold, colluders=cohort // 5)
        assert insecurity(cohort, roster - 1, settings) <= LARGEST_INSECURITY
    # A limit more never makes a client believe more.
    free = words(cohort, threshold, roster, local)
    assert believed.clients <= free.clients


@given(st.integers(2, 2000), st.integers(0, 400), st.none() | st.integers(2, 2000))
def test_the_shares_of_an_honest_server_are_accepted_in_every_complete_graph(
    cohort: int, more: int, threshold: int | None
) -> None:
    """By default, and with as many more colluders as the user likes."""
    threshold = None if threshold is None else min(threshold, cohort)
    fewest = SecureSum(threshold=threshold).threshold_of(cohort)
    settings = SecureSum(threshold=fewest, colluders=min(cohort // 5 + more, fewest - 1))
    for chosen in (SecureSum(threshold=threshold), settings):
        believed = words(cohort, fewest, cohort, fewest, pinned=cohort)
        assert 1 <= chosen.parties_of(cohort) <= believed.honest == believed.certain


def test_fewer_colluders_than_clients_reckon_with_are_refused_by_name() -> None:
    text = "secure_sum.colluders = 3: expected at least 4 with noise in shares"
    with pytest.raises(InvalidParameterError, match=text):
        SecureSum(colluders=3).parties_of(20)
    assert SecureSum(colluders=0).parties_of(4) == 3
