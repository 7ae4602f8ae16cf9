"""Energy and delay of a round."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp.control.resources import Cost, Link, ResourceModel
from flwr_privacy.m2fdp.tree.counts import TierCounts
from flwr_privacy.m2fdp.tree.tree import TierTree

MODEL = 7840  # parameters of the paper's model
DEFAULT = TierCounts.of_fanouts((10, 5))
UNEVEN = TierCounts(children=((2,), (2, 1), (3, 1, 2)), secure=(True, False))


def test_A18_of_one_upload() -> None:
    bits = 32 * MODEL
    model = ResourceModel()
    assert model.wireless.watts == pytest.approx(0.251189, rel=2e-6)
    assert model.wired.watts == pytest.approx(6.309573, rel=1e-6)
    assert model.wireless.seconds(bits) == pytest.approx(7.168e-3, rel=1e-12)
    assert model.wireless.joules(bits) == pytest.approx(1.80052e-3, rel=1e-5)
    assert model.wired.seconds(bits) == pytest.approx(2.5088e-3, rel=1e-12)
    assert model.wired.joules(bits) == pytest.approx(15.82946e-3, rel=1e-6)


@pytest.mark.parametrize(
    ("steps", "events", "energy", "paper_sum", "tdma"),
    [(20, 3, 1.5183986, 5.458688, 4.145869), (5, 0, 0.4983206, 1.383488, 1.038349)],
)
def test_A18_of_a_round(
    steps: int, events: int, energy: float, paper_sum: float, tdma: float
) -> None:
    for mode, seconds in {"paper_sum": paper_sum, "tdma": tdma}.items():
        cost = ResourceModel(delay_mode=mode).round(
            DEFAULT, steps=steps, events={1: events}, parameters=MODEL
        )
        assert cost.energy == pytest.approx(energy, rel=1e-6)
        assert cost.seconds == pytest.approx(seconds, rel=1e-6)


def test_A18_of_events_without_steps() -> None:
    model = ResourceModel(step_energy=0, step_seconds=0)
    alone = model.round(DEFAULT, steps=1, parameters=MODEL)
    with_one = model.round(DEFAULT, steps=1, events={1: 1}, parameters=MODEL)
    assert alone.energy == pytest.approx(0.2483206, rel=1e-6)
    assert with_one.energy - alone.energy == pytest.approx(0.0900260, rel=1e-6)


@pytest.mark.parametrize(("link", "energy"), [("wireless", 1.0900260), ("wired", 1.7914729)])
def test_A18_of_a_star(link: str, energy: float) -> None:
    star = TierCounts.of_fanouts((50,))
    cost = ResourceModel(star_link=link).round(star, steps=20, parameters=MODEL)
    assert cost.energy == pytest.approx(energy, rel=1e-6)


def in_order(counts: TierCounts, taking: tuple[int, ...], top: int) -> tuple[int, list[int]]:
    """Walk the tree: all uploads that nodes of tier `top` and below it receive, and by tier the
    most of one node."""
    uploads, most = 0, []
    for tier in range(top, counts.depth):
        received = taking if tier == counts.depth - 1 else counts.children[tier]
        uploads += sum(received)
        most.append(max(received))
    return uploads, most


DELAYS: dict[str, Callable[[int, list[int], int], tuple[float, float]]] = {
    # mode: (uploads, most of one node by tier, N_1) -> (wireless turns, wired turns)
    "paper_sum": lambda uploads, most, first: (uploads, first),
    "tdma": lambda uploads, most, first: (sum(most), 1),
    "parallel": lambda uploads, most, first: (len(most), 1),
}


@pytest.mark.parametrize("mode", list(DELAYS))
@pytest.mark.parametrize("taking", [(3, 1, 2), (2, 1, 1), (1, 0, 2)], ids=str)
def test_an_uneven_tree_node_by_node(mode: str, taking: tuple[int, ...]) -> None:
    model = ResourceModel(
        bits=8,
        wireless=Link(dbm=30, rate=8e3),  # 1 W, 1 ms a parameter
        wired=Link(dbm=40, rate=8e4),  # 10 W, 0.1 ms a parameter
        step_energy=0.5,
        step_seconds=2.0,
        delay_mode=mode,
    )
    cost = model.round(UNEVEN, steps=7, events={1: 2, 2: 3}, parameters=10, participants=taking)
    energy, seconds = 7 * sum(taking) * 0.5, 7 * 2.0
    for top, times in ((1, 1), (1, 2), (2, 3)):  # the global event, and the local ones
        uploads, most = in_order(UNEVEN, taking, top)
        energy += times * uploads * 0.01
        seconds += times * DELAYS[mode](uploads, most, 2)[0] * 0.01
    energy += 2 * 0.01
    seconds += DELAYS[mode](0, [], 2)[1] * 0.001
    assert cost.energy == pytest.approx(energy, rel=1e-12)
    assert cost.seconds == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("mode", "link", "turns"),
    [
        ("paper_sum", "wired", 6),
        ("paper_sum", "wireless", 6),
        ("tdma", "wired", 1),
        ("tdma", "wireless", 6),
        ("parallel", "wired", 1),
        ("parallel", "wireless", 1),
    ],
)
def test_delay_of_a_star(mode: str, link: str, turns: int) -> None:
    model = ResourceModel(delay_mode=mode, star_link=link)
    star = TierCounts.of_fanouts((8,))
    cost = model.round(star, steps=3, parameters=MODEL, participants=(6,))
    hop = (model.wired if link == "wired" else model.wireless).seconds(32 * MODEL)
    assert cost.seconds == pytest.approx(3 * 0.2 + turns * hop, rel=1e-12)


def test_arrays_of_points_equal_the_points() -> None:
    for mode in DELAYS:
        model = ResourceModel(delay_mode=mode)
        steps, devices = np.array([[1], [5]]), np.array([10, 30, 50])
        work: dict[str, Any] = {"events": {1: np.array([[0], [1]])}, "parameters": MODEL}
        energy = model.energy(DEFAULT, steps=steps, devices=devices, **work)
        most = devices // 10
        seconds = model.seconds(DEFAULT, steps=steps, devices=devices, most=most, **work)
        for row, (k, events) in enumerate(((1, 0), (5, 1))):
            for column, each in enumerate((1, 3, 5)):
                cost = model.round(
                    DEFAULT, steps=k, events={1: events}, parameters=MODEL, participants=[each] * 10
                )
                assert energy[row, column] == pytest.approx(cost.energy, rel=1e-12)
                assert seconds[row, column] == pytest.approx(cost.seconds, rel=1e-12)


def test_counts_of_a_tree() -> None:
    edges = [("cloud", "a"), ("cloud", "b"), ("a", "c"), ("a", "d"), ("b", "e")]
    edges += [("c", "1"), ("c", "2"), ("c", "3"), ("d", "4"), ("e", "5"), ("e", "6")]
    tree = TierTree.of_edges(edges, trusted=["a", "c", "d"])
    counts = TierCounts.of(tree)
    assert counts == UNEVEN
    assert counts.depth == 3
    assert counts.nodes == (2, 3, 6)
    assert counts.lowest == (3, 1, 2)
    assert counts.lowest_secure == (True, True, False)
    # d is not trusted, and so a is insecure with both below it
    untrusted = TierCounts.of(TierTree.of_edges(edges, trusted=["a", "c"]))
    assert untrusted.lowest_secure == (False, False, False)
    assert TierCounts.of(TierTree.of_fanouts((4,))) == TierCounts.of_fanouts((4,))


def test_counts_of_fanouts_equal_those_of_the_tree() -> None:
    tree = TierTree.of_fanouts((2, 4, 4, 8), p=(0.5, 0, 1))
    assert TierCounts.of(tree) == TierCounts.of_fanouts((2, 4, 4, 8), secure=1)


BAD_COUNTS: list[tuple[dict[str, Any], str]] = [
    ({"children": ()}, "children = (): expected at least the cloud's"),
    ({"children": ((2, 1),)}, "children[0] = (2, 1): expected 1 counts, as many as tier 0"),
    ({"children": ((2,), (1,))}, "children[1] = (1,): expected 2 counts, as many as tier 1"),
    ({"children": ((0,),)}, "children[0] = 0: expected an integer of at least 1"),
    ({"children": ((2,), (1, True))}, "children[1] = True: expected an integer"),
    ({"children": ((2,), (1, 1)), "secure": (True,)}, "secure = (True,): expected 2 labels"),
    ({"children": ((2,),), "secure": (True, True)}, "secure = (True, True): expected 0 labels"),
    ({"children": ((1,), (1,)), "secure": (1,)}, "secure = 1: expected true or false"),
]


@pytest.mark.parametrize(("values", "text"), BAD_COUNTS, ids=str)
def test_counts_of_no_tree_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        TierCounts(**values)
    assert str(caught.value).startswith(text)


def test_fanouts_of_no_tree_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"fanouts\[1\] = 0: expected an integer"):
        TierCounts.of_fanouts((2, 0))
    with pytest.raises(InvalidParameterError, match="secure = 3: expected an integer from 0 to 2"):
        TierCounts.of_fanouts((2, 2), secure=3)
    with pytest.raises(InvalidParameterError, match="secure = 1: expected an integer from 0 to 0"):
        TierCounts.of_fanouts((2,), secure=1)


BAD_MODELS: list[tuple[dict[str, Any], str]] = [
    ({"bits": 0}, "bits = 0: expected an integer of at least 1"),
    ({"wireless": 35e6}, "wireless = 35000000.0: expected a Link"),
    ({"wired": None}, "wired = None: expected a Link"),
    ({"step_energy": -1e-3}, "step_energy = -0.001: expected a finite number of at least 0"),
    ({"step_seconds": float("nan")}, "step_seconds = nan: expected a finite number"),
    ({"delay_mode": "papersum"}, "delay_mode = 'papersum': expected one of 'paper_sum'"),
    ({"star_link": "cable"}, "star_link = 'cable': expected one of 'wired', 'wireless'"),
]


@pytest.mark.parametrize(("values", "text"), BAD_MODELS, ids=str)
def test_what_is_no_model_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        ResourceModel(**values)
    assert str(caught.value).startswith(text)


def test_what_is_no_link_or_cost_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="rate = 0: expected a finite number of at"):
        Link(dbm=24, rate=0)
    with pytest.raises(InvalidParameterError, match="dbm = inf: expected a finite number"):
        Link(dbm=float("inf"), rate=1)
    with pytest.raises(InvalidParameterError, match=r"seconds = -0\.1: expected a finite number"):
        Cost(energy=1.0, seconds=-0.1)
    with pytest.raises(InvalidParameterError, match="energy = nan: expected a finite number"):
        Cost(energy=float("nan"), seconds=0.1)


BAD_ROUNDS: list[tuple[dict[str, Any], str]] = [
    ({"steps": 0}, "steps = 0: expected an integer of at least 1"),
    ({"parameters": 0}, "parameters = 0: expected an integer of at least 1"),
    ({"events": {2: 1}}, "events: tier = 2: expected an integer from 1 to 1"),
    ({"events": {0: 1}}, "events: tier = 0: expected an integer from 1 to 1"),
    ({"events": {1: -1}}, "events[1] = -1: expected an integer of at least 0"),
    ({"participants": [5] * 9}, "participants = [5, 5, 5, 5, 5, 5, 5, 5, 5]: expected 10 counts"),
    ({"participants": [5] * 9 + [6]}, "participants = 6: expected an integer from 0 to 5"),
]


@pytest.mark.parametrize(("values", "text"), BAD_ROUNDS, ids=str)
def test_what_is_no_round_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        ResourceModel().round(DEFAULT, **({"steps": 5, "parameters": MODEL} | values))
    assert str(caught.value).startswith(text)


def test_a_star_has_no_local_events() -> None:
    with pytest.raises(InvalidParameterError, match="expected none in a star"):
        ResourceModel().round(TierCounts.of_fanouts((5,)), steps=1, events={1: 1}, parameters=MODEL)
