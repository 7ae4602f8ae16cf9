"""The small file of an experiment's verdicts, which the repository keeps: one for each size.

`flwr-privacy experiment` writes it next to its results, and `flwr-privacy replication` collects it
into ``docs/replication/results/<paper>/`` and makes the pages from what is there. It has what a
page says and what a verdict rests on: the differences of each comparison by seed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr_privacy import __version__
from flwr_privacy.errors import DataError
from flwr_privacy.simulations.reports.style import drawing
from flwr_privacy.simulations.settings.run_settings import flat_table
from flwr_privacy.wire.files import write_text

from .description import ExperimentDescription
from .picture import draw
from .results import ExperimentResults
from .tables import comparison_label, curve_rows, target_rows
from .verdicts import VERDICTS, CheckedClaim, Comparison

__all__ = [
    "COMPUTED",
    "FORMAT",
    "PAIRED",
    "PICTURE",
    "SUMMARY",
    "paper_of",
    "read_summary",
    "save",
    "summary",
    "summary_text",
]

SUMMARY = "replication.json"
PICTURE = "figure.png"
FORMAT = 1
PAIRED = "paired test"
COMPUTED = "computed"
_MOST = 30  # comparisons that are all kept; of more only the weakest
_DIGITS = 6

_KEYS: dict[str, type | tuple[type, ...]] = {
    "format": int,
    "experiment": str,
    "title": str,
    "paper": str,
    "figure": str,
    "size": str,
    "full": bool,
    "paper_size": bool,
    "differences": list,
    "seeds": list,
    "rule": str,
    "command": str,
    "version": str,
    "seconds": (int, float, type(None)),
    "claims": list,
    "tables": list,
}
_OF_CLAIM = {
    *("id", "text", "measure", "kind", "relative", "paper"),
    *("verdict", "p", "better", "number", "comparisons"),
}


def paper_of(experiment: str) -> str:
    """Return the folder of an experiment's results: the scheme of its paper, or ``own``.

    Examples
    --------
    >>> paper_of("acfl/figure1"), paper_of("my")
    ('acfl', 'own')
    """
    paper, slash, _ = experiment.partition("/")
    return paper if slash else "own"


def summary(results: ExperimentResults) -> dict[str, Any]:
    """Return what the file says, as JSON knows it."""
    chosen, full = results.experiment, results.full and results.experiment.smaller
    table = results.to_dict()
    findings = results.findings()
    exact = all(run.exact for run in results.runs)
    seeds = [] if exact else results.seeds
    tables = [curve_rows(table)]
    if table["targets"]:
        tables.append(target_rows(table))
    return {
        "format": FORMAT,
        "experiment": chosen.name,
        "title": chosen.title,
        "paper": chosen.paper,
        "figure": chosen.figure,
        "size": results.size,
        "full": full,
        "paper_size": results.at_papers_size,
        "differences": [] if results.at_papers_size else differences(chosen),
        "seeds": seeds,
        "rule": COMPUTED if exact else PAIRED,
        "command": command(chosen.name, full=full, seeds=seeds),
        "version": __version__,
        "seconds": float(f"{results.seconds:.3g}"),
        "claims": [_claim(finding) for finding in findings],
        "tables": [_table(*rows) for rows in tables],
    }


def save(results: ExperimentResults, out: Path) -> tuple[Path, Path]:
    """Write the picture, all numbers and the summary into a folder; return the first two paths."""
    out.mkdir(parents=True, exist_ok=True)
    picture, numbers = out / PICTURE, out / "experiment.json"
    with drawing():
        draw(results.experiment, results.runs, size=results.size).savefig(picture)
    write_text(numbers, json.dumps(results.to_dict(), indent=1, allow_nan=False) + "\n")
    write_text(out / SUMMARY, summary_text(summary(results)))
    return picture, numbers


def command(name: str, *, full: bool, seeds: Sequence[int]) -> str:
    """Return the command that repeats an experiment.

    Examples
    --------
    >>> command("acfl/figure3a", full=True, seeds=[0, 1])
    'flwr-privacy experiment acfl/figure3a --full --seeds 0,1'
    """
    words = ["flwr-privacy experiment", name]
    words += ["--full"] * full + [f"--seeds {','.join(map(str, seeds))}"] * bool(seeds)
    return " ".join(words)


def differences(chosen: ExperimentDescription) -> list[str]:
    """Return how the smaller size differs from the paper's, one line for each setting."""
    base = flat_table(chosen.base)
    found = [
        f"{key}: {base.get(key, 'default')}, paper {value}"
        for key, value in flat_table(chosen.full).items()
    ]
    for curve in chosen.curves:
        own = {**base, **flat_table(curve.settings)}
        found += [
            f"{curve.label}, {key}: {own.get(key, 'default')}, paper {value}"
            for key, value in flat_table(curve.full).items()
        ]
    if chosen.sweep is not None and chosen.sweep.full:
        key, ours, paper = chosen.sweep.key, chosen.sweep.values, chosen.sweep.full
        found.append(f"{key}: {_listed(ours)}, paper {_listed(paper)}")
    return found


