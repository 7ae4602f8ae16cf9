"""The tree of aggregators: shape, trust, who adds noise, and what is no tree."""

import pickle
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zones import tree_file

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp.tree.tree import CLOUD, TierTree

TINY = {"A": CLOUD, "B": CLOUD, "1": "A", "3": "A", "5": "B", "7": "B"}
TINY_DEVICES = ("1", "3", "5", "7")


def tiny(*trusted: str) -> TierTree:
    return TierTree(parents=TINY, devices=TINY_DEVICES, trusted=frozenset(trusted))


@st.composite
def trees(draw: st.DrawFn) -> TierTree:
    """A tree of any shape, its nodes in any order, with trust in anybody."""
    depth = draw(st.integers(1, 4))
    parents: dict[str, str] = {}
    level = [CLOUD]
    for tier in range(1, depth + 1):
        level = [
            (parents.setdefault(name, above), name)[1]
            for above in level
            for name in (f"{tier}.{above}.{i}"[-64:] for i in range(draw(st.integers(1, 3))))
        ]
    aggregators = [node for node in parents if node not in set(level)]
    order = draw(st.permutations(sorted(parents)))
    trusted = draw(st.sets(st.sampled_from(aggregators))) if aggregators else set()
    return TierTree(
        parents={node: parents[node] for node in order},
        devices=tuple(draw(st.permutations(level))),
        trusted=frozenset(trusted),
    )


def path_to(tree: TierTree, node: str) -> list[str]:
    """Return the nodes from `node` up to below the cloud, by the parents alone."""
    path = []
    while node != CLOUD:
        path.append(node)
        node = tree.parents[node]
    return path


def injectors_by_tier(tree: TierTree) -> list[int]:
    counts = [0] * (tree.depth + 1)
    for node in tree.injectors():
        counts[tree.tier(node)] += 1
    return counts[1:]


# --- Shape ---------------------------------------------------------------------------------------


def test_the_shape_of_a_balanced_tree() -> None:
    tree = TierTree.of_fanouts("2,2,3")
    assert tree.tiers[:3] == ((CLOUD,), ("t1-0", "t1-1"), ("t2-0", "t2-1", "t2-2", "t2-3"))
    assert tree.tiers[3] == tree.devices == tuple(map(str, range(12)))
    assert (tree.depth, tree.smallest_fanouts()) == (3, (2, 3))
    assert tree.children(CLOUD) == ("t1-0", "t1-1")
    assert tree.children("t2-1") == ("3", "4", "5") == tree.leaves("t2-1")
    assert tree.leaves("t1-1") == ("6", "7", "8", "9", "10", "11")
    assert (tree.children("7"), tree.leaves("7")) == ((), ("7",))
    assert (tree.parent("7"), tree.parent("t1-0")) == ("t2-2", CLOUD)
    assert [tree.ancestor("7", tier) for tier in range(4)] == [CLOUD, "t1-1", "t2-2", "7"]
    assert [tree.tier(node) for node in (CLOUD, "t1-0", "t2-3", "11")] == [0, 1, 2, 3]
    assert [tree.position(node) for node in (CLOUD, "t1-0", "t2-3", "11")] == [0, 0, 3, 11]


def test_a_star_has_no_aggregators() -> None:
    tree = TierTree.of_fanouts((3,), p=0.0)
    assert (tree.depth, tree.tiers) == (1, ((CLOUD,), ("0", "1", "2")))
    assert tree.injectors() == tree.devices
    assert (tree.smallest_fanouts(), tree.ratios(), tree.ratios_min()) == ((), (), ())


def test_devices_of_one_parent_lie_side_by_side_in_any_order_given() -> None:
    tree = TierTree(parents=TINY, devices=("7", "3", "5", "1"))
    assert tree.devices == tree.tiers[2] == ("3", "1", "7", "5")
    assert (tree.leaves("A"), tree.leaves("B"), tree.span("B")) == (("3", "1"), ("7", "5"), (2, 4))


