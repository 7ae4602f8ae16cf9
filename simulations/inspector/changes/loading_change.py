"""Has an app's clients load a part of the model, where the model has adapters."""

import ast

from flwr_privacy.simulations.inspector.app_folder import AppFolder
from flwr_privacy.simulations.inspector.client_half import ClientHalf
from flwr_privacy.simulations.inspector.source import Source
from flwr_privacy.simulations.inspector.wraps import TORCH, Wrap

from .edits import Edit, changed, with_imports

__all__ = ["LOADER", "loading_changed", "loads"]

LOADER = "load_trainable"


def loads(half: ClientHalf) -> list[tuple[Source, ast.Call]]:
    """Return the calls that load what came into the model; none if one of them is not found.

    Each function of a Message-API app that trains or evaluates has one of the usual form,
    ``model.load_state_dict(arrays.to_torch_state_dict())``, as a statement of its own.
    """
    found: list[tuple[Source, ast.Call]] = []
    for function in half.functions:
        if function.own_type:
            continue
        calls = [
            statement.value
            for statement in ast.walk(function.node)
            if isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and _is_load(statement.value)
        ]
        if len(calls) != 1:
            return []
        found.append((function.source, calls[0]))
    return found


def loading_changed(app: AppFolder, half: ClientHalf, wrap: Wrap) -> AppFolder:
    """Return the app with `load_trainable` in the place of these calls, if a part is trained."""
    if not wrap.trainable:
        return app
    edits: dict[str, tuple[Source, list[Edit]]] = {}
    for source, call in loads(half):
        given, model = call.args[0], call.func
        assert isinstance(given, ast.Call)
        assert isinstance(given.func, ast.Attribute)
        assert isinstance(model, ast.Attribute)
        written = f"{LOADER}({source.segment(model.value)}, {source.segment(given.func.value)})"
        edits.setdefault(source.module, (source, []))[1].append(Edit.of(source, call, written))
    for source, own in edits.values():
        app = app.with_source(with_imports(changed(source, own), add={TORCH: [LOADER]}, drop=set()))
    return app


def _is_load(call: ast.Call) -> bool:
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "load_state_dict"):
        return False
    given = call.args[0] if call.args else None
    return (
        isinstance(given, ast.Call)
        and isinstance(given.func, ast.Attribute)
        and given.func.attr == "to_torch_state_dict"
        and not given.args
        and not given.keywords
    )
