"""Writes the report of one or more runs: a self-contained HTML file, and the same as JSON.

A report is a list of sections; a section is a function from the runs to a piece of HTML, or to
none where it has nothing to say. To add one, write the function and put it into `SECTIONS`.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.wire.files import write_text

from .page import rendered
from .privacy import privacy, void_guarantees
from .reported import ReportedRun, read_runs
from .sections import answers, configurations, curves, problems, provenance, table_of_runs
from .summary import summary
from .tiers import tiers
from .vertical import columns

__all__ = ["SECTIONS", "Section", "write_report"]

Section = Callable[[Sequence[ReportedRun]], Markup]
"""Makes a piece of the page."""

SECTIONS: tuple[Section, ...] = (
    summary,
    void_guarantees,
    problems,
    table_of_runs,
    privacy,
    tiers,
    columns,
    curves,
    answers,
    configurations,
    provenance,
)
"""The pieces of the page, in order."""


def write_report(
    runs: Sequence[RunFolder],
    out: Path,
    *,
    title: str = "Federated learning runs",
    about: Mapping[str, str] | None = None,
) -> Path:
    """Write ``report.html`` and ``report.json`` into a folder.

    Parameters
    ----------
    runs : Sequence of RunFolder
        At least one. Runs that go on or did not complete are shown as such.
    out : Path
        The folder; it is made if need be.
    title : str, default "Federated learning runs"
        Title of the page.
    about : Mapping, optional
        What each run is, in a line, by its name.

    Returns
    -------
    Path
        The page. It refers to nothing outside of it.

    Raises
    ------
    InvalidParameterError
        If there is no run or the folder cannot be written.
    DataError
        If a run folder is damaged.
    """
    if not runs:
        raise InvalidParameterError("runs", [], "at least one run folder")
    reported = read_runs(runs)
    sections = [section(reported) for section in SECTIONS]
    page = rendered("report.html", title=title, about=about or {}, sections=sections)
    path = out / "report.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "report.json", _as_json(title, reported))
        write_text(path, page)
    except OSError as error:
        allowed = f"a folder that can be written ({error.strerror})"
        raise InvalidParameterError("out", str(out), allowed) from error
    return path


def _as_json(title: str, runs: Sequence[ReportedRun]) -> str:
    entries = [
        {
            "name": run.name,
            "label": run.label,
            "settings": run.told if run.settings is None else asdict(run.settings),
            "summary": run.summary,
            "guarantee": run.guarantee.to_dict() if run.guarantee else None,
            "answers": asdict(run.answers) if run.answers else None,
            "tree": None if run.tree is None else [asdict(node) for node in run.tree],
            "rounds": run.rounds,
            "results": asdict(run.results),
        }
        for run in runs
    ]
    return json.dumps(_finite({"title": title, "runs": entries}), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    # JSON knows neither NaN nor infinity: null stands for them.
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
