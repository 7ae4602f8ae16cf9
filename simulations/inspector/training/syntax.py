"""Questions about a Python syntax tree that the readers of a training ask."""

import ast

__all__ = ["called_by", "is_stored", "method_of", "names_in", "names_read"]


def method_of(node: ast.AST) -> str:
    """Return the name of the method that a call calls; "" if it is no such call."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr
    return ""


def called_by(node: ast.Call) -> str:
    """Return the last part of what a call calls."""
    return node.func.id if isinstance(node.func, ast.Name) else method_of(node)


def names_in(text: str) -> set[str]:
    """Return the names in an expression as it is written."""
    return {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}


def names_read(node: ast.AST) -> set[str]:
    """Return the names whose values count in a node, also those that it adds to."""
    parts = list(ast.walk(node))
    added_to = [n.target for n in parts if isinstance(n, ast.AugAssign)]
    read = [n for n in parts if not is_stored(n)] + added_to
    return {n.id for n in read if isinstance(n, ast.Name)}


def is_stored(node: ast.AST) -> bool:
    """Tell whether a node is a name that gets a value there."""
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
