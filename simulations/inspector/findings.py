"""Says what an app is, and what a scheme will take from it, refuse or pass on unprotected."""

import ast
from collections.abc import Iterator, Sequence

from .app_folder import AppFolder
from .arrays import Arrays, InitialArray
from .changes.client_change import replaced_mods
from .changes.server_change import METRICS_FUNCTIONS
from .client_half import NUMPY, REPLACED_MODS, ClientHalf, client_half
from .server_half import ServerHalf, server_half
from .source import Source, keyword_of
from .training.trainings import trainings
from .unfit import own_start
from .wraps import PRIVATE_LOOP, Wrap

__all__ = ["described", "losses", "of_arrays"]

_MOST_ARRAYS = 12  # in a line

LEGACY_NAMES = {
    "fit_metrics_aggregation_fn": "train_metrics_aggr_fn",
    "evaluate_metrics_aggregation_fn": "evaluate_metrics_aggr_fn",
}


def described(app: AppFolder) -> list[str]:
    """Return what an app is, as lines."""
    server, client = server_half(app), client_half(app)
    by = f", published by {app.publisher}" if app.publisher else ""
    lines = [f"app: {app.name}{by}", f"kind: {_kind(app)}"]
    lines.append(f"client: {_where(app, client.source, client.call)}")
    if client.functions:
        lines.append(f"messages: {', '.join(f.message_type for f in client.functions)}")
    if client.mods is None:
        lines.append("mods: made elsewhere, so their order is not known")
    elif client.mods:
        names = (mod.name or client.source.segment(mod.node) for mod in client.mods)
        lines.append(f"mods, outermost first: {', '.join(names)}")
    for strategy in server.strategies:
        lines.append(f"strategy: {_where(app, strategy.source, strategy.call)}")
    return lines


def losses(app: AppFolder, wrap: Wrap) -> list[str]:
    """Return what a scheme takes from an app, refuses or passes on unprotected, as sentences."""
    server, client = server_half(app), client_half(app)
    return [
        *_of_mods(client, wrap),
        *_of_metrics(server, client, wrap),
        *_of_evaluations(server, client, wrap),
        *_of_messages(app, server, client, wrap),
        *_of_start(server, wrap),
        *_of_training(wrap),
    ]


def of_arrays(found: Arrays | str, wrap: Wrap) -> list[str]:
    """Return which arrays are released, kept back or look like statistics, as lines."""
    if isinstance(found, str):
        return [f"arrays: not known: {found}"]
    whole, found = found, found.part(wrap.trainable) if wrap.trainable else found
    released = found.released(keeps_statistics=wrap.keeps_statistics)
    kept = found.kept(keeps_statistics=wrap.keeps_statistics)
    weights = sum(array.size for array in released)
    lines = [f"arrays released: {_named(released)} ({weights:,} weights)"]
    if wrap.trainable:
        count, all_values = len(whole.arrays) - len(found.arrays), sum(a.size for a in whole.arrays)
        lines.append(
            f"adapters: {count} frozen arrays never travel ({weights / all_values:.2%} of the "
            "values do)"
        )
    elif whole.adapters and wrap.takes_part:
        patterns = ", ".join(f'"{pattern}"' for pattern in whole.adapters)
        lines.append(
            f"adapters: all arrays travel. With trainable=[{patterns}] on the server and "
            "load_trainable(model, arrays) on the clients in the place of load_state_dict only the "
            "adapters do (docs/adapters.md)"
        )
    if kept and (wrap.spends or wrap.keeps_statistics or not wrap.sends_metrics):
        lines.append(f"arrays kept back, the model keeps the server's values: {_named(kept)}")
    if found.suspected:
        lines.append(
            f"arrays that look like running statistics: {', '.join(found.suspected)}"
            + ("; the change keeps them back" if wrap.keeps_statistics else "; they are averaged")
        )
    return lines


def _named(arrays: Sequence[InitialArray]) -> str:
    """Return arrays with their shapes; of many, the first and the last."""
    texts = [f"{a.name} {'x'.join(map(str, a.shape)) or '1'}" for a in arrays]
    if len(texts) > _MOST_ARRAYS:
        texts = [*texts[: _MOST_ARRAYS - 2], f"... {len(texts)} in all ...", texts[-1]]
    return ", ".join(texts) or "none"


def _kind(app: AppFolder) -> str:
    server, client = server_half(app), client_half(app)
    half = f"{client.kind} on the clients"
    if server.workflows:
        return f"{half}, a workflow of Flower's older API on the server"
    if not server.strategies:
        return f"{half}, messages of its own on the server (no strategy)"
    strategy = server.strategies[0]
    name = strategy.name
    if strategy.classes:
        name = f"{strategy.classes[0][1].name}, a class of the app from {name}"
    if strategy.ours:
        name = f"{name} of flwr_privacy"
    made = "server_fn" if strategy.legacy else "main"
    own = " with a start of its own" if own_start(strategy) else ""
    return f"{half}, {made} with the strategy {name}{own} on the server"


def _where(app: AppFolder, source: Source, node: ast.expr) -> str:
    folder = source.path.parent.relative_to(app.path).as_posix()
    return f"{folder}/{source.line(node)}".removeprefix("./")


