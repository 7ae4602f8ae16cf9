"""Puts the call for private steps before the loop in which an app trains with torch."""

import ast

from flwr_privacy.simulations.inspector.app_folder import AppFolder
from flwr_privacy.simulations.inspector.client_half import MESSAGE, NUMPY, ClientHalf
from flwr_privacy.simulations.inspector.source import Source
from flwr_privacy.simulations.inspector.training.training_loop import LoopError, TrainingLoop
from flwr_privacy.simulations.inspector.training.trainings import call_of_loop
from flwr_privacy.simulations.inspector.wraps import PRIVATE_LOOP, TORCH, Wrap

from .edits import Edit, add_arguments, changed, with_imports

__all__ = ["loop_by_hand", "made_private"]

_CONTEXT = "context"


def made_private(app: AppFolder, half: ClientHalf, found: TrainingLoop, wrap: Wrap) -> AppFolder:
    """Return the app with private steps in its loop, which gets Flower's context.

    Raises
    ------
    LoopError
        If the context or the steps of an optimiser are not found.
    """
    if half.kind != MESSAGE:
        raise LoopError(
            "a NumPyClient does not get Flower's context, which is needed: "
            f"{found.source.line(found.function)}"
        )
    if not found.optimizer:
        raise LoopError(f"no optimizer of torch takes its steps: {found.source.line(found.loop)}")
    called = call_of_loop(app, half, found.source, found.function)
    edits: dict[str, list[Edit]] = {found.source.module: []}
    own, name = edits[found.source.module], _CONTEXT
    if called is None:
        name = _context_of(found.source, found.function)
    else:
        source, training, call = called
        own.append(_with_context(found.source, found.function))
        given = f"{_CONTEXT}={_context_of(source, training)}"
        edits.setdefault(source.module, []).extend(add_arguments(source, call, [given]))
    own += _private(found, name)
    if wrap.trainable:
        trained = f"[p for p in {found.model}.parameters() if p.requires_grad]"
        own.append(Edit.of(found.source, found.moved, trained))
    for module, changes in edits.items():
        new = changed(app.sources[module], changes)
        if module == found.source.module:
            new = with_imports(new, add={TORCH: [PRIVATE_LOOP]})
        app = app.with_source(new)
    return app


def loop_by_hand(half: ClientHalf, where: str) -> list[str]:
    """Return the lines to write where a training is, as text."""
    lines = [
        f"clients, once in the training ({where}), before its loop: model, optimizer, loader = "
        f"{PRIVATE_LOOP}(model, optimizer, loader, context), with Flower's context of the client",
        "clients: train until the loader ends: for _ in range(loader.passes): in the place of the "
        "loop over epochs; one forward pass, loss.backward() and optimizer.step() for each batch "
        "(docs/dp-sgd.md)",
    ]
    if half.kind == NUMPY:
        lines.append("clients: client_fn(context) hands its context on to the client that it makes")
    return lines


def _private(found: TrainingLoop, context: str) -> list[Edit]:
    """Return the edits that put the call before the loop, and have it go on for all steps."""
    source, outer, inner = found.source, found.loop, found.batches
    given, indent = source.segment(inner.iter), source.indent(outer)
    loader = given if isinstance(inner.iter, ast.Name) else "private_loader"
    arguments = f"{found.model}, {found.optimizer}, {given}, {context}"
    model = found.model if found.model.isidentifier() else "_"
    call = f"{model}, {found.optimizer}, {loader} = {PRIVATE_LOOP}({arguments})\n{indent}"
    start, end = source.span(outer)
    renamed = Edit.of(source, inner.iter, loader)
    if inner is not outer:
        assert isinstance(outer, ast.For)
        passes = Edit.of(source, outer.iter, f"range({loader}.passes)")
        return [Edit(start, start, call), passes, renamed]
    body = source.text[start : renamed.start] + loader + source.text[renamed.end : end]
    loops = f"for _ in range({loader}.passes):\n{indent}    "
    return [Edit(start, end, call + loops + body.replace("\n", "\n    "))]


def _context_of(source: Source, training: ast.FunctionDef) -> str:
    """Return what a training of the Message API calls Flower's context."""
    arguments = training.args.args
    if len(arguments) != 2:
        raise LoopError(f"it does not take a message and a context: {source.line(training)}")
    return arguments[1].arg


def _with_context(source: Source, function: ast.FunctionDef) -> Edit:
    """Return the edit that has a function take the context, by its name."""
    taken = function.args
    used = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    used |= {argument.arg for argument in taken.args}
    more = taken.vararg or taken.kwarg or taken.kwonlyargs or taken.posonlyargs
    if more or not taken.args or _CONTEXT in used:
        raise LoopError(
            f"the function with the loop has other arguments than by position, or takes "
            f"`{_CONTEXT}` already: {source.line(function)}"
        )
    end = max(source.span(node)[1] for node in (*taken.args, *taken.defaults))
    return Edit(end, end, f", *, {_CONTEXT}")
