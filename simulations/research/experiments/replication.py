"""Writes the page of all verdicts, docs/replication.md, from the results of experiments."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr_privacy.errors import DataError
from flwr_privacy.simulations.reports.markdown import markdown_table

from .results import FULL, RESULTS
from .tables import claim_rows, curve_rows, target_rows
from .verdicts import VERDICTS

__all__ = ["replication"]


def replication(folder: Path, earlier: str = "") -> str:
    """Return a page in Markdown with the verdicts of all experiments below a folder.

    Parameters
    ----------
    folder : Path
        Where to look for results.
    earlier : str, default ""
        The page as it was: it keeps what it says of experiments that have no results there.

    Raises
    ------
    DataError
        If there is none, a file with results is damaged, or `earlier` is no such page.
    """
    found = _kept(earlier)
    before = len(found)
    results = sorted(folder.glob(f"**/{RESULTS}"))
    for path in results:
        try:
            table = json.loads(path.read_bytes())
            key = (str(table["experiment"]), str(table["size"]))
            found[key] = ([str(count) for count in _counts(table)], _section(table))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: no results of an experiment ({error!r})") from error
    if not results:
        raise DataError(
            f"no results below {folder}, and {before} experiments on the page: run "
            "`flwr-privacy experiment <scheme>/<figure>` first"
        )
    page = sorted(found.items())
    head = ["experiment", "size", *VERDICTS]
    overview = [[f"`{name}`", size, *counts] for (name, size), (counts, _) in page]
    sections = (section for _, (_, section) in page)
    return "\n".join([_HEAD, f"{markdown_table(head, overview)}\n", *sections])


_ROW = re.compile(r"\| `([^`]+)` \| ([^|]+) \|((?: \d+ \|)+)")


def _kept(page: str) -> dict[tuple[str, str], tuple[list[str], str]]:
    """Return the counts and the section of every experiment on a page."""
    head, *sections = page.split("\n\n## ")
    rows = [match for line in head.splitlines() if (match := _ROW.fullmatch(line))]
    if len(rows) != len(sections):
        raise DataError(
            f"the page has {len(rows)} experiments in its table and {len(sections)} sections: "
            "give another file, or none"
        )
    return {
        (row[1], row[2]): (row[3].strip(" |").split(" | "), f"\n## {section.rstrip()}\n")
        for row, section in zip(rows, sections, strict=True)
    }


_HEAD = """# Replication

After this page you know which claims of the papers came out when we trained them again, with which
numbers, and the command that repeats each. Each claim is checked over several seeds: runs with the
same seed (the same split of the data, start and sampled clients) are compared.

- **Reproduced**, **not reproduced**: the mean difference is more than two standard errors on that
  side of the claim (with three seeds, a rough rule). **Undecided**: it is smaller than that.
- The advantage is that of the first curve over the second, with its standard error. A run that
  diverged is worse than any that did not.
- **Scaled down**: fewer clients, records and rounds than in the paper; the experiment's file in
  `simulations/research/` lists the differences.
- **NumPy simulation**: the scheme's mathematics or its strategy's rounds, without Flower and
  messages, at the paper's size unless it says "scaled down".

`flwr-privacy replication` writes this page from the results of `flwr-privacy experiment`; do not
edit it by hand.
"""


def _section(table: Mapping[str, Any]) -> str:
    seeds = f", seeds {', '.join(map(str, table['seeds']))}" * (table["size"] != "computed")
    parts = [
        f"\n## {table['title']}\n",
        f"`flwr-privacy experiment {table['experiment']}"
        f"{' --full' * table.get('full', table['size'] == FULL)}`. "
        f"{table['source']}, {table['size']}{seeds}.\n",
        *([f"{table['about']}\n"] if table["about"] else []),
    ]
    tables = [claim_rows(table), curve_rows(table)]
    if table["targets"]:
        tables.append(target_rows(table))
    return "\n".join([*parts, *(f"{markdown_table(*rows)}\n" for rows in tables)])


def _counts(table: Mapping[str, Any]) -> list[int]:
    return [sum(claim["verdict"] == verdict for claim in table["claims"]) for verdict in VERDICTS]
