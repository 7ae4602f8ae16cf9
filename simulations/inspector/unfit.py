"""Says why a scheme does not fit an app, and which lines to change by hand."""

import ast

from .app_folder import AppFolder
from .client_half import REPLACED_MODS, ClientHalf, Mod, client_half
from .server_half import ServerHalf, StrategyCall, server_half
from .source import Source, keyword_of
from .unfit_error import UnfitError
from .workflow import with_workflow
from .wraps import Wrap

__all__ = ["INNER", "WRAPPER", "UnfitError", "check_fits", "check_strategy", "own_start"]

INNER = {"FedAdagrad", "FedAdam", "FedAvgM", "FedProx", "FedYogi"}
"""Flower's strategies that take a scheme's average as one reply."""

WRAPPER = "DifferentialPrivacy"
"""How the names of Flower's wrappers with clipping and noise begin."""

_WHY_NOT = {
    **dict.fromkeys(
        ("Bulyan", "FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "QFedAvg"),
        "it needs to see every client's reply, which a scheme hides or averages",
    ),
    **dict.fromkeys(
        ("FedXgbBagging", "FedXgbCyclic"), "it collects trees, and a scheme averages arrays"
    ),
}


def check_fits(app: AppFolder, wrap: Wrap) -> None:
    """Refuse an app that a scheme cannot go around.

    Raises
    ------
    UnfitError
        If it is one.
    """
    server, client = server_half(app), client_half(app)
    if server.workflows:
        raise with_workflow(server, client, wrap)
    if not server.strategies:
        raise _without_strategy(server, client)
    for strategy in server.strategies:
        if strategy.name.startswith(WRAPPER):
            raise _with_wrapper(strategy)
    if len(server.strategies) > 1:
        raise UnfitError(
            "the app makes more than one strategy",
            [f"change the one that trains: {s.source.line(s.call)}" for s in server.strategies],
        )
    check_strategy(server.strategies[0], wrap)
    _check_client(client)
    for mod in client.mods or ():
        _check_protection(client, mod, wrap)


def _with_wrapper(strategy: StrategyCall) -> UnfitError:
    """Return the error for a strategy inside Flower's own wrapper, where it has to stay."""
    call, source = strategy.call, strategy.source
    inner = keyword_of(call, "strategy") or (call.args[0] if call.args else None)
    by_hand = ["--scheme central-dp takes its place, with its clipping norm"]
    if inner is not None:
        by_hand.append(
            f"for another scheme write {source.segment(inner)} in the place of this call: "
            f"{source.line(call)}"
        )
    return UnfitError(
        f"Flower's {strategy.name} clips and adds noise by itself: noise of two kinds would be "
        f"added, and no ledger counts the first: {source.line(call)}",
        by_hand,
    )


def _without_strategy(server: ServerHalf, client: ClientHalf) -> UnfitError:
    """Return the error for a server in which no strategy is found."""
    if not server.sends:
        return UnfitError(
            "no place is found where the app makes one of Flower's strategies",
            [
                f"change the strategy where it is made; the server begins here: "
                f"{server.source.line(server.main or server.call)}"
            ],
        )
    own = [f.message_type for f in client.functions if f.own_type]
    said = f", in message types of its own ({', '.join(own)})" if own else ""
    return UnfitError(
        f"the app makes no strategy: its server sends the messages itself{said}. A scheme is a "
        "strategy, and has none to take the place of",
        [
            *(f"this line sends messages: {source.line(node)}" for source, node in server.sends),
            "write the rounds as a Flower strategy; where the clients have columns of the same "
            "records, look at --scheme fedvs",
        ],
    )


def _check_client(client: ClientHalf) -> None:
    if not any(f.message_type == "train" for f in client.functions) and client.client_fn is None:
        raise UnfitError(
            "the client app has no function under @app.train() and no client_fn: there is no "
            "training for the scheme to go around",
            [f"the app is made here: {client.source.line(client.call)}"],
        )
    for function in client.functions:
        for mod in function.mods:
            if mod.replaced:
                raise UnfitError(
                    f"the function for '{function.message_type}' has the mod {mod.name}: "
                    f"{REPLACED_MODS[mod.name]}",
                    [f"take it out: {client.source.line(mod.node)}"],
                )


def _check_protection(client: ClientHalf, mod: Mod, wrap: Wrap) -> None:
    """Refuse to take out a mod that protects something, where nothing takes its place."""
    if not mod.replaced or wrap.spends or (mod.sums and wrap.summed):
        return
    by_hand = ["--secure-sum takes its place" if mod.sums else "--scheme central-dp or udp does"]
    raise UnfitError(
        f"the mod {mod.name} protects what the clients send, and {wrap.scheme} "
        f"{'without a secure sum ' if mod.sums else ''}puts nothing in its place: "
        f"{client.source.line(mod.node)}",
        [*by_hand, "or take it out yourself, if nothing is to be protected"],
    )


def check_strategy(strategy: StrategyCall, wrap: Wrap) -> None:
    """Refuse a strategy whose place a scheme cannot take.

    Raises
    ------
    UnfitError
        If it is one.
    """
    where = strategy.source.line(strategy.call)
    if strategy.ours and strategy.name != wrap.strategy:
        raise UnfitError(
            f"the server has the strategy {strategy.name} of this library already: {where}",
            [f"write {wrap.strategy}({', '.join([*wrap.arguments, '...'])}) in its place"],
        )
    level = keyword_of(strategy.call, "privacy")
    if strategy.ours and isinstance(level, ast.Call) and wrap.level:
        written = strategy.source.dotted(level.func).rpartition(".")[2]
        if written not in ("", wrap.level):
            raise UnfitError(
                f"the strategy has privacy={written}(...) already: {where}",
                [f"write {argument}" for argument in wrap.arguments],
            )
    if why := _WHY_NOT.get(strategy.name):
        raise UnfitError(f"the strategy {strategy.name}: {why}: {where}")
    if not (strategy.ours or strategy.name == "FedAvg" or strategy.name in INNER):
        raise UnfitError(
            f"the strategy comes from Flower's {strategy.name}, which does not average: {where}",
            [f"let it come from {wrap.strategy} of flwr_privacy.strategies"],
        )
    if (found := own_start(strategy)) and wrap.no_own_start:
        raise UnfitError(
            f"the strategy has a start of its own, and with {wrap.scheme} {wrap.no_own_start}: "
            f"{found[0].line(found[1])}",
            ["take the start out, and do what it does beside in evaluate_fn or LoopOptions"],
        )
    for name in ("configure_train", "aggregate_train"):
        found = strategy.method(name)
        if found and name in wrap.not_called:
            raise UnfitError(
                f"the strategy's own {name} would not be called: with {wrap.scheme} a round is "
                f"another exchange than Flower's: {found[0].line(found[1])}",
                ["do what it does in evaluate_fn, in LoopOptions(on_round=...) or on the clients"],
            )
        if found and not _calls_super(found[1], name):
            raise UnfitError(
                f"the strategy's own {name} does not call super().{name}: the scheme would be "
                f"passed over: {found[0].line(found[1])}",
                [f"call super().{name} in it"],
            )


def own_start(strategy: StrategyCall) -> tuple[Source, ast.FunctionDef] | None:
    """Return a `start` of the app that runs the rounds itself."""
    found = strategy.method("start")
    return None if found is None or _calls_super(found[1], "start") else found


def _calls_super(function: ast.FunctionDef, name: str) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
        for node in ast.walk(function)
    )
