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

__all__ = ["AllowedApps", "entry_of"]

DIGEST = re.compile("[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9._/+ -]{1,200}")


@dataclass(frozen=True)
class AllowedApps:
    """The apps that a node runs, each known by the SHA-256 of its bundle (FAB).

    Parameters
    ----------
    names : mapping of str to str
        Name of each app by the digest of its FAB, in hexadecimal digits. A name is for people:
        whoever makes an app chooses its name and version.

    Notes
    -----
    **Guarantee.** *Protected*: that a node runs none but these apps. *Against*: the server, and
    whoever may submit apps to it. *Covered*: the bytes of the FAB as they came, compared before
    anything of them is unpacked; the hash, name and version that the server says are not looked at.
    *Not covered*: an allowed app that does harm, packages of the node's environment that it
    imports, and its settings, which come with the run.
    """

    names: Mapping[str, str]

    @classmethod
    def read(cls, path: str | Path) -> "AllowedApps":
        """Read a TOML file with a table ``[[app]]`` of ``name`` and ``sha256`` for each app.

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
            return cls(dict(map(_entry, entries)))

        return read_toml("allowed-apps", path, apps)

    def check(self, fab: bytes) -> str:
        """Return the name of an app.

        Raises
        ------
        DeclinedError
            If its FAB is not allowed.
        """
        digest = hashlib.sha256(fab).hexdigest()
        if digest not in self.names:
            raise DeclinedError(f"this node does not run the app whose FAB has sha256 {digest}")
        return self.names[digest]


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
    name, digest = _entry({"name": name, "sha256": hashlib.sha256(content).hexdigest()})[::-1]
    return f'[[app]]\nname = "{name}"\nsha256 = "{digest}"\n'


def _entry(entry: Any) -> tuple[str, str]:
    if not isinstance(entry, dict) or set(entry) != {"name", "sha256"}:
        raise InvalidParameterError("app", entry, "a table with name and sha256")
    for key, pattern, allowed in (
        ("sha256", DIGEST, "64 hexadecimal digits"),
        ("name", NAME, "up to 200 letters, digits, blanks and . _ / + -"),
    ):
        if not isinstance(entry[key], str) or not pattern.fullmatch(entry[key]):
            raise InvalidParameterError(f"app.{key}", entry[key], allowed)
    return entry["sha256"], entry["name"]
