"""Finds the server half of an app: its main function, its strategy, and loops of its own."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from flwr.server import strategy as legacy_strategy
from flwr.serverapp import strategy

from flwr_privacy.errors import InvalidParameterError

from .app_folder import AppFolder
from .source import Source, keyword_of

__all__ = ["ServerHalf", "StrategyCall", "server_half"]

FLOWER = "flwr.serverapp.strategy."
LEGACY = "flwr.server.strategy."
OURS = "flwr_privacy.strategies."
SENDING = {"send_and_receive", "push_messages"}
WORKFLOWS = (
    "flwr.server.workflow",
    "flwr.server.LegacyContext",
    "flwr.compat.server.legacy_context",
)


@dataclass(frozen=True)
class StrategyCall:
    """The place where an app makes its strategy.

    Parameters
    ----------
    source : Source
        The file.
    call : Call
        The call.
    base : str
        Dotted name of the library's class that is called, or that the app's class comes from.
    classes : tuple of (Source, ClassDef)
        The app's own classes from the one that is called to the one that has `base` as its base.
    """

    source: Source
    call: ast.Call
    base: str
    classes: tuple[tuple[Source, ast.ClassDef], ...] = ()

    @property
    def name(self) -> str:
        """The last part of the library's class."""
        return self.base.rpartition(".")[2]

    @property
    def legacy(self) -> bool:
        """Whether it is a strategy of Flower's older API."""
        return self.base.startswith(LEGACY)

    @property
    def ours(self) -> bool:
        """Whether it is a strategy of this library."""
        return self.base.startswith(OURS)

    def method(self, name: str) -> tuple[Source, ast.FunctionDef] | None:
        """Return a method that one of the app's classes defines."""
        for source, node in self.classes:
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == name:
                    return source, part
        return None


@dataclass(frozen=True)
class ServerHalf:
    """The server half of an app.

    Parameters
    ----------
    source : Source
        The file that makes the ServerApp.
    call : Call
        The call that makes it.
    main : FunctionDef, optional
        The function under `@app.main()`.
    server_fn : (Source, FunctionDef), optional
        The function of Flower's older API.
    strategies : tuple of StrategyCall
        Every place that makes a strategy, but for one inside another.
    sends : tuple of (Source, Call)
        Calls that send messages outside of a strategy's class.
    workflows : tuple of (Source, node)
        Where workflows of the older API are used, such as SecAgg+.
    """

    source: Source
    call: ast.Call
    main: ast.FunctionDef | None
    server_fn: tuple[Source, ast.FunctionDef] | None
    strategies: tuple[StrategyCall, ...]
    sends: tuple[tuple[Source, ast.Call], ...]
    workflows: tuple[tuple[Source, ast.AST], ...]

    @property
    def strategy(self) -> StrategyCall | None:
        """The strategy, if there is exactly one."""
        return self.strategies[0] if len(self.strategies) == 1 else None

    def start(self) -> tuple[Source, ast.Call] | None:
        """Return the call of the strategy's `start` in the main function."""
        if self.main is not None:
            for node in ast.walk(self.main):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr == "start"
                ):
                    return self.source, node
        return None


def server_half(app: AppFolder) -> ServerHalf:
    """Find the server half.

    Raises
    ------
    InvalidParameterError
        If the app's ServerApp is not made by a call that can be found.
    """
    source, made = app.half(app.server)
    if not isinstance(made, ast.Call) or not source.dotted(made.func).endswith(".ServerApp"):
        allowed = f"an app that makes '{app.server}' by calling ServerApp(...)"
        raise InvalidParameterError("app", str(app.path), allowed)
    given = keyword_of(made, "server_fn")
    found = app.find(source.dotted(given)) if given is not None else None
    calls = [(s, node) for s in app.sources.values() for node in ast.walk(s.tree)]
    strategies = [
        call
        for s, node in calls
        if isinstance(node, ast.Call) and (call := _strategy_call(app, s, node)) is not None
    ]
    inside = {
        id(part)
        for strategy in strategies
        for argument in (*strategy.call.args, *(k.value for k in strategy.call.keywords))
        for part in ast.walk(argument)
    }
    in_classes = {
        id(part)
        for s in app.sources.values()
        for node in ast.walk(s.tree)
        if isinstance(node, ast.ClassDef) and _library_base(app, s, node)
        for part in ast.walk(node)
    }
    return ServerHalf(
        source=source,
        call=made,
        main=_main(app, source),
        server_fn=(found[0], found[1]) if found and isinstance(found[1], ast.FunctionDef) else None,
        strategies=tuple(s for s in strategies if id(s.call) not in inside),
        sends=tuple(
            (s, node)
            for s, node in calls
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in SENDING
            and id(node) not in in_classes
        ),
        workflows=tuple(
            (s, node)
            for s, node in calls
            if isinstance(node, ast.Name | ast.Attribute) and s.dotted(node).startswith(WORKFLOWS)
        ),
    )


def _main(app: AppFolder, source: Source) -> ast.FunctionDef | None:
    for node in source.tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(call, ast.Attribute) and call.attr == "main":
                return node
    return None


def _strategy_call(app: AppFolder, source: Source, node: ast.Call) -> StrategyCall | None:
    dotted = source.dotted(node.func)
    if (base := _library_class(dotted)) is not None:
        return StrategyCall(source, node, base)
    found = app.find(dotted)
    if found is None or not isinstance(found[1], ast.ClassDef):
        return None
    classes = list(_line_of(app, found[0], found[1]))
    last_source, last = classes[-1]
    for written in last.bases:
        if (base := _library_class(last_source.dotted(written))) is not None:
            return StrategyCall(source, node, base, tuple(classes))
    return None


def _line_of(
    app: AppFolder, source: Source, node: ast.ClassDef
) -> Iterator[tuple[Source, ast.ClassDef]]:
    """Return a class of the app, and its bases in the app."""
    for _ in range(20):
        yield source, node
        for written in node.bases:
            found = app.find(source.dotted(written))
            if found and isinstance(found[1], ast.ClassDef):
                source, node = found[0], found[1]
                break
        else:
            return


def _library_base(app: AppFolder, source: Source, node: ast.ClassDef) -> bool:
    *_, (last_source, last) = _line_of(app, source, node)
    return any(_library_class(last_source.dotted(base)) for base in last.bases)


def _library_class(dotted: str) -> str | None:
    """Return the full name of a library's strategy, where there is one of this name."""
    name = dotted.rpartition(".")[2]
    for package, known in ((FLOWER, strategy.__all__), (LEGACY, legacy_strategy.__all__)):
        if dotted.startswith(package) and name in known and name != "Result":
            return f"{package}{name}"
    if dotted.startswith(OURS) and name in OUR_STRATEGIES:
        return f"{OURS}{name}"
    return None


OUR_STRATEGIES = frozenset(
    {"ACFL", "M2FDP", "MSP", "MSPDQ", "UDP", "CentralDP", "FedAvg", "FedVS", "SplitVFL"}
)
"""The strategies of this library that an app may already have; their options are none."""
