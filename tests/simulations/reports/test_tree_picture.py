"""The tree of a run: read from its file, accumulated where it is large, drawn."""

import json

import pytest
from matplotlib.patches import FancyBboxPatch

from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.simulations.reports.tree_groups import accumulated, tiers_of
from flwr_privacy.simulations.reports.tree_nodes import TreeNode, read_tree, variances
from flwr_privacy.simulations.reports.tree_picture import tree_figure, tree_svg, write_picture

DASH = "\N{EN DASH}"
SIGMA, EPSILON, TIMES = "\N{GREEK SMALL LETTER SIGMA}", "\N{GREEK SMALL LETTER EPSILON}", "\xd7"


def entries(fanouts, trusted=(), *, sigma=4.0, epsilon=lambda name: 8.0):
    """Return the nodes of a balanced tree as the file has them; `trusted` with all below them."""
    depth = len(fanouts)
    nodes = [{"name": "cloud", "parent": None, "tier": 0, "secure": False, "noise": False}]
    secure, level = {"cloud": False}, ["cloud"]
    for tier, fanout in enumerate(fanouts, 1):
        below = 1
        for later in fanouts[tier:]:
            below *= later
        names = []
        for parent in level:
            for _ in range(fanout):
                name = f"t{tier}-{len(names)}" if tier < depth else str(len(names))
                names.append(name)
                secure[name] = tier == depth or secure[parent] or name in trusted
                noise = secure[name] and not secure[parent]
                nodes.append(
                    {
                        "name": name,
                        "parent": parent,
                        "tier": tier,
                        "secure": secure[name],
                        "noise": noise,
                        "sigma": sigma / below if noise else None,
                        "epsilon": epsilon(name) if noise else None,
                        "devices": below,
                    }
                )
        level = names
    nodes[0]["devices"] = len(level)
    return nodes


def tree(*arguments, **options):
    return [TreeNode(**entry) for entry in entries(*arguments, **options)]


def half(count):
    return [f"t1-{index}" for index in range(count)]


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


# -- The file ------------------------------------------------------------------------------------


def write(path, nodes):
    path.write_text(json.dumps({"nodes": nodes}))
    return path


def test_a_file_is_read_with_or_without_the_cloud(tmp_path):
    nodes = entries((2, 3), half(1))
    whole = read_tree(write(tmp_path / "tree.json", nodes[::-1]))
    assert sorted(whole, key=lambda n: n.name) == sorted(
        tree((2, 3), half(1)), key=lambda n: n.name
    )
    assert [node.tier for node in whole] == [0, 1, 1, *[2] * 6]
    without = read_tree(write(tmp_path / "tree.json", nodes[1:]))
    assert without[0] == whole[0]
    assert set(without) == set(whole)
    assert read_tree(tmp_path / "none.json") is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "no tree"),
        ("[]", "no tree"),
        ("{}", "no tree .*nodes"),
        ('{"nodes": [1]}', "no tree"),
        ('{"nodes": []}', "no tree .*not one root"),
        ('{"nodes": [{"name": "a"}]}', "no tree .*parent"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, text, what):
    path = tmp_path / "tree.json"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"tree\.json: {what}"):
        read_tree(path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"name": "t1-1"}, "a name comes twice"),
        ({"parent": "nobody"}, "not one root"),
        ({"tier": 2}, "the tier of 't1-0' does not follow"),
        ({"parent": "3"}, "the tier of 't1-0' does not follow"),  # in a circle
        ({"secure": 1}, "secure = 1: expected true or false"),
        ({"sigma": -1.0}, "sigma = -1.0: expected a finite number of at least 0"),
        ({"epsilon": "8"}, "epsilon = '8': expected a finite number"),
        ({"devices": 2.5}, "devices = 2.5: expected an integer"),
        ({"parent": 7}, "parent = 7: expected text or null"),
    ],
)
def test_a_tree_that_is_none_is_refused(tmp_path, change, what):
    nodes = entries((2, 3), half(1))
    nodes[1].update(change)
    with pytest.raises(DataError, match=what):
        read_tree(write(tmp_path / "tree.json", nodes))


def test_a_node_checks_its_name():
    with pytest.raises(InvalidParameterError, match="name = 3: expected text"):
        TreeNode(name=3, parent=None, tier=0, secure=False, noise=False)


