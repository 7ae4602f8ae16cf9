"""Sums of codes by group: exact in any order, in any split over nodes, and nothing forged."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_privacy.m2fdp import TierSums
from flwr_privacy.privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.privacy.grid import CODE_LIMIT

START = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(2), "n": np.array(3)}
NAMES = ["w", "b"]
GROUPS = {"0": "left", "1": "left", "2": "right", "3": "right", "4": "lone"}

Codes = dict[str, Any]


def empty(groups: dict[str, str] | None = None) -> TierSums:
    return TierSums(START, NAMES, GROUPS if groups is None else groups)


def codes_of(client: str, seed: int = 0) -> Codes:
    draws = np.random.default_rng(100 * seed + int(client))
    return {
        name: draws.integers(-CODE_LIMIT, CODE_LIMIT, START[name].shape, np.int32, endpoint=True)
        for name in NAMES
    }


def of(clients: str, groups: dict[str, str] | None = None) -> TierSums:
    sums = empty(groups)
    for client in clients:
        sums.accumulate(client, codes_of(client), weight=1, metrics={"loss": float(client)})
    return sums


def equal(one: TierSums, other: TierSums) -> bool:
    assert (one.weight, one.clients) == (other.weight, other.clients)
    for group in set(GROUPS.values()):
        assert one.answered(group) == other.answered(group)
        assert list(one.of(group)) == list(other.of(group)) or not one.of(group)
        for name, sums in one.of(group).items():
            assert np.issubdtype(sums.dtype, np.signedinteger)
            np.testing.assert_array_equal(sums, other.of(group)[name])
    return True


def refused(reason: str, detail: str, work: Callable[[], object]) -> None:
    with pytest.raises(ReplyRefusedError, match=detail) as error:
        work()
    assert error.value.reason == reason


def test_each_group_has_the_sum_of_its_own_clients() -> None:
    sums = of("01234")
    for group in ("left", "right", "lone"):
        members = [client for client, place in GROUPS.items() if place == group]
        assert sums.answered(group) == members
        for name in NAMES:
            expected = sum(codes_of(client)[name].astype(object) for client in members)
            assert (sums.of(group)[name] == expected).all()
    assert sums.weight == 5
    assert sums.metrics() == {"loss": 2.0}


def test_a_group_of_which_nobody_answered_has_no_sum() -> None:
    sums = of("02")
    assert (sums.of("lone"), sums.answered("lone")) == ({}, [])
    assert (sums.of("nowhere"), sums.answered("nowhere")) == ({}, [])
    assert sums.answered("left") == ["0"]


@given(st.permutations("01234"), st.lists(st.integers(0, 2), min_size=5, max_size=5))
@settings(max_examples=50, deadline=None)
def test_sums_are_the_same_in_any_order_and_on_any_nodes(
    order: list[str], nodes: list[int]
) -> None:
    parts = [of("".join(c for c in order if nodes[int(c)] == node)) for node in range(3)]
    merged = empty()
    for part in parts:
        arrays, fields = part.state()
        merged.merge(empty().from_state(arrays, json.loads(json.dumps(fields))))
    assert equal(merged, of("01234"))
    assert merged.metrics() == {"loss": pytest.approx(2.0)}


def test_the_largest_codes_of_many_clients_are_summed_exactly() -> None:
    groups = {str(client): "all" for client in range(300)}
    sums = TierSums({"w": np.zeros(2)}, ["w"], groups)
    for client in groups:
        sums.accumulate(client, {"w": np.array([CODE_LIMIT, -CODE_LIMIT], np.int32)}, weight=1)
    assert sums.of("all")["w"].tolist() == [300 * CODE_LIMIT, -300 * CODE_LIMIT]


def test_the_sum_of_a_group_is_taken_out_once_as_one_vector() -> None:
    sums = of("013")
    vector, count = sums.taken("left") or (np.zeros(0), 0)
    expected = [codes_of("0")[name].astype(np.int64) + codes_of("1")[name] for name in NAMES]
    np.testing.assert_array_equal(vector, np.concatenate([part.reshape(-1) for part in expected]))
    assert count == 2
    assert sums.taken("left") is None
    assert sums.taken("lone") is None
    assert sums.answered("right") == ["3"]


def test_what_is_summed_later_does_not_change_a_reply() -> None:
    """The first reply of a group may be a view into a message."""
    first = codes_of("0")
    kept = {name: array.copy() for name, array in first.items()}
    sums = empty()
    sums.accumulate("0", first, weight=1)
    sums.accumulate("1", codes_of("1"), weight=1)
    for name, array in first.items():
        np.testing.assert_array_equal(array, kept[name])


def test_an_empty_state_is_an_empty_sum() -> None:
    arrays, fields = empty().state()
    assert arrays == {}
    assert equal(empty().from_state(arrays, fields), empty())


def test_a_state_names_groups_and_arrays() -> None:
    arrays, fields = of("02").state()
    assert sorted(arrays) == ["left/b", "left/w", "right/b", "right/w"]
    assert (fields["clients"], fields["weight"]) == (["0", "2"], 2)


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "twice": ({"client": "0"}, "duplicate", "client 0 is already in a sum"),
    "of no group": ({"client": "9"}, "unknown client", "client 9 has no group"),
    "weight": ({"weight": 2}, "weight", "every client weighs 1"),
    "no weight": ({"weight": 0}, "weight", "every client weighs 1"),
    "floats": ({"codes": {"w": START["w"], "b": START["b"]}}, "dtype", "'w'"),
    "shape": ({"codes": {**codes_of("1"), "b": np.zeros(3, np.int32)}}, "shape", "'b'"),
    "missing": ({"codes": {"w": codes_of("1")["w"]}}, "names", "'b'"),
    "kept back": ({"codes": {**codes_of("1"), "n": np.zeros((), np.int32)}}, "names", "'n'"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_reply_is_refused_and_changes_nothing(what: str) -> None:
    change, reason, detail = BAD[what]
    sums, before = of("0"), of("0")
    given = {"client": "1", "codes": codes_of("1"), "weight": 1, **change}
    refused(
        reason,
        detail,
        lambda: sums.accumulate(given["client"], given["codes"], weight=given["weight"]),
    )
    assert equal(sums, before)


def test_a_group_whose_only_answer_was_refused_has_no_sum() -> None:
    sums = empty()
    refused("names", "w", lambda: sums.accumulate("4", {}, weight=1))
    assert sums.taken("lone") is None
    assert sums.answered("lone") == []


def test_a_sealed_answer_counts_once_and_is_in_no_sum() -> None:
    sums = empty()
    sums.count("0")
    sums.accumulate("2", codes_of("2"), weight=1)
    assert (sums.weight, sums.clients) == (2, {"0", "2"})
    assert (sums.of("left"), sums.answered("left")) == ({}, [])
    refused("duplicate", "client 0 has answered already", lambda: sums.count("0"))
    refused("duplicate", "client 0", lambda: sums.accumulate("0", codes_of("0"), weight=1))
    assert sums.weight == 2


def test_sums_that_do_not_fit_together_are_not_merged() -> None:
    sums = of("0")
    other = TierSums({"w": START["w"]}, ["w"], GROUPS)
    refused("shape", "different templates", lambda: sums.merge(other))
    refused("shape", "different templates", lambda: sums.merge(WeightedMean(START)))
    refused(
        "duplicate", "clients ['0'] are in both".replace("[", r"\["), lambda: sums.merge(of("01"))
    )
    assert equal(sums, of("0"))


def _without(key: str, arrays: Any, fields: Any) -> None:
    del arrays[key]


FORGED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a client of no group": (lambda a, f: f["clients"].append("9"), "client 9 has no group"),
    "a client in no sum": (lambda a, f: f["clients"].append("4"), "client 4 is in no sum"),
    "the wrong weight": (lambda a, f: f.update(weight=3.0), "3.0 of 2 replies that weigh 1"),
    "a weight of nothing": (lambda a, f: f.update(weight="2"), "'weight' is no finite number"),
    "a sum over nobody": (
        lambda a, f: a.update({"lone/w": a["left/w"], "lone/b": a["left/b"]}),
        "a sum over no clients",
    ),
    "a group that is none": (
        lambda a, f: a.update({"ghost/w": a["left/w"], "ghost/b": a["left/b"]}),
        "a sum over no clients",
    ),
    "an array that is missing": (lambda a, f: _without("left/b", a, f), "'b'"),
    "an array too many": (lambda a, f: a.update({"left/n": np.zeros((), np.int64)}), "'n'"),
    "an array of no group": (lambda a, f: a.update({"w": a["left/w"]}), "sum over no clients"),
    "another shape": (lambda a, f: a.update({"left/b": np.zeros(3, np.int64)}), "'b'"),
    "floats": (lambda a, f: a.update({"left/b": np.zeros(2)}), "'b'"),
    "more than one client can send": (
        lambda a, f: a.update({"left/b": np.full(2, 2 * CODE_LIMIT, np.int64)}),
        "'b'",
    ),
    "a client twice": (lambda a, f: f.update(clients=["0", "0"]), "client"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_state_is_refused(what: str) -> None:
    forge, detail = FORGED[what]
    arrays, fields = of("02").state()
    arrays, fields = dict(arrays), {**fields, "clients": list(fields["clients"])}
    forge(arrays, fields)
    with pytest.raises(ReplyRefusedError, match=detail):
        empty().from_state(arrays, fields)


def test_the_sums_of_several_groups_have_no_mean() -> None:
    with pytest.raises(TypeError, match="sums of several groups have no mean of their own"):
        of("01").finish()
