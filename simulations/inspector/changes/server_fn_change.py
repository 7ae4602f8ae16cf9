"""Turns a server of Flower's older API, with `server_fn`, into one with a `main`."""

import ast
from dataclasses import dataclass, replace

from flwr_privacy.simulations.inspector.app_folder import AppFolder
from flwr_privacy.simulations.inspector.server_half import ServerHalf, StrategyCall
from flwr_privacy.simulations.inspector.source import Source, keyword_of
from flwr_privacy.simulations.inspector.unfit import UnfitError

from .edits import Edit, changed, line_of, with_imports

__all__ = ["with_main"]

RENAMED = {
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
    "fit_metrics_aggregation_fn": "train_metrics_aggr_fn",
    "evaluate_metrics_aggregation_fn": "evaluate_metrics_aggr_fn",
}
METRICS = {"fit_metrics_aggregation_fn", "evaluate_metrics_aggregation_fn"}
MOVED = {"evaluate_fn", "initial_parameters", "accept_failures", "inplace"}
PER_ROUND = {
    "on_fit_config_fn": "configure_train",
    "on_evaluate_config_fn": "configure_evaluate",
}

EVALUATED = '''
def evaluated(function):
    """Return an evaluate_fn that takes a list of arrays as one that takes an ArrayRecord."""

    def evaluate(server_round, arrays):
        result = function(server_round, arrays.to_numpy_ndarrays(), {})
        return None if result is None else MetricRecord({"loss": result[0], **result[1]})

    return evaluate
'''

AGGREGATED = '''
def aggregated(function):
    """Return a metrics function that takes pairs as one that takes the clients' records."""

    def aggregate(contents, weighted_by):
        records = [next(iter(content.metric_records.values())) for content in contents]
        return MetricRecord(function([(int(r[weighted_by]), dict(r)) for r in records]))

    return aggregate
'''
PER_ROUND_CLASS = """
class PerRound({base}):
    \"\"\"Tells the clients what a function says of each round.\"\"\"
{methods}"""
PER_ROUND_METHOD = """
    def {method}(self, server_round, arrays, config, grid):
        config.update({function}(server_round))
        return super().{method}(server_round, arrays, config, grid)
"""
_LONGEST = 76  # characters of a call that stays on one line, behind `strategy = `
PAGE = "docs/drop-in.md shows the change, under 'Server with server_fn'"


def with_main(app: AppFolder, half: ServerHalf, *, metrics: bool) -> AppFolder:
    """Return the app with a `main` in the place of its `server_fn`.

    Parameters
    ----------
    app : AppFolder
        The app.
    half : ServerHalf
        Its server half.
    metrics : bool
        Whether functions that aggregate the clients' metrics stay.

    Raises
    ------
    UnfitError
        If its `server_fn` has another form than that of Flower's examples.
    """
    strategy = half.strategies[0]
    source, function = _function(half, strategy)
    parts, call = _returned(source, function), strategy.call
    _check(source, strategy)
    initial = _initial_arrays(source, call)
    arguments = ["grid", initial, f"num_rounds={parts.rounds}", *parts.timeout]
    helpers = []
    if (evaluate_fn := keyword_of(call, "evaluate_fn")) is not None:
        arguments.append(f"evaluate_fn=evaluated({source.segment(evaluate_fn)})")
        helpers.append(EVALUATED)
    if metrics and any(keyword.arg in METRICS for keyword in call.keywords):
        helpers.append(AGGREGATED)
    called = call.func.id if isinstance(call.func, ast.Name) else strategy.name
    base, per_round = called, [keyword for keyword in call.keywords if keyword.arg in PER_ROUND]
    if per_round:
        methods = "".join(
            PER_ROUND_METHOD.format(
                method=PER_ROUND[str(keyword.arg)], function=source.segment(keyword.value)
            )
            for keyword in per_round
        )
        helpers.append(PER_ROUND_CLASS.format(base=base, methods=methods))
        called = "PerRound"
    renamed = "" if base == strategy.name else f" as {base}"
    name = app.server.partition(":")[2]
    indent = source.indent(parts.statement)
    lines = "".join(f"{indent}    {argument},\n" for argument in arguments)
    blocks = "".join(f"{helper.lstrip()}\n\n" for helper in helpers)
    place = source.span(function)[0]
    edits = [
        Edit(place, place, f"{blocks}{name} = ServerApp()\n\n\n@{name}.main()\n"),
        _header(source, function),
        _renamed_arguments(source, call, called, metrics=metrics),
        Edit.of(source, parts.statement, f"{parts.strategy}.start(\n{lines}{indent})"),
        *([] if parts.config is None else [line_of(source, parts.config)]),
        *(
            line_of(source, node)
            for node in source.tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is half.call
        ),
    ]
    imports = {
        "flwr.app": {
            "ArrayRecord",
            *(["MetricRecord"] if {EVALUATED, AGGREGATED} & set(helpers) else []),
        },
        "flwr.serverapp": {"Grid", "ServerApp"},
        "flwr.serverapp.strategy": {f"{strategy.name}{renamed}"},
    }
    if "parameters_to_ndarrays" in initial:
        imports["flwr.common"] = {"parameters_to_ndarrays"}
    gone = {"ServerAppComponents", "ServerConfig", "ndarrays_to_parameters"}
    new = with_imports(changed(source, edits), add=imports, drop=gone)
    return app.with_source(replace(new, text=new.text.rstrip("\n") + "\n"))


