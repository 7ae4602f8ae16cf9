"""Finds the loop in which an app trains with torch, where it has the usual shape.

The usual shape is gradient descent on pairs from one DataLoader: a prediction, its loss, a step,
and sums of losses beside. A loop that does anything else is refused, with the line: what it does
would be lost if a trainer of this library took its place.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .app_folder import AppFolder
from .client_half import NUMPY, ClientHalf
from .source import Source, keyword_of

__all__ = ["LoopError", "TrainingLoop", "training_loop", "trainings"]

CROSS_ENTROPY = {"torch.nn.functional.cross_entropy", "torch.nn.CrossEntropyLoss"}
MEAN_LOSSES = {
    *(f"torch.nn.functional.{n}" for n in ("mse_loss", "l1_loss", "nll_loss")),
    "torch.nn.functional.binary_cross_entropy_with_logits",
    *(f"torch.nn.{n}" for n in ("MSELoss", "L1Loss", "NLLLoss", "BCEWithLogitsLoss")),
}
"""Losses that are means over the batch, so that those of the single records are what they say."""

READING = {"item", "len", "float", "int", "sum", "argmax", "max", "mean", "size", "detach", "cpu"}
"""Functions whose results only go into the sums of a loop."""


class LoopError(Exception):
    """The training has another shape."""


@dataclass(frozen=True)
class TrainingLoop:
    """The loop in which an app trains.

    Parameters
    ----------
    source : Source
        The file.
    function : FunctionDef
        The function with the loop.
    loop : For
        The outermost loop: over the epochs, or over the batches.
    model, loader : str
        The model and what gives the batches, as they are written.
    loss : str
        The loss function as it is written; "" for the cross entropy.
    learning_rate : str
        The step size as it is written; "" if it is not found.
    sums : tuple of str
        Names that the loop sums up and that are read after it.
    idle : tuple of stmt
        Statements before the loop that are for the loop alone: its optimiser, its sums.
    """

    source: Source
    function: ast.FunctionDef
    loop: ast.For
    model: str
    loader: str
    loss: str
    learning_rate: str
    sums: tuple[str, ...]
    idle: tuple[ast.stmt, ...]


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
        if _method(node) == "backward"
    ]
    if len(found) != 1:
        where = "; ".join(source.line(node) for source, _, node in found)
        raise LoopError(
            f"loss.backward() is called at {len(found)} places of the app, and one is needed to "
            f"know the training{': ' if where else ''}{where}"
        )
    source, function, backward = found[0]
    _check_called_once(app, client, source, function)
    return _Reader(source, function, backward).read()


def _check_called_once(
    app: AppFolder, client: ClientHalf, source: Source, function: ast.FunctionDef
) -> None:
    """Refuse a loop that is not in the training, or in what the training calls once."""
    roots = list(trainings(client))
    if any(root is function for _, root in roots):
        return
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
        node
        for _, root in roots
        for statement in root.body
        if not isinstance(statement, ast.For | ast.While)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and any(node.func is use for use in uses)
    ]
    if len(uses) != 1 or len(calls) != 1:
        raise LoopError(f"{here} is not called once in a training, outside of a loop")


def _local_names(source: Source) -> Iterator[int]:
    """Return the ids of the nodes whose name is a function's own there."""
    for function in ast.walk(source.tree):
        if isinstance(function, ast.FunctionDef):
            names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
            own = {n.id for n in names if _stores(n)} | {a.arg for a in function.args.args}
            yield from (id(n) for n in names if n.id in own)


