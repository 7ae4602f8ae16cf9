"""Makes packages import their modules on first use, so that a node loads only its scheme.

The package has its imports under ``if TYPE_CHECKING``, where type checkers see them, and says
``else: __getattr__, __dir__ = lazy(__name__)``. A name that one of its modules has too cannot be
lazy: that module takes its place when it is imported.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["lazy"]


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Parameters
    ----------
    package : str
        Its name. ``__all__`` says what it has, and its source where that is imported from.
    """
    module = sys.modules[package]

    def get(name: str) -> Any:
        if name not in module.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(_places(package)[name], package), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *module.__all__})


@cache
def _places(package: str) -> dict[str, str]:
    """Return for each name that a package imports the module that has it."""
    tree = ast.parse(inspect.getsource(sys.modules[package]))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {
        alias.name: "." * node.level + str(node.module) for node in imports for alias in node.names
    }