# -- Its noise -----------------------------------------------------------------------------------


def test_A8_variance_of_the_default_tree():
    # Acceptance fact A8 of the scheme, in units of a device's noise: 0.02, 0.012, 0.004.
    for trusted, parts in ((0, {2: 0.02}), (5, {1: 0.002, 2: 0.01}), (10, {1: 0.004})):
        found = variances(tree((10, 5), half(trusted), sigma=1.0))
        assert found == pytest.approx(parts)


def test_A10_variance_of_a_mixed_tree():
    mixed = tree((4, 2, 3), ["t1-0", "t1-1", "t2-4", "t2-6"], sigma=1.0)
    assert sum(variances(mixed).values()) == pytest.approx(0.0173611, abs=1e-7)


def test_a_leaf_for_several_devices_has_the_mean_of_their_noise():
    single = tree((2, 5), half(1), sigma=1.0)
    together = [node for node in single if node.tier < 2]
    for parent in ("t1-0", "t1-1"):
        first = next(node for node in single if node.parent == parent)
        together.append(TreeNode(**{**vars(first), "name": f"{parent} all", "devices": 5}))
    assert variances(together) == pytest.approx(variances(single))
    # With two of five devices, each has more weight.
    share = variances(single, answered=0.4)
    assert share[2] == pytest.approx(2.5 * variances(single)[2])
    assert share[1] == variances(single)[1]


# -- Folding -------------------------------------------------------------------------------------


def shape(group):
    """Return how many there are of a group, and the shapes below it."""
    return (group.times, [shape(child) for child in group.children])


def size(nodes):
    return sum(map(len, tiers_of(accumulated(nodes))[1:]))


def test_trees_of_up_to_sixty_nodes_are_drawn_whole():
    assert size(tree((10, 5), half(5))) == 60
    assert size(tree((60,))) == 60
    assert size(tree((12, 4), half(6))) == 60


@pytest.mark.parametrize("fanouts", [(61,), (12, 5), (13, 3)])
def test_larger_trees_are_folded(fanouts):
    assert size(tree(fanouts)) < 10


def test_equal_siblings_become_one_with_their_number():
    nodes = tree((10, 20), half(5))
    assert shape(accumulated(nodes)) == ("", [(f"{TIMES} 5", [(f"{TIMES} 20", [])])] * 2)
    one, other = accumulated(nodes).children
    assert (one.label, other.label) == ([f"{SIGMA} 0.2", f"{EPSILON} 8"], [])
    assert other.children[0].label == [f"{SIGMA} 4", f"{EPSILON} 8"]
    assert len(other.children[0].members) == 100


def test_siblings_with_other_subtrees_stay_apart_as_long_as_there_is_room():
    trusted = ["t1-0", "t3-20", "t3-21", "t3-24"]
    _, insecure = accumulated(tree((2, 4, 4, 4), trusted)).children
    assert sorted(child.times for child in insecure.children) == ["", "", f"{TIMES} 2"]


def test_siblings_that_differ_in_numbers_share_a_range():
    nodes = tree((20, 8), half(8), epsilon=lambda name: 1 + hash_of(name) % 700 / 100)
    trusted, others = accumulated(nodes).children
    assert (trusted.times, others.times) == (f"{TIMES} 8", f"{TIMES} 12")
    spent = [node.epsilon for node in nodes if node.tier == 1 and node.noise]
    low, high = (f"{value:.3g}" for value in (min(spent), max(spent)))
    assert trusted.label == [f"{SIGMA} 0.5", f"{EPSILON} {low}{DASH}{high}"]


def hash_of(name):
    return sum(ord(letter) * 31**place for place, letter in enumerate(name))


def test_siblings_of_other_sizes_share_a_range_in_the_end():
    nodes = [TreeNode(name="cloud", parent=None, tier=0, secure=False, noise=False)]
    for index in range(70):
        edge = f"e{index}"
        nodes.append(TreeNode(name=edge, parent="cloud", tier=1, secure=False, noise=False))
        nodes += [
            TreeNode(name=f"{edge}-{d}", parent=edge, tier=2, secure=True, noise=True, sigma=1.0)
            for d in range(3 + index)
        ]
    assert shape(accumulated(nodes)) == ("", [(f"{TIMES} 70", [(f"{TIMES} 3{DASH}72", [])])])


