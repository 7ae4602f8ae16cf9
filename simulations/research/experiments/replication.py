"""Collects the results of experiments, and makes the pages of verdicts from them.

The results are files in ``docs/replication/results/<paper>/``: one small file for each experiment
and size (`flwr_privacy.simulations.research.experiments.summary`), and ``paper.toml``, which people
write: what the verdicts mean for a user, which figures have none, what those that were not run at
the paper's size would take, and what else there is to know of an experiment's numbers. The pages
are made from that folder alone, and from the pictures of ``docs/replication/pictures/``, which come
with the results.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from flwr_privacy.errors import DataError
from flwr_privacy.wire.files import write_text

from .pages import Paper, front_page, of_paper, paper_page
from .summary import PICTURE, SUMMARY, paper_of, read_summary, summary_text

__all__ = ["collect", "pages", "replication"]

RESULTS = Path("replication", "results")
PICTURES = "pictures"
_COLOURS = 128  # of a picture that is kept: a third of its size, and its lines keep theirs
PAPER = "paper.toml"
_KEYS = {"title": "", "short": "", "meaning": "", "scheme": "replication.md", "order": 99}
_LISTS = ("pictures", "missing", "notes")


def replication(runs: Path, docs: Path) -> tuple[list[Path], list[str]]:
    """Collect new results and write all pages.

    Parameters
    ----------
    runs : Path
        Where to look for results; it need not be there.
    docs : Path
        The folder of the pages.

    Returns
    -------
    written : list of Path
        The pages.
    left : list of str
        Which results were left where they are, and why.

    Raises
    ------
    DataError
        If there are no results, old or new, or a file is damaged.
    """
    left = collect(runs, docs / RESULTS)
    found = pages(docs / RESULTS)
    if not found:
        raise DataError(
            f"no results below {runs} and {docs / RESULTS}: run "
            "`flwr-privacy experiment <scheme>/<figure>` first"
        )
    for name, text in found.items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(docs / name, text)
    return [docs / name for name in found], left


def collect(runs: Path, results: Path) -> list[str]:
    """Copy new results into the folder that is kept; return which were left, and why.

    Results with fewer seeds than those that are kept are left: to drop seeds would be to choose
    among them. Those at the paper's size take the place of smaller ones, whatever they say.
    """
    left = []
    for path in sorted(runs.glob(f"**/{SUMMARY}")):
        table = read_summary(path)
        name = f"{table['experiment'].rpartition('/')[2]}{'-full' * table['full']}.json"
        place = results / paper_of(table["experiment"]) / name
        larger = place.with_name(f"{place.stem}-full.json")
        if _seeds(place) > len(table["seeds"]):
            left.append(f"{path}: {place} has more seeds")
            continue
        if not table["full"] and larger.exists() and _seeds(larger) >= len(table["seeds"]):
            left.append(f"{path}: {larger} is at the paper's size, with no fewer seeds")
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, summary_text(table))
        _keep_picture(path.with_name(PICTURE), _picture_of(place))
    for place in results.glob("*/*-full.json"):
        smaller = place.with_name(place.name.replace("-full.json", ".json"))
        if smaller.exists() and _seeds(smaller) <= _seeds(place):
            smaller.unlink()
            _picture_of(smaller).unlink(missing_ok=True)
    return left


def _seeds(place: Path) -> int:
    return len(read_summary(place)["seeds"]) if place.exists() else 0


def _picture_of(place: Path) -> Path:
    """Return where the picture of kept results is."""
    results, paper = place.parents[1], place.parent.name
    return results.with_name(PICTURES) / paper / f"{place.stem}.png"


def _keep_picture(path: Path, place: Path) -> None:
    """Keep the picture of results; without one, that of the results before goes."""
    if not path.exists():
        place.unlink(missing_ok=True)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with Image.open(path) as drawn:
        few = drawn.convert("RGB").quantize(_COLOURS, method=Image.Quantize.FASTOCTREE)
        few.save(place, optimize=True)


def pages(results: Path) -> dict[str, str]:
    """Return all pages by their place in the docs, made from the files in a folder."""
    papers = [_paper(folder) for folder in sorted(results.glob("*")) if folder.is_dir()]
    orders = {paper.name: order for paper, order in papers}
    found = sorted((paper for paper, _ in papers), key=lambda one: (orders[one.name], one.name))
    if not found:
        return {}
    return {
        "replication.md": front_page(found),
        **{f"replication/{paper.name}.md": paper_page(paper) for paper in found},
    }


def _paper(folder: Path) -> tuple[Paper, int]:
    """Read a folder; return the paper and its place on the front page."""
    files = sorted(
        folder.glob("*.json"), key=lambda path: _natural(path.stem.removesuffix("-full"))
    )
    tables = sorted((read_summary(path) for path in files), key=lambda table: not of_paper(table))
    usual = {**_KEYS, **dict.fromkeys(_LISTS, ()), "estimates": {}}
    own = _toml(folder / PAPER)
    if unknown := set(own) - set(usual):
        raise DataError(f"{folder / PAPER}: unknown keys {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {**usual, **own}
    for name, one in values["estimates"].items():
        numbers = isinstance(one, dict) and all(isinstance(v, int | float) for v in one.values())
        if not numbers or not {"hours"} <= set(one) <= {"hours", "times"}:
            allowed = "the numbers hours and perhaps times"
            raise DataError(f"{folder / PAPER}: the estimate of {name} has {allowed}, not {one}")
    values["title"] = values["title"] or (tables[0]["paper"] if tables else folder.name)
    values["short"] = values["short"] or folder.name
    drawn = frozenset(path.stem for path in files if _picture_of(path).exists())
    names = {path.stem for path in files}
    values["notes"] = [one for one in values["notes"] if not _is_outdated(one, names)]
    order = values.pop("order")
    return Paper(name=folder.name, summaries=tables, drawn=drawn, **values), order


def _is_outdated(note: Mapping[str, Any], names: set[str]) -> bool:
    """Tell whether a note says what is smaller than the paper's, and nothing is any more."""
    return note.get("smaller", False) and all(f"{one}-full" in names for one in note["experiments"])


def _toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{path}: no TOML ({error})") from error


def _natural(name: str) -> list[tuple[int, str]]:
    """Let figure2 stand before figure10."""
    return [(int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
