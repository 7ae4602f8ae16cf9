"""Puts a trainer of this library in the place of the loop in which an app trains with torch."""

import ast
from collections.abc import Collection

from flwr_privacy.simulations.inspector.app_folder import AppFolder
from flwr_privacy.simulations.inspector.client_half import ClientHalf
from flwr_privacy.simulations.inspector.training.training_loop import LoopError, TrainingLoop
from flwr_privacy.simulations.inspector.training.trainings import training_loop, trainings
from flwr_privacy.simulations.inspector.unfit import UnfitError
from flwr_privacy.simulations.inspector.wraps import PRIVATE_LOOP, TORCH, Wrap

from .edits import Edit, changed, line_of, with_imports
from .private_loop_change import loop_by_hand, made_private

__all__ = ["training_changed"]

CHOOSING = {"drop_last", "sampler", "batch_sampler"}
"""Keywords of a DataLoader that leave out or repeat records, which the trainers refuse."""


def training_changed(app: AppFolder, half: ClientHalf, wrap: Wrap) -> AppFolder:
    """Return the app with the trainer that the unit of a scheme needs.

    Raises
    ------
    UnfitError
        If its training does not have the usual shape; it has the lines to write.
    """
    trainer = wrap.trainer
    if not trainer or _has(app, trainer):
        return app
    found: TrainingLoop | None = None
    try:
        found = training_loop(app, half)
        made_new = not (found.pairs or trainer == PRIVATE_LOOP)
        _check_loaders(app, {*CHOOSING, "collate_fn"} if made_new else CHOOSING)
        if trainer == PRIVATE_LOOP:
            return made_private(app, half, found, wrap)
        if trainer == "train_poisson" and not found.learning_rate:
            raise LoopError(f"its step size is not found: {found.source.line(found.loop)}")
    except LoopError as error:
        raise UnfitError(
            f"a guarantee for single records needs {trainer} in the training, and that change "
            f"cannot be made safely: {error}",
            _by_hand(half, wrap, found),
        ) from error
    source, loop = found.source, found.loop
    indent = source.indent(loop)
    lines = [_call(trainer, found)]
    lines += [f'{name} = float("nan")  # it would tell of the records' for name in found.sums]
    edits = [Edit.of(source, loop, f"\n{indent}".join(lines))]
    edits += [line_of(source, statement) for statement in found.idle]
    gone = {n.id for s in (loop, *found.idle) for n in ast.walk(s) if isinstance(n, ast.Name)}
    return app.with_source(with_imports(changed(source, edits), add={TORCH: [trainer]}, drop=gone))


def _call(trainer: str, found: TrainingLoop) -> str:
    rate = [f"learning_rate={found.learning_rate or '...'}"] if trainer == "train_poisson" else []
    loss = [f"loss={found.loss}"] if found.loss else []
    return f"{trainer}({', '.join([found.model, found.records, *rate, *loss])})"


def _by_hand(half: ClientHalf, wrap: Wrap, found: TrainingLoop | None) -> list[str]:
    """Return the lines to write, with the names of the app where they are known."""
    call = f"{wrap.trainer}(model, features, labels)"
    if wrap.trainer == "train_poisson":
        call = f"{wrap.trainer}(model, features, labels, learning_rate=0.1)"
    if found is not None:
        call = _call(wrap.trainer, found)
    where = "; ".join(source.line(node) for source, node in trainings(half))
    lines = [f"clients, once in the training ({where}), in the place of its loop: {call}"]
    if wrap.trainer == PRIVATE_LOOP:
        lines = loop_by_hand(half, where)
    arguments = ", ".join(["...", *wrap.arguments])
    return [
        f"clients: from flwr_privacy.clients import {wrap.client_app} as ClientApp",
        f"clients: from {TORCH} import {wrap.trainer}",
        *lines,
        f"server: {wrap.strategy}({arguments})",
    ]


def _has(app: AppFolder, trainer: str) -> bool:
    """Tell whether the app calls the trainer already."""
    return any(
        source.dotted(node) == f"{TORCH}.{trainer}"
        for source in app.sources.values()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )


def _check_loaders(app: AppFolder, refused: Collection[str]) -> None:
    """Refuse a DataLoader that would choose among the records, or repeat some."""
    for source in app.sources.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and source.dotted(node.func).endswith(".DataLoader"):
                for keyword in node.keywords:
                    off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                    if keyword.arg in refused and not off:
                        why = (
                            "leaves out or repeats records"
                            if keyword.arg in CHOOSING
                            else ("makes its batches itself")
                        )
                        raise LoopError(
                            f"a DataLoader with {keyword.arg} {why}, and which records there are "
                            f"is what the guarantee counts: {source.line(node)}"
                        )
