"""Writes the results of an experiment: tables, JSON, picture, and the page of all verdicts."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from flwr_privacy import __version__
from flwr_privacy.errors import DataError
from flwr_privacy.simulations.reports.style import drawing
from flwr_privacy.simulations.research.udp.theory import search_cost
from flwr_privacy.simulations.settings.run_folder import flat_settings
from flwr_privacy.wire.files import write_text

from .claims import VERDICTS, CheckedClaim, judge
from .curves import Searched, TrainedRun
from .description import Curve, Experiment
from .functions import FUNCTIONS
from .picture import draw

__all__ = ["Results", "replication", "save", "tables"]

RESULTS = "experiment.json"
FULL = "paper's size"
SCALED = "scaled down"
_MANY = 30  # comparisons, or points of a curve, that a table has room for


@dataclass(frozen=True, kw_only=True)
class Results:
    """An experiment with its runs and findings.

    Parameters
    ----------
    experiment : Experiment
        What was trained.
    full : bool
        Whether at the paper's size.
    runs : Sequence of TrainedRun
        For each curve one run per seed.
    """

    experiment: Experiment
    full: bool
    runs: Sequence[TrainedRun]

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs."""
        return sorted({run.seed for run in self.runs})

    @property
    def size(self) -> str:
        """The size in words."""
        function = self.experiment.function
        if function and not FUNCTIONS[function].seeded:
            return "computed"
        if function:
            return f"rehearsed, {SCALED}" if self._smaller else "rehearsed"
        return FULL if self.full else SCALED

    @property
    def _smaller(self) -> bool:
        return self.experiment.smaller and not self.full

    def findings(self) -> list[CheckedClaim]:
        """Judge all claims."""
        return [judge(claim, self.runs) for claim in self.experiment.claims]

    def of(self, label: str) -> list[TrainedRun]:
        """Return the runs of a curve."""
        return [run for run in self.runs if run.curve == label]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON knows it; what is not finite is the text ``inf`` or ``nan``."""
        chosen = self.experiment
        table = {
            "experiment": chosen.name,
            "title": chosen.title,
            "source": f'"{chosen.paper}", {chosen.figure}',
            "about": chosen.about.strip(),
            "size": self.size,
            "full": self.full and chosen.smaller,
            "failed": chosen.failed,
            "version": __version__,
            "seeds": self.seeds,
            "metrics": chosen.metrics,
            "curves": [
                {
                    "label": curve.label,
                    "settings": self._settings(curve),
                    "diverged": sum(run.diverged for run in self.of(curve.label)),
                    "last": {} if chosen.sweep else _last(self.of(curve.label)),
                    "points": self._points(curve.label) if chosen.sweep else [],
                    "runs": [
                        {"seed": run.seed, "diverged": run.diverged, "by_round": run.values}
                        | ({} if run.x is None else {"x": run.x})
                        for run in self.of(curve.label)
                    ],
                }
                for curve in chosen.curves
            ],
            "sweep": asdict(chosen.sweep) if chosen.sweep else None,
            "targets": [
                {
                    "target": str(target),
                    "curves": {
                        curve.label: {
                            cost: [target.cost(run, cost) for run in self.of(curve.label)]
                            for cost in ("uploads", "bits", "seconds")
                        }
                        for curve in chosen.curves
                    },
                }
                for target in chosen.targets
            ],
            "claims": [
                {
                    "id": finding.claim.id,
                    "text": finding.claim.text,
                    "kind": finding.claim.kind,
                    "share": finding.claim.share,
                    "relative": finding.claim.relative,
                    "measure": finding.claim.measure,
                    "verdict": finding.verdict,
                    "comparisons": [asdict(comparison) for comparison in finding.comparisons],
                }
                for finding in self.findings()
            ],
        }
        return _plain(table)  # type: ignore[no-any-return]

    def _settings(self, curve: Curve) -> Mapping[str, Any]:
        chosen = self.experiment
        if chosen.function:
            return curve.settings
        return flat_settings(chosen.settings(curve, seed=self.seeds[0], full=self.full))

    def _points(self, label: str) -> list[dict[str, Any]]:
        points = []
        for x in dict.fromkeys(run.x for run in self.of(label)):
            runs = [run for run in self.of(label) if run.x == x]
            searched = [run.searched for run in runs if run.searched is not None]
            points.append(
                {
                    "x": x,
                    "diverged": sum(run.diverged for run in runs),
                    "last": _last(runs),
                    "note": runs[0].note,
                    "search": _search(searched) if searched else None,
                }
            )
        return points


def save(results: Results, out: Path) -> tuple[Path, Path]:
    """Write the picture and the numbers into a folder; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    picture, numbers = out / "figure.png", out / RESULTS
    with drawing():
        draw(results.experiment, results.runs, size=results.size).savefig(picture)
    write_text(numbers, json.dumps(results.to_dict(), indent=1, allow_nan=False) + "\n")
    return picture, numbers


def tables(results: Results) -> list[Table]:
    """Return what the curves came to, what reaching the targets cost, and the verdicts."""
    table = results.to_dict()
    found = [
        _rich(
            f"{table['title']} ({_extent(results.size, len(results.seeds))})", *_curve_rows(table)
        ),
    ]
    if table["targets"]:
        found.append(_rich("Cost of reaching a level, mean over the seeds", *_target_rows(table)))
    if table["claims"]:
        found.append(_rich("Claims", *_claim_rows(table, "\n")))
    return found


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
    return "\n".join([_HEAD, _markdown(head, overview), *sections])


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

