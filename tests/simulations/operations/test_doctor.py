import builtins
import socket
from pathlib import Path

import pytest

from flwr_privacy.simulations.operations import doctor
from flwr_privacy.simulations.operations.checks import Check, flwr_status
from flwr_privacy.simulations.operations.doctor import diagnose
from flwr_privacy.simulations.operations.superlink_checks import check_superlink_files


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_environment_is_fine() -> None:
    checks = by_name(diagnose())
    for name in ("python", "numpy", "flwr", "ray", "torch", "gpu", "temporary folder"):
        assert checks[name].status == "ok", checks[name]
    assert checks["data digits"].status == "ok"
    assert "mnist, msrc, parkinsons (--data-root DIR)" in checks["data"].detail
    assert "data mnist" not in checks


def test_a_folder_is_asked_for_every_data_set(tmp_path: Path) -> None:
    check = by_name(diagnose(tmp_path))["data mnist"]
    assert check.status == "warn"
    assert "missing" in check.detail


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("1.41.0", "ok"),
        ("1.50.1", "ok"),
        ("1.40.9", "fail"),
        ("2.0.0", "fail"),
        ("unknown", "warn"),
    ],
)
def test_supported_range_of_flwr(version: str, status: str) -> None:
    check = flwr_status(version)
    assert check.status == status
    assert version in check.detail


def test_left_over_superlink_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(doctor, "FLOWER_PORTS", {port: "SuperLink"})
        check = by_name(diagnose())[f"port {port}"]
    assert check.status == "warn"
    assert "left behind" in check.detail


def test_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    assert by_name(diagnose())["telemetry"].status == "ok"
    monkeypatch.delenv("FLWR_TELEMETRY_ENABLED")
    assert by_name(diagnose())["telemetry"].status == "warn"


def test_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package-of-ours",))
    check = by_name(diagnose())["no-such-package-of-ours"]
    assert check.status == "fail"
    assert "flwr-privacy[simulation]" in check.detail


def test_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(gone))
    check = by_name(diagnose())["temporary folder"]
    assert check.status == "fail"
    assert str(gone) in check.detail


def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name == "flwr_privacy.simulations.tasks.data":
            raise ImportError("No module named 'sklearn'")
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    check = by_name(diagnose())["data"]
    assert check.status == "fail"
    assert "sklearn" in check.detail


def test_a_left_over_ray_cluster_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert status_of("Ray cluster") == "ok"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    (check,) = (check for check in diagnose() if check.name == "Ray cluster")
    assert check.status == "warn"
    assert "127.0.0.1:1 that does not answer" in check.detail


def status_of(name: str) -> str:
    (check,) = (check for check in diagnose() if check.name == name)
    return check.status


def test_a_database_that_others_can_read_is_named(tmp_path: Path) -> None:
    database = tmp_path / "superlink.db"
    for name in ("superlink.db", "superlink.db-wal"):
        (tmp_path / name).touch(mode=0o600)
    assert by_name(check_superlink_files(database=database))["database"].status == "ok"
    (tmp_path / "superlink.db-wal").chmod(0o644)
    check = by_name(check_superlink_files(database=database))["database"]
    assert check.status == "fail"
    assert f"chmod 600 {tmp_path / 'superlink.db-wal'}" in check.detail
