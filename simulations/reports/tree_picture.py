"""Draws a tree of aggregators: which nodes the devices trust, and where noise is added."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch

from .figures import svg_of
from .style import COLOURS, INK, PAPER
from .tree_groups import MOST_NODES, Group, accumulated, tiers_of
from .tree_nodes import TreeNode

__all__ = ["tree_figure", "tree_svg", "write_picture"]

TRUSTED, NOISE = COLOURS[:2]

WIDTH = 7.4  # inches, as everything below
ROW = 1.0
LEFT = 0.85  # for the names of the tiers
WIDEST_SLOT = 1.5
FAMILY_GAP = 0.7  # slots
TOP = 0.3
LABEL_WIDTH = 0.5
UPRIGHT = 0.65  # length of a label that stands upright
LINE = 0.115
NODE = 0.085  # half the side of an aggregator
DEVICE = 0.045
FOLD = 0.035  # how far the nodes of a stack lie apart
SMALL, LARGE = 6.5, 8.5  # points
LONGEST_NAME = 12  # characters
CROWD = 10  # children of a node from which on their links are thinner


def tree_svg(nodes: Sequence[TreeNode], *, name: str) -> Markup:
    """Draw a tree and return it as an ``<svg>`` element.

    Parameters
    ----------
    nodes : Sequence of TreeNode
        As `read_tree` returns them.
    name : str
        Name of the figure, unique in its page.
    """
    return svg_of(tree_figure(nodes), name=name, description=_description(nodes))


def write_picture(nodes: Sequence[TreeNode], path: Path) -> None:
    """Draw a tree into a file; its suffix says as what: png, svg or pdf.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    tree_figure(nodes).savefig(path, dpi=200, facecolor="white")


@dataclass(frozen=True)
class _Place:
    group: Group
    x: float
    y: float
    noised: bool  # whether noise enters at or below it


def tree_figure(nodes: Sequence[TreeNode]) -> Figure:
    """Return the drawing of a tree, whose units are inches.

    Large trees are accumulated: siblings are drawn as a stack with their number beside it, as
    `flwr_privacy.simulations.reports.tree_groups.accumulated` has it.

    Parameters
    ----------
    nodes : Sequence of TreeNode
        As `read_tree` returns them.
    """
    tree = accumulated(nodes)
    depth = len(tiers_of(tree)) - 1
    figure = Figure()
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    slots = _slots(tree)
    room = WIDTH - LEFT - 0.45
    slot = min(WIDEST_SLOT, room / slots)
    drawing = _Drawing(axes, slot=slot, whole=len(nodes) <= MOST_NODES + 1)
    drawing.draw(tree, LEFT + 0.1 + max(0.0, (room - slots * slot) / 2))
    for tier in range(depth + 1):
        named = ("Cloud" if tier == 0 else f"Tier {tier}") + ("\ndevices" if tier == depth else "")
        _text(axes, 0.08, -ROW * tier, named, ha="left", alpha=0.75)
    bottom = drawing.legend()
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(bottom, TOP)
    figure.set_size_inches(WIDTH, TOP - bottom)
    return figure


def _slots(group: Group) -> float:
    """Return how many leaves wide a group is, with the gaps between families."""
    if not group.children:
        return 1.0
    gaps = sum(bool(child.children) for child in group.children[:-1])
    return sum(map(_slots, group.children)) + FAMILY_GAP * gaps


