"""The results of an experiment: tables, a JSON file beside the picture, all verdicts as a page."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from flwr_privacy import __version__
from flwr_privacy.errors import DataError
from flwr_privacy.files import write_text
from flwr_privacy.simulations.experiment.claims import VERDICTS, Finding, judge
from flwr_privacy.simulations.experiment.curves import Trained
from flwr_privacy.simulations.experiment.description import Experiment
from flwr_privacy.simulations.experiment.picture import draw
from flwr_privacy.simulations.runs import flat_settings

__all__ = ["Results", "replication", "save", "tables"]

RESULTS = "experiment.json"


@dataclass(frozen=True, kw_only=True)
class Results:
    """An experiment with its runs and findings.

    Parameters
    ----------
    experiment : Experiment
        What was trained.
    full : bool
        Whether at the paper's size.
    runs : Sequence of Trained
        For each curve one run per seed.
    """

    experiment: Experiment
    full: bool
    runs: Sequence[Trained]

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs."""
        return sorted({run.seed for run in self.runs})

    @property
    def size(self) -> str:
        """The size in words."""
        return "paper's size" if self.full else "scaled down"

    def findings(self) -> list[Finding]:
        """Judge all claims."""
        return [judge(claim, self.runs) for claim in self.experiment.claims]

    def of(self, label: str) -> list[Trained]:
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
            "version": __version__,
            "seeds": self.seeds,
            "metrics": chosen.metrics,
            "curves": [
                {
                    "label": curve.label,
                    "settings": flat_settings(
                        chosen.settings(curve, seed=self.seeds[0], full=self.full)
                    ),
                    "diverged": sum(run.diverged for run in self.of(curve.label)),
                    "last": _last(self.of(curve.label)),
                    "runs": [
                        {"seed": run.seed, "diverged": run.diverged, "by_round": run.values}
                        for run in self.of(curve.label)
                    ],
                }
                for curve in chosen.curves
            ],
            "targets": [
                {
                    "target": str(target),
                    "curves": {
                        curve.label: {
                            cost: [target.cost(run, cost) for run in self.of(curve.label)]
                            for cost in ("uploads", "bits")
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


def save(results: Results, out: Path) -> tuple[Path, Path]:
    """Write the picture and the numbers into a folder; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    picture, numbers = out / "figure.png", out / RESULTS
    draw(results.experiment, results.runs, size=results.size).savefig(picture, dpi=150)
    write_text(numbers, json.dumps(results.to_dict(), indent=1, allow_nan=False) + "\n")
    return picture, numbers


def tables(results: Results) -> list[Table]:
    """Return what the curves came to, what reaching the targets cost, and the verdicts."""
    table = results.to_dict()
    found = [
        _rich(
            f"{table['title']} ({table['size']}, {len(results.seeds)} seeds)", *_curve_rows(table)
        ),
    ]
    if table["targets"]:
        found.append(_rich("Cost of reaching a level, mean over the seeds", *_target_rows(table)))
    if table["claims"]:
        found.append(_rich("Claims", *_claim_rows(table, "\n")))
    return found


def replication(folder: Path) -> str:
    """Return a page in Markdown with the verdicts of all experiments below a folder.

    Raises
    ------
    DataError
        If there is none, or a file with results is damaged.
    """
    found = []
    for path in sorted(folder.glob(f"**/{RESULTS}")):
        try:
            table = json.loads(path.read_bytes())
            found.append((table["experiment"], table["size"], _section(table), _counts(table)))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: no results of an experiment ({error!r})") from error
    if not found:
        raise DataError(
            f"no results below {folder}: run `flwr-privacy experiment <scheme>/<figure>` first"
        )
    found.sort(key=lambda entry: entry[:2])
    head = ["experiment", "size", *VERDICTS]
    overview = [[f"`{name}`", size, *map(str, counts)] for name, size, _, counts in found]
    return "\n".join([_HEAD, _markdown(head, overview), *(section for _, _, section, _ in found)])


_HEAD = """# Replication

Written by `flwr-privacy replication` from the results of `flwr-privacy experiment`; nothing here is
edited by hand. Each claim of a paper is checked over several seeds, and runs with the same seed
(the same split of the data, start and sampled clients) are compared. **Reproduced** and **not
reproduced**: the mean difference is more than two standard errors on that side of the claim (with
three seeds, a rough rule). **Undecided**: it is not. The advantage is of the first curve over the
second, with its standard error; a run that diverged is worse than any that did not. Scaled down
means fewer clients, records and rounds than the paper's; what differs is in the file of the
experiment in `simulations/papers/`.
"""


def _section(table: Mapping[str, Any]) -> str:
    seeds = ", ".join(map(str, table["seeds"]))
    parts = [
        f"\n## {table['title']}\n",
        f"`flwr-privacy experiment {table['experiment']}"
        f"{' --full' if table['size'] != 'scaled down' else ''}`. "
        f"{table['source']}, {table['size']}, seeds {seeds}.\n",
        *([f"{table['about']}\n"] if table["about"] else []),
        _markdown(*_claim_rows(table)),
        _markdown(*_curve_rows(table)),
    ]
    if table["targets"]:
        parts.append(_markdown(*_target_rows(table)))
    return "\n".join(parts)


def _counts(table: Mapping[str, Any]) -> list[int]:
    return [sum(claim["verdict"] == verdict for claim in table["claims"]) for verdict in VERDICTS]


def _curve_rows(table: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    names = [*table["metrics"], "bits", "uploads"]
    head = ["curve", *(f"last {name}" for name in table["metrics"]), "uplink bits", "uploads"]
    rows = []
    for curve in table["curves"]:
        cells = [_number(*map(float, curve["last"][name])) for name in names]
        diverged, runs = curve["diverged"], len(curve["runs"])
        label = curve["label"] + (f" (diverged: {diverged} of {runs})" if diverged else "")
        rows.append([label, *cells])
    return head, rows


def _target_rows(table: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["curve"] + [f"{entry['target']}: uploads, bits" for entry in table["targets"]]
    rows = []
    for curve in table["curves"]:
        costs = [entry["curves"][curve["label"]] for entry in table["targets"]]
        rows.append([curve["label"], *(_cost(cost) for cost in costs)])
    return head, rows


def _cost(cost: Mapping[str, list[float | str]]) -> str:
    uploads, bits = (np.array(cost[name], dtype=float) for name in ("uploads", "bits"))
    reached = np.isfinite(uploads)
    if not reached.any():
        return "not reached"
    text = f"{uploads[reached].mean():.4g}, {bits[reached].mean():.4g}"
    return text if reached.all() else f"{text} ({reached.sum()} of {len(reached)} seeds)"


def _claim_rows(
    table: Mapping[str, Any], separator: str = "; "
) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            claim["id"],
            claim["text"],
            claim["measure"],
            separator.join(_comparison(claim, entry) for entry in claim["comparisons"]),
            claim["verdict"],
        ]
        for claim in table["claims"]
    ]
    return ["id", "claim", "by", "advantage", "verdict"], rows


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


def _number(mean: float, error: float, *, sign: str = "") -> str:
    if math.isnan(mean):
        return "diverged"
    return f"{mean:{sign}.4g}" + (f" ± {error:.2g}" if math.isfinite(error) else "")


def _last(runs: Sequence[Trained]) -> dict[str, tuple[float, float]]:
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
