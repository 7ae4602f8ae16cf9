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
from flwr_privacy.simulations.reports.style import drawing

__all__ = ["Row", "draw", "draw_scores", "save"]

_IMAGES = 8  # in a row


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A row of images.

    Parameters
    ----------
    name : str
        What they are.
    images : ndarray, shape (images, features)
        Square ones.
    notes : sequence of str, optional
        What stands below each.
    span : tuple of float, optional
        What is black and white; by default each image has a grey scale of its own.
    """

    name: str
    images: NDArray[np.float64]
    notes: Sequence[str] | None = None
    span: tuple[float, float] | None = None


@drawing()
def draw(rows: Sequence[Row], path: Path, *, title: str, step: int = 1) -> Path:
    """Draw the first images of some rows, one below the other.

    Parameters
    ----------
    rows : sequence of Row
        The rows, all with the same number of images.
    path : Path
        File for the PNG; its folder is made if need be.
    title : str
        Title.
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
    side = round(rows[0].images.shape[1] ** 0.5)
    figure = Figure(figsize=(1.1 * columns + 1.3, 1.3 * len(rows)))
    figure.suptitle(textwrap.fill(title, 16 * columns + 12))
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for axes, row in zip(grid, rows, strict=True):
        axes[0].set_ylabel(textwrap.fill(row.name, 12))
        low, high = row.span or (None, None)
        for column, place in enumerate(axes):
            image = row.images[column * step].reshape(side, side)
            place.imshow(image, cmap="gray", vmin=low, vmax=high)
            place.set_xticks([])
            place.set_yticks([])
            place.spines[:].set_visible(False)
            if row.notes is not None:
                place.set_xlabel(row.notes[column * step])
    return save(figure, path)


def draw_scores(
    axes: Axes,
    scores: NDArray[np.float64],
    coins: NDArray[np.bool_],
    *,
    names: tuple[str, str],
    reach: float,
) -> None:
    """Draw histograms of the scores under tails and under heads, from -reach to reach."""
    bins = list(np.linspace(-reach, reach, 81))
    for coin, name in enumerate(names):
        axes.hist(scores[coins == bool(coin)], bins, alpha=0.6, label=name)


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