def _of_mods(client: ClientHalf, wrap: Wrap) -> Iterator[str]:
    for mod in replaced_mods(client):
        why = REPLACED_MODS[mod.name]
        if mod.sums and not wrap.summed:
            why = "the server sees each noised update; with --secure-sum it learns only sums"
        yield f"the mod {mod.name} goes: {why}"
    left = [m for m in client.mods or () if m not in replaced_mods(client)]
    if left:
        names = ", ".join(mod.name or client.source.segment(mod.node) for mod in left)
        yield (
            f"the mods {names} stay, behind the scheme: they see the app's own messages, and "
            "nothing of the scheme's"
        )
    if client.mods is None:
        yield (
            f"the mods are made elsewhere: take {', '.join(sorted(REPLACED_MODS))} out yourself, "
            "if they are among them"
        )


def _of_metrics(server: ServerHalf, client: ClientHalf, wrap: Wrap) -> Iterator[str]:
    if wrap.sends_metrics:
        return
    names = sorted({name for f in trainings(client) for name in _metric_names(*f)})
    said = f" ({', '.join(names)})" if names else ""
    yield f"metrics of the clients' training{said} do not leave the nodes"
    for strategy in server.strategies:
        for keyword in strategy.call.keywords:
            name = LEGACY_NAMES.get(str(keyword.arg), keyword.arg)
            if name in METRICS_FUNCTIONS:
                value = strategy.source.segment(keyword.value)
                yield f"{keyword.arg}={value} goes: no metrics of the clients would reach it"


def _of_evaluations(server: ServerHalf, client: ClientHalf, wrap: Wrap) -> Iterator[str]:
    for strategy in server.strategies:
        given = keyword_of(strategy.call, "fraction_evaluate")
        wanted = given.value if isinstance(given, ast.Constant) else 1.0
        if not isinstance(wanted, int | float) or isinstance(wanted, bool):
            wanted = 1.0
        built = wrap.build(fraction_evaluate=min(1.0, max(0.0, float(wanted))))
        evaluates = client.kind == NUMPY or any(
            f.message_type == "evaluate" for f in client.functions
        )
        if wanted and not built.fraction_evaluate and evaluates:
            yield (
                "the clients are not asked to evaluate; evaluate_fn on the server works as before"
                + (
                    ". evaluation=PrivateEvaluation() of the strategy asks them for noised counts, "
                    "from the same budget"
                    if hasattr(built, "evaluation")
                    else ""
                )
            )


def _of_messages(
    app: AppFolder, server: ServerHalf, client: ClientHalf, wrap: Wrap
) -> Iterator[str]:
    own = [f.message_type for f in client.functions if f.own_type]
    if own:
        yield (
            f"messages {', '.join(own)} are not part of {wrap.scheme}: nothing protects what they "
            "bring and return; a node with a policy refuses them unless they are in "
            "allowed_messages"
        )
    for source, node in server.sends:
        yield f"the server also sends messages of its own: {_where(app, source, node)}"


def _of_start(server: ServerHalf, wrap: Wrap) -> Iterator[str]:
    for strategy in server.strategies:
        if own_start(strategy):
            yield (
                "the strategy's own start runs the rounds: no checkpoint, no run folder, no quorum "
                "and no end when a budget is used up; strategy.card() returns the privacy card"
            )
        if (found := strategy.method("aggregate_train")) and _lists(found[1]):
            yield "list(replies) holds every reply in memory, and the round waits for every client"


def _of_training(wrap: Wrap) -> Iterator[str]:
    if wrap.trainer == "train_per_record":
        yield (
            "a round is one step on all records of a client, each of which is clipped by itself: "
            "the app's epochs, batches, optimiser and learning rate have no effect. learning_rate "
            "of RecordLevel is the step; it takes more rounds than before"
        )
    elif wrap.trainer == PRIVATE_LOOP:
        yield (
            "the server says how many steps a training takes (steps of DPSGD) and the share of the "
            "records in each (sampling_rate): the app's epochs and the DataLoader's batch size "
            "have no effect. The clients need pip install 'flwr-privacy[dp-sgd]'"
        )
    elif wrap.trainer:
        yield (
            "a local step takes each record with the probability sampling_rate of RecordNoise: the "
            "app's epochs, batches and optimiser have no effect. schedule=EventSchedule(steps=...) "
            "of the strategy has a round take more steps"
        )


def _lists(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "list"
        for node in ast.walk(function)
    )


def _metric_names(source: Source, function: ast.FunctionDef) -> Iterator[str]:
    """Return the names of the metrics that a training returns, as far as they are written out."""
    for node in ast.walk(function):
        values: ast.expr | None = None
        if isinstance(node, ast.Call) and source.dotted(node.func).endswith(".MetricRecord"):
            values = node.args[0] if node.args else None
            if isinstance(values, ast.Name):
                values = _assigned(function, values.id)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            values = node.value.elts[-1]
        if isinstance(values, ast.Dict):
            names = [k.value for k in values.keys if isinstance(k, ast.Constant)]
            yield from (str(name) for name in names if name != "num-examples")


def _assigned(function: ast.FunctionDef, name: str) -> ast.expr | None:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            return node.value
    return None
