"""Puts a scheme's strategy into an app in the place of Flower's, with the arguments it has."""

import ast
from collections.abc import Sequence

from flwr_privacy.simulations.inspector.app_folder import AppFolder
from flwr_privacy.simulations.inspector.server_half import ServerHalf, StrategyCall, server_half
from flwr_privacy.simulations.inspector.source import Source, keyword_of
from flwr_privacy.simulations.inspector.unfit import INNER, UnfitError, check_strategy, own_start
from flwr_privacy.simulations.inspector.wraps import STRATEGIES, Wrap

from .edits import Edit, add_arguments, changed, drop_items, with_imports
from .server_fn_change import with_main

__all__ = ["METRICS_FUNCTIONS", "server_changed"]

METRICS_FUNCTIONS = ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn")

OUTER = {
    *("fraction_train", "fraction_evaluate", "min_train_nodes", "min_evaluate_nodes"),
    *("min_available_nodes", "weighted_by_key", "arrayrecord_key", "configrecord_key"),
    *METRICS_FUNCTIONS,
}
"""Keywords of FedAvg's: where another strategy becomes the inner one, the scheme's has them."""


def server_changed(app: AppFolder, half: ServerHalf, wrap: Wrap) -> AppFolder:
    """Return the app with the server half of a scheme.

    Raises
    ------
    UnfitError
        If the change cannot be made safely.
    """
    if half.strategies[0].ours:
        return app
    if half.strategies[0].legacy:
        app = with_main(app, half, metrics=wrap.sends_metrics)
        half = server_half(app)
        check_strategy(half.strategies[0], wrap)
    strategy = half.strategies[0]
    if strategy.name in INNER:
        return _as_inner(app, strategy, wrap)
    rounds = _rounds(half, strategy) if wrap.takes_rounds and own_start(strategy) else ()
    return _in_place(app, strategy, wrap, [*rounds, *wrap.arguments])


def _in_place(
    app: AppFolder, strategy: StrategyCall, wrap: Wrap, arguments: Sequence[str]
) -> AppFolder:
    """Change the class that is called, or the base of the app's own class."""
    edits: dict[str, list[Edit]] = {}
    names: dict[str, set[str]] = {}  # that may be imported for nothing now
    add: dict[str, dict[str, set[str]]] = {}

    def edit(source: Source, *changes: Edit) -> None:
        edits.setdefault(source.module, []).extend(changes)

    def import_from(source: Source, module: str, *imported: str) -> None:
        add.setdefault(source.module, {}).setdefault(module, set()).update(imported)

    if strategy.classes:
        source, node = strategy.classes[-1]
        written = next(b for b in node.bases if source.dotted(b).endswith(f".{strategy.name}"))
    else:
        source, written = strategy.source, strategy.call.func
    edit(source, Edit.of(source, written, wrap.strategy))
    import_from(source, STRATEGIES, wrap.strategy)
    names.setdefault(source.module, set()).update(_names(written))
    taking, call = _taking_arguments(strategy)
    edit(taking, *add_arguments(taking, call, arguments))
    for module, imported in wrap.imports.items():
        import_from(taking, module, *imported)
    if not wrap.sends_metrics:
        for where, made in {id(c): (s, c) for s, c in _calls(strategy)}.values():
            gone = [k for k in made.keywords if k.arg in METRICS_FUNCTIONS]
            edit(where, *drop_items(where, [*made.args, *made.keywords], gone))
            for keyword in gone:
                names.setdefault(where.module, set()).update(_names(keyword.value))
    for module, changes in edits.items():
        old = app.sources[module]
        new = with_imports(
            changed(old, changes), add=add.get(module, {}), drop=names.get(module, set())
        )
        app = app.with_source(new)
    return app


