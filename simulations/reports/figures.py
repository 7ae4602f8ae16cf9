"""Figures of a report: line charts as SVG to be placed inside an HTML page.

Text and axes take the colour of the page (``currentColor``), so that a figure is readable in a
light and in a dark scheme. Nothing in it refers to anything outside of it.
"""

import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from .style import COLOURS, INK, PAPER, drawing

__all__ = ["Reference", "Series", "Style", "chart", "svg_of", "swatch"]

DASHES: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0, ()),
    (0, (5, 1.5)),
    (0, (1.2, 1.2)),
    (0, (6, 1.5, 1.2, 1.5)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")

SIZE = (5.0, 3.1)  # inches
NOTE_WIDTH = 70  # characters that have room above the axes
NOTE_HEIGHT = 0.14  # inches of a line
MARKERS_PER_LINE = 8
LOG_SPAN = 50.0


@dataclass(frozen=True)
class Style:
    """Look of one run, the same in every figure; `index` counts the runs from 0."""

    index: int

    @property
    def colour(self) -> str:
        """Colour of the line."""
        return COLOURS[self.index % len(COLOURS)]

    def line(self, xs: Sequence[float], ys: Sequence[float]) -> Line2D:
        """Return the run's line through some points, with a marker on some of them."""
        every = max(1, math.ceil(len(xs) / MARKERS_PER_LINE))
        return Line2D(
            xs,
            ys,
            color=self.colour,
            linestyle=DASHES[self.index % len(DASHES)],
            linewidth=1.7,
            marker=MARKERS[self.index % len(MARKERS)],
            markersize=5,
            markeredgewidth=0,
            markevery=(self.index % every, every),
            clip_on=False,
            zorder=3 + 0.01 * self.index,
        )


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values of one run: `ys` over `xs`, equally long."""

    label: str
    style: Style
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Reference:
    """A level to compare the lines with."""

    label: str
    y: float


@drawing()
def chart(
    series: Sequence[Series],
    *,
    name: str,
    xlabel: str,
    ylabel: str,
    limits: tuple[float, float] | None = None,
    whole_xs: bool = False,
    log_xs: bool = False,
    reference: Reference | None = None,
    notes: Sequence[str] = (),
) -> Markup:
    """Draw lines and return them as an ``<svg>`` element.

    Parameters
    ----------
    series : Sequence of Series
        At least one.
    name : str
        Name of the figure, unique in its page; the ids in it start with it.
    xlabel, ylabel : str
        What the axes show, with the unit.
    limits : (float, float), optional
        Ends of the upright axis. By default they fit the data, and the axis is logarithmic where
        positive values span a factor of 50 or more.
    whole_xs : bool, default False
        Whether the level axis has whole numbers only.
    log_xs : bool, default False
        Whether the level axis is logarithmic; it has no place for what lies at 0 then.
    reference : Reference, optional
        A thin line across the figure, with its label on it.
    notes : Sequence of str, default ()
        Sentences above the axes: what has to stay with the figure where it is copied.
    """
    wrapped = [line for note in notes for line in textwrap.wrap(note, NOTE_WIDTH)]
    width, height = SIZE
    figure = Figure(figsize=(width, height + NOTE_HEIGHT * len(wrapped)))
    axes = figure.add_subplot()
    axes.set_title("\n".join(wrapped), loc="left")
    for one in series:
        axes.add_line(one.style.line(one.xs, one.ys))
    axes.relim()
    if reference is not None:
        _draw(reference, axes)
    values = [y for one in series for y in one.ys if math.isfinite(y)]
    if limits is not None:
        axes.set_ylim(*limits)
    elif values and min(values) > 0 and max(values) / min(values) >= LOG_SPAN:
        axes.set_yscale("log")
    axes.autoscale_view()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if log_xs:
        axes.set_xscale("log", nonpositive="mask")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    if whole_xs:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    lines = [one.label for one in series] + ([reference.label] if reference else [])
    description = ". ".join([f"{ylabel} over {xlabel}: {', '.join(lines)}", *notes])
    return svg_of(figure, name=name, description=description)


def swatch(style: Style, *, name: str) -> Markup:
    """Return a piece of a run's line, for legends and tables, as an ``<svg>`` element."""
    figure = Figure(figsize=(0.42, 0.14))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, 2)
    axes.set_ylim(-1, 1)
    line = style.line([0.1, 1, 1.9], [0, 0, 0])
    line.set_markevery([1])
    axes.add_line(line)
    return svg_of(figure, name=name, description=None)


def svg_of(figure: Figure, *, name: str, description: str | None) -> Markup:
    """Return a figure as an ``<svg>`` element in the colours of the page.

    Parameters
    ----------
    figure : Figure
        Drawn with `INK` where the colour of the page's text is meant, and `PAPER` for its ground.
    name : str
        Name of the figure, unique in its page; the ids in it start with it.
    description : str or None
        What it shows, for who cannot see it; None for a decoration.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # HTML knows the namespaces of SVG by itself; matplotlib's style sheet would hold for the
    # whole page; and ids are to be unique in the page.
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'(\sid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = text.replace(INK, "currentColor").replace(PAPER, "var(--paper, #fff)")
    look = 'aria-hidden="true"'
    if description is not None:
        look = f'role="img" aria-label="{escape(description)}"'
    return Markup(text.replace("<svg", f"<svg {look}", 1))


def _draw(reference: Reference, axes: Axes) -> None:
    axes.axhline(reference.y, color=INK, alpha=0.7, linewidth=1.0, linestyle=(0, (2, 2)))
    # At the left, where curves that rise begin far below.
    axes.annotate(
        reference.label,
        (0.0, reference.y),
        xycoords=axes.get_yaxis_transform(),
        xytext=(4, -3),
        textcoords="offset points",
        verticalalignment="top",
        fontsize=8.5,
    )
