"""What members of a trusted zone learn of each other, against closed forms."""

import math

import numpy as np
import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.m2fdp.trust_zone import separate_members, sibling_view


@pytest.mark.parametrize("events", [1, 3])
def test_of_two_members_each_has_the_others_models(events: int) -> None:
    draws = np.random.default_rng(0)
    own, other = draws.integers(-(2**20), 2**20, (2, events, 8)).astype(np.float64)
    view = sibling_view((own + other) / 2, own, weight=0.5)
    np.testing.assert_array_equal(view.models, other)
    assert not view.rounding.any()


def test_of_rounded_codes_it_has_them_to_a_step() -> None:
    draws = np.random.default_rng(1)
    own, other = draws.integers(-100, 100, (2, 1, 1000))
    average = (own + other + 1) // 2
    view = sibling_view(average, own, weight=0.5, step=1.0)
    wrong = np.abs(view.models - other)
    assert wrong.max() == view.rounding[0] == 1
    # Where the sum is odd it is off by one: about half of them, 6 standard errors of a coin.
    assert abs(np.count_nonzero(wrong) / 1000 - 0.5) < 6 * 0.5 / math.sqrt(1000)


def test_it_has_their_updates_from_event_to_event() -> None:
    """Everybody trains on from the average that was sent."""
    draws = np.random.default_rng(2)
    steps = draws.normal(size=(2, 3, 4))  # of the member and of the other, 3 events
    model, averages, own = np.ones(4), [], []
    for event in range(3):
        uploads = model + steps[:, event]
        own.append(uploads[0])
        model = uploads.mean(axis=0)
        averages.append(model)
    view = sibling_view(averages, own, weight=0.5, start=np.ones(4))
    np.testing.assert_allclose(view.updates, steps[1])
    np.testing.assert_allclose(view.errors(steps[1:]), 0, atol=1e-12)


@pytest.mark.parametrize(("members", "together"), [(5, 1), (5, 2), (5, 4), (9, 1)])
def test_of_more_members_it_has_the_average_of_the_others(members: int, together: int) -> None:
    updates = np.eye(members)[:, None, :]  # of one length, at right angles; one event
    own = updates[:together].mean(axis=0)
    view = sibling_view(updates.mean(axis=0), own, weight=together / members)
    others = members - together
    np.testing.assert_allclose(view.updates[0], np.eye(members)[together:].mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(
        view.errors(updates[together:]), math.sqrt(1 - 1 / others), atol=1e-12
    )


def test_weights_may_differ_by_event() -> None:
    own, others = np.array([[1.0], [1.0]]), np.array([[4.0], [7.0]])
    shares = np.array([0.5, 0.2])
    averages = shares[:, None] * own + (1 - shares[:, None]) * others
    view = sibling_view(averages, own, weight=shares, step=0.1)
    np.testing.assert_allclose(view.models, others)
    np.testing.assert_allclose(view.rounding, [0.1, 0.0625])


def test_who_is_missing_tells_the_others_apart() -> None:
    updates = np.random.default_rng(3).normal(size=(3, 6))
    present = np.array([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 1, 1]], dtype=bool)
    means = np.array([updates[there].mean(axis=0) for there in present])
    found, rank = separate_members(means, present)
    assert rank == 3
    np.testing.assert_allclose(found, updates)
    found, rank = separate_members(means[[0, 3]], present[[0, 3]])
    assert rank == 1
    np.testing.assert_allclose(found, np.broadcast_to(updates.mean(axis=0), (3, 6)))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: sibling_view([[1.0]], [[1.0, 2.0]], weight=0.5),
            r"own = \(1, 2\): expected shape",
        ),
        (lambda: sibling_view([[1.0]], [[1.0]], weight=1.0), "weight = 1.0: expected numbers str"),
        (lambda: sibling_view([1.0], [1.0], weight=0.5), r"averages = \(1,\): expected an array"),
        (lambda: sibling_view([[1.0]], [[np.nan]], weight=0.5), "finite numbers"),
        (lambda: sibling_view([[1.0]], [[1.0]], weight=0.5, step=-1), "step = -1"),
        (
            lambda: sibling_view([[1.0]], [[1.0]], weight=0.5).errors(np.zeros((1, 1, 1))),
            "updates = 0.0: expected updates that are not zero",
        ),
        (
            lambda: sibling_view([[1.0]], [[1.0]], weight=0.5).errors(np.ones((1, 2, 1))),
            r"updates = \(1, 2, 1\): expected shape \(others, \*\(1, 1\)\)",
        ),
        (lambda: separate_members([[1.0]], [[1, 0]]), r"present = 'int64 \(1, 2\)'"),
        (lambda: separate_members([[1.0]], [[False]]), "present = 0: expected somebody"),
    ],
)
def test_what_is_not_allowed_is_named(call, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidParameterError, match=text):
        call()
