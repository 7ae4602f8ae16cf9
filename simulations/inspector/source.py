"""Reads one Python file of an app: its syntax tree, and what its names mean."""

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["Definition", "Source", "SourceError", "keyword_of"]

Definition = ast.FunctionDef | ast.ClassDef | ast.expr


class SourceError(ValueError):
    """A file of an app is no Python that can be read."""


@dataclass(frozen=True)
class Source:
    """A Python file of an app.

    Parameters
    ----------
    path : Path
        The file.
    module : str
        The name under which the app imports it.
    text : str
        Its text, which may be newer than the file.

    Examples
    --------
    >>> source = Source(Path("app.py"), "app", "from flwr.app import Context as C")
    >>> source.names["C"]
    'flwr.app.Context'
    """

    path: Path
    module: str
    text: str

    @classmethod
    def read(cls, path: Path, module: str) -> "Source":
        """Read a file.

        Raises
        ------
        SourceError
            If it cannot be read or is no Python.
        """
        try:
            source = cls(path, module, path.read_bytes().decode())  # line ends stay as they are
            _ = source.tree
        except (OSError, ValueError, SyntaxError) as error:
            raise SourceError(f"{path}: {error}") from error
        return source

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        """Every import of the file, also those in functions."""
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.Import | ast.ImportFrom)]

    @cached_property
    def names(self) -> dict[str, str]:
        """What imported names mean, as dotted names."""
        found = {}
        for node in self.imports:
            for alias in node.names:
                if isinstance(node, ast.ImportFrom):
                    found[alias.asname or alias.name] = f"{self.imported_from(node)}.{alias.name}"
                elif alias.asname:
                    found[alias.asname] = alias.name
                else:  # `import a.b` makes the name `a`
                    first = alias.name.partition(".")[0]
                    found[first] = first
        return found

    def imported_from(self, node: ast.ImportFrom) -> str:
        """Return the dotted name of the module of a `from` import, a relative one too."""
        if not node.level:
            return node.module or ""
        package = self.module.split(".")
        is_package = self.path.name == "__init__.py"
        base = package[: len(package) - node.level + is_package]
        return ".".join([*base, *([node.module] if node.module else [])])

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """What the file itself defines at the top: functions, classes and values, by name."""
        found: dict[str, Definition] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = node
            elif isinstance(node, ast.Assign):
                found |= {t.id: node.value for t in node.targets if isinstance(t, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found |= {node.target.id: node.value} if node.value else {}
        return found

    def dotted(self, node: ast.AST) -> str:
        """Return the dotted name that an expression has; "" if it has none.

        A name that the file itself defines has the file's module in front.
        """
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        if not isinstance(node, ast.Name):
            return ""
        if node.id in self.definitions:
            return f"{self.module}.{node.id}"
        return self.names.get(node.id, "")

    def segment(self, node: ast.AST) -> str:
        """Return the text of a node."""
        return self.text[slice(*self.span(node))]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the places of a node's text: its first character, and the one after its last."""
        where = ast.Module if isinstance(node, ast.Module) else node
        assert isinstance(where, ast.expr | ast.stmt | ast.keyword | ast.arg | ast.alias)
        assert where.end_lineno is not None
        assert where.end_col_offset is not None
        return (
            self.offset(where.lineno, where.col_offset),
            self.offset(where.end_lineno, where.end_col_offset),
        )

    def offset(self, line: int, column: int) -> int:
        """Return the place of a line's column, which `ast` counts in bytes of UTF-8."""
        text = self._lines[line - 1]
        return self._starts[line - 1] + len(text.encode()[:column].decode())

    def line(self, node: ast.AST) -> str:
        """Return file and line of a node, with the text of its first line."""
        number = getattr(node, "lineno", 1)
        return f"{self.path.name}:{number}: {self._lines[number - 1].strip()}"

    def indent(self, node: ast.AST) -> str:
        """Return the blanks in front of the line where a node begins."""
        text = self._lines[getattr(node, "lineno", 1) - 1]
        return text[: len(text) - len(text.lstrip())]

    @cached_property
    def _lines(self) -> list[str]:
        # Not `splitlines`, which also splits where Python does not.
        return [f"{line}\n" for line in self.text.split("\n")]

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self._lines:
            starts.append(starts[-1] + len(line))
        return starts


def keyword_of(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a call's keyword; None if it has none."""
    return next((k.value for k in call.keywords if k.arg == name), None)
