"""Takes Flower's own wrapper for central differential privacy off a strategy.

`CentralDP` then stands in the strategy's place, with the wrapper's clipping norm. The noise is not
taken over but told: Flower's multiplier says no budget, and CentralDP's noise follows from one.
"""

import ast
from dataclasses import dataclass, replace

from flwr_privacy.accounting.gaussian import epsilon_of
from flwr_privacy.simulations.inspector.app_folder import AppFolder
from flwr_privacy.simulations.inspector.server_half import StrategyCall, server_half
from flwr_privacy.simulations.inspector.training.syntax import names_in
from flwr_privacy.simulations.inspector.unfit import WRAPPER, UnfitError
from flwr_privacy.simulations.inspector.wraps import STRATEGIES, Options, Wrap

from .edits import Edit, changed, line_of, with_imports

__all__ = ["Unwrapped", "unwrapped"]

FIXED = ("strategy", "noise_multiplier", "clipping_norm", "num_sampled_clients")
ADAPTIVE = (
    *("strategy", "noise_multiplier", "num_sampled_clients", "initial_clipping_norm"),
    *("target_clipped_quantile", "clip_norm_lr", "clipped_count_stddev"),
)
DEFAULTS = {
    "initial_clipping_norm": "0.1",
    "target_clipped_quantile": "0.5",
    "clip_norm_lr": "0.2",
}
"""Those of Flower's wrappers with adaptive clipping."""


@dataclass(frozen=True)
class Unwrapped:
    """An app without Flower's wrapper.

    Parameters
    ----------
    app : AppFolder
        The app; the same one where it had no wrapper.
    wrap : Wrap
        The scheme, with what the wrapper said.
    name : str
        The wrapper's class; "" if there was none.
    noise : str
        Its noise multiplier as it is written.
    """

    app: AppFolder
    wrap: Wrap
    name: str = ""
    noise: str = ""

    def told(self, options: Options, rounds: int | None) -> list[str]:
        """Return what becomes of the wrapper, as sentences."""
        if not self.name:
            return []
        lines = [
            f"Flower's {self.name} goes: CentralDP clips to its norm, and its noise follows from "
            f"--epsilon {options.epsilon:g}, not from noise_multiplier={self.noise}"
        ]
        multiplier = _number(self.noise)
        if multiplier and rounds and "Adaptive" not in self.name:
            same = epsilon_of(2 * rounds**0.5 / multiplier, options.delta)
            lines.append(
                f"noise_multiplier={self.noise} over {rounds} rounds in which a client takes part "
                f"is epsilon {same:.4g}, where its data are replaced and every client weighs the "
                f"same: --epsilon {same:.4g} keeps that noise"
            )
        return lines


def unwrapped(app: AppFolder, wrap: Wrap) -> Unwrapped:
    """Return an app without Flower's wrapper, and the scheme with its clipping.

    Other schemes than CentralDP leave the app as it is; `check_fits` refuses it.

    Raises
    ------
    UnfitError
        If the wrapper cannot be taken off safely; it has the lines to write.
    """
    found = [s for s in server_half(app).strategies if s.name.startswith(WRAPPER)]
    if wrap.strategy != "CentralDP" or len(found) != 1:
        return Unwrapped(app, wrap)
    wrapper = found[0]
    source, call = wrapper.source, wrapper.call
    adaptive = "Adaptive" in wrapper.name
    given = dict(zip(ADAPTIVE if adaptive else FIXED, call.args, strict=False))
    given |= {str(k.arg): k.value for k in call.keywords}
    texts = {name: source.segment(value) for name, value in given.items()}
    norm = texts.get("clipping_norm", texts.get("initial_clipping_norm", "0.1"))
    arguments = _arguments(wrap, norm, texts if adaptive else None)
    inner = given.get("strategy")
    if wrapper.classes or inner is None or "None" in given or not _known(app, wrapper, arguments):
        raise UnfitError(
            f"Flower's {wrapper.name} cannot be taken off safely: {source.line(call)}",
            [
                "make the strategy without it, and take Flower's clipping mod out of the clients",
                f"server: {wrap.strategy}({', '.join(['...', *arguments])})",
            ],
        )
    edit = Edit.of(source, call, source.segment(inner))
    for node in ast.walk(source.tree):  # `strategy = Wrapper(strategy, ...)` goes altogether
        if (
            isinstance(node, ast.Assign)
            and node.value is call
            and [source.segment(target) for target in node.targets] == [source.segment(inner)]
        ):
            edit = line_of(source, node)
    gone = {n.id for n in ast.walk(call) if isinstance(n, ast.Name)}
    new = with_imports(changed(source, [edit]), add={}, drop=gone)
    imports = dict(wrap.imports)
    if adaptive:
        imports[STRATEGIES] = (*imports[STRATEGIES], "AdaptiveClipping")
    return Unwrapped(
        app.with_source(new),
        replace(wrap, arguments=arguments, imports=imports),
        wrapper.name,
        texts.get("noise_multiplier", ""),
    )


def _arguments(wrap: Wrap, norm: str, adaptive: dict[str, str] | None) -> tuple[str, ...]:
    """Return the arguments of CentralDP with the clipping of the wrapper."""
    privacy, *others = wrap.arguments
    found = [f"{privacy.removesuffix(')')}, clipping_norm={norm})", *others]
    if adaptive is not None:
        said = {**DEFAULTS, **adaptive}
        found.append(
            f"clipping=AdaptiveClipping(quantile={said['target_clipped_quantile']}, "
            f"clipping_learning_rate={said['clip_norm_lr']})"
        )
    return tuple(found)


def _known(app: AppFolder, wrapper: StrategyCall, arguments: tuple[str, ...]) -> bool:
    """Tell whether the names of the arguments mean something where the strategy is made.

    The strategy may be made before the wrapper, and in another function.
    """
    strategies = [s for s in server_half(app).strategies if s.call is not wrapper.call]
    places = [s.call for s in strategies] or [wrapper.call]
    source = wrapper.source
    if len(places) != 1 or any(s.source.module != source.module for s in strategies):
        return False
    own = {n for a in arguments for n in names_in(a.partition("=")[2])}
    own -= {"ServerNoise", "DistributedNoise", "AdaptiveClipping"}
    known = set(source.definitions) | set(source.names) | {"int", "float"}
    for function in ast.walk(source.tree):
        if isinstance(function, ast.FunctionDef) and places[0] in set(ast.walk(function)):
            known |= {a.arg for a in function.args.args}
            known |= {
                node.id
                for node in ast.walk(function)
                if isinstance(node, ast.Name)
                and isinstance(node.ctx, ast.Store)
                and node.lineno < places[0].lineno
            }
    return own <= known


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
