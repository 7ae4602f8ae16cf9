"""Notes which mechanisms of Flower an app makes, with their numbers: what it promises by them."""

import functools
import importlib
from collections.abc import Callable
from numbers import Real
from typing import Any

__all__ = ["watch_mechanisms"]

_LOCAL = "LocalDpMod"

_OLDER = "flwr.server.strategy"
_MECHANISMS = (
    ("flwr.clientapp.mod.localdp_mod", _LOCAL),
    ("flwr.client.mod.localdp_mod", _LOCAL),
    ("flwr.serverapp.strategy.dp_fixed_clipping", "DifferentialPrivacyFixedClippingBase"),
    ("flwr.serverapp.strategy.dp_adaptive_clipping", "DifferentialPrivacyAdaptiveBase"),
    *(
        (_OLDER, f"DifferentialPrivacy{side}Side{kind}Clipping")
        for side in ("Server", "Client")
        for kind in ("Fixed", "Adaptive")
    ),
)


def watch_mechanisms() -> Callable[[], list[dict[str, Any]]]:
    """Begin to watch, before the app is imported; return what tells the mechanisms made so far.

    Each is a ``name``, whether it is ``local`` noise, its ``numbers``, and the ``epsilon`` and
    ``delta`` that Flower's own accountant states, where it has one.
    """
    made: dict[int, Any] = {}
    for module, name in _MECHANISMS:
        kind = getattr(importlib.import_module(module), name)
        _note(kind, made)
    return lambda: [_declared(one) for one in made.values()]


def _note(kind: type[Any], made: dict[int, Any]) -> None:
    build = kind.__init__

    @functools.wraps(build)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        made[id(self)] = self  # kept, so that no other gets its id

    kind.__init__ = noted


def _declared(one: Any) -> dict[str, Any]:
    # A clipping norm that adapts moves on; the others stay as they were given.
    numbers = {k: float(v) for k, v in vars(one).items() if isinstance(v, Real)}
    local = any(kind.__name__ == _LOCAL for kind in type(one).__mro__)  # it may be a subclass
    found: dict[str, Any] = {"name": type(one).__name__, "local": local, "numbers": numbers}
    spent = one.privacy_spent() if hasattr(one, "privacy_spent") else None
    if spent is not None:
        found |= {"epsilon": spent.epsilon, "delta": spent.delta}
    return found
