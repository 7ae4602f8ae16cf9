"""Turns a server of Flower's older API, with `server_fn`, into one with a `main`."""

import ast

from .app_folder import AppFolder
from .edits import Edit, changed, line_of, with_imports
from .server_half import ServerHalf, StrategyCall
from .source import Source, keyword_of
from .unfit import UnfitError

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
PER_ROUND = {"on_fit_config_fn", "on_evaluate_config_fn"}

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
PAGE = "docs/drop-in.md, 'Server with server_fn', shows the change"


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
    call, (returned, rounds, timeout), names = strategy.call, *_returned(source, function)
    _check(source, strategy)
    initial = _initial_arrays(source, call)
    edits = [_header(source, function), *_arguments(source, call, metrics=metrics)]
    arguments = ["grid", initial, f"num_rounds={rounds}", *timeout]
    helpers = []
    if (evaluate_fn := keyword_of(call, "evaluate_fn")) is not None:
        arguments.append(f"evaluate_fn=evaluated({source.segment(evaluate_fn)})")
        helpers.append(EVALUATED)
    if metrics and any(keyword.arg in METRICS for keyword in call.keywords):
        helpers.append(AGGREGATED)
    indent = source.indent(returned)
    name = names["strategy"]
    lines = "".join(f"{indent}    {argument},\n" for argument in arguments)
    edits.append(Edit.of(source, returned, f"{name}.start(\n{lines}{indent})"))
    if names["config"] is not None:
        edits.append(line_of(source, names["config"]))
    if half.source.module != source.module:
        raise UnfitError("server_fn is not in the file of the ServerApp", [PAGE])
    statement = next(
        node
        for node in source.tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is half.call
    )
    made = app.server.partition(":")[2]
    edits.append(line_of(source, statement))
    place = source.span(function)[0]
    blocks = "".join(f"{helper.lstrip()}\n\n" for helper in helpers)
    edits.append(Edit(place, place, f"{blocks}{made} = ServerApp()\n\n\n@{made}.main()\n"))
    new = changed(source, edits)
    old_name = _imported_as(source, call.func)
    new = with_imports(
        new,
        add={
            "flwr.app": {"ArrayRecord", *({"MetricRecord"} if helpers else ())},
            "flwr.serverapp": {"Grid", "ServerApp"},
            "flwr.serverapp.strategy": {strategy.name + (f" as {old_name}" if old_name else "")},
            **(
                {"flwr.common": {"parameters_to_ndarrays"}}
                if "parameters_to_ndarrays" in initial
                else {}
            ),
        },
        drop={"ServerAppComponents", "ServerConfig", "ndarrays_to_parameters"},
    )
    text = new.text.rstrip("\n") + "\n"
    return app.with_source(Source(new.path, new.module, text))


def _function(half: ServerHalf, strategy: StrategyCall) -> tuple[Source, ast.FunctionDef]:
    if half.server_fn is None:
        raise UnfitError(
            "the server is made of Flower's older API, without server_fn: "
            f"{half.source.line(half.call)}",
            [PAGE],
        )
    source, function = half.server_fn
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
    if own := [k.arg for k in call.keywords if k.arg in PER_ROUND]:
        raise UnfitError(
            f"{' and '.join(map(str, own))} makes a configuration for each round: "
            f"{source.line(call)}",
            [
                "give start what is the same in every round: train_config=ConfigRecord({...}); "
                "the clients get the round as 'server-round'",
                PAGE,
            ],
        )


def _returned(
    source: Source, function: ast.FunctionDef
) -> tuple[tuple[ast.Return, str, list[str]], dict[str, "ast.stmt | str | None"]]:
    """Return the function's return, its rounds and timeout, and the statements of its parts."""
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    inner = {
        id(node)
        for part in ast.walk(function)
        if isinstance(part, ast.FunctionDef | ast.Lambda) and part is not function
        for node in ast.walk(part)
    }
    returns = [node for node in returns if id(node) not in inner]
    made = returns[0].value if len(returns) == 1 else None
    components = isinstance(made, ast.Call) and source.dotted(made.func).endswith(
        ".ServerAppComponents"
    )
    if not components or not isinstance(made, ast.Call):
        raise UnfitError(
            f"server_fn does not end with ServerAppComponents(...): {source.line(function)}", [PAGE]
        )
    strategy, config = keyword_of(made, "strategy"), keyword_of(made, "config")
    statement: ast.stmt | None = None
    if isinstance(config, ast.Name):
        wanted = config.id
        for node in function.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == wanted for target in node.targets
            ):
                statement, config = node, node.value
    made_config = isinstance(config, ast.Call) and source.dotted(config.func)
    if (
        not isinstance(strategy, ast.Name)
        or not isinstance(config, ast.Call)
        or not str(made_config).endswith(".ServerConfig")
    ):
        raise UnfitError(
            f"strategy and config are not found: {source.line(returns[0])}",
            ["write strategy = FedAvg(...), config = ServerConfig(...) before it", PAGE],
        )
    rounds = keyword_of(config, "num_rounds") or (config.args[0] if config.args else None)
    timeout = keyword_of(config, "round_timeout")
    return (
        returns[0],
        "1" if rounds is None else source.segment(rounds),
        [] if timeout is None else [f"timeout={source.segment(timeout)}"],
    ), {"strategy": strategy.id, "config": statement}


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


def _arguments(source: Source, call: ast.Call, *, metrics: bool) -> list[Edit]:
    """Rename the strategy's keywords, and take out those that it no longer has."""
    gone = MOVED if metrics else MOVED | METRICS
    left = [keyword for keyword in call.keywords if keyword.arg not in gone]
    texts = []
    for keyword in left:
        value = source.segment(keyword.value)
        value = f"aggregated({value})" if keyword.arg in METRICS else value
        texts.append(f"{RENAMED.get(str(keyword.arg), keyword.arg)}={value}")
    start = source.span(call.func)[1]
    end = source.span(call)[1]
    line = f"({', '.join(texts)})"
    if len(source.indent(call)) + len(line) > 80:
        indent = source.indent(call)
        line = "(\n" + "".join(f"{indent}    {text},\n" for text in texts) + f"{indent})"
    return [Edit(start, end, line)]


def _imported_as(source: Source, written: ast.expr) -> str:
    """Return the name under which the strategy was imported, if that is another."""
    name = written.id if isinstance(written, ast.Name) else ""
    return "" if name == source.dotted(written).rpartition(".")[2] else name
