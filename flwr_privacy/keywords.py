"""Raises errors for wrong keywords that name the right one, or the object that takes it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from .errors import InvalidParameterError, KeywordError

__all__ = ["check_options", "check_usual", "checked_keywords", "nearest", "option_types"]

T = TypeVar("T")


def checked_keywords(cls: type[T]) -> type[T]:
    """Make a dataclass explain unknown and missing keywords, and keep NumPy's numbers as Python's.

    A decorator.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @checked_keywords
    ... @dataclass(kw_only=True)
    ... class Step:
    ...     size: float
    >>> Step(sise=1.0)
    Traceback (most recent call last):
    ...
    flwr_privacy.errors.KeywordError: Step has no 'sise': the nearest is 'size'
    """
    plain: Callable[..., None] = cls.__init__
    known = signature(plain).parameters
    required = [
        name
        for name, parameter in known.items()
        if parameter.kind is Parameter.KEYWORD_ONLY and parameter.default is Parameter.empty
    ]

    @wraps(plain)
    def init(self: T, *arguments: Any, **keywords: Any) -> None:
        for name in keywords:
            if name not in known:
                raise KeywordError(
                    type(self).__name__, name, _belongs(cls, type(self).__name__, name)
                )
        if missing := [name for name in required if name not in keywords]:
            advice = _takes(cls, missing[0])
            raise KeywordError(type(self).__name__, missing[0], advice, missing=True)
        plain(self, *arguments, **{name: _of_python(value) for name, value in keywords.items()})

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    return cls


def check_options(cls: type, options: Any, *names: str) -> None:
    """Refuse values that are not of a dataclass that their field takes, and no word of it.

    Parameters
    ----------
    cls : type
        The dataclass that has the fields.
    options
        An instance of it.
    *names : str
        The fields.

    Raises
    ------
    InvalidParameterError
        If a value is none of them; it says which there are.
    """
    hints = get_type_hints(cls)
    for name in names:
        kinds, value = list(_dataclasses(hints[name])), getattr(options, name)
        allowed = [f"{kind.__name__}(...)" for kind in kinds]
        parts = get_args(hints[name])
        words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
        allowed += map(repr, words)
        if type(None) in parts:
            kinds, allowed = [*kinds, type(None)], [*allowed, "None"]
        if not isinstance(value, tuple(kinds)) and value not in words:
            raise InvalidParameterError(name, value, " or ".join(allowed))


def check_usual(options: object, usual: Mapping[str, Any], where: str) -> None:
    """Refuse options that differ from the only values that are allowed in some place.

    Raises
    ------
    InvalidParameterError
        If one does; the text says `where`.
    """
    for name, only in usual.items():
        if getattr(options, name) != only:
            raise InvalidParameterError(name, getattr(options, name), f"{only!r} {where}")


@cache
def option_types(cls: type) -> dict[str, list[type]]:
    """Return the dataclasses that the fields of a dataclass take, by the field's name."""
    hints = get_type_hints(cls)
    found = {f.name: list(_dataclasses(hints[f.name])) for f in fields(cls) if f.init}
    return {name: kinds for name, kinds in found.items() if kinds}


def nearest(wrong: str, known: Sequence[str]) -> str:
    """Return the name that is nearest to a wrong one, or all of them, as advice."""
    close = get_close_matches(wrong, known, n=1, cutoff=0.5)
    return f"the nearest is {close[0]!r}" if close else f"there are {', '.join(known)}"


def _of_python(value: Any) -> Any:
    """Return a number of NumPy as one that every record, file and digest takes."""
    return value.item() if isinstance(value, np.generic) else value


def _dataclasses(hint: Any) -> Iterator[type]:
    if get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _dataclasses(part)
    elif isinstance(hint, type) and is_dataclass(hint):
        yield hint


def _belongs(cls: Any, called: str, wrong: str) -> str:
    """Return where a keyword belongs that a class does not have, or the nearest that there is."""
    if advice := getattr(cls, "not_here", {}).get(wrong):
        return str(advice)
    own = [f.name for f in fields(cls) if f.init]
    owners: dict[str, str] = {}  # of the keywords of its options, as what to write
    for field, kinds in option_types(cls).items():
        # What tells the kinds apart, such as where noise is added: a constant of each.
        if all(isinstance(getattr(kind, wrong, None), str) for kind in kinds):
            choices = (f"{field}={kind.__name__}(...)" for kind in kinds)
            owners[wrong] = f"it is chosen by {' or '.join(choices)}"
        for name in {f.name for kind in kinds for f in fields(kind) if f.init}:
            having = [k.__name__ for k in kinds if any(f.name == name for f in fields(k))]
            owners[name] = (
                f"{_listed(having)} {'have' if len(having) > 1 else 'has'} it, as in "
                f"{called}({field}={having[0]}({name}=...))"
            )
    if wrong in owners:
        return owners[wrong]
    close = get_close_matches(wrong, [*own, *owners], n=1, cutoff=0.5)
    where = f"; {owners[close[0]]}" if close and close[0] not in own else ""
    return f"{nearest(wrong, [*own, *owners])}{where}"


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _takes(cls: Any, name: str) -> str:
    kinds = [kind.__name__ for kind in option_types(cls).get(name, [])]
    return f"it is required{', as ' if kinds else ''}{' or '.join(f'{k}(...)' for k in kinds)}"
