"""Reads what a function does before and after the loop in which it trains."""

import ast
from collections.abc import Collection

from flwr_privacy.simulations.inspector.source import Source

from .syntax import called_by, is_stored, method_of, names_read

__all__ = ["CROSS_ENTROPY", "MEAN_LOSSES", "LoopError", "idle_before", "read_after"]

CROSS_ENTROPY = {"torch.nn.functional.cross_entropy", "torch.nn.CrossEntropyLoss"}
MEAN_LOSSES = {
    *(f"torch.nn.functional.{n}" for n in ("mse_loss", "l1_loss", "nll_loss")),
    "torch.nn.functional.binary_cross_entropy_with_logits",
    *(f"torch.nn.{n}" for n in ("MSELoss", "L1Loss", "NLLLoss", "BCEWithLogitsLoss")),
}
"""Losses that are means over the batch, so that those of the single records are what they say."""


class LoopError(Exception):
    """The training has another shape."""


def read_after(
    source: Source, function: ast.FunctionDef, loop: ast.For, sums: Collection[str]
) -> tuple[str, ...]:
    """Return the sums of a loop that are read after it.

    Raises
    ------
    LoopError
        If another name of the loop is, or a sum where it has to be more than a number.
    """
    bound = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and is_stored(n)}
    found: list[str] = []
    for statement in function.body[function.body.index(loop) + 1 :]:
        for parent in ast.walk(statement):
            for node in ast.iter_child_nodes(parent):
                if not (isinstance(node, ast.Name) and node.id in bound):
                    continue
                if is_stored(node) and not isinstance(parent, ast.AugAssign):
                    continue
                number = not isinstance(parent, ast.Attribute | ast.Subscript | ast.Call)
                number |= isinstance(parent, ast.Call) and called_by(parent) in ("float", "print")
                if node.id not in sums or not number:
                    raise LoopError(
                        f"{node.id} of the loop is used after it: {source.line(statement)}"
                    )
                if node.id not in found:
                    found.append(node.id)
        if isinstance(statement, ast.Assign):  # from here on the name has another value
            bound -= {t.id for t in statement.targets if isinstance(t, ast.Name)}
    return tuple(found)


def idle_before(
    source: Source,
    function: ast.FunctionDef,
    loop: ast.For,
    sums: Collection[str],
    kept: Collection[str],
) -> tuple[ast.stmt, ...]:
    """Return the statements before a loop that are for the loop alone: its optimiser, its sums."""
    place = function.body.index(loop)
    before = {name for statement in function.body[:place] for name in names_read(statement)}
    after = {name for statement in function.body[place + 1 :] for name in names_read(statement)}
    needed = before | (after - set(sums)) | set(kept)
    return tuple(
        s
        for s in function.body[:place]
        if isinstance(s, ast.Assign)
        and len(s.targets) == 1
        and isinstance(target := s.targets[0], ast.Name)
        and target.id not in needed
        and (target.id in sums or _is_of_torch(source, s.value))
    )


def _is_of_torch(source: Source, value: ast.expr) -> bool:
    """Tell whether a value is an optimiser or a loss of torch's."""
    if isinstance(value, ast.Call) and method_of(value) == "to":
        assert isinstance(value.func, ast.Attribute)
        value = value.func.value
    dotted = source.dotted(value.func) if isinstance(value, ast.Call) else ""
    return dotted.startswith("torch.optim.") or dotted in CROSS_ENTROPY | MEAN_LOSSES
