"""Finds the training of an app, and in it the loop that trains with torch."""

import ast
from collections.abc import Iterator

from flwr_privacy.simulations.inspector.app_folder import AppFolder
from flwr_privacy.simulations.inspector.client_half import NUMPY, ClientHalf
from flwr_privacy.simulations.inspector.source import Source

from .syntax import is_stored, method_of
from .training_loop import LoopError, TrainingLoop, read_loop

__all__ = ["call_of_loop", "training_loop", "trainings"]


def trainings(client: ClientHalf) -> Iterator[tuple[Source, ast.FunctionDef]]:
    """Return the functions that Flower calls to train."""
    for function in client.functions:
        if function.message_type == "train":
            yield function.source, function.node
    if client.kind == NUMPY:
        for node in ast.walk(client.source.tree):
            if isinstance(node, ast.FunctionDef) and node.name == "fit":
                yield client.source, node


def training_loop(app: AppFolder, client: ClientHalf) -> TrainingLoop:
    """Find the loop in which the clients train.

    Raises
    ------
    LoopError
        If it is not found, or does not have the usual shape; the text says why.
    """
    found = [
        (source, function, node)
        for source in app.sources.values()
        for function in ast.walk(source.tree)
        if isinstance(function, ast.FunctionDef)
        for node in _own_nodes(function)
        if method_of(node) == "backward"
    ]
    if len(found) != 1:
        where = "; ".join(source.line(node) for source, _, node in found)
        raise LoopError(
            f"loss.backward() is called at {len(found)} places of the app, and one is needed to "
            f"know the training{': ' if where else ''}{where}"
        )
    source, function, backward = found[0]
    call_of_loop(app, client, source, function)
    return read_loop(source, function, backward)


def call_of_loop(
    app: AppFolder, client: ClientHalf, source: Source, function: ast.FunctionDef
) -> tuple[Source, ast.FunctionDef, ast.Call] | None:
    """Return where a training calls the function with the loop; None if that is the training.

    Raises
    ------
    LoopError
        If the loop is not in the training, nor in what the training calls once.
    """
    roots = list(trainings(client))
    if any(root is function for _, root in roots):
        return None
    here = source.line(function)
    if source.definitions.get(function.name) is not function:
        raise LoopError(f"the loop is in a method: {here}")
    local = {i for other in app.sources.values() for i in _local_names(other)}
    uses = [
        node
        for other in app.sources.values()
        for node in ast.walk(other.tree)
        if isinstance(node, ast.Name | ast.Attribute)
        and id(node) not in local
        and ((found := app.find(other.dotted(node))) is not None and found[1] is function)
    ]
    calls = [
        (own, root, node)
        for own, root in roots
        for statement in root.body
        if not isinstance(statement, ast.For | ast.While)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and any(node.func is use for use in uses)
    ]
    if len(uses) != 1 or len(calls) != 1:
        raise LoopError(f"{here} is not called once in a training, outside of a loop")
    return calls[0]


def _local_names(source: Source) -> Iterator[int]:
    """Return the ids of the nodes whose name is a function's own there."""
    for function in ast.walk(source.tree):
        if isinstance(function, ast.FunctionDef):
            names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
            own = {n.id for n in names if is_stored(n)} | {a.arg for a in function.args.args}
            yield from (id(n) for n in names if n.id in own)


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Return the nodes of a function without those of functions in it."""
    inner = {
        id(node)
        for part in ast.walk(function)
        if isinstance(part, ast.FunctionDef) and part is not function
        for node in ast.walk(part)
    }
    return (node for node in ast.walk(function) if id(node) not in inner)