def _function(half: ServerHalf, strategy: StrategyCall) -> tuple[Source, ast.FunctionDef]:
    if half.server_fn is None:
        raise UnfitError(
            "the server is made of Flower's older API, without server_fn: "
            f"{half.source.line(half.call)}",
            [PAGE],
        )
    source, function = half.server_fn
    if source.module != half.source.module:
        raise UnfitError("server_fn is not in the file of the ServerApp", [PAGE])
    if not any(node is strategy.call for node in ast.walk(function)):
        raise UnfitError(
            "the strategy of Flower's older API is not made in server_fn: "
            f"{strategy.source.line(strategy.call)}",
            [PAGE],
        )
    return source, function


def _check(source: Source, strategy: StrategyCall) -> None:
    if strategy.classes:
        where, node = strategy.classes[0]
        raise UnfitError(
            "the strategy is a class of the app that comes from one of Flower's older API: "
            f"{where.line(node)}",
            [
                "let it come from flwr_privacy.strategies: aggregate_fit becomes aggregate_train, "
                "with replies in the place of results",
                PAGE,
            ],
        )
    call = strategy.call
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise UnfitError(f"the strategy has arguments without a name: {source.line(call)}", [PAGE])
    for keyword in call.keywords:
        value = keyword.value
        known = isinstance(value, ast.Name) and source.dotted(value)
        if keyword.arg in PER_ROUND and not known:
            raise UnfitError(
                f"{keyword.arg} is no function at the top of the file: {source.line(keyword)}",
                [f"override {PER_ROUND[keyword.arg]} in a class of your own", PAGE],
            )


@dataclass(frozen=True)
class Returned:
    """What a `server_fn` returns.

    Parameters
    ----------
    statement : Return
        The statement that returns it.
    strategy : str
        The name of the strategy.
    config : stmt, optional
        The statement that makes the ServerConfig, where it is one of its own.
    rounds : str
        The number of rounds, as it is written.
    timeout : list of str
        An argument for the timeout, if there is one.
    """

    statement: ast.Return
    strategy: str
    config: ast.stmt | None
    rounds: str
    timeout: list[str]


def _returned(source: Source, function: ast.FunctionDef) -> Returned:
    inner = {
        id(node)
        for part in ast.walk(function)
        if isinstance(part, ast.FunctionDef | ast.Lambda) and part is not function
        for node in ast.walk(part)
    }
    returns = [n for n in ast.walk(function) if isinstance(n, ast.Return) and id(n) not in inner]
    made = returns[0].value if len(returns) == 1 else None
    if not isinstance(made, ast.Call) or not _calls(source, made, "ServerAppComponents"):
        raise UnfitError(
            f"server_fn does not end with ServerAppComponents(...): {source.line(function)}", [PAGE]
        )
    strategy, config = keyword_of(made, "strategy"), keyword_of(made, "config")
    statement: ast.stmt | None = None
    for node in function.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(config, ast.Name)
            and any(isinstance(t, ast.Name) and t.id == config.id for t in node.targets)
        ):
            statement, config = node, node.value
    if (
        not isinstance(strategy, ast.Name)
        or not isinstance(config, ast.Call)
        or not _calls(source, config, "ServerConfig")
    ):
        raise UnfitError(
            f"strategy and config are not found: {source.line(returns[0])}",
            ["write strategy = FedAvg(...), config = ServerConfig(...) before it", PAGE],
        )
    rounds = keyword_of(config, "num_rounds") or (config.args[0] if config.args else None)
    timeout = keyword_of(config, "round_timeout")
    return Returned(
        returns[0],
        strategy.id,
        statement,
        "1" if rounds is None else source.segment(rounds),
        [] if timeout is None else [f"timeout={source.segment(timeout)}"],
    )


def _calls(source: Source, call: ast.Call, name: str) -> bool:
    return source.dotted(call.func).endswith(f".{name}")


def _initial_arrays(source: Source, call: ast.Call) -> str:
    given = keyword_of(call, "initial_parameters")
    if given is None:
        raise UnfitError(
            "the strategy has no initial_parameters: a strategy of the Message API starts from "
            f"arrays of the server: {source.line(call)}",
            ["give it initial_parameters=ndarrays_to_parameters(<the model's arrays>)", PAGE],
        )
    if (
        isinstance(given, ast.Call)
        and source.dotted(given.func).endswith(".ndarrays_to_parameters")
        and given.args
    ):
        return f"ArrayRecord({source.segment(given.args[0])})"
    return f"ArrayRecord(parameters_to_ndarrays({source.segment(given)}))"


def _header(source: Source, function: ast.FunctionDef) -> Edit:
    start, body = source.span(function)[0], source.span(function.body[0])[0]
    header = source.text[start:body]
    parameters = ", ".join(source.segment(argument) for argument in function.args.args)
    rest = header[header.rindex(":") + 1 :]
    return Edit(start, body, f"def main(grid: Grid, {parameters}) -> None:{rest}")


def _renamed_arguments(source: Source, call: ast.Call, called: str, *, metrics: bool) -> Edit:
    """Rename the strategy's keywords, and take out those that it no longer has."""
    gone = MOVED | set(PER_ROUND) if metrics else MOVED | set(PER_ROUND) | METRICS
    texts = []
    for keyword in call.keywords:
        if keyword.arg not in gone:
            value = source.segment(keyword.value)
            value = f"aggregated({value})" if keyword.arg in METRICS else value
            texts.append(f"{RENAMED.get(str(keyword.arg), keyword.arg)}={value}")
    indent = source.indent(call)
    line = f"{called}({', '.join(texts)})"
    if len(indent) + len(line) > _LONGEST:
        lines = "".join(f"{indent}    {text},\n" for text in texts)
        line = f"{called}(\n{lines}{indent})"
    return Edit.of(source, call, line)
