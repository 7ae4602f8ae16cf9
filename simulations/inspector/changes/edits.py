"""Changes the text of an app's file at some places and leaves the rest as it is, comments too."""

import ast
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from flwr_privacy.simulations.inspector.source import Source

__all__ = [
    "Edit",
    "EditError",
    "add_arguments",
    "changed",
    "drop_items",
    "line_of",
    "with_imports",
]

_LONGEST = 88  # characters of an import that stays on one line


class EditError(Exception):
    """Two edits overlap."""


@dataclass(frozen=True)
class Edit:
    """A part of a text, and what takes its place.

    Parameters
    ----------
    start, end : int
        Its first character, and the one after its last.
    text : str
        What takes its place.
    """

    start: int
    end: int
    text: str

    @classmethod
    def of(cls, source: Source, node: ast.AST, text: str) -> "Edit":
        """Replace a node."""
        return cls(*source.span(node), text)


def changed(source: Source, edits: Sequence[Edit]) -> Source:
    """Return a file with edits.

    Raises
    ------
    EditError
        If two edits overlap.
    """
    text, after = source.text, len(source.text)
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        if edit.end > after:
            raise EditError(f"two changes at {source.path}, characters {edit.start} to {edit.end}")
        text, after = text[: edit.start] + edit.text + text[edit.end :], edit.start
    return replace(source, text=text)


def add_arguments(source: Source, call: ast.Call, arguments: Sequence[str]) -> list[Edit]:
    """Add arguments to the end of a call, on lines of their own where the others have some."""
    if not arguments:
        return []
    given = sorted([*call.args, *call.keywords], key=source.span)
    start = source.text.index("(", source.span(call.func)[1]) + 1
    close = source.span(call)[1] - 1
    if not given:
        return [Edit(start, close, ", ".join(arguments))]
    end = source.span(given[-1])[1]
    rest = source.text[end:close]
    comma = "" if rest.lstrip().startswith(",") else ","
    if "\n" in rest:
        indent = source.indent(given[-1])
        place = source.text.rindex("\n", 0, close) + 1
        lines = "".join(f"{indent}{text},\n" for text in arguments)
        return [*([Edit(end, end, comma)] if comma else []), Edit(place, place, lines)]
    added = ", ".join(arguments)
    line = source.text[source.text.rfind("\n", 0, start) + 1 : close]
    if "\n" in source.text[start:close] or len(line) + len(added) + 2 <= _LONGEST:
        return [Edit(end, close, f", {added}")]
    indent = source.indent(call)
    texts = [*map(source.segment, given), *arguments]
    lines = "".join(f"{indent}    {text},\n" for text in texts)
    return [Edit(start, close, f"\n{lines}{indent}")]


def drop_items(
    source: Source, items: Sequence[ast.AST], dropped: Collection[ast.AST]
) -> list[Edit]:
    """Take some of several items between commas out, such as arguments of a call.

    An item with lines of its own goes with them and with the comment behind it.
    """
    order = sorted(items, key=source.span)
    gone = {id(node) for node in dropped}
    edits, kept_before = [], 0  # the end of the last item that stays
    for place, node in enumerate(order):
        start, end = source.span(node)
        if id(node) not in gone:
            kept_before = end
            continue
        line = source.text.rfind("\n", 0, start) + 1
        rest = re.compile(r",?[ \t]*(#[^\n]*)?\r?\n").match(source.text, end)
        if not source.text[line:start].strip() and rest is not None:
            edits.append(Edit(line, rest.end(), ""))
        elif place + 1 < len(order):
            edits.append(Edit(start, source.span(order[place + 1])[0], ""))
        else:  # the last one: the comma is that of the last item that stays
            before = max([kept_before, *(edit.end for edit in edits)])
            alone = kept_before != before or not kept_before
            edits.append(Edit(start if alone else before, end, ""))
    return edits


def with_imports(
    source: Source, *, add: Mapping[str, Collection[str]], drop: Collection[str] = ()
) -> Source:
    """Return a file with other imports.

    Parameters
    ----------
    source : Source
        The file.
    add : mapping of str to collection of str
        Names to import, by module: "UDP", or "UDPClientApp as ClientApp".
    drop : collection of str
        Local names whose imports go if the file does not use them any more. Those that `add`
        imports too always go.
    """
    taken = {name.rpartition(" as ")[2] for names in add.values() for name in names}
    used = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
    gone = taken | (set(drop) - used)
    missing = {module: set(names) for module, names in add.items()}
    edits: list[Edit] = []
    last = _first_imports(source)  # or the last import of Flower, or of this library
    empty: list[ast.stmt] = []
    for node in source.tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        first = node.names[0].name if isinstance(node, ast.Import) else _module(node)
        last = node if first.partition(".")[0] in ("flwr", "flwr_privacy") else last
        if isinstance(node, ast.Import):
            continue
        own = list(map(_written, node.names))
        new = missing.pop(_module(node), set())
        keep = [name for name in own if name in new or name.rpartition(" as ")[2] not in gone]
        keep = sorted({*keep, *new}, key=_by_name) if not new <= set(keep) else keep
        if not keep:
            empty.append(node)
        elif keep != own:
            edits.append(Edit.of(source, node, _import(_module(node), keep)))
    block = "\n".join(
        _import(module, sorted(names, key=_by_name)) for module, names in sorted(missing.items())
    )
    for node in empty:
        if node is last and block:  # the new imports take its place
            edits.append(Edit.of(source, node, block))
            block = ""
        else:
            edits.append(line_of(source, node))
    if block and last is not None:
        end = source.span(last)[1]
        edits.append(Edit(end, end, f"\n{block}"))
    elif block:
        top = _top(source)
        edits.append(Edit(top, top, f"{block}\n"))
    return changed(source, edits)


def _first_imports(source: Source) -> ast.stmt | None:
    """Return the last of the imports with which a file begins; None if it begins otherwise."""
    body = source.tree.body[ast.get_docstring(source.tree) is not None :]
    first = takewhile(lambda node: isinstance(node, ast.Import | ast.ImportFrom), body)
    return next(reversed(list(first)), None)


def line_of(source: Source, node: ast.stmt) -> Edit:
    """Take a statement out, with its line."""
    start, end = source.span(node)
    return Edit(start - len(source.indent(node)), end + source.text[end:].startswith("\n"), "")


def _top(source: Source) -> int:
    """Return where the first import of a file may stand: after its docstring."""
    if ast.get_docstring(source.tree) is None:
        return 0
    end = source.span(source.tree.body[0])[1]
    return end + source.text[end:].startswith("\n")


def _import(module: str, names: Sequence[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _LONGEST:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _written(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _module(node: ast.ImportFrom) -> str:
    """Return the module of an import as it is written."""
    return "." * node.level + (node.module or "")


def _by_name(text: str) -> tuple[int, str]:
    """Return the order of isort's: constants, classes, functions."""
    name = text.partition(" ")[0]
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2, name)
