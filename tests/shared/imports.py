"""Which module imports which, by the source. A package that imports late is looked through."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = ("flwr_privacy", "strategies", "clients", "simulations")


@cache
def modules() -> dict[str, Path]:
    """Return the modules of the product and their files."""
    found = {}
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*.py"):
            place = path.relative_to(ROOT).with_suffix("")
            if "quickstarts" in place.parts:
                continue  # apps of a user, which import theirs
            parts = place.parts if floor == "flwr_privacy" else ("flwr_privacy", *place.parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def imported(module: str) -> frozenset[str]:
    """Return the modules of the product that a module imports, wherever in its source."""
    found = set()
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = _source(node, module)
            found |= {_definer(source, alias.name) for alias in node.names}
    return frozenset(found & modules().keys())


@cache
def foreign(module: str) -> frozenset[str]:
    """Return the packages outside of the product that a module imports, wherever in its source."""
    found = set()
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(_source(node, module))
    return frozenset({name.partition(".")[0] for name in found} - {"flwr_privacy"})


def reached(starts: set[str]) -> set[str]:
    """Return what some modules import, and what that imports; packages are looked through."""
    found: set[str] = set()
    ahead = set(starts)
    while ahead:
        module = ahead.pop()
        found.add(module)
        if modules()[module].name != "__init__.py":
            ahead |= imported(module) - found
    return found


def _definer(source: str, name: str) -> str:
    """Return the module that a name comes from, if a package only passes it on."""
    if f"{source}.{name}" in modules():
        return f"{source}.{name}"
    while (passed_on := _exports(source).get(name, source)) != source:
        source = passed_on
    return source


@cache
def _exports(module: str) -> dict[str, str]:
    if module not in modules() or modules()[module].name != "__init__.py":
        return {}
    return {
        alias.asname or alias.name: _source(node, module)
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _source(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return str(node.module)
    package = module.split(".")
    if modules()[module].name != "__init__.py":
        package.pop()
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *filter(None, [node.module])])


def _tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))