def _as_inner(app: AppFolder, strategy: StrategyCall, wrap: Wrap) -> AppFolder:
    """Put the scheme's strategy around another one of Flower's, which takes the average."""
    source, call = strategy.source, strategy.call
    where = source.line(call)
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise UnfitError(
            f"{strategy.name} has arguments without a name, or `**`: {where}",
            [f"write {wrap.strategy}({', '.join(wrap.arguments)}, inner={strategy.name}(...))"],
        )
    if own_start(strategy):
        raise UnfitError(
            f"the strategy has a start of its own and comes from {strategy.name}: {where}",
            [f"take the start out: {wrap.strategy}(inner=...) runs the rounds"],
        )
    outer: list[str] = []
    inner: list[str] = []
    for keyword in call.keywords:
        if keyword.arg in METRICS_FUNCTIONS and not wrap.sends_metrics:
            continue
        (outer if keyword.arg in OUTER else inner).append(source.segment(keyword))
    indent = source.indent(call)
    inner_call = f"inner={source.segment(call.func)}({', '.join(inner)})"
    lines = "".join(f"{indent}    {a},\n" for a in [*outer, *wrap.arguments, inner_call])
    new = changed(source, [Edit.of(source, call, f"{wrap.strategy}(\n{lines}{indent})")])
    imports = {STRATEGIES: {wrap.strategy, *wrap.imports.get(STRATEGIES, ())}}
    return app.with_source(with_imports(new, add={**wrap.imports, **imports}))


def _calls(strategy: StrategyCall) -> list[tuple[Source, ast.Call]]:
    """Return the call that makes the strategy, and those of `super().__init__` in its classes."""
    found = [(strategy.source, strategy.call)]
    for source, node in strategy.classes:
        for part in ast.walk(node):
            if (
                isinstance(part, ast.Call)
                and isinstance(part.func, ast.Attribute)
                and part.func.attr == "__init__"
            ):
                found.append((source, part))
    return found


def _taking_arguments(strategy: StrategyCall) -> tuple[Source, ast.Call]:
    """Return the call that can take arguments of the library's class.

    It is the one that makes the strategy, or a `super().__init__` of a class that does not hand
    on every keyword it gets.
    """
    taking = strategy.source, strategy.call
    for source, node in strategy.classes:
        init = next(
            (p for p in node.body if isinstance(p, ast.FunctionDef) and p.name == "__init__"), None
        )
        if init is None:
            continue
        call = next((c for _, c in _calls(strategy)[1:] if c in set(ast.walk(init))), None)
        if call is None:
            raise UnfitError(
                f"the strategy's own __init__ does not call super().__init__: {source.line(init)}",
                ["call it, with the keywords of FedAvg's"],
            )
        rest = init.args.kwarg.arg if init.args.kwarg else None
        handed_on = {
            k.value.id for k in call.keywords if not k.arg and isinstance(k.value, ast.Name)
        }
        if rest not in handed_on:
            taking = source, call
    return taking


def _rounds(half: ServerHalf, strategy: StrategyCall) -> list[str]:
    """Return `rounds=` for a strategy whose own `start` runs them."""
    found = half.start()
    given = None
    if found is not None:
        _, call = found
        given = keyword_of(call, "num_rounds") or (call.args[2] if len(call.args) > 2 else None)
    by_hand = "write rounds=<the number of rounds> where the strategy is made"
    if found is None or given is None:
        raise UnfitError(
            "the strategy has a start of its own, and the number of its rounds is not found: the "
            "budget is spread over them",
            [f"{by_hand}: {strategy.source.line(strategy.call)}"],
        )
    text = found[0].segment(given)
    if isinstance(given, ast.Constant):
        return [f"rounds={text}"]
    if not _known_before(half, given, _taking_arguments(strategy)[1]):
        raise UnfitError(
            "the strategy has a start of its own, and the number of its rounds is not known where "
            f"the strategy is made: num_rounds={text}",
            [f"{by_hand}: {strategy.source.line(strategy.call)}"],
        )
    return [f"rounds={text}"]


def _known_before(half: ServerHalf, value: ast.expr, call: ast.Call) -> bool:
    """Tell whether an expression of the main function has its names where a call is."""
    main = half.main
    if main is None or not any(node is call for node in ast.walk(main)):
        return False
    known = {a.arg for a in main.args.args} | set(half.source.definitions) | set(half.source.names)
    for node in ast.walk(main):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known |= {node.id} if node.lineno < call.lineno else set()
    return _names(value) <= known | {"int", "float", "str"}


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
