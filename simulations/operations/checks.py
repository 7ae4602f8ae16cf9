"""Checks that nodes and servers share: versions, rights of files, certificates, telemetry."""

import os
import platform
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from cryptography import x509

__all__ = [
    "FAIL",
    "INSTALL",
    "OK",
    "WARN",
    "Check",
    "Status",
    "certificate_check",
    "expiry",
    "flwr_status",
    "others_may",
    "private_check",
    "python_check",
    "telemetry_check",
    "version_check",
]

Status = Literal["ok", "warn", "fail"]
OK: Status = "ok"
WARN: Status = "warn"
FAIL: Status = "fail"

OLDEST_PYTHON = (3, 11)
OLDEST_FLWR = (1, 41)
FIRST_FLWR_TOO_NEW = (2, 0)
INSTALL = "pip install 'flwr-privacy[simulation]'"
RENEW_DAYS = 30
"""Days before a certificate ends from which on it is time to renew it."""


@dataclass(frozen=True)
class Check:
    """The result of one check; `detail` says what was found and what to do about it."""

    name: str
    status: Status
    detail: str


def python_check() -> Check:
    """Check the version of Python."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    needed = tuple(map(int, platform.python_version_tuple()[:2])) >= OLDEST_PYTHON
    return Check("python", OK if needed else FAIL, found)


def version_check(package: str) -> Check:
    """Check that a package is installed, and the version of flwr."""
    try:
        found = version(package)
    except PackageNotFoundError:
        return Check(package, FAIL, f"not installed: {INSTALL}")
    return flwr_status(found) if package == "flwr" else Check(package, OK, found)


def flwr_status(found: str) -> Check:
    """Judge a version of flwr.

    Examples
    --------
    >>> flwr_status("1.41.0").status, flwr_status("1.40.2").status, flwr_status("2.0.0").status
    ('ok', 'fail', 'fail')
    """
    oldest = ".".join(map(str, OLDEST_FLWR))
    try:
        numbers = tuple(int(part) for part in found.split(".")[:2])
    except ValueError:
        return Check("flwr", WARN, f"{found}: cannot be compared with >={oldest},<2")
    if OLDEST_FLWR <= numbers < FIRST_FLWR_TOO_NEW:
        return Check("flwr", OK, found)
    return Check("flwr", FAIL, f"{found}: needed is >={oldest},<2 ({INSTALL})")


def telemetry_check() -> Check:
    """Check whether Flower sends usage data."""
    if os.environ.get("FLWR_TELEMETRY_ENABLED", "1") == "0":
        return Check("telemetry", OK, "Flower's telemetry is off")
    return Check(
        "telemetry",
        WARN,
        "Flower's own commands send usage data to Flower Labs unless FLWR_TELEMETRY_ENABLED=0 is "
        "set where they start; `flwr-privacy` switches it off for its own runs",
    )


def others_may(path: Path, rights: str = "rwx") -> bool:
    """Tell whether the group of a file or others have one of some rights.

    Parameters
    ----------
    path : Path
        The file or folder; a link is followed.
    rights : str, default "rwx"
        Letters of the rights that are asked about.
    """
    bits = {"r": stat.S_IRGRP | stat.S_IROTH, "w": stat.S_IWGRP | stat.S_IWOTH}
    bits["x"] = stat.S_IXGRP | stat.S_IXOTH
    mode = path.stat().st_mode
    return any(mode & bits[letter] for letter in rights)


def private_check(name: str, paths: Iterable[Path]) -> Check:
    """Check that files are there for their owner alone.

    Parameters
    ----------
    name : str
        Name of the check.
    paths : iterable of Path
        The files.
    """
    files = list(paths)
    if missing := [str(path) for path in files if not os.path.isfile(path)]:
        return Check(name, FAIL, f"there is no file {missing[0]}")
    if shown := [path for path in files if others_may(path)]:
        mode = stat.S_IMODE(shown[0].stat().st_mode)
        detail = f"other users may use {shown[0]} (mode {mode:04o}): chmod 600 {shown[0]}"
        return Check(name, FAIL, detail)
    return Check(name, OK, f"{', '.join(map(str, files))}: for the owner alone")


def expiry(certificate: Path) -> tuple[datetime, datetime]:
    """Return from when until when all certificates of a PEM file are valid.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it has no certificate.
    """
    found = x509.load_pem_x509_certificates(certificate.read_bytes())
    return max(one.not_valid_before_utc for one in found), min(
        one.not_valid_after_utc for one in found
    )


def certificate_check(certificate: Path, *, now: datetime | None = None) -> Check:
    """Check how long the certificates of a PEM file are still valid.

    Parameters
    ----------
    certificate : Path
        The file.
    now : datetime, optional
        When; by default now.
    """
    name, now = "certificate", now or datetime.now(UTC)
    try:
        first, last = expiry(certificate)
    except OSError as error:
        return Check(name, FAIL, f"{certificate} cannot be read: {error.strerror}")
    except ValueError:
        return Check(name, FAIL, f"{certificate} has no certificate in PEM format")
    return validity(name, str(certificate), first, last, now=now)


def validity(name: str, of: str, first: datetime, last: datetime, *, now: datetime) -> Check:
    """Judge the time in which a certificate is valid."""
    if now < first:
        return Check(
            name, FAIL, f"{of} is valid from {_day(first)} on: renew it, or set this clock"
        )
    if now >= last:
        return Check(name, FAIL, f"{of} has ended on {_day(last)}: renew it")
    text = f"{of} is valid until {_day(last)}, {(last - now).days} days from now"
    if (last - now).days < RENEW_DAYS:
        return Check(name, WARN, f"{text}: renew it")
    return Check(name, OK, text)


def _day(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d")
