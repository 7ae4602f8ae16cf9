"""Tables of an experiment's results: the curves, the cost of reaching a level, and the claims."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.table import Table

from flwr_privacy.simulations.reports.comparison.spread import spread_text

from .results import ExperimentResults
from .significance import next_look
from .verdicts import UNDECIDED, VERDICTS

__all__ = [
    "Rows",
    "claim_rows",
    "comparison_label",
    "curve_rows",
    "more_seeds",
    "tables",
    "target_rows",
]

_MANY = 30  # comparisons, or points of a curve, that a table has room for

Rows = tuple[list[str], list[list[str]]]
"""Names of the columns, and the cells."""


def tables(results: ExperimentResults) -> list[Table]:
    """Return what the curves came to, what reaching the targets cost, and the verdicts."""
    table = results.to_dict()
    found = [
        _rich(
            f"{table['title']} ({_extent(results.size, len(results.seeds))})", *curve_rows(table)
        ),
    ]
    if table["targets"]:
        found.append(_rich("Cost of reaching a level, mean over the seeds", *target_rows(table)))
    if table["claims"]:
        found.append(_rich("Claims", *claim_rows(table, "\n")))
    return found


def more_seeds(results: ExperimentResults) -> str:
    """Return after how many more seeds undecided claims are tested again; empty if none are."""
    tested = [one for one in results.findings() if not one.exact]
    undecided = sum(one.verdict == UNDECIDED for one in tested)
    look, seeds = next_look(len(results.seeds)), len(results.seeds)
    if not undecided:
        return ""
    claims = f"{undecided} undecided claim{'s' * (undecided > 1)}"
    if look is None:
        return f"{claims} after the last test ({seeds} seeds)"
    return f"{claims}: the next test is after {look} seeds, {look - seeds} more (--seeds)"


def _extent(size: str, seeds: int) -> str:
    return size if size == "computed" else f"{size}, {seeds} seeds"


def curve_rows(table: Mapping[str, Any]) -> Rows:
    """Return what the curves came to, or the points of their sweep."""
    if table.get("sweep"):
        return _point_rows(table)
    names = [*table["metrics"], "bits", "uploads"]
    head = ["curve", *(f"last {name}" for name in table["metrics"]), "uplink bits", "uploads"]
    rows = []
    for curve in table["curves"]:
        cells = [spread_text(*map(float, curve["last"][name])) for name in names]
        diverged, runs = curve["diverged"], len(curve["runs"])
        label = curve["label"] + (f" (diverged: {diverged} of {runs})" if diverged else "")
        rows.append([label, *cells])
    return head, rows


def _point_rows(table: Mapping[str, Any]) -> Rows:
    """Return a row for each point of each curve; of many points, or of rounds, only the ends."""
    names = [*table["metrics"]]
    if "rounds" not in names and table["sweep"]["key"] != "round":
        names.append("rounds")
    everything = [point for curve in table["curves"] for point in curve["points"]]
    names = [name for name in names if all(name in point["last"] for point in everything)]
    notes = any(point.get("note") for point in everything)
    searches = any(point["search"] for point in everything)
    failed = table.get("failed", "diverged")
    rounds = table["sweep"]["key"] == "round"
    head = ["curve", table["sweep"]["label"], *(f"last {name}" for name in names)]
    head += ["chosen by seed; cost of a search"] * searches + ["note"] * notes
    rows = []
    for curve in table["curves"]:
        points = curve["points"]
        few = len(points) <= _MANY and not rounds
        for point in points if few else (points[0], points[-1]):
            cells = [spread_text(*map(float, point["last"][name]), failed=failed) for name in names]
            mark = f" ({failed}: {point['diverged']})" if point["diverged"] else ""
            cells += [_search_text(point["search"])] * searches + [point.get("note", "")] * notes
            rows.append([curve["label"] + mark, f"{float(point['x']):g}", *cells])
    return head, rows


def _search_text(search: Mapping[str, Any] | None) -> str:
    if search is None:
        return ""
    values = ", ".join(f"{value:g}" for value in search["values"])
    epsilon = f", epsilon {search['epsilon']:.4g}" if search["epsilon"] else ""
    return f"{values}; {search['rounds']} rounds in {search['runs']} runs{epsilon}"


def target_rows(table: Mapping[str, Any]) -> Rows:
    """Return what each curve spent until it reached each level."""
    head = ["curve"]
    head += [f"{entry['target']}: uploads, bits, virtual seconds" for entry in table["targets"]]
    rows = []
    for curve in table["curves"]:
        costs = [entry["curves"][curve["label"]] for entry in table["targets"]]
        rows.append([curve["label"], *(_cost(cost) for cost in costs)])
    return head, rows


def _cost(cost: Mapping[str, list[float | str]]) -> str:
    names = ("uploads", "bits", "seconds")
    uploads, bits, seconds = (np.array(cost[name], dtype=float) for name in names)
    reached = np.isfinite(uploads)
    if not reached.any():
        return "not reached"
    text = ", ".join(f"{values[reached].mean():.4g}" for values in (uploads, bits, seconds))
    return text if reached.all() else f"{text} ({reached.sum()} of {len(reached)} seeds)"


def claim_rows(table: Mapping[str, Any], separator: str = "; ") -> Rows:
    """Return the claims with their comparisons and verdicts."""
    rows = [
        [
            claim["id"],
            claim["text"],
            claim["measure"],
            separator.join(_comparisons(claim)),
            _verdict(claim),
        ]
        for claim in table["claims"]
    ]
    return ["id", "claim", "by", "advantage", "verdict"], rows


def _verdict(claim: Mapping[str, Any]) -> str:
    """Return the verdict with its p value, if it was a test that had enough seeds."""
    p = claim["p"]
    return claim["verdict"] if p is None or p == 1 else f"{claim['verdict']}, p = {p:.2g}"


def _comparisons(claim: Mapping[str, Any]) -> list[str]:
    """Return the comparisons in words; of many alike only what they come to."""
    entries = claim["comparisons"]
    if len(entries) <= _MANY:
        return [_comparison(claim, entry) for entry in entries]
    worst = min(entries, key=lambda entry: float(entry["mean"]))
    counts = (f"{sum(e['verdict'] == v for e in entries)} {v}" for v in VERDICTS)
    return [f"{len(entries)} comparisons: {', '.join(counts)}", _comparison(claim, worst)]


def comparison_label(kind: str, share: float, first: str, second: str) -> str:
    """Return two curves and how a claim compares them.

    Examples
    --------
    >>> comparison_label("better", 0.5, "UDP", "FedAvg")
    'UDP over FedAvg'
    """
    relation = {"close": "and", "trains": f"over {share:g} of", "collapses": f"under {share:g} of"}
    return f"{first} {relation.get(kind, 'over')} {second}"


def _comparison(claim: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    pair = comparison_label(claim["kind"], claim["share"], entry["first"], entry["second"])
    mean, error = float(entry["mean"]), float(entry["error"])
    percent = " of the latter" if claim["relative"] else ""
    if math.isfinite(mean):
        return f"{pair}: {spread_text(mean, error, sign='+')}{percent}"
    seeds = ", ".join(f"{float(value):+.4g}" for value in entry["differences"])
    return f"{pair}: by seed {seeds}{percent}"


def _rich(title: str, head: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
