"""Pictures of attacks: rows of images, one below the other, and scores of two coins."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.reports.style import COLOURS, drawing

__all__ = ["Row", "above", "draw", "draw_scores", "save"]

_IMAGES = 8  # in a row
_FRAME = 3  # points
_ROOM = 1.25  # for a legend of one row above the bars


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A row of images.

    Parameters
    ----------
    name : str
        What they are.
    images : ndarray, shape (images, features), (images, height, width) or (images, channels, ...)
        Flat ones are square. With three channels they are in colour, and `span` is for all three.
    notes : sequence of str, optional
        What stands below each.
    span : tuple of float, optional
        What is black and white; by default each image has a grey scale of its own.
    recovered : sequence of bool, optional
        Which images count as recovered; these are framed.
    """

    name: str
    images: NDArray[np.float64]
    notes: Sequence[str] | None = None
    span: tuple[float, float] | None = None
    recovered: Sequence[bool] | NDArray[np.bool_] | None = None


@drawing()
def draw(rows: Sequence[Row], path: Path, *, title: str, recovered: str, step: int = 1) -> Path:
    """Draw the first images of some rows, one below the other.

    Parameters
    ----------
    rows : sequence of Row
        The rows, all with the same number of images.
    path : Path
        File for the PNG; its folder is made if need be.
    title : str
        Title.
    recovered : str
        What counts as recovered, for the line that explains the frames.
    step : int, default 1
        Draw every so many-th image only.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    InvalidParameterError
        If it cannot be written.
    """
    columns = min(_IMAGES, len(rows[0].images) // step)
    figure = Figure(figsize=(1.1 * columns + 1.3, 1.3 * len(rows)))
    lines = (title, f"framed: recovered, {recovered}")
    figure.suptitle("\n".join(textwrap.fill(line, 16 * columns + 12) for line in lines))
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for axes, row in zip(grid, rows, strict=True):
        axes[0].set_ylabel(textwrap.fill(row.name, 12))
        low, high = row.span or (None, None)
        for column, place in enumerate(axes):
            image = _as_drawn(row.images[column * step], row.span)
            place.imshow(image, cmap="gray", vmin=low, vmax=high)
            place.set_xticks([])
            place.set_yticks([])
            framed = row.recovered is not None and row.recovered[column * step]
            place.spines[:].set(visible=framed, color=COLOURS[1], linewidth=_FRAME)
            if row.notes is not None:
                place.set_xlabel(row.notes[column * step])
    return save(figure, path)


def _as_drawn(image: NDArray[np.float64], span: tuple[float, float] | None) -> NDArray[np.float64]:
    """Return an image as matplotlib takes it: its channels last, colours from 0 to 1."""
    if image.ndim == 1:
        side = round(image.size**0.5)
        return image.reshape(side, side)
    if image.ndim == 2 or len(image) == 1:
        return image.reshape(image.shape[-2:])
    low, high = span or (float(image.min()), float(image.max()))
    scaled = (np.moveaxis(image, 0, -1) - low) / max(high - low, 1e-12)
    colours: NDArray[np.float64] = np.clip(scaled, 0.0, 1.0)
    return colours


def draw_scores(
    axes: Axes,
    scores: NDArray[np.float64],
    coins: NDArray[np.bool_],
    *,
    names: tuple[str, str],
    legend: str,
    reach: float,
) -> None:
    """Draw histograms of the scores under tails and under heads, from -reach to reach."""
    bins = list(np.linspace(-reach, reach, 81))
    for coin, name in enumerate(names):
        axes.hist(scores[coins == bool(coin)], bins, alpha=0.6, label=name)
    axes.set_ylim(0, axes.get_ylim()[1] * _ROOM)
    axes.legend(title=legend, loc="upper right", ncols=2)


def above(axes: Axes, columns: int) -> None:
    """Give axes without a title a legend above them, where it covers nothing."""
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure that was drawn inside `drawing` as PNG; its folder is made if need be.

    Raises
    ------
    InvalidParameterError
        If it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise InvalidParameterError(
            "picture", str(path), f"a file that can be written ({error.strerror})"
        ) from error
    return path