class _Drawing:
    """Draws a tree from left to right, a node above its children, in inches from the cloud."""

    def __init__(self, axes: Axes, *, slot: float, whole: bool) -> None:
        self.axes = axes
        self.slot = slot
        self.whole = whole
        self.lowest = 0.0
        self.kinds: set[str] = set()  # of links, as far as there are any

    def draw(self, group: Group, left: float) -> _Place:
        y = -ROW * group.one.tier
        self.lowest = min(self.lowest, y - 2 * LINE)
        if not group.children:
            return self._node(_Place(group, left + self.slot / 2, y, group.one.noise))
        places = []
        for child in group.children:
            places.append(self.draw(child, left))
            left += self.slot * (_slots(child) + (FAMILY_GAP if child.children else 0))
        middle = (places[0].x + places[-1].x) / 2
        noised = group.one.noise or any(place.noised for place in places)
        here = _Place(group, middle, y, noised)
        scale = min(1.0, math.sqrt(CROWD / len(places)))
        for place in places:
            self._link(place, here, scale)
        self._leaf_labels([place for place in places if not place.group.children])
        return self._node(here)

    def _link(self, child: _Place, parent: _Place, scale: float) -> None:
        kind = _link_kind(child.group.one, parent.group.one, noised=child.noised)
        self.kinds.add(kind)
        look = {**LINKS[kind], "linewidth": scale * LINKS[kind]["linewidth"]}
        x, y = (child.x, parent.x), (child.y + _half(child.group), parent.y - _half(parent.group))
        self.axes.add_line(Line2D(x, y, zorder=1, **look))
        if child.group.one.noise:
            near = 0.2  # nearer to the node that adds the noise
            at = (x[0] + near * (x[1] - x[0]), y[0] + near * (y[1] - y[0]))
            mark = {**NOISE_MARK, "markersize": scale * NOISE_MARK["markersize"]}
            self.axes.add_line(Line2D(*([v] for v in at), zorder=4, **mark))

    def _node(self, place: _Place) -> _Place:
        group, x, y = place.group, place.x, place.y
        shifts = (2 * FOLD, FOLD, 0.0) if group.times else (0.0,)
        for shift in shifts:
            _shape(self.axes, group, x + shift, y + shift / 2, zorder=3 - shift)
        lines = [(group.times, INK, LARGE)]
        if group.children and group.one.parent is not None and self.whole:
            lines.append((_short(group.one.name), INK, SMALL))
        if group.children or group.times:
            lines += [(text, NOISE, SMALL) for text in group.label]
        lines = [line for line in lines if line[0]]
        start = x + _half(group) + shifts[0] + 0.05
        top = y + LINE * (len(lines) - 1) / 2
        for row, (text, color, size) in enumerate(lines):
            _text(self.axes, start, top - LINE * row, text, ha="left", color=color, size=size)
        return place

    def _leaf_labels(self, places: Sequence[_Place]) -> None:
        """Write the noise of leaves under them, once for neighbours that add the same."""
        runs: list[list[_Place]] = []
        for place in places:
            if place.group.times or not place.group.label:
                continue  # it stands beside them, or there is none
            if runs and runs[-1][0].group.label == place.group.label:
                runs[-1].append(place)
            else:
                runs.append([place])
        for run in runs:
            first, last = run[0].x, run[-1].x
            y = run[0].y - LINE
            if len(run) > 1:
                span = Line2D((first, last), (y, y), color=NOISE, linewidth=0.9)
                self.axes.add_line(span)
            upright = last - first + self.slot < LABEL_WIDTH
            self.lowest = min(self.lowest, y - (UPRIGHT if upright else 2 * LINE) - 0.05)
            _text(
                self.axes,
                (first + last) / 2,
                y - 0.05,
                ("  " if upright else "\n").join(run[0].group.label),
                va="top",
                color=NOISE,
                rotation=90 if upright else 0,
            )

    def legend(self) -> float:
        """Explain the looks that there are, and return where the picture ends."""
        links = {kind: look for kind, look in LINKS.items() if kind in self.kinds}
        shapes = {kind: look for kind, look in NODES.items() if kind != TRUST or ZONE in links}
        for row, looks in enumerate((shapes, links)):
            y = self.lowest - 0.25 - 0.19 * row
            for column, (text, look) in enumerate(looks.items()):
                x = 0.35 + 1.78 * column
                ends = (x + 0.12,) if "marker" in look else (x, x + 0.24)
                self.axes.add_line(Line2D(ends, [y] * len(ends), **look))
                if text == ADDED:
                    self.axes.add_line(Line2D([x + 0.12], [y], **NOISE_MARK))
                _text(self.axes, x + 0.32, y, text, ha="left")
        return self.lowest - 0.57


