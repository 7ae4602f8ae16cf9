"""Finds the mods of an app that stand before ours, and the mods that a scheme takes the place of.

A mod before ours gets what our client half sends: it could change noised or masked values, and add
others that no ledger has. It gets the messages of our protocol too, most of which have no arrays.
"""

import sys
from collections.abc import Callable, Iterable
from inspect import getclosurevars
from types import FrameType
from typing import Any

from flwr.client.mod.utils import make_ffn
from flwr.clientapp import ClientApp

from flwr_privacy.errors import InvalidParameterError

__all__ = ["check_beside", "inner_mods", "outer_mods"]

_REPLACED = {
    "adaptiveclipping_mod": "UDP and CentralDP clip by themselves",
    "fixedclipping_mod": "UDP and CentralDP clip by themselves",
    "secagg_mod": "secure_sum=SecureSum() of the strategy takes its place",
    "secaggplus_mod": "secure_sum=SecureSum() of the strategy takes its place",
}
"""Mods of Flower that answer only to strategies or workflows of Flower."""


def outer_mods() -> list[str]:
    """Return the names of the mods that stand before the one that is running, the first one first.

    They are on the call stack, between Flower's ClientApp and the running mod; nothing else knows.
    """
    mods: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not ClientApp.__call__.__code__:
        if frame.f_code.co_filename == make_ffn.__code__.co_filename:
            mods.append(frame.f_locals["_mod"])
        frame = frame.f_back
    if frame is None:  # no ClientApp called it
        return []
    return [_name_of(mod) for mod in reversed(mods[1:])]


def inner_mods(call_next: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the mods behind the one that is running, which calls `call_next`."""
    mods: list[Callable[..., Any]] = []
    code = getattr(call_next, "__code__", None)
    while code is not None and code.co_filename == make_ffn.__code__.co_filename:
        inside = getclosurevars(call_next).nonlocals
        mods.append(inside["_mod"])
        call_next = inside["_ffn"]
        code = getattr(call_next, "__code__", None)
    return mods


def _name_of(mod: Callable[..., Any]) -> str:
    """Return a short name of a mod for an error's text."""
    return str(getattr(mod, "__name__", None) or type(mod).__name__)


def check_beside(mods: Iterable[Callable[..., Any]]) -> None:
    """Refuse mods of Flower that cannot work beside a scheme, before anything is charged.

    Raises
    ------
    InvalidParameterError
        If there is one; the message says what takes its place.
    """
    for mod in mods:
        name = _name_of(mod)
        if name in _REPLACED and str(getattr(mod, "__module__", "")).startswith("flwr."):
            raise InvalidParameterError(
                "mods", name, f"no mod for a strategy of Flower: leave it out; {_REPLACED[name]}"
            )