def test_A3_weights_are_those_of_a_mean_of_means() -> None:
    edges = [(CLOUD, "a"), (CLOUD, "b"), ("a", "0"), ("b", "1"), ("b", "2"), ("b", "3")]
    tree = TierTree.of_edges(edges)
    values = {"0": 0.0, "1": 4.0, "2": 4.0, "3": 4.0}
    assert sum(tree.weight(device) * values[device] for device in tree.devices) == 2.0
    assert (tree.weight("1"), tree.weight("1", "b"), tree.weight("b"), tree.weight("b", "b")) == (
        1 / 6,
        1 / 3,
        0.5,
        1.0,
    )


def test_smallest_fanouts_are_the_smallest() -> None:
    edges = [(CLOUD, "a"), (CLOUD, "b"), ("a", "0"), ("b", "1"), ("b", "2"), ("b", "3")]
    tree = TierTree.of_edges(edges)
    assert (tree.smallest_fanouts(), tree.fanouts(0), tree.fanouts(1)) == ((1,), (2,), (1, 3))
    with pytest.raises(InvalidParameterError, match="tier = 2: expected an integer from 0 to 1"):
        tree.fanouts(2)


@given(trees())
@settings(max_examples=60, deadline=None)
def test_weights_add_up_and_leaves_are_those_whose_path_it_is(tree: TierTree) -> None:
    for node in (CLOUD, *tree.parents):
        leaves = tree.leaves(node)
        assert leaves == tuple(
            device for device in tree.devices if node in (CLOUD, *path_to(tree, device))
        )
        total = sum(tree.weight(device, node) for device in leaves)
        assert total == pytest.approx(1, rel=1e-12)
        assert [tree.ancestor(device, tree.tier(node)) for device in leaves] == [node] * len(leaves)


def test_other_names_for_the_devices() -> None:
    tree = TierTree.of_fanouts((2, 2), p=0.5).with_devices(["w", "x", "y", "z"])
    assert (tree.devices, tree.leaves("t1-1"), tree.trusted) == (
        ("w", "x", "y", "z"),
        ("y", "z"),
        {"t1-0"},
    )
    assert tree == TierTree.of_fanouts((2, 2), p=0.5, devices=["w", "x", "y", "z"])


def test_a_tree_can_be_compared_copied_and_used_as_a_key() -> None:
    tree, other = tiny("A"), tiny("B")
    assert tree.injectors() == ("A", "5", "7")  # what was derived does not count
    assert tree == tiny("A") != other
    assert len({tree, tiny("A"), other}) == 2
    assert pickle.loads(pickle.dumps(tree)) == tree
    assert replace(tree, trusted=frozenset({"B"})).injectors() == ("B", "1", "3")


def test_the_tree_keeps_a_copy() -> None:
    parents = dict(TINY)
    tree = TierTree(parents=parents, devices=TINY_DEVICES)
    parents["1"] = "B"
    assert tree.parent("1") == "A"


# --- Trust ---------------------------------------------------------------------------------------


def test_A2_who_injects_in_the_tiny_tree() -> None:
    tree = tiny("A")
    assert tree.injectors() == ("A", "5", "7")
    assert tree.injectors(1) == ("5", "7")
    assert [tree.boundary(device) for device in tree.devices] == ["A", "A", "5", "7"]
    assert [tree.secure(node) for node in (CLOUD, "A", "B", "1", "5")] == [
        False,
        True,
        False,
        True,
        True,
    ]


def test_A4_a_trusted_node_with_an_insecure_child_is_insecure() -> None:
    edges = [(CLOUD, "a"), ("a", "b"), ("a", "c"), ("b", "1"), ("c", "2")]
    tree = TierTree.of_edges(edges, trusted={"a", "b"})
    assert (tree.secure("a"), tree.secure("b"), tree.secure("c")) == (False, True, False)
    assert tree.withdrawn == ("a",)
    assert tree.injectors() == ("b", "2")
    closed = TierTree.of_edges(edges, trusted={"a", "b", "c"})
    assert (closed.withdrawn, closed.injectors()) == ((), ("a",))


