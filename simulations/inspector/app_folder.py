"""Reads the folder of a Flower app: its pyproject.toml, and the files of its two halves."""

import ast
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr_privacy.errors import InvalidParameterError

from .source import Definition, Source, SourceError

__all__ = ["AppFolder"]

PROJECT = "pyproject.toml"
_NOT_THE_APP = {".venv", "venv", "build", "dist", "node_modules", "__pycache__", "tests"}


@dataclass(frozen=True)
class AppFolder:
    """The folder of a Flower app.

    Parameters
    ----------
    path : Path
        The folder.
    name, publisher : str
        As its pyproject.toml says.
    server, client : str
        Its halves, as "module:attribute".
    config : mapping
        The run configuration, with Flower's dotted keys.
    sources : mapping of str to Source
        The Python files, by module.
    nodes : int, optional
        The number of nodes of its default federation, where its pyproject.toml says one.
    """

    path: Path
    name: str
    publisher: str
    server: str
    client: str
    config: Mapping[str, Any]
    sources: Mapping[str, Source]
    nodes: int | None = None

    @classmethod
    def read(cls, path: Path) -> "AppFolder":
        """Read a folder.

        Raises
        ------
        InvalidParameterError
            If it is no Flower app, or a file of it cannot be parsed.
        """
        folder = path.parent if path.name == PROJECT else path

        def wrong(allowed: str) -> InvalidParameterError:
            return InvalidParameterError("app", str(path), allowed)

        try:
            project = tomllib.loads((folder / PROJECT).read_text(encoding="utf-8"))
        except OSError as error:
            allowed = f"the folder of a Flower app, with a {PROJECT} ({error.strerror})"
            raise wrong(allowed) from error
        except ValueError as error:
            raise wrong(f"a {PROJECT} that can be parsed ({error})") from error
        app = _table(project, "tool", "flwr", "app")
        components = _table(app, "components")
        halves = []
        for half in ("serverapp", "clientapp"):
            reference = components.get(half)
            if not isinstance(reference, str) or reference.count(":") != 1:
                raise wrong(
                    f"{half} = 'module:attribute' under [tool.flwr.app.components] in {PROJECT}"
                )
            halves.append(reference)
        try:
            sources = _sources(folder)
        except SourceError as error:
            raise wrong(f"an app whose files can be parsed ({error})") from error
        for reference in halves:
            module = reference.partition(":")[0]
            if module not in sources:
                raise wrong(f"an app with the module '{module}' that its {PROJECT} names")
        return cls(
            path=folder,
            name=str(_table(project, "project").get("name", folder.name)),
            publisher=str(app.get("publisher", "")),
            server=halves[0],
            client=halves[1],
            config=_flat(_table(app, "config")),
            sources=sources,
            nodes=_nodes(_table(project, "tool", "flwr", "federations")),
        )

    def find(self, dotted: str) -> tuple[Source, Definition] | None:
        """Return what a dotted name of the app means, and the file that defines it.

        Imports from one module of the app to another are followed. None if it is not of the app.
        """
        for _ in range(20):  # an app whose modules import each other in a circle
            module, _, name = dotted.rpartition(".")
            source = self.sources.get(module)
            if source is None:
                return None
            if name in source.definitions:
                found = source.definitions[name]
                again = source.dotted(found) if isinstance(found, ast.Name) else ""
                if not again or again == dotted:
                    return source, found
                dotted = again
            elif name in source.names:
                dotted = source.names[name]
            else:
                return None
        return None

    def half(self, reference: str) -> tuple[Source, Definition]:
        """Return what makes a half of the app, and the file where it is.

        Raises
        ------
        InvalidParameterError
            If the module has no such attribute at its top.
        """
        module, _, attribute = reference.partition(":")
        found = self.find(f"{module}.{attribute}")
        if found is None:
            allowed = f"an app whose module '{module}' defines '{attribute}' at its top"
            raise InvalidParameterError("app", str(self.path), allowed)
        return found

    def with_source(self, source: Source) -> "AppFolder":
        """Return the app with another text of one of its files."""
        return replace(self, sources={**self.sources, source.module: source})


def _sources(folder: Path) -> dict[str, Source]:
    """Return the Python files of an app by module, also those of a `src` layout."""
    found: dict[str, Source] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if _NOT_THE_APP.intersection(parts) or any(part.startswith(".") for part in parts):
            continue
        if parts[0] == "src":
            parts = parts[1:]
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts:
            module = ".".join(parts)
            found[module] = Source.read(path, module)
    return found


def _table(values: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    for key in keys:
        inner = values.get(key)
        values = inner if isinstance(inner, dict) else {}
    return values


def _nodes(federations: Mapping[str, Any]) -> int | None:
    """Return the number of nodes of the default federation."""
    default = _table(federations, str(federations.get("default", "local-simulation")))
    nodes = _table(default, "options").get("num-supernodes")
    return nodes if isinstance(nodes, int) else None


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        own = _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
        found |= own
    return found
