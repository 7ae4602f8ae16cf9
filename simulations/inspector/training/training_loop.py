"""Reads the loop in which an app trains with torch, where it has the usual shape.

The usual shape is gradient descent on pairs from one DataLoader: a prediction, its loss, a step,
and sums of losses beside. A loop that does anything else is refused, with the line: what it does
would be lost if a trainer of this library took its place.
"""

import ast
from dataclasses import dataclass

from flwr_privacy.simulations.inspector.source import Source, keyword_of

from .around_loop import CROSS_ENTROPY, MEAN_LOSSES, LoopError, idle_before, read_after
from .syntax import called_by, method_of, names_in, names_read

__all__ = ["LoopError", "TrainingLoop", "read_loop"]

READING = {
    *("item", "len", "float", "int", "sum", "argmax", "max", "mean", "size", "detach", "cpu"),
    "print",
}
"""Functions that only read what a loop has found."""

MORE = "more than a step of gradient descent"
NO_PAIR = "a batch is no pair of features and labels"


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
    model, records : str
        The model, and what gives its records to a trainer: the DataLoader as it is written, or a
        list of pairs where its batches are dictionaries.
    loss : str
        The loss function as it is written; "" for the cross entropy.
    learning_rate : str
        The step size as it is written; "" if it is not found.
    sums : tuple of str
        Names that the loop sums up and that are read after it.
    idle : tuple of stmt
        Statements before the loop that are for the loop alone: its optimiser, its sums.
    batches : For
        The loop over the batches: the outermost one, or the one in it.
    optimizer : str
        Name of the optimiser of torch that takes the steps; "" if there is none.
    moved : expr
        The parameters that it moves, as they are written.
    """

    source: Source
    function: ast.FunctionDef
    loop: ast.For
    model: str
    records: str
    loss: str
    learning_rate: str
    sums: tuple[str, ...]
    idle: tuple[ast.stmt, ...]
    batches: ast.For
    optimizer: str
    moved: ast.expr

    @property
    def pairs(self) -> bool:
        """Whether the DataLoader gives pairs; else its Dataset has dictionaries."""
        return not self.records.startswith("[")


def read_loop(source: Source, function: ast.FunctionDef, backward: ast.AST) -> TrainingLoop:
    """Read the loop in which a function trains.

    Parameters
    ----------
    source : Source
        The file.
    function : FunctionDef
        The function.
    backward : AST
        The call in it that computes the gradients.

    Raises
    ------
    LoopError
        If it does not have the usual shape; the text has the line that is why.
    """
    return _Reader(source, function, backward).read()


class _Reader:
    """Reads the function with the loop, statement by statement."""

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
        self._model = self._loss = self._rate = self._batch = self._optimizer = ""
        self._moved: ast.expr = ast.Constant("")
        self._parts: dict[str, str] = {}  # of which part of a batch a name is: "0", "1", "'img'"
        self._features = self._labels = ""
        self._outputs: set[str] = set()
        self._losses: set[str] = set()
        self._steps = 0
        self._sums: dict[str, ast.stmt] = {}
        self._needed: set[str] = set()  # names that the training itself reads

    def read(self) -> TrainingLoop:
        outer = self._loop
        if not isinstance(outer, ast.For) or outer.orelse:
            raise self._wrong(outer or self._function, "no loop over the batches")
        inner = outer
        if isinstance(outer.iter, ast.Call) and called_by(outer.iter) == "range":
            loops = [s for s in outer.body if isinstance(s, ast.For)]
            if len(loops) != 1 or loops[0].orelse:
                raise self._wrong(outer, "no single loop over the batches in it")
            inner = loops[0]
            for statement in outer.body:
                if statement is not inner:
                    self._take_sum(statement)
        self._begin(inner)
        for statement in inner.body:
            if self._is_of_training(statement):
                self._needed |= names_read(statement)
            else:
                self._take_sum(statement)
        if not (self._model and self._losses):
            raise self._wrong(inner, "no loss = criterion(model(features), labels)")
        if self._steps != 1:
            raise self._wrong(inner, "not one step of an optimiser for each batch")
        for name, statement in self._sums.items():
            if name in self._needed:  # it is no sum: it changes what is trained
                raise self._wrong(statement, MORE)
        source, function = self._source, self._function
        kept = names_in(self._loss) | names_in(self._rate)
        return TrainingLoop(
            source,
            function,
            outer,
            self._model,
            self._records(inner),
            self._loss,
            self._rate,
            read_after(source, function, outer, self._sums),
            idle_before(source, function, outer, self._sums, kept),
            inner,
            self._optimizer,
            self._moved,
        )

    def _begin(self, inner: ast.For) -> None:
        """Note the names of a batch, or of its two parts."""
        if not isinstance(inner.iter, ast.Name | ast.Attribute):
            raise self._wrong(inner, "the batches are not those of a DataLoader by its name")
        if isinstance(inner.target, ast.Name):
            self._batch = inner.target.id
        elif not self._unpacks(inner.target):
            raise self._wrong(inner, NO_PAIR)

    def _unpacks(self, target: ast.expr) -> bool:
        """Note the names of the two parts of a batch, if they are two."""
        names = [e.id for e in getattr(target, "elts", ()) if isinstance(e, ast.Name)]
        if len(names) != 2 or len(getattr(target, "elts", ())) != 2:
            return False
        self._parts |= {name: str(place) for place, name in enumerate(names)}
        return True

    def _records(self, inner: ast.For) -> str:
        """Return what gives a trainer its records."""
        loader, record = self._source.segment(inner.iter), "record"
        if (self._features, self._labels) == ("0", "1"):
            return loader
        if self._features == self._labels or "'" not in self._features[:1] + self._labels[:1]:
            raise self._wrong(inner, NO_PAIR)
        pair = ", ".join(f'{record}["{key[1:-1]}"]' for key in (self._features, self._labels))
        return f"[({pair}) for {record} in {loader}.dataset]"

    def _is_of_training(self, statement: ast.stmt) -> bool:
        """Tell whether a statement of the inner loop is a part of gradient descent."""
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            return self._is_call_of_training(statement.value)
        if isinstance(statement, ast.With):
            return self._is_step(statement)
        if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
            return False
        (target,), value = statement.targets, statement.value
        if isinstance(value, ast.Name) and value.id == self._batch:
            return self._unpacks(target)
        if self._moves(target, value):
            return True
        if not isinstance(target, ast.Name):
            return False
        if self._is_output(value):
            self._outputs.add(target.id)
        elif self._is_loss(value):
            self._losses.add(target.id)
        else:
            return False
        return True

    def _is_call_of_training(self, call: ast.Call) -> bool:
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if owner is None or call.args or call.keywords:
            return False
        if method_of(call) == "zero_grad":
            return True
        if method_of(call) == "backward":
            if not isinstance(owner, ast.Name) and self._is_loss(owner):
                self._losses.add("")
                return True
            return isinstance(owner, ast.Name) and owner.id in self._losses
        made = self._made.get(owner.id) if isinstance(owner, ast.Name) else None
        if method_of(call) != "step" or not isinstance(made, ast.Call):
            return False
        assert isinstance(owner, ast.Name)
        dotted = self._source.dotted(made.func)
        if not dotted.startswith("torch.optim.") or "lr_scheduler" in dotted:
            return False
        rate = keyword_of(made, "lr") or (made.args[1] if len(made.args) > 1 else None)
        moved = keyword_of(made, "params") or (made.args[0] if made.args else made)
        self._take_step(made, moved, rate)
        self._optimizer = owner.id
        return True

    def _take_step(self, step: ast.AST, moved: ast.expr, rate: ast.expr | None) -> None:
        if self._source.segment(moved) != f"{self._model}.parameters()":
            raise self._wrong(step, "a step of other parameters than all of the model")
        self._steps += 1
        self._moved = moved
        self._rate = "" if rate is None else self._source.segment(rate)
        self._needed |= names_in(self._rate)

    def _take_sum(self, statement: ast.stmt) -> None:
        """Take a statement that only prints or adds up what the loop has found."""
        targets: list[ast.expr] = []
        if isinstance(statement, ast.AugAssign):
            targets = [statement.target]
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            targets = getattr(statement.targets[0], "elts", statement.targets)
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
            raise self._wrong(statement, MORE)
        calls = [called_by(n) for n in ast.walk(statement) if isinstance(n, ast.Call)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if len(names) != len(targets) or not READING.issuperset(calls):
            raise self._wrong(statement, MORE)
        self._sums |= dict.fromkeys(names, statement)

    def _moves(self, target: ast.expr, value: ast.expr) -> bool:
        """Note names of parts of a batch, on whatever device, if that is all that is given."""
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        values = value.elts if isinstance(value, ast.Tuple) else [value]
        names = [name.id for name in targets if isinstance(name, ast.Name)]
        parts = [self._part(part) for part in values]
        if len(names) != len(targets) or len(names) != len(parts) or not all(parts):
            return False
        self._parts |= dict(zip(names, parts, strict=True))
        return True

    def _part(self, node: ast.expr) -> str:
        """Return which part of a batch an expression is, on whatever device; "" if none."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            device = node.args[0] if node.args else None
            last = self._source.segment(device).rpartition(".")[2] if device is not None else ""
            told = isinstance(device, ast.Constant) or last.lower() == "device"
            if node.func.attr == "cuda" or (node.func.attr == "to" and told):
                node = node.func.value
        if isinstance(node, ast.Name):
            return self._parts.get(node.id, "")
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id == self._batch
            and isinstance(node.slice, ast.Constant)
        ):
            return repr(node.slice.value)
        return ""

    def _is_output(self, node: ast.expr) -> bool:
        """Tell whether an expression is the model's output for the features."""
        if not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name | ast.Attribute)
            and len(node.args) == 1
            and not node.keywords
            and (part := self._part(node.args[0]))
        ):
            return False
        model = self._source.segment(node.func)
        if (self._model or model, self._features or part) != (model, part):
            return False
        self._model, self._features = model, part
        return True

    def _is_loss(self, node: ast.expr) -> bool:
        """Tell whether an expression is the loss of the output and the labels."""
        if not (isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords):
            return False
        output, labels = node.args
        known = isinstance(output, ast.Name) and output.id in self._outputs
        part = self._part(labels)
        if not part or not (known or self._is_output(output)):
            return False
        name = self._loss_name(node.func)
        if name not in CROSS_ENTROPY | MEAN_LOSSES:
            raise self._wrong(node, "a loss whose value for single records is not known")
        self._loss = "" if name in CROSS_ENTROPY else self._source.segment(node.func)
        self._labels = part
        return True

    def _loss_name(self, function: ast.expr) -> str:
        """Return the dotted name of a loss, of a module that of its class."""
        made: ast.AST | None = function
        if isinstance(function, ast.Name):
            made = self._made.get(function.id, self._source.definitions.get(function.id, function))
        if isinstance(made, ast.Call) and method_of(made) == "to":
            assert isinstance(made.func, ast.Attribute)
            made = made.func.value
        if isinstance(made, ast.Call):
            return "" if made.args or made.keywords else self._source.dotted(made.func)
        return "" if made is None else self._source.dotted(made)

    def _is_step(self, node: ast.With) -> bool:
        """Tell whether a block is `parameter -= step * parameter.grad` for every parameter."""
        loop = node.body[0]
        context = node.items[0].context_expr
        if not (
            len(node.body) == len(node.items) == 1
            and isinstance(context, ast.Call)
            and self._source.dotted(context.func) == "torch.no_grad"
            and isinstance(loop, ast.For)
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
        self._take_step(loop, loop.iter, rates[0])
        return True

    def _wrong(self, node: ast.AST, what: str) -> LoopError:
        return LoopError(f"{what}: {self._source.line(node)}")
