"""Says how an app leaves a workflow of Flower's older API, such as SecAgg+, line by line."""

import ast
from collections.abc import Iterator

from .client_half import ClientHalf
from .server_half import ServerHalf
from .source import Source, keyword_of
from .unfit_error import UnfitError
from .wraps import Wrap

__all__ = ["with_workflow"]

SECAGG = (
    *("num_shares", "reconstruction_threshold", "max_weight", "clipping_range"),
    *("quantization_range", "modulus_range", "timeout"),
)
"""Arguments of SecAggPlusWorkflow, in their order."""

_CONVERTED = "ndarrays_to_parameters("  # ArrayRecord takes what is converted

PLACES = {
    "reconstruction_threshold": "threshold: clients, more than half of the cohort",
    "max_weight": "largest_weight, a whole number",
    "clipping_range": "value_range: bounds the update, not the weights",
    "quantization_range": "bits, as 22 for 2**22",
    "timeout": "LoopOptions(deadline=...) of the strategy",
}
"""What of a secure sum takes their place; the others follow from the cohort."""


def with_workflow(server: ServerHalf, client: ClientHalf, wrap: Wrap) -> UnfitError:
    """Return the error for a server that runs a workflow, with the lines to change."""
    source, node = server.workflows[0]
    return UnfitError(
        "the server runs a workflow of Flower's older API, which talks to the clients in "
        f"messages of its own: {source.line(node)}",
        [*_of_server(server, wrap), *_of_secagg(server, wrap), *_of_client(client, wrap)],
    )


def _of_server(server: ServerHalf, wrap: Wrap) -> Iterator[str]:
    made = f"{wrap.strategy}({', '.join(['...', *wrap.arguments])})"
    yield f"server: {made} of flwr_privacy.strategies"
    for strategy in server.strategies:
        yield f"server: in the place of this strategy: {strategy.source.line(strategy.call)}"
    for source, call in _calls(server):
        if source.dotted(call.func).endswith(".LegacyContext"):
            yield f"server: take this out, and what has it: {source.line(call)}"
    given = next((s.call for s in server.strategies), None)
    initial = None if given is None else keyword_of(given, "initial_parameters")
    written = "<the model>" if initial is None else server.strategies[0].source.segment(initial)
    if written.startswith(_CONVERTED):
        written = written[len(_CONVERTED) : -1]
    yield (
        "server: in the place of the call of the workflow: strategy.start(grid, "
        f"ArrayRecord({written}), num_rounds={_rounds(server)})"
    )
    yield 'docs/drop-in.md has the whole change, under "From Flower\'s SecAgg+ and clipping mods"'


def _of_secagg(server: ServerHalf, wrap: Wrap) -> Iterator[str]:
    for source, call in _calls(server):
        if not source.dotted(call.func).endswith(".SecAggPlusWorkflow"):
            continue
        if not wrap.summed:
            yield f"--secure-sum takes the place of SecAgg+: {source.line(call)}"
        given = dict(zip(SECAGG, call.args, strict=False))
        given |= {str(k.arg): k.value for k in call.keywords}
        for name, value in given.items():
            if name in PLACES:
                yield f"SecureSum: {name}={source.segment(value)} becomes {PLACES[name]}"


def _of_client(client: ClientHalf, wrap: Wrap) -> Iterator[str]:
    yield f"clients: from flwr_privacy.clients import {wrap.client_app} as ClientApp"
    for mod in client.mods or ():
        if mod.replaced:
            yield f"clients: take the mod {mod.name} out: {client.source.line(mod.node)}"


def _rounds(server: ServerHalf) -> str:
    for source, call in _calls(server):
        if source.dotted(call.func).endswith(".ServerConfig"):
            rounds = keyword_of(call, "num_rounds") or next(iter(call.args), None)
            return "1" if rounds is None else source.segment(rounds)
    return "..."


def _calls(server: ServerHalf) -> Iterator[tuple[Source, ast.Call]]:
    """Return the calls in the files that use the workflow."""
    files = {source.module: source for source, _ in server.workflows}
    for source in files.values():
        yield from ((source, n) for n in ast.walk(source.tree) if isinstance(n, ast.Call))