def _listed(values: Sequence[float]) -> str:
    few = [f"{value:g}" for value in values]
    return " ".join(few if len(few) <= 8 else [*few[:2], "...", few[-1]])


def _claim(finding: CheckedClaim) -> dict[str, Any]:
    claim, comparisons = finding.claim, finding.comparisons
    kept = comparisons if len(comparisons) <= _MOST else [weakest(comparisons)]
    return {
        "id": claim.id,
        "text": claim.text,
        "measure": claim.measure,
        "kind": claim.kind,
        "relative": claim.relative,
        "paper": claim.paper,
        "verdict": finding.verdict,
        "p": None if finding.exact else _number(finding.p_values.two_sided),
        "better": finding.p_values.is_better,
        "number": len(comparisons),
        "counts": [sum(one.verdict == verdict for one in comparisons) for verdict in VERDICTS],
        "comparisons": [
            {
                "pair": comparison_label(claim.kind, claim.share, one.first, one.second),
                "mean": _number(one.mean),
                "error": _number(one.error),
                "verdict": one.verdict,
                "differences": [_number(value) for value in one.differences],
            }
            for one in kept
        ],
    }


def weakest(comparisons: Sequence[Comparison]) -> Comparison:
    """Return the comparison that says least for the claim."""
    return max(comparisons, key=lambda one: (one.p_values.better, -one.mean))


def _number(value: float) -> float | str:
    """Return a number with few digits: what machines differ in, no file need have."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else str(value)


def _table(head: list[str], rows: list[list[str]]) -> dict[str, Any]:
    return {"head": head, "rows": rows}


def summary_text(table: Mapping[str, Any]) -> str:
    """Return the file's text: a line for each comparison and each row of a table.

    Examples
    --------
    >>> print(summary_text({"a": 1, "claims": [{"id": "X", "comparisons": [{"mean": 1}]}]}), end="")
    {
     "a": 1,
     "claims": [
      {
       "id": "X",
       "comparisons": [
        {"mean": 1}
       ]
      }
     ]
    }
    """
    return _text(table, 0) + "\n"


def _text(value: Any, depth: int) -> str:
    flat = json.dumps(value, allow_nan=False, ensure_ascii=False)
    scalars = not isinstance(value, dict | list)
    if scalars or not value or depth == _LINES or (depth and not _nested(value)):
        return flat
    inner = " " * (depth + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_text(item, depth + 1)}" for key, item in value.items()]
    else:
        items = [_text(item, depth + 1) for item in value]
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    return f"{opened}\n{inner}" + f",\n{inner}".join(items) + f"\n{' ' * depth}{closed}"


_LINES = 4  # depth of what has one line


def _nested(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return any(isinstance(item, dict | list) for item in items)


def read_summary(path: Path) -> dict[str, Any]:
    """Read the file.

    Raises
    ------
    DataError
        If it is none, or has another format.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["format"] != FORMAT:
            raise DataError(
                f"{path}: its format is {table['format']}, and this version reads {FORMAT}: "
                "run its command again"
            )
        for key, kind in _KEYS.items():
            if not isinstance(table[key], kind):
                raise TypeError(f"{key} = {table[key]!r}")
        if table["rule"] not in (PAIRED, COMPUTED):
            raise ValueError(f"rule = {table['rule']!r}")
        for claim in table["claims"]:
            if missing := _OF_CLAIM - set(claim):
                raise KeyError(", ".join(sorted(missing)))
            if claim["verdict"] not in VERDICTS:
                raise ValueError(f"verdict = {claim['verdict']!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: no results of an experiment ({error!r})") from error
    return table  # type: ignore[no-any-return]