def test_A4_closure_goes_all_the_way_up() -> None:
    edges = [(CLOUD, "a"), ("a", "b"), ("b", "c"), ("b", "d"), ("c", "1"), ("d", "2")]
    tree = TierTree.of_edges(edges, trusted={"a", "b", "c"})
    assert (tree.withdrawn, tree.injectors()) == (("a", "b"), ("c", "2"))


@given(trees())
@settings(max_examples=150, deadline=None)
def test_A4_one_injector_on_every_path(tree: TierTree) -> None:
    aggregators = [node for node in tree.parents if tree.children(node)]
    for node in aggregators:
        # Secure means trusted, and so is every aggregator below.
        below = [other for other in aggregators if node in path_to(tree, other)]
        assert tree.secure(node) == (set(below) <= tree.trusted)
        assert (node in tree.withdrawn) == (node in tree.trusted and not tree.secure(node))
        if tree.secure(node):
            assert all(tree.secure(other) for other in below)
    for event_tier in range(tree.depth):
        injectors = tree.injectors(event_tier)
        assert len(set(injectors)) == len(injectors)
        for device in tree.devices:
            path = path_to(tree, device)
            on_path = [node for node in path if node in injectors]
            boundary = [node for node in path if tree.secure(node)][-1]
            assert tree.boundary(device) == boundary
            assert on_path == ([boundary] if tree.tier(boundary) > event_tier else [])
    tiers = [tree.tier(node) for node in tree.injectors()]
    assert tiers == sorted(tiers)


@pytest.mark.parametrize(
    ("p", "counts"), [(0.0, [0, 50]), (0.5, [5, 25]), (1.0, [10, 0])], ids=["0", "half", "1"]
)
def test_A8_injectors_of_the_default_tree(p: float, counts: list[int]) -> None:
    tree = TierTree.of_fanouts((10, 5), p=p)
    assert injectors_by_tier(tree) == counts
    assert len(tree.injectors()) == {0.0: 50, 0.5: 30, 1.0: 10}[p]
    assert tree.ratios() == tree.ratios_min() == (p,)


def test_A10_injectors_of_the_mixed_tree() -> None:
    tree = TierTree.of_fanouts((4, 2, 3), p=(0.5, 0.5))
    assert injectors_by_tier(tree) == [2, 2, 6]
    assert [len(tree.injectors(tier)) for tier in range(3)] == [10, 8, 6]
    assert {tree.weight(node) for node in tree.injectors(2)} == {1 / 24}


@pytest.mark.parametrize(
    ("p", "counts"),
    [
        ((0.5, 0, 0), [1, 0, 0, 64]),
        ((0.5, 0, 1), [1, 0, 16, 0]),
        ((0.5, 1, 1), [1, 4, 0, 0]),
        ((1, 1, 1), [2, 0, 0, 0]),
    ],
    ids=["D1", "D2", "D3", "D4"],
)
def test_A11_injectors_of_the_D_configurations(p: tuple[float, ...], counts: list[int]) -> None:
    tree = TierTree.of_fanouts((2, 4, 4, 4), p=p)
    assert [len(tier) for tier in tree.tiers] == [1, 2, 8, 32, 128]
    assert injectors_by_tier(tree) == counts
    # Equal noise multipliers: the noise of a tier is as its weight within the injector.
    variance = sum(
        (tree.weight(node) * tree.weight(tree.leaves(node)[0], node)) ** 2
        for node in tree.injectors()
    )
    expected = {64: 3.967285e-3, 16: 1.037598e-3, 4: 3.051758e-4, 2: 1.220703e-4}
    assert variance == pytest.approx(expected[max(counts)], rel=1e-6)


