"""The five apps of the page: half a minute gives the verdicts of whole audits, and its lines."""

import json
import re
from pathlib import Path

import pytest

from flwr_privacy.simulations.research.app_audit.audit import audit
from flwr_privacy.simulations.research.app_audit.findings import LEAK, REFUTED, Finding

ROOT = Path(__file__).parents[4]
GALLERY = ROOT / "docs" / "gallery"
PAGE = ROOT / "docs" / "app-audit.md"
APPS = ("plain_cnn", "tabular", "secagg", "local_dp", "shared_noise")
SOON = (
    *("uploads", "metrics in the clear", "number of records", "rows of linear layers"),
    "labels of few records",
)
"""What half a minute is enough for. Searches and canaries of a whole audit take longer."""


def checked_in(app: str) -> dict[str, Finding]:
    read = json.loads((GALLERY / f"{app}.json").read_text())
    return {one["name"]: Finding.from_json(one) for one in read["findings"]}


def lines(app: str) -> list[str]:
    """Return the lines of the page about an app."""
    (part,) = re.findall(rf"^### `{app}`.*?\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S)
    return [" ".join(one.split()) for one in re.findall(r"^- (.*(?:\n  .*)*)", part, re.M)]


@pytest.mark.parametrize("app", APPS)
def test_the_lines_of_the_page_are_findings_of_the_whole_audit(app: str) -> None:
    said = {f"**{one.verdict}**: {one.said}" for one in checked_in(app).values()}
    shown = lines(app)
    assert len(shown) == 3
    assert [line for line in shown if line not in said] == []


def test_what_the_whole_audits_say_of_the_five() -> None:
    proven = {
        app: {f.name for f in checked_in(app).values() if f.verdict in (LEAK, REFUTED)}
        for app in APPS
    }
    assert {"uploads", "rows of linear layers", "gradient inversion"} <= proven["plain_cnn"]
    assert {"uploads", "label histograms"} <= proven["tabular"]
    for app in ("secagg", "local_dp", "shared_noise"):
        assert not {"uploads", "rows of linear layers", "gradient inversion"} & proven[app]
    assert {"metrics in the clear", "number of records"} <= proven["local_dp"] & proven["secagg"]
    assert proven["shared_noise"] == set()


@pytest.mark.long
@pytest.mark.parametrize("app", APPS)
def test_half_a_minute_gives_the_same_verdicts(app: str, tmp_path: Path) -> None:
    found = {f.name: f.verdict for f in audit(GALLERY / app, out=tmp_path, minutes=0.5).findings}
    whole = {name: f.verdict for name, f in checked_in(app).items()}
    for name in SOON:
        assert (name in found) == (name in whole), name
        if name in whole:
            assert found[name] == whole[name], name
    refuted = [name for name, verdict in found.items() if verdict == REFUTED]
    assert refuted == []
