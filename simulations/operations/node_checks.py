"""Checks a node before and while it takes part: files, policy, apps, keys, clock, disk."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.policy import Policy
from flwr_privacy.wire.pins import Identity, Pins

from .allowed_apps import AllowedApps
from .checks import (
    FAIL,
    OK,
    WARN,
    Check,
    certificate_check,
    others_may,
    private_check,
    python_check,
    telemetry_check,
    version_check,
)
from .ledger_checks import CLOCK_ROOM, check_ledgers
from .state_files import StateFile, state_files
from .superlink_checks import check_superlink

__all__ = ["NodeFiles", "check_files", "check_node"]

LITTLE_ROOM = 100_000_000  # bytes
NEARLY_FULL = 0.9


@dataclass(frozen=True, kw_only=True)
class NodeFiles:
    """What a node's operator has set up.

    Parameters
    ----------
    state, policy, pins, identity : Path, optional
        What the node's configuration names ``privacy-state``, ``privacy-policy``, ``privacy-pins``
        and ``privacy-identity``.
    key : Path, optional
        The key with which the SuperNode identifies itself to the SuperLink.
    certificate : Path, optional
        The CA's certificate, of ``--root-certificates``.
    allowed_apps : Path, optional
        The apps that `flwr-privacy executor` runs.
    witness : Path, optional
        What the node's configuration names ``privacy-witness``.
    """

    state: Path | None = None
    policy: Path | None = None
    pins: Path | None = None
    identity: Path | None = None
    key: Path | None = None
    certificate: Path | None = None
    allowed_apps: Path | None = None
    witness: Path | None = None


def check_node(files: NodeFiles, superlink: str | None = None) -> list[Check]:
    """Check a node; never raises for what is wrong with it.

    Parameters
    ----------
    files : NodeFiles
        What it has.
    superlink : str, optional
        Host and port of its SuperLink, which is asked for its certificate, its time and its
        version.

    Raises
    ------
    InvalidParameterError
        If the SuperLink's address is none.
    """
    policy, _ = _policy(files.policy)
    checks = check_files(files)
    found = _found(files.state)
    if files.state is not None and found is not None:
        checks += [_clock(found), *_disk(files.state, found, policy)]
        if any(files.state.glob("*.ledger")):
            checks += check_ledgers(files.state, policy, witness=files.witness)
    if superlink is not None:
        checks += check_superlink(superlink, files.certificate)
    return checks


def check_files(files: NodeFiles) -> list[Check]:
    """Check what does not depend on what the node has released: versions, rights, keys, dates."""
    return [
        python_check(),
        version_check("flwr"),
        version_check("flwr-privacy"),
        telemetry_check(),
        _state(files.state),
        _policy(files.policy)[1],
        _apps(files.allowed_apps),
        *([] if files.key is None else [private_check("key", [files.key])]),
        *_keys(files),
        *([] if files.certificate is None else [certificate_check(files.certificate)]),
    ]


def _state(state: Path | None) -> Check:
    name = "state"
    if state is None:
        return Check(name, WARN, "no folder is named: schemes with a budget are refused (--state)")
    try:
        files = state_files(state)
    except InvalidParameterError as error:
        advice = "" if error.__cause__ else f": mkdir -m 700 {state}"
        return Check(name, FAIL, f"{error}{advice}")
    if others_may(state):
        return Check(name, FAIL, f"other users may look into {state}: chmod 700 {state}")
    if os.geteuid() != 0 and not os.access(state, os.W_OK | os.X_OK):
        return Check(name, FAIL, f"this user cannot write to {state}")
    owner = state.stat().st_uid
    for file in files:
        try:
            if others_may(file.path):
                return Check(name, FAIL, f"other users may use {file.path}: chmod 600 {file.path}")
            if file.path.stat().st_uid != owner:
                return Check(name, FAIL, f"{file.path} is not its folder's owner's: chown it")
        except FileNotFoundError:  # the node has removed it, or a link leads nowhere
            continue
    return Check(name, OK, f"{state}: for its owner alone")


def _found(state: Path | None) -> list[StateFile] | None:
    try:
        return None if state is None else state_files(state)
    except InvalidParameterError:  # `_state` says why
        return None


def _policy(path: Path | None) -> tuple[Policy | None, Check]:
    name = "policy"
    if path is None:
        return None, Check(name, FAIL, "none is set: the server alone chooses what is released")
    try:
        policy = Policy.read(path)
    except InvalidParameterError as error:
        return None, Check(name, FAIL, str(error))
    if others_may(path, "w"):
        return policy, Check(name, FAIL, f"other users may change it: chmod go-w {path}")
    missing = [
        key for key in ("max_epsilon", "min_noise_multiplier") if getattr(policy, key) is None
    ]
    if missing and not policy.allow_unprotected:
        detail = f"{path} has no {' and no '.join(missing)}: the server chooses (docs/privacy.md)"
        return policy, Check(name, WARN, detail)
    if policy.allow_unprotected:
        names = ", ".join(policy.allow_unprotected)
        return policy, Check(name, WARN, f"{path} trusts the server under {names}")
    return policy, Check(name, OK, f"{path}: epsilon at most {policy.max_epsilon:g}")


def _apps(path: Path | None) -> Check:
    name = "allowed-apps"
    if path is None:
        detail = (
            "none are listed: the node runs any app that the server sends, and no policy binds it. "
            "List what it may run (flwr-privacy node allow), give the SuperNode --isolation "
            "process and start flwr-privacy executor (docs/deployment.md, Which apps may run)"
        )
        return Check(name, FAIL, detail)
    try:
        apps = AllowedApps.read(path)
    except InvalidParameterError as error:
        return Check(name, FAIL, str(error))
    if others_may(path, "w"):
        return Check(name, FAIL, f"other users may change them: chmod go-w {path}")
    if shared := apps.sharing():
        told = f"{', '.join(shared)} share one ledger: give each a data_set in {path}"
        return Check(name, WARN, told)
    return Check(name, OK, f"{path}: {', '.join(sorted(app.name for app in apps.apps.values()))}")


def _keys(files: NodeFiles) -> Iterator[Check]:
    identity = None
    if files.identity is not None:
        try:
            identity = Identity.read(files.identity)
            yield Check("identity", OK, f"{files.identity}: for its owner alone")
        except InvalidParameterError as error:
            yield Check("identity", FAIL, str(error))
    if files.pins is None:
        yield Check(
            "pins", WARN, "none are set: in a secure sum the server may make up all other clients"
        )
        return
    try:
        pins = Pins.read(files.pins)
    except InvalidParameterError as error:
        yield Check("pins", FAIL, str(error))
        return
    if others_may(files.pins, "w"):
        yield Check("pins", FAIL, f"other users may change them: chmod go-w {files.pins}")
        return
    own = [client for client, key in pins.clients.items() if identity and key == identity.public]
    text = f"{files.pins} has {len(pins.clients)} clients"
    if identity is not None and not own:
        detail = f"{text} and not this node's identity: the others may have an old key"
        yield Check("pins", WARN, detail)
    else:
        yield Check("pins", OK, text + (f"; this node is {own[0]!r}" if own else ""))


def _clock(files: list[StateFile]) -> Check:
    newest = max((file.modified for file in files), default=None)
    if newest is not None and newest > datetime.now(UTC) + CLOCK_ROOM:
        return Check("clock", FAIL, f"a file of the state is of {newest:%Y-%m-%d %H:%M}: set it")
    return Check("clock", OK, "no file of the state is from the future")


def _disk(state: Path, files: list[StateFile], policy: Policy | None) -> Iterator[Check]:
    free, limit = shutil.disk_usage(state).free, None if policy is None else policy.max_disk
    clients: dict[str, int] = {}
    for file in files:
        clients[file.client] = clients.get(file.client, 0) + file.size
    largest = max(clients.values(), default=0)
    if limit is not None:
        status = FAIL if largest >= limit else WARN if largest >= NEARLY_FULL * limit else OK
        yield Check("max_disk", status, f"{largest} of {limit} bytes (flwr-privacy state show)")
    needed = max(LITTLE_ROOM, 0 if limit is None else limit - largest)
    if free < needed:
        yield Check("disk", WARN, f"{free} bytes are free, {needed} may be needed")
    else:
        yield Check("disk", OK, f"{free // 10**6} MB are free")