Written by `flwr-privacy replication` from the results of `flwr-privacy experiment`; nothing here is
edited by hand. Each claim of a paper is checked over several seeds, and runs with the same seed
(the same split of the data, start and sampled clients) are compared. **Reproduced** and **not
reproduced**: the mean difference is more than two standard errors on that side of the claim (with
three seeds, a rough rule). **Undecided**: the difference is smaller than that. The advantage is of
the first curve over the second, with its standard error; a run that diverged is worse than any that
did not. **Scaled down**: fewer clients, records and rounds than in the paper; the experiment's file
in `simulations/research/` lists the differences. **Rehearsed**: simulated with NumPy alone, without
Flower, at the paper's size unless it says "scaled down".
"""


def _section(table: Mapping[str, Any]) -> str:
    seeds = f", seeds {', '.join(map(str, table['seeds']))}" * (table["size"] != "computed")
    parts = [
        f"\n## {table['title']}\n",
        f"`flwr-privacy experiment {table['experiment']}"
        f"{' --full' * table.get('full', table['size'] == FULL)}`. "
        f"{table['source']}, {table['size']}{seeds}.\n",
        *([f"{table['about']}\n"] if table["about"] else []),
        _markdown(*_claim_rows(table)),
        _markdown(*_curve_rows(table)),
    ]
    if table["targets"]:
        parts.append(_markdown(*_target_rows(table)))
    return "\n".join(parts)


def _extent(size: str, seeds: int) -> str:
    return size if size == "computed" else f"{size}, {seeds} seeds"


def _counts(table: Mapping[str, Any]) -> list[int]:
    return [sum(claim["verdict"] == verdict for claim in table["claims"]) for verdict in VERDICTS]


def _curve_rows(table: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    if table.get("sweep"):
        return _point_rows(table)
    names = [*table["metrics"], "bits", "uploads"]
    head = ["curve", *(f"last {name}" for name in table["metrics"]), "uplink bits", "uploads"]
    rows = []
    for curve in table["curves"]:
        cells = [_number(*map(float, curve["last"][name])) for name in names]
        diverged, runs = curve["diverged"], len(curve["runs"])
        label = curve["label"] + (f" (diverged: {diverged} of {runs})" if diverged else "")
        rows.append([label, *cells])
    return head, rows


def _point_rows(table: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
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
            cells = [_number(*map(float, point["last"][name]), failed=failed) for name in names]
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


def _search(searched: Sequence[Searched]) -> dict[str, Any]:
    """Return what a search chose for each seed, and what it cost."""
    spent = max(one.epsilon for one in searched)
    rounds = searched[0].rounds
    epsilon = 0.0
    if spent > 0:
        epsilon = search_cost(rounds, epsilon=spent, delta=searched[0].delta).epsilon
    return {
        "values": [one.value for one in searched],
        "runs": len(rounds),
        "rounds": sum(rounds),
        "epsilon": epsilon,
    }


def _target_rows(table: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
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


def _claim_rows(
    table: Mapping[str, Any], separator: str = "; "
) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            claim["id"],
            claim["text"],
            claim["measure"],
            separator.join(_comparisons(claim)),
            claim["verdict"],
        ]
        for claim in table["claims"]
    ]
    return ["id", "claim", "by", "advantage", "verdict"], rows


def _comparisons(claim: Mapping[str, Any]) -> list[str]:
    """Return the comparisons in words; of many alike only what they come to."""
    entries = claim["comparisons"]
    if len(entries) <= _MANY:
        return [_comparison(claim, entry) for entry in entries]
    worst = min(entries, key=lambda entry: float(entry["mean"]))
    counts = (f"{sum(e['verdict'] == v for e in entries)} {v}" for v in VERDICTS)
    return [f"{len(entries)} comparisons: {', '.join(counts)}", _comparison(claim, worst)]


def _comparison(claim: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    relation = {"close": "and", "trains": f"over {claim['share']:g} of"}
    relation["collapses"] = f"under {claim['share']:g} of"
    pair = f"{entry['first']} {relation.get(claim['kind'], 'over')} {entry['second']}"
    mean, error = float(entry["mean"]), float(entry["error"])
    percent = " of the latter" if claim["relative"] else ""
    if math.isfinite(mean):
        return f"{pair}: {_number(mean, error, sign='+')}{percent}"
    seeds = ", ".join(f"{float(value):+.4g}" for value in entry["differences"])
    return f"{pair}: by seed {seeds}{percent}"


def _number(mean: float, error: float, *, sign: str = "", failed: str = "diverged") -> str:
    if math.isnan(mean):
        return failed
    return f"{mean:{sign}.4g}" + (f" ± {error:.2g}" if math.isfinite(error) else "")


def _last(runs: Sequence[TrainedRun]) -> dict[str, tuple[float, float]]:
    """Return the mean of the last values and its standard error; of runs that did not diverge."""
    whole = [run.values for run in runs if not run.diverged]
    last = {}
    for name in runs[0].values:
        values = np.array([value[name][-1] for value in whole])
        mean = float(values.mean()) if len(values) else math.nan
        spread = float(values.std(ddof=1)) if len(values) > 1 else math.nan
        last[name] = (mean, spread / math.sqrt(max(1, len(values))))
    return last


def _rich(title: str, head: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join(f"| {' | '.join(c.replace('|', '/') for c in line)} |" for line in lines) + "\n"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