class _Reader:
    """Reads the function with the loop."""

    def __init__(self, source: Source, function: ast.FunctionDef, backward: ast.AST) -> None:
        self._source, self._function = source, function
        self._loop = next(
            (s for s in function.body if any(node is backward for node in ast.walk(s))), None
        )
        self._made = {  # what the function's own names are made of
            target.id: node.value
            for node in function.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self._model = self._loss = self._rate = ""
        self._pair: tuple[str, str] = ("", "")
        self._outputs: set[str] = set()
        self._losses: set[str] = set()
        self._sums: set[str] = set()

    def read(self) -> TrainingLoop:
        outer = self._loop
        if not isinstance(outer, ast.For) or outer.orelse:
            raise self._wrong(outer or self._function, "no loop over the batches")
        inner = outer
        if isinstance(outer.iter, ast.Call) and _called(outer.iter) == "range":
            loops = [s for s in outer.body if isinstance(s, ast.For)]
            if len(loops) != 1 or loops[0].orelse:
                raise self._wrong(outer, "no single loop over the batches in it")
            inner = loops[0]
            for statement in outer.body:
                if statement is not inner:
                    self._take_sum(statement)
        body = self._begin(inner)
        for statement in body:
            self._take(statement)
        if not (self._model and self._losses):
            raise self._wrong(inner, "no loss = criterion(model(features), labels)")
        return TrainingLoop(
            self._source,
            self._function,
            outer,
            self._model,
            self._source.segment(inner.iter),
            self._loss,
            self._rate,
            self._read_after(outer),
            self._idle(outer),
        )

    def _begin(self, inner: ast.For) -> Sequence[ast.stmt]:
        """Note the names of a pair; return the statements that follow."""
        if not isinstance(inner.iter, ast.Name | ast.Attribute):
            raise self._wrong(inner, "the batches are not those of a DataLoader by its name")
        body, target = list(inner.body), inner.target
        if isinstance(target, ast.Name) and isinstance(body[0], ast.Assign):
            first = body.pop(0)
            assert isinstance(first, ast.Assign)
            if isinstance(first.value, ast.Name) and first.value.id == target.id:
                target = first.targets[0]
        names = [e.id for e in getattr(target, "elts", ()) if isinstance(e, ast.Name)]
        if len(names) != 2 or len(names) != len(getattr(target, "elts", ())):
            raise self._wrong(inner, "a batch is no pair of features and labels")
        self._pair = names[0], names[1]
        return body

    def _take(self, statement: ast.stmt) -> None:
        """Take a statement of the inner loop."""
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            if _method(call) == "zero_grad":
                return
            if _method(call) == "backward" and not (call.args or call.keywords):
                if isinstance(owner, ast.Name) and owner.id in self._losses:
                    return
                if owner is not None and self._is_loss(owner):
                    self._losses.add("")
                    return
            if _method(call) == "step" and isinstance(owner, ast.Name) and not call.args:
                made = self._made.get(owner.id)
                if isinstance(made, ast.Call) and self._is_optimiser(made):
                    rate = keyword_of(made, "lr") or (made.args[1] if len(made.args) > 1 else None)
                    self._rate = "" if rate is None else self._source.segment(rate)
                    return
        elif isinstance(statement, ast.With) and self._is_step(statement):
            return
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            (target,), value = statement.targets, statement.value
            if self._moves(target, value):
                return
            if isinstance(target, ast.Name) and self._is_output(value):
                self._outputs.add(target.id)
                return
            if isinstance(target, ast.Name) and self._is_loss(value):
                self._losses.add(target.id)
                return
        self._take_sum(statement)

    def _take_sum(self, statement: ast.stmt) -> None:
        """Take a statement that only adds up what the loop has found."""
        target: ast.expr | None = None
        if isinstance(statement, ast.AugAssign):
            target = statement.target
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
        calls = [_called(n) for n in ast.walk(statement) if isinstance(n, ast.Call)]
        if not isinstance(target, ast.Name) or not READING.issuperset(calls):
            raise self._wrong(statement, "more than a step of gradient descent")
        self._sums.add(target.id)

    def _moves(self, target: ast.expr, value: ast.expr) -> bool:
        """Tell whether a statement only moves the pair to a device."""
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        values = value.elts if isinstance(value, ast.Tuple) else [value]
        return len(targets) == len(values) and all(
            isinstance(name, ast.Name) and name.id in self._pair and self._moved(source) == name.id
            for name, source in zip(targets, values, strict=True)
        )

    def _moved(self, node: ast.expr) -> str:
        """Return the name of the pair that an expression is, on whatever device; "" if none."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            device = node.args[0] if node.args else None
            last = self._source.segment(device).rpartition(".")[2] if device is not None else ""
            told = isinstance(device, ast.Constant) or last.lower() == "device"
            if node.func.attr == "cuda" or (node.func.attr == "to" and told):
                node = node.func.value
        return node.id if isinstance(node, ast.Name) and node.id in self._pair else ""

    def _is_output(self, node: ast.expr) -> bool:
        """Tell whether an expression is the model's output for the features."""
        if not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name | ast.Attribute)
            and len(node.args) == 1
            and not node.keywords
            and self._moved(node.args[0]) == self._pair[0]
        ):
            return False
        model = self._source.segment(node.func)
        if self._model not in ("", model):
            return False
        self._model = model
        return True

    def _is_loss(self, node: ast.expr) -> bool:
        """Tell whether an expression is the loss of the output and the labels."""
        if not (isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords):
            return False
        output, labels = node.args
        known = isinstance(output, ast.Name) and output.id in self._outputs
        if self._moved(labels) != self._pair[1] or not (known or self._is_output(output)):
            return False
        name = self._loss_name(node.func)
        if name not in CROSS_ENTROPY | MEAN_LOSSES:
            raise self._wrong(node, "a loss whose value for single records is not known")
        self._loss = "" if name in CROSS_ENTROPY else self._source.segment(node.func)
        return True

    def _loss_name(self, function: ast.expr) -> str:
        """Return the dotted name of a loss, of a module that of its class."""
        made: ast.AST | None = function
        if isinstance(function, ast.Name):
            made = self._made.get(function.id, self._source.definitions.get(function.id, function))
        if isinstance(made, ast.Call) and _method(made) == "to":
            assert isinstance(made.func, ast.Attribute)
            made = made.func.value
        if isinstance(made, ast.Call):
            return "" if made.args or made.keywords else self._source.dotted(made.func)
        return "" if made is None else self._source.dotted(made)

    def _is_optimiser(self, made: ast.Call) -> bool:
        dotted = self._source.dotted(made.func)
        return dotted.startswith("torch.optim.") and "lr_scheduler" not in dotted

    def _is_step(self, node: ast.With) -> bool:
        """Tell whether a block is `parameter -= step * parameter.grad` for every parameter."""
        loop = node.body[0]
        context = node.items[0].context_expr
        if not (
            len(node.body) == len(node.items) == 1
            and isinstance(context, ast.Call)
            and self._source.dotted(context.func) == "torch.no_grad"
            and isinstance(loop, ast.For)
            and _method(loop.iter) == "parameters"
            and len(loop.body) == 1
            and isinstance(loop.target, ast.Name)
        ):
            return False
        step, name = loop.body[0], loop.target.id
        if not (
            isinstance(step, ast.AugAssign)
            and isinstance(step.op, ast.Sub)
            and isinstance(step.value, ast.BinOp)
            and isinstance(step.value.op, ast.Mult)
            and self._source.segment(step.target) == name
        ):
            return False
        sides = [step.value.left, step.value.right]
        rates = [side for side in sides if self._source.segment(side) != f"{name}.grad"]
        if len(rates) != 1:
            return False
        self._rate = self._source.segment(rates[0])
        return True

    def _read_after(self, outer: ast.For) -> tuple[str, ...]:
        """Return the sums that are read after the loop."""
        bound = {n.id for n in ast.walk(outer) if _stores(n)}
        found: list[str] = []
        after = self._function.body[self._function.body.index(outer) + 1 :]
        for statement in after:
            for parent in ast.walk(statement):
                for node in ast.iter_child_nodes(parent):
                    if not (isinstance(node, ast.Name) and node.id in bound):
                        continue
                    number = not isinstance(parent, ast.Attribute | ast.Subscript | ast.Call)
                    number |= isinstance(parent, ast.Call) and _called(parent) == "float"
                    if node.id not in self._sums or not number:
                        raise self._wrong(statement, f"{node.id} of the loop is used after it")
                    if node.id not in found:
                        found.append(node.id)
        return tuple(found)

    def _idle(self, outer: ast.For) -> tuple[ast.stmt, ...]:
        """Return the statements before the loop whose names nothing but the loop reads."""
        body = self._function.body
        place = body.index(outer)
        read = {
            node.id
            for statement in (*body[:place], *body[place + 1 :])
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        } - self._sums
        kept = {self._model, self._source.segment(outer.iter), self._loss, *_names(self._rate)}
        return tuple(
            s
            for s in body[:place]
            if isinstance(s, ast.Assign)
            and len(s.targets) == 1
            and isinstance(target := s.targets[0], ast.Name)
            and target.id not in read | kept
            and (target.id in self._sums or self._of_torch(s.value))
        )

    def _of_torch(self, value: ast.expr) -> bool:
        """Tell whether a value is an optimiser or a loss of torch's."""
        if isinstance(value, ast.Call) and _method(value) == "to":
            assert isinstance(value.func, ast.Attribute)
            value = value.func.value
        dotted = self._source.dotted(value.func) if isinstance(value, ast.Call) else ""
        return dotted.startswith("torch.optim.") or dotted in CROSS_ENTROPY | MEAN_LOSSES

    def _wrong(self, node: ast.AST, what: str) -> LoopError:
        return LoopError(f"{what}: {self._source.line(node)}")


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Return the nodes of a function without those of functions in it."""
    inner = {
        id(node)
        for part in ast.walk(function)
        if isinstance(part, ast.FunctionDef) and part is not function
        for node in ast.walk(part)
    }
    return (node for node in ast.walk(function) if id(node) not in inner)


def _method(node: ast.AST) -> str:
    """Return the name of the method that a call calls; "" if it is no such call."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if called else ""


def _called(node: ast.Call) -> str:
    """Return the last part of what a call calls."""
    return node.func.id if isinstance(node.func, ast.Name) else _method(node)


def _names(text: str) -> set[str]:
    return {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}


def _stores(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
