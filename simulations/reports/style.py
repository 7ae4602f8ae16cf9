"""One look for all pictures: colours, sizes of text, grid and frame."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from matplotlib import rc_context
from matplotlib.rcsetup import cycler

__all__ = ["COLOURS", "INK", "PAPER", "drawing"]

# Inside a page the colours of its text and of its ground take the place of these two.
INK = "#010203"
PAPER = "#fcfdfe"
# Okabe and Ito's palette for all kinds of colour vision, without the yellow (too pale on white)
# and with the colour of the text in place of black. Reading order is order of contrast.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": f"{INK}80",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 10,
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 8.5,
    "figure.constrained_layout.use": True,
    "figure.titlesize": 10,
    "grid.alpha": 0.14,
    "grid.color": INK,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.title_fontsize": 8.5,
    "savefig.dpi": 150,
    "text.color": INK,
    **{
        f"{axis}tick.{name}": value
        for axis in "xy"
        for name, value in (("color", INK), ("labelsize", 9), ("major.size", 3), ("minor.size", 0))
    },
}


@contextmanager
def drawing() -> Iterator[None]:
    """Give what is drawn inside the look of all pictures; also a decorator.

    A figure has to be saved inside as well, because matplotlib makes its ticks only then.
    """
    with rc_context(_STYLE):
        yield
