"""The report of an audit: page, JSON, JUnit, and limits on it in a test."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.app_audit.findings import VERDICTS, Finding, Table
from flwr_privacy.simulations.research.app_audit.report import AuditReport
from flwr_privacy.simulations.testing import assert_leaks_less_than


def finding(name: str, verdict: str, **more: object) -> Finding:
    values: dict[str, object] = {
        "part": "left",
        "said": f"{name} <was> found",
        "adversary": "the server",
        "chance": "none",
    }
    return Finding(name=name, verdict=verdict, **{**values, **more})  # type: ignore[arg-type]


@pytest.fixture
def report(tmp_path: Path) -> AuditReport:
    figure = Figure()
    figure.subplots().imshow(np.eye(3))
    figure.savefig(tmp_path / "rows.png")
    rows = Table(("what", "how much"), [["a <b>", 0.25], ["c", 3.0]])
    return AuditReport(
        name="small",
        folder=tmp_path,
        settings={"clients": 3, "seed": 0, "version": "0", "config": {"lr": 0.1}},
        seconds=1.5,
        findings=(
            finding("uploads", "leak", numbers={"share": 0.5}, table=rows),
            finding("rows", "leak", part="rebuilt", pictures={"rows.png": "rows"}),
            finding("epsilon", "refuted", part="promise"),
            finding("claim", "not refuted", part="promise"),
            finding("attacks", "left out", part="rebuilt"),
            finding("a sum", "note", part="advice", text="- old\n+ new <x>"),
        ),
    )


def test_the_page_has_everything_and_escapes_it(report: AuditReport) -> None:
    report.write()
    page = report.page.read_text()
    for text in ("a &lt;b&gt;", "&lt;was&gt;", "+ new &lt;x&gt;", "data:image/png;base64,", ">3<"):
        assert text in page
    for one in report.findings:
        assert f'id="{one.name.replace(" ", "-")}"' in page
    assert page.count("<li><a href") == len(report.leaks) == 3
    assert "http" not in page.replace("http://www.w3.org", "")


def test_json_gives_the_findings_back(report: AuditReport) -> None:
    report.write()
    read = json.loads((report.folder / "audit.json").read_text())
    again = tuple(Finding.from_json(one) for one in read["findings"])
    assert [one.as_json() for one in again] == read["findings"]
    assert [one.verdict for one in again] == [one.verdict for one in report.findings]


def test_junit_counts_leaks_as_failures(report: AuditReport, tmp_path: Path) -> None:
    report.write_junit(tmp_path / "junit.xml")
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("6", "3", "1")
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == ["uploads", "rows", "epsilon"]


@pytest.mark.parametrize("name", ["said", "adversary", "chance"])
def test_a_finding_says_who_learns_it_and_what_chance_gives(name: str) -> None:
    with pytest.raises(InvalidParameterError, match=name):
        finding("uploads", "leak", **{name: ""})


def test_nothing_is_ever_private() -> None:
    assert not any("private" in verdict or "safe" in verdict for verdict in VERDICTS)
    with pytest.raises(InvalidParameterError, match="verdict"):
        finding("uploads", "private")


ALLOWED = ("rows", "epsilon")


def test_limits_pass_where_everything_is_below_them(report: AuditReport) -> None:
    limits = {"uploads: share": 0.5}
    assert assert_leaks_less_than(report, limits, allowed=ALLOWED) is report


@pytest.mark.parametrize(
    ("limits", "allowed", "said"),
    [
        ({"uploads: share": 0.4}, ALLOWED, "uploads: share is 0.5, at most 0.4 may be"),
        ({"uploads: rows": 1.0}, ALLOWED, "uploads: rows was not measured"),
        ({"links: right": 1.0, "uploads: share": 1.0}, ALLOWED, "links: right was not measured"),
        ({"uploads: share": 0.5}, ("rows",), "epsilon: epsilon <was> found"),
        ({}, ALLOWED, "uploads: uploads <was> found"),
    ],
)
def test_what_leaks_more_fails(
    limits: dict[str, float], allowed: tuple[str, ...], said: str, report: AuditReport
) -> None:
    with pytest.raises(AssertionError, match="small leaks more than it may") as failed:
        assert_leaks_less_than(report, limits, allowed=allowed)
    assert said in str(failed.value)


def test_limits_that_mean_nothing_are_refused(report: AuditReport) -> None:
    with pytest.raises(InvalidParameterError, match="finding: number"):
        assert_leaks_less_than(report, {"share": 0.4})
    with pytest.raises(InvalidParameterError, match="the audit is finished"):
        assert_leaks_less_than(report, rounds=2)
