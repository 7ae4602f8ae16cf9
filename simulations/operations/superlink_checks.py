"""Checks a SuperLink: from a node (TLS, clocks, versions, who may start apps), and its files."""

import http.client
import ipaddress
import json
import socket
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path

from flwr_privacy.errors import InvalidParameterError

from .checks import (
    FAIL,
    OK,
    WARN,
    Check,
    certificate_check,
    private_check,
    python_check,
    telemetry_check,
    validity,
    version_check,
)

__all__ = ["check_superlink", "check_superlink_files"]

NAME = "SuperLink"
TIMEOUT = 10.0
MOST_AHEAD, MOST_BEHIND = 5.0, 300.0
"""Seconds by which a SuperLink lets a node's clock differ from its own."""

# Of the operators' interface. Without a body it changes nothing: only a proxy answers 403.
CONTROL = "/v1/control/list-runs"


def check_superlink_files(
    *, database: Path | None = None, certificate: Path | None = None
) -> list[Check]:
    """Check the machine of a SuperLink; never raises for a problem.

    Parameters
    ----------
    database : Path, optional
        Its database, which has the clients' replies.
    certificate : Path, optional
        Its certificate.
    """
    checks = [python_check(), version_check("flwr"), version_check("flwr-privacy")]
    checks.append(telemetry_check())
    if database is not None:
        beside = (database.with_name(database.name + e) for e in ("-wal", "-shm", "-journal"))
        files = [database, *(file for file in beside if file.exists())]
        checks.append(private_check("database", files))
    if certificate is not None:
        checks.append(certificate_check(certificate))
    return checks


def check_superlink(address: str, certificate: Path | None) -> list[Check]:
    """Check the SuperLink at an address; nothing that this sends changes anything there.

    Parameters
    ----------
    address : str
        Host and port, as ``flower-supernode --superlink`` takes them.
    certificate : Path, optional
        The CA's certificate, as ``--root-certificates`` takes it; by default the system's.

    Raises
    ------
    InvalidParameterError
        If the address is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InvalidParameterError("--superlink", address, "HOST:PORT")
    try:
        context = ssl.create_default_context(cafile=certificate)
    except OSError as error:  # ssl.SSLError is one
        return [Check(NAME, FAIL, f"{certificate} cannot be used: {error}")]
    connection = http.client.HTTPSConnection(host, int(port), timeout=TIMEOUT, context=context)
    try:
        return list(_checks(connection, address, host))
    except ssl.SSLCertVerificationError as error:
        return [
            Check(
                NAME,
                FAIL,
                f"{address}: its certificate is not trusted ({error.verify_message}); a CA's "
                "certificate is given by --certificate",
            )
        ]
    except (OSError, http.client.HTTPException) as error:
        return [Check(NAME, FAIL, f"{address} does not answer with TLS: {error}")]
    finally:
        connection.close()


def _checks(connection: http.client.HTTPSConnection, address: str, host: str) -> Iterator[Check]:
    connection.connect()
    yield _certificate(connection.sock, address)
    before = time.time()
    date, status, _ = _asked(connection, "GET", "/health")
    yield Check(NAME, OK, f"{address} answers (status {status} to /health)")
    yield _clock(date, (before + time.time()) / 2)
    yield _version(connection)
    yield _control(connection, host)


def _asked(
    connection: http.client.HTTPSConnection, method: str, path: str
) -> tuple[str | None, int, bytes]:
    connection.request(method, path)
    reply = connection.getresponse()
    return reply.getheader("date"), reply.status, reply.read(2**20)


def _certificate(sock: socket.socket, address: str) -> Check:
    assert isinstance(sock, ssl.SSLSocket)
    found = sock.getpeercert() or {}
    first, last = (
        datetime.fromtimestamp(ssl.cert_time_to_seconds(str(found[key])), UTC)
        for key in ("notBefore", "notAfter")
    )
    name = "SuperLink's certificate"
    return validity(name, f"that of {address}", first, last, now=datetime.now(UTC))


def _clock(date: str | None, now: float) -> Check:
    name = "clock"
    if date is None:
        return Check(name, WARN, "the SuperLink does not say its time")
    try:
        # A date has whole seconds, rounded down.
        ahead = now - (parsedate_to_datetime(date).timestamp() + 0.5)
    except ValueError:
        return Check(name, WARN, "the SuperLink says a time that cannot be read")
    text = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the SuperLink's"
    if ahead > MOST_AHEAD or ahead < -MOST_BEHIND:
        return Check(name, FAIL, f"{text}: it refuses this node; run NTP")
    if ahead > MOST_AHEAD / 2 or ahead < -MOST_BEHIND / 2:
        return Check(name, WARN, f"{text}: run NTP")
    return Check(name, OK, text)


def _version(connection: http.client.HTTPSConnection) -> Check:
    name, mine = "flwr on both ends", version("flwr")
    _, status, body = _asked(connection, "GET", "/openapi.json")
    try:
        theirs = json.loads(body)["info"]["version"] if status == 200 else None
    except (ValueError, LookupError, TypeError):
        theirs = None
    if theirs is None:
        return Check(name, OK, f"{mine} here; the SuperLink's is not told (a proxy is in front)")
    if theirs != mine:
        return Check(name, WARN, f"{mine} here, {str(theirs)[:32]!r} at the SuperLink: install one")
    return Check(name, OK, mine)


def _control(connection: http.client.HTTPSConnection, host: str) -> Check:
    name = "apps"
    _, status, _ = _asked(connection, "POST", CONTROL)
    if status in (401, 403):
        return Check(name, OK, "this node's address cannot start apps at the SuperLink")
    return Check(
        name,
        WARN if is_loopback(host) else FAIL,
        f"whoever reaches this port may start apps on all nodes (status {status} to {CONTROL}): a "
        "proxy has to let in nodes only (docs/deployment.md)",
    )


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
