"""Reads which apps a node's operator allows, and compares an app's bytes with them."""

import hashlib
import io
import re
import tomllib
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr_privacy.errors import DeclinedError, InvalidParameterError
from flwr_privacy.wire.files import read_toml
from flwr_privacy.wire.identity import check_client_id

__all__ = ["AllowedApp", "AllowedApps", "entry_of"]

DIGEST = re.compile("[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9._/+ -]{1,200}")


@dataclass(frozen=True)
class AllowedApp:
    """An app that a node runs.

    Parameters
    ----------
    name : str
        For people: whoever makes an app chooses its name and version.
    data_set : str, optional
        Name of the data set that it trains on, whose ledger its releases are charged to.
    """

    name: str
    data_set: str | None = None


@dataclass(frozen=True)
class AllowedApps:
    """The apps that a node runs, each known by the SHA-256 of its bundle (FAB).

    Parameters
    ----------
    apps : mapping of str to AllowedApp
        Each app by the digest of its FAB, in hexadecimal digits.

    Notes
    -----
    **Guarantee.** *Protected*: that a node runs none but these apps. *Against*: the server, and
    whoever may submit apps to it. *Covered*: the bytes of the FAB as they came, compared before
    anything of them is unpacked; the hash, name and version that the server says are not looked at.
    *Not covered*: an allowed app that does harm, packages of the node's environment that it
    imports, and its settings, which come with the run.
    """

    apps: Mapping[str, AllowedApp]

    @classmethod
    def read(cls, path: str | Path) -> "AllowedApps":
        """Read a TOML file with a table ``[[app]]`` of ``name`` and ``sha256`` for each app.

        A table may also have ``data_set``.

        Raises
        ------
        InvalidParameterError
            If the file cannot be read, allows nothing or has something else in it.
        """

        def apps(values: dict[str, Any]) -> "AllowedApps":
            entries = values.get("app")
            if set(values) != {"app"} or not isinstance(entries, list) or not entries:
                allowed = "tables [[app]], as `flwr-privacy node allow` prints them"
                raise InvalidParameterError("keys", sorted(values), allowed)
            made: dict[str, AllowedApp] = {}
            for digest, app in map(_entry, entries):
                if digest in made and made[digest].data_set != app.data_set:
                    allowed = f"one data set for one app; {app.name} has several"
                    raise InvalidParameterError("app.data_set", app.data_set, allowed)
                made[digest] = app
            return cls(made)

        return read_toml("allowed-apps", path, apps)

    def check(self, fab: bytes) -> AllowedApp:
        """Return the app of a FAB.

        Raises
        ------
        DeclinedError
            If its FAB is not allowed.
        """
        digest = hashlib.sha256(fab).hexdigest()
        if digest not in self.apps:
            raise DeclinedError(f"this node does not run the app whose FAB has sha256 {digest}")
        return self.apps[digest]

    def sharing(self) -> list[str]:
        """Return the apps that share one ledger because the list names no data set for them.

        Versions of one app are one: they have one name up to the version.
        """
        unnamed = [app.name for app in self.apps.values() if app.data_set is None]
        several = len({name.rpartition(" ")[0] or name for name in unnamed}) > 1
        return sorted(unnamed) if several else []


def entry_of(fab: Path) -> str:
    """Return the table that allows the app of a FAB.

    Parameters
    ----------
    fab : Path
        The file that ``flwr build`` has written.

    Raises
    ------
    InvalidParameterError
        If it is no FAB.
    """
    try:
        content = fab.read_bytes()
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            config = tomllib.loads(archive.read("pyproject.toml").decode())
        project, app = config["project"], config["tool"]["flwr"]["app"]
        name = f"{app['publisher']}/{project['name']} {project['version']}"
    except (
        *(OSError, ValueError, KeyError, TypeError),
        *(zipfile.BadZipFile, zlib.error, RuntimeError),  # damaged, or encrypted
    ) as error:
        allowed = f"a FAB, as `flwr build` writes it ({error})"
        raise InvalidParameterError("fab", str(fab), allowed) from error
    digest, made = _entry({"name": name, "sha256": hashlib.sha256(content).hexdigest()})
    return f'[[app]]\nname = "{made.name}"\nsha256 = "{digest}"\n'


def _entry(entry: Any) -> tuple[str, AllowedApp]:
    needed = {"name", "sha256"}
    if not isinstance(entry, dict) or not needed <= set(entry) <= {*needed, "data_set"}:
        allowed = "a table with name and sha256, and data_set if you like"
        raise InvalidParameterError("app", entry, allowed)
    for key, pattern, allowed in (
        ("sha256", DIGEST, "64 hexadecimal digits"),
        ("name", NAME, "up to 200 letters, digits, blanks and . _ / + -"),
    ):
        if not isinstance(entry[key], str) or not pattern.fullmatch(entry[key]):
            raise InvalidParameterError(f"app.{key}", entry[key], allowed)
    data_set = entry.get("data_set")
    if data_set is not None:
        check_client_id(data_set if isinstance(data_set, str) else "", parameter="app.data_set")
    return entry["sha256"], AllowedApp(entry["name"], data_set)