@pytest.mark.parametrize("fanouts", [(2, 4), (2, 4, 4), (2, 4, 4, 4)], ids=["L2", "L3", "L4"])
def test_A12_depth(fanouts: tuple[int, ...]) -> None:
    secure, insecure = TierTree.of_fanouts(fanouts, p=1.0), TierTree.of_fanouts(fanouts, p=0)
    assert secure.injectors() == ("t1-0", "t1-1")
    assert insecure.injectors() == insecure.devices
    assert injectors_by_tier(insecure)[-1] == 2 * 4 ** (len(fanouts) - 1)


def test_shares_are_rounded_half_up_from_their_decimals() -> None:
    for p, count in [(0.29, 15), (0.289, 14), (0.31, 16), (0.01, 1), (0.009, 0), (1, 50)]:
        assert count == int(Fraction(str(p)) * 50 + Fraction(1, 2))
        assert injectors_by_tier(TierTree.of_fanouts((50, 1), p=p))[0] == count
    assert injectors_by_tier(TierTree.of_fanouts((5, 2), p=0.5)) == [3, 4]


def test_ratios_are_over_the_insecure_nodes_above() -> None:
    edges = [(CLOUD, f"e{i}") for i in range(4)]
    edges += [(f"e{i}", f"m{i}{j}") for i in range(4) for j in range(4)]
    edges += [(f"m{i}{j}", f"{i}{j}") for i in range(4) for j in range(4)]
    trusted = {"e0", *(f"m0{j}" for j in range(4)), "m10", "m20", "m21", "m22"}
    tree = TierTree.of_edges(edges, trusted=trusted)
    assert (tree.ratios(), tree.ratios_min()) == ((0.25, 0.75), (0.25, 0.0))
    # Nobody is insecure at tier 1: by convention 1.
    assert TierTree.of_fanouts((2, 2, 2), p=(1, 0.5)).ratios() == (1.0, 1.0)


def test_a_seed_draws_which_are_secure() -> None:
    first = TierTree.of_fanouts((10, 2, 2), p=(0.5, 0.5))
    drawn = [TierTree.of_fanouts((10, 2, 2), p=(0.5, 0.5), seed=seed) for seed in range(20)]
    assert all(injectors_by_tier(tree) == injectors_by_tier(first) for tree in drawn)
    assert drawn[3] == TierTree.of_fanouts((10, 2, 2), p=(0.5, 0.5), seed=3)
    assert len({tree.injectors() for tree in drawn}) == 20
    assert first.injectors()[:6] == ("t1-0", "t1-1", "t1-2", "t1-3", "t1-4", "t2-10")


def test_one_share_is_for_all_tiers() -> None:
    assert TierTree.of_fanouts((4, 2, 3), p=0.5) == TierTree.of_fanouts((4, 2, 3), p=(0.5, 0.5))


# --- Files ---------------------------------------------------------------------------------------