def test_devices_in_one_entry_are_counted():
    nodes = tree((2,))
    together = [nodes[0], TreeNode(**{**vars(nodes[1]), "devices": 600})]
    assert [group.times for group in accumulated(together).children] == [f"{TIMES} 600"]
    assert "tier 1: 600 devices; 600 add noise" in tree_svg(together, name="t")


def test_deep_trees_fold_quickly():
    assert size(tree((2, 3, 4, 5, 6, 2), ["t2-1"])) <= 60


# -- The picture ---------------------------------------------------------------------------------


def test_the_default_tree_says_who_is_trusted_and_where_noise_enters():
    figure = tree_figure(tree((10, 5), half(5)))
    words = texts(figure)
    assert [words.count(name) for name in ("t1-0", "t1-9", "Cloud", "Tier 1")] == [1] * 4
    assert words.count(f"{SIGMA} 0.8") == 5  # beside each trusted edge
    assert words.count(f"{SIGMA} 4\n{EPSILON} 8") == 5  # once below each family of devices
    assert "Tier 2\ndevices" in words
    boxes = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    faces = [patch.get_facecolor()[:3] for patch in boxes]
    assert len(faces) == 11
    assert sorted(map(faces.count, set(faces))) == [5, 6]  # trusted edges; the others and the cloud


def test_only_what_is_there_is_explained():
    legend = {"trusted by all its children", "noise is added here", "noise was added below"}
    legend |= {"in a trusted zone, no noise", "in clear, no noise", "not trusted"}

    def explained(nodes):
        return legend & set(texts(tree_figure(nodes)))

    assert explained(tree((10, 5), half(5))) == legend - {"in clear, no noise"}
    assert explained(tree((50,))) == {"not trusted", "noise is added here"}
    silent = [TreeNode(**{**vars(node), "noise": False}) for node in tree((4, 3), half(1))]
    assert explained(silent) == legend - {"noise is added here", "noise was added below"}


def test_everything_lies_within_the_picture():
    for nodes in (
        tree((10, 5), half(5)),
        tree((40, 10, 20), half(20)),
        tree((3, 8), epsilon=lambda name: 1.0 + hash_of(name) % 3),
    ):
        figure = tree_figure(nodes)
        figure.canvas.draw()
        whole = figure.bbox
        for text in figure.axes[0].texts:
            box = text.get_window_extent()
            assert whole.x0 <= box.x0 < box.x1 <= whole.x1, text.get_text()
            assert whole.y0 <= box.y0 < box.y1 <= whole.y1, text.get_text()


def test_labels_of_the_default_tree_do_not_overlap():
    figure = tree_figure(tree((10, 5), half(5), sigma=4.291))
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    for index, one in enumerate(boxes):
        assert not any(one.overlaps(other) for other in boxes[index + 1 :])


def test_names_from_outside_are_cut_and_no_formula():
    nodes = tree((1, 2))
    names = {"t1-0": "$x$" + "very-long-name" * 4}
    renamed = [
        TreeNode(
            **{
                **vars(node),
                "name": names.get(node.name, node.name),
                "parent": names.get(node.parent, node.parent),
            }
        )
        for node in nodes
    ]
    assert "$x$very-lon\N{HORIZONTAL ELLIPSIS}" in texts(tree_figure(renamed))
    assert "aria-label" in tree_svg(renamed, name="t")


def test_the_svg_takes_the_colours_of_the_page_and_describes_itself():
    svg = tree_svg(tree((10, 5), half(5)), name="tree7")
    assert svg.startswith("<svg")
    assert "currentColor" in svg
    assert "var(--paper, #fff)" in svg
    assert 'id="tree7-' in svg
    assert (
        'aria-label="Tree of the tiers. tier 1: 10 aggregators, 5 of them trusted; 5 add noise. '
        'tier 2: 50 devices; 25 add noise."'
    ) in svg
    assert svg == tree_svg(tree((10, 5), half(5)), name="tree7")


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_written_as_its_name_says(tmp_path, suffix, magic):
    path = tmp_path / f"tree.{suffix}"
    write_picture(tree((2, 3), half(1)), path)
    assert path.read_bytes().startswith(magic)
