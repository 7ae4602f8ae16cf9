"""Small errors that can be planted in a module: each changes one expression or one statement."""

import ast
import copy
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "mutants"]

COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
PAIRS = ("min max", "floor ceil", "any all", "minimum maximum", "argmin argmax", "sum mean")
COMMUTE = {"min", "max", "minimum", "maximum", "add", "multiply"}
CALLED = {a: b for pair in PAIRS for a, b in (pair.split(), pair.split()[::-1])}


@dataclass(frozen=True)
class Mutant:
    """A module with one error: other code in place of its bytes from `begin` to `end`.

    `where` is the file and the function, `old` and `new` are the changed lines, `line` is the
    number of the first of them.
    """

    path: str
    where: str
    line: int
    old: str
    new: str
    begin: int
    end: int
    code: str

    @property
    def key(self) -> str:
        """What stays the same when other lines of the file change."""
        return f"{self.where}\n- {self.old}\n+ {self.new}"

    def rank(self, seed: int) -> str:
        """Return a place in the order of the sample: other mutants do not change it."""
        return hashlib.sha256(f"{seed}\n{self.key}".encode()).hexdigest()

    def planted(self, text: str) -> str | None:
        """Return the module with the error, or None if it is no code or the same code."""
        octets = text.encode()
        changed = (octets[: self.begin] + self.code.encode() + octets[self.end :]).decode()
        try:
            same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text))
        except SyntaxError:
            return None
        return None if same else changed


def mutants(path: str, text: str) -> list[Mutant]:
    """Return the mutants of a module, in order, each once."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    starts = list(itertools.accumulate(map(len, lines), initial=0))
    found: dict[str, Mutant] = {}
    for function, node, code in _changes(ast.parse(text), ""):
        last = node.end_lineno or node.lineno
        tail = node.end_col_offset or 0
        old = b"".join(lines[node.lineno - 1 : last])
        new = old[: node.col_offset] + code.encode() + lines[last - 1][tail:]
        mutant = Mutant(
            path,
            f"{path}::{function}",
            node.lineno,
            " ".join(old.decode().split()),
            " ".join(new.decode().split()),
            starts[node.lineno - 1] + node.col_offset,
            starts[last - 1] + tail,
            code,
        )
        found.setdefault(mutant.key, mutant)
    return list(found.values())


def _changes(node: ast.AST, function: str) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Yield function, node and the text that takes its place, for all that is executed."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}" if function else node.name
    if isinstance(node, ast.stmt):
        for new in _statements(node):
            yield function, node, new
    elif isinstance(node, ast.expr):
        for expression in _expressions(node):
            code = ast.unparse(expression)
            simple = isinstance(expression, ast.Constant | ast.Name | ast.Call)
            yield function, node, code if simple else f"({code})"
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            # Texts of errors, documentation and f-strings (which have no positions) stay.
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.JoinedStr):
                yield from _changes(child, function)


def _statements(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.Expr(value=ast.Call()):
            yield "pass"
        case ast.If(body=[ast.Raise()], orelse=[]):
            yield "pass"
        case ast.Return(value=ast.Call(args=[ast.expr() as first, *_])):
            yield f"return {ast.unparse(first)}"
        case ast.AugAssign() if type(node.op) in COMPUTED:
            other = copy.deepcopy(node)
            other.op = COMPUTED[type(node.op)]()
            yield ast.unparse(other)


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    other = copy.deepcopy(node)
    match other:
        case ast.Compare():
            for i, operator in enumerate(other.ops):
                for changed in COMPARED[type(operator)]:
                    other.ops[i] = changed()
                    yield other
                other.ops[i] = operator
        case ast.BinOp() if type(other.op) in COMPUTED:
            other.op = COMPUTED[type(other.op)]()
            yield other
        case ast.BoolOp():
            other.op = ast.Or() if isinstance(other.op, ast.And) else ast.And()
            yield other
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield other.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not other.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(other.value + 1)
            yield ast.Constant(other.value * 2)
        case ast.Call(func=ast.Name() | ast.Attribute()):
            yield from _calls(other)


def _calls(node: ast.Call) -> Iterator[ast.expr]:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    match node.args:
        case [ast.expr(), ast.expr(), *_] if not (
            isinstance(node.args[0], ast.Starred) or name in COMMUTE
        ):
            node.args[:2] = node.args[1], node.args[0]
            yield node
            node.args[:2] = node.args[1], node.args[0]
        case [ast.expr() as only] if not node.keywords and not isinstance(only, ast.Starred):
            yield only  # abs, sqrt, check_bound, ...
    if name in CALLED:
        field = "id" if isinstance(node.func, ast.Name) else "attr"
        setattr(node.func, field, CALLED[name])
        yield node