NOISE_MARK: dict[str, Any] = {
    "marker": "D",
    "markersize": 4.5,
    "color": NOISE,
    "markeredgewidth": 0,
    "linestyle": "none",
}

TRUST = "trusted by all its children"
NODES: dict[str, dict[str, Any]] = {
    TRUST: {"marker": "s", "linestyle": "none", "markersize": 7, "color": TRUSTED},
    "not trusted": {
        "marker": "s",
        "linestyle": "none",
        "markersize": 7,
        "color": PAPER,
        "markeredgecolor": INK,
        "markeredgewidth": 1.2,
    },
}

ADDED, ZONE = "noise is added here", "in a trusted zone, no noise"
BELOW, CLEAR = "noise was added below", "in clear, no noise"
LINKS: dict[str, dict[str, Any]] = {
    ADDED: {"color": NOISE, "linewidth": 1.5},
    ZONE: {"color": TRUSTED, "linewidth": 1.3},
    BELOW: {
        "color": INK,
        "alpha": 0.6,
        "linewidth": 1.1,
        "linestyle": (0, (1, 1.6)),
    },
    CLEAR: {"color": INK, "linewidth": 1.1, "linestyle": (0, (5, 2))},
}
"""Links of the tree by what is sent over them."""


def _link_kind(child: TreeNode, parent: TreeNode, *, noised: bool) -> str:
    if child.noise:
        return ADDED
    if parent.secure:
        return ZONE
    return BELOW if noised else CLEAR


def _half(group: Group) -> float:
    return NODE if group.children or group.one.tier == 0 else DEVICE


def _shape(axes: Axes, group: Group, x: float, y: float, *, zorder: float) -> None:
    half = _half(group)
    if half == DEVICE:
        marker = Line2D([x], [y], marker="o", markersize=144 * DEVICE, color=INK, zorder=zorder)
        marker.set_markeredgecolor(PAPER)
        marker.set_markeredgewidth(0.6)
        axes.add_line(marker)
        return
    trusted = group.one.secure
    box = FancyBboxPatch(
        (x - half, y - half),
        2 * half,
        2 * half,
        boxstyle="round,pad=0,rounding_size=0.04",
        facecolor=TRUSTED if trusted else PAPER,
        edgecolor=PAPER if trusted and group.times else TRUSTED if trusted else INK,
        linewidth=1.2,
        zorder=zorder,
    )
    axes.add_patch(box)


def _text(axes: Axes, x: float, y: float, text: str, **look: Any) -> None:
    ground = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.4}  # where a link runs behind it
    look = {"color": INK, "ha": "center", "va": "center", "size": SMALL, "bbox": ground, **look}
    # A name may have a dollar sign, and is no formula.
    axes.text(x, y, text, parse_math=False, linespacing=1.15, zorder=5, **look)


def _description(nodes: Sequence[TreeNode]) -> str:
    depth = max(node.tier for node in nodes)
    sentences = []
    for tier in range(1, depth + 1):
        here = [node for node in nodes if node.tier == tier]
        if tier == depth:
            total, noisy = (
                sum(node.devices for node in some) for some in (here, [n for n in here if n.noise])
            )
            sentences.append(f"tier {tier}: {total} devices; {noisy} add noise")
        else:
            trusted, noisy = sum(n.secure for n in here), sum(n.noise for n in here)
            words = f"{len(here)} aggregators, {trusted} of them trusted"
            sentences.append(f"tier {tier}: {words}; {noisy} add noise")
    return f"Tree of the tiers. {'. '.join(sentences)}."


def _short(name: str) -> str:
    return (
        name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}\N{HORIZONTAL ELLIPSIS}"
    )