@given(trees())
@settings(max_examples=60, deadline=None)
def test_a_written_tree_is_read_back(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    path = tmp_path_factory.mktemp("tree") / "tree.toml"
    path.write_text(tree_file(tree), encoding="utf-8")
    read = TierTree.read(path)
    assert read == tree
    assert (read.tiers, read.injectors()) == (tree.tiers, tree.injectors())


def test_a_file_as_somebody_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "tree.toml"
    path.write_text(
        """
        [nodes.north]
        trusted = true
        [nodes.ward-1]
        parent = "north"
        trusted = true
        devices = ["a", "b"]
        [nodes.south]
        parent = "cloud"
        [nodes."ward.2"]
        parent = "south"
        devices = ["c"]
        """,
        encoding="utf-8",
    )
    tree = TierTree.read(str(path))
    assert tree.tiers == ((CLOUD,), ("north", "south"), ("ward-1", "ward.2"), ("a", "b", "c"))
    assert tree.injectors() == ("north", "c")


def test_a_star_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "star.toml").write_text('nodes.cloud.devices = ["a", "b"]')
    assert TierTree.read(tmp_path / "star.toml").tiers == ((CLOUD,), ("a", "b"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[nodes", "tree = '{path}': expected a TOML file (Expected"),
        ("", "tree {path}: nodes = None: expected a table [nodes.NAME]"),
        ("nodes = 3", "tree {path}: nodes = 3: expected a table [nodes.NAME]"),
        ("[nodes]", "tree {path}: nodes = {{}}: expected a table [nodes.NAME]"),
        ("[node.a]", "tree {path}: key = 'node': expected one of 'nodes' (nearest: 'nodes')"),
        ("nodes.a = 3", "tree {path}: nodes.a = 3: expected a table"),
        (
            "[nodes.a]\ntrust = true",
            "tree {path}: nodes.a: key = 'trust': expected one of 'devices', 'parent', 'trusted'"
            " (nearest: 'trusted'",
        ),
        ("[nodes.a]\ntrusted = 1", "nodes.a: trusted = 1: expected true or false"),
        ("[nodes.a]\nparent = 1", "nodes.a: parent = 1: expected names"),
        ("[nodes.a]\nparent = 'b'", "nodes.a: parent = 'b': expected 'cloud' or a node of the"),
        ("[nodes.a]\ndevices = 'xy'", "nodes.a: devices = 'xy': expected a list of names"),
        ("[nodes.a]\ndevices = [1]", "nodes.a: devices = 1: expected names other than 'cloud'"),
        ("[nodes.a]\ndevices = ['cloud']", "nodes.a: devices = 'cloud': expected names other"),
        ("[nodes.a]\ndevices = ['x/y']", "nodes.a: devices = 'x/y': expected 1 to 64 letters"),
        ("[nodes.a]\ndevices = []", "nodes.a: devices = []: expected at least one name"),
        ("[nodes.a]\ndevices = ['x', 'x']", "nodes.a: devices = 'x': expected different names"),
        (
            "[nodes.a]\ndevices = ['x']\n[nodes.b]\ndevices = ['x']",
            "tree {path}: nodes.b: devices = 'x': expected a name that is not yet a device of 'a'",
        ),
        (
            "[nodes.a]\ndevices = ['b']\n[nodes.b]\ndevices = ['x']",
            "tree {path}: nodes.a: devices = 'b': expected a name that is not yet an aggregator",
        ),
        (
            "[nodes.cloud]\ndevices = ['x']\ntrusted = true",
            "tree {path}: nodes.cloud: key = 'trusted': expected one of 'devices'",
        ),
        (
            "[nodes.a]\nparent = 'b'\ndevices = ['x']\n[nodes.b]\nparent = 'a'",
            "tree {path}: parents = 'a': expected a way to 'cloud', not the cycle a -> b -> a",
        ),
        (
            "[nodes.a]\ndevices = ['x']\n[nodes.b]",
            "tree {path}: parents = 'b': expected an aggregator with a child, or a device",
        ),
    ],
    ids=lambda value: None if "{path}" in value or "expected" in value else value[:40],
)
def test_bad_files_name_the_file_and_the_node(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tree.toml"
    path.write_text(text)
    with pytest.raises(InvalidParameterError) as caught:
        TierTree.read(path)
    assert str(path) in str(caught.value)
    assert message.format(path=path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=r"none\.toml': expected a file that can be re"):
        TierTree.read(tmp_path / "none.toml")


# --- What is no tree -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parents", "devices", "message"),
    [
        ({}, (), "devices = []: expected at least one name"),
        ({"1": CLOUD}, "1", "devices = '1': expected a list of names"),
        ({"1": CLOUD}, ("1", "1"), "devices = '1': expected different names"),
        ({"1": CLOUD}, (1,), "devices = 1: expected names other than 'cloud'"),
        ([("1", CLOUD)], ("1",), "expected a table of parents by node"),
        ({"1": CLOUD, "cloud": "1"}, ("1",), "parents = 'cloud': expected names other"),
        ({"1": CLOUD, "a b": CLOUD}, ("1",), "parents = 'a b': expected 1 to 64 letters"),
        (TINY, (*TINY_DEVICES, "9"), "devices = '9': expected a device that has a parent"),
        (TINY | {"C": CLOUD}, TINY_DEVICES, "parents = 'C': expected an aggregator with a child"),
        (TINY | {"9": "C"}, (*TINY_DEVICES, "9"), "parents = 'C': expected 'cloud' or a node"),
        (TINY | {"9": ["A"]}, (*TINY_DEVICES, "9"), "parents = ['A']: expected 'cloud' or a nod"),
        (TINY | {"9": "7"}, (*TINY_DEVICES, "9"), "parents = '7': expected an aggregator, not a"),
        (TINY | {"9": CLOUD}, (*TINY_DEVICES, "9"), "devices = '9': expected all devices on one "),
        (TINY | {"C": "A", "9": "C"}, (*TINY_DEVICES, "9"), "is on tier 2, '9' on tier 3"),
        (
            TINY | {"C": "D", "D": "E", "E": "D", "9": "C"},
            (*TINY_DEVICES, "9"),
            "parents = 'D': expected a way to 'cloud', not the cycle D -> E -> D",
        ),
        ({"A": "A", "1": "A"}, ("1",), "not the cycle A -> A"),
    ],
    ids=[
        "nothing",
        "text",
        "twice",
        "number",
        "pairs",
        "parent-of-cloud",
        "malformed",
        "device-without-leaf",
        "leaf-without-device",
        "unknown-parent",
        "parent-no-name",
        "device-as-parent",
        "device-too-high",
        "device-too-low",
        "cycle",
        "own-parent",
    ],
)
def test_what_is_no_tree_is_refused_by_name(parents: Any, devices: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        TierTree(parents=parents, devices=devices)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [CLOUD, "1", "C", 3], ids=str)
def test_only_aggregators_can_be_trusted(name: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        TierTree(parents=TINY, devices=TINY_DEVICES, trusted=frozenset({"A", name}))
    assert f"trusted = {name!r}: expected an aggregator below the cloud" in str(caught.value)


def test_a_name_is_no_list_of_trusted_ones() -> None:
    with pytest.raises(InvalidParameterError, match="trusted = 'AB': expected a list"):
        TierTree(parents=TINY, devices=TINY_DEVICES, trusted="AB")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        (
            [(CLOUD, "a"), (CLOUD, "b"), ("a", "1"), ("b", "1")],
            "edges = '1': expected a node with one parent, not 'a' and 'b'",
        ),
        ([(CLOUD, "1"), (CLOUD, "1")], "edges = '1': expected a node that is there once below"),
        ([("a", "b"), ("b", "a")], "not the cycle b -> a -> b"),
        ([("a", "b"), ("b", "a"), ("a", "1")], "not the cycle b -> a -> b"),
        ([("a", "1")], "parents = 'a': expected 'cloud' or a node that has a parent itself"),
        ([("a", CLOUD)], "edges = 'cloud': expected names other than 'cloud'"),
        (["ab"], "edges = 'ab': expected pairs"),
        ([("a", "b", "c")], "expected pairs of a parent and its child"),
        ([], "devices = []: expected at least one name"),
    ],
    ids=["two-parents", "twice", "circle", "cycle", "rootless", "above", "text", "three", "none"],
)
def test_edges_that_are_no_tree_are_refused(edges: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        TierTree.of_edges(edges)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fanouts": "10;5"}, "fanouts = '10;5': expected numbers, as '10,5'"),
        ({"fanouts": ""}, "fanouts = '': expected numbers"),
        ({"fanouts": ()}, "fanouts = (): expected a number of children for every tier"),
        ({"fanouts": 1.5}, "fanouts = 1.5: expected a number of children for every tier"),
        ({"fanouts": (10, 0)}, "fanouts = 0: expected an integer of at least 1"),
        ({"fanouts": (10, 2.0)}, "fanouts = 2.0: expected an integer of at least 1"),
        ({"fanouts": (10**4, 10**4)}, "expected at most 10000000 devices"),
        ({"fanouts": (2, 2), "p": 1.1}, "p = 1.1: expected a finite number from 0 to 1"),
        ({"fanouts": (2, 2), "p": (-0.1,)}, "p = -0.1: expected a finite number from 0 to 1"),
        ({"fanouts": (2, 2), "p": "0.5"}, "p = '0.5': expected a finite number from 0 to 1"),
        ({"fanouts": (2, 2), "p": (0.5, 0.5)}, "p = [0.5, 0.5]: expected 1 numbers, one for eve"),
        ({"fanouts": (2,), "p": 0.5}, "p = 0.5: expected 0 or None: a tree of depth 1"),
        ({"fanouts": (2, 2), "p": 0.5, "seed": 1.5}, "seed = 1.5: expected an integer"),
        (
            {"fanouts": (2, 2), "devices": ["a", "b", "c"]},
            "devices = '3 names': expected 4 names, one for every leaf",
        ),
        ({"fanouts": (1, 2), "devices": ["a", "a"]}, "devices = 'a': expected different names"),
        ({"fanouts": (1, 2), "devices": ["a", "t1-0"]}, "devices = 't1-0': expected no name of a"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_bad_fanouts_shares_and_names(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        TierTree.of_fanouts(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b", "c"], "devices = '3 names': expected 4 names, one for every leaf"),
        (["a", "b", "c", "A"], "devices = 'A': expected no name of an aggregator"),
        (["a", "b", "c", "c"], "devices = 'c': expected different names"),
    ],
    ids=["too-few", "aggregator", "twice"],
)
def test_bad_other_names(names: list[str], message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        tiny().with_devices(names)
    assert message in str(caught.value)


def test_questions_about_nobody() -> None:
    tree = tiny("A")
    for ask in (tree.tier, tree.parent, tree.children, tree.leaves, tree.secure, tree.boundary):
        with pytest.raises(InvalidParameterError, match="node = 'x': expected a node of the tree"):
            ask("x")
    with pytest.raises(InvalidParameterError, match="node = 'cloud': expected a node below"):
        tree.parent(CLOUD)
    with pytest.raises(InvalidParameterError, match="device = 'A': expected a device of the tree"):
        tree.boundary("A")
    with pytest.raises(InvalidParameterError, match="tier = 2: expected an integer from 0 to 1"):
        tree.ancestor("A", 2)
    for under in ("B", "3"):
        with pytest.raises(InvalidParameterError, match=f"under = '{under}': expected a node abov"):
            tree.weight("1", under)
    with pytest.raises(InvalidParameterError, match="event_tier = 2: expected an integer from 0 t"):
        tree.injectors(2)


# --- Size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fanouts", [(100, 1000), (50_000, 2)])
def test_a_tree_of_100_000_devices_is_built_and_asked(fanouts: tuple[int, int]) -> None:
    """Each answer walks one path: a walk over the tree for every device would take hours."""
    tree = TierTree.of_fanouts(fanouts, p=0.5)
    trusted = fanouts[0] // 2
    boundaries = [tree.tier(tree.boundary(device)) for device in tree.devices]
    assert boundaries == [1] * trusted * fanouts[1] + [2] * trusted * fanouts[1]
    assert {tree.weight(device) for device in tree.devices} == {1 / fanouts[0] / fanouts[1]}
    assert sum(len(tree.leaves(node)) for node in tree.tiers[1]) == 100_000
    assert len(tree.injectors()) == trusted * (1 + fanouts[1])
    assert (tree.ratios(), tree.withdrawn) == ((0.5,), ())
