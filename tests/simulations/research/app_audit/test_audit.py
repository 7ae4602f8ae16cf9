"""Whole audits: of a small app, of apps that cannot be audited, and of an interrupted one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flwr_privacy.errors import EngineError, InvalidParameterError
from flwr_privacy.simulations.research.app_audit import audit as module
from flwr_privacy.simulations.research.app_audit.audit import audit
from flwr_privacy.simulations.research.app_audit.findings import PARTS
from flwr_privacy.simulations.research.app_audit.report import AuditReport
from flwr_privacy.simulations.testing import assert_leaks_less_than
from tests.shared.imports import ROOT

from .apps import small_app


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_app(tmp_path_factory.mktemp("app"))


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def audited(app: Path, told: list[str], tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    out = tmp_path_factory.mktemp("audit")
    return audit(app, out=out, minutes=2.0, tell=lambda step, done: told.append(step))


@pytest.mark.long
def test_every_part_is_in_the_report(audited: AuditReport, told: list[str]) -> None:
    assert [part for part in PARTS if any(f.part == part for f in audited.findings)] == list(PARTS)
    assert told[:2] == ["as it is", "few records"]
    uploads = audited.finding("uploads")
    assert uploads is not None
    assert uploads.numbers["kinds"] == {"plain": 6}


@pytest.mark.long
def test_no_secret_of_the_configuration_is_in_the_report(audited: AuditReport) -> None:
    for path in (audited.page, audited.folder / "audit.json"):
        assert "hub-token" in path.read_text()
        assert "hf_AbCdEfGhIjKlMnOpQr12" not in path.read_text()


@pytest.mark.long
def test_an_audit_goes_on_where_it_was_interrupted(
    audited: AuditReport, app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (audited.folder / "parts" / "left.json").unlink()  # it was killed before this part

    def again(*args: object, **kwargs: object) -> None:
        raise AssertionError("the app runs again")

    monkeypatch.setattr(module, "run_probe", again)
    second = audit(app, out=audited.folder, minutes=2.0)
    assert [f.as_json() for f in second.findings] == [
        f.as_json() for f in map(_kept, audited.findings)
    ]


def _kept(finding: object) -> object:
    return type(finding).from_json(json.loads(json.dumps(finding.as_json())))  # type: ignore[attr-defined]


@pytest.mark.long
def test_a_folder_has_one_audit(audited: AuditReport, app: Path) -> None:
    with pytest.raises(InvalidParameterError, match="other settings"):
        audit(app, out=audited.folder, rounds=1)


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("raise RuntimeError('no model here')", "RuntimeError: no model here"),
        ("__import__('socket').create_connection(('hub.org', 443))", "for hub.org"),
        ("__import__('sys').exit(3)", "SystemExit: 3"),
    ],
)
def test_an_app_that_asks_no_node_is_an_error_with_its_reason(
    server: str, reason: str, tmp_path: Path
) -> None:
    text = f"from flwr.serverapp import ServerApp\n\n{server}\napp = ServerApp()\n"
    app = small_app(tmp_path, server=text.replace("{", "{{").replace("}", "}}"))
    with pytest.raises(EngineError, match="asked no node anything") as failed:
        audit(app, out=tmp_path / "out")
    assert reason in str(failed.value)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"rounds": 0}, "rounds"), ({"minutes": 0.0}, "minutes"), ({"clients": 0}, "clients")],
)
def test_settings_are_checked_before_anything_runs(
    settings: dict[str, float], name: str, app: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidParameterError, match=name):
        audit(app, out=tmp_path / "out", **settings)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_folder_without_an_app_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="pyproject"):
        audit(tmp_path, out=tmp_path / "out")


@pytest.mark.long
def test_the_blocks_of_the_page_run(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/app-audit.md").read_text(encoding="utf-8")
    (app.parent / "MY_APP").symlink_to(app)
    monkeypatch.chdir(app.parent)
    values: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(block, values)
    assert values["report"].name == "small"
    values["test_my_app"](assert_leaks_less_than)  # goes on with the same audit
    with pytest.raises(AssertionError, match="number of records: "):
        assert_leaks_less_than(values["report"], allowed=["uploads", "metrics in the clear"])
