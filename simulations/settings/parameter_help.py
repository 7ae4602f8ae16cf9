"""Describes the parameters of a scheme from the docstrings and defaults of its classes."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any

from flwr_privacy.strategies import SchemeStrategy

from .flat_options import choices_of, flat_keys

__all__ = ["ParameterHelp", "parameters_of"]

_ELSEWHERE = re.compile(r"^(As in|Those of|FedAvg's)\b")
_TREE = {
    "fanouts": ("Children of a node of each tier, from the cloud down: fanouts=10,5.", "required"),
    "p": ("Share of the aggregators of each tier that is trusted, or one for each tier.", "None"),
}


@dataclass(frozen=True, kw_only=True)
class ParameterHelp:
    """What a user needs to know of a parameter.

    Parameters
    ----------
    name : str
        Its key on the command line.
    default : str
        Its value where nothing is set; "required" if there is none.
    text : str
        What it does.
    only : tuple of str
        The choices with which it exists, such as ``unit=record``; empty if it always does.
    """

    name: str
    default: str
    text: str
    only: tuple[str, ...] = ()


def parameters_of(strategy: type[SchemeStrategy]) -> list[ParameterHelp]:
    """Return what a scheme takes beyond the parameters of every scheme.

    Examples
    --------
    >>> from flwr_privacy.strategies import QuantizedFedAvg
    >>> {one.name: one.default for one in parameters_of(QuantizedFedAvg)}["bits"]
    '8'
    """
    common = set(flat_keys(SchemeStrategy))
    found: dict[str, list[ParameterHelp]] = {}
    for one in _described(strategy, ()):
        if one.name in common:
            continue
        alike = found.setdefault(one.name, [])
        same = next((before for before in alike if _same(before, one)), None)
        if same is None:
            alike.append(one)
        else:
            alike[alike.index(same)] = _joined(same, one)
    return [one for alike in found.values() for one in alike]


def _same(first: ParameterHelp, second: ParameterHelp) -> bool:
    """Return whether one description is enough for a parameter that two options have."""
    told = {one.text for one in (first, second) if one.text and not _ELSEWHERE.match(one.text)}
    return first.default == second.default and len(told) <= 1


def _joined(first: ParameterHelp, second: ParameterHelp) -> ParameterHelp:
    texts = sorted((first.text, second.text), key=lambda text: bool(_ELSEWHERE.match(text)))
    only = (*first.only, *second.only) if first.only and second.only else ()
    return replace(first, text=texts[0], only=tuple(dict.fromkeys(only)))


def _described(kind: type, only: tuple[str, ...]) -> Iterator[ParameterHelp]:
    choices, texts = choices_of(kind), _texts(kind)
    for field in fields(kind):
        choice = choices.get(field.name)
        if choice is None:
            if field.init and field.name != "tree":
                yield ParameterHelp(
                    name=field.name,
                    default=_default(field),
                    text=texts.get(field.name, ""),
                    only=only,
                )
            elif field.init:
                for name, (text, default) in _TREE.items():
                    yield ParameterHelp(name=name, default=default, text=text, only=only)
                text = f"File with the tree, in place of fanouts and p. {texts.get('tree', '')}"
                yield ParameterHelp(name="tree", default="None", text=text, only=only)
            continue
        if choice.key:
            usual = choice.usual(kind)
            default = usual or ("required" if _default(field) == "required" else "None")
            text = f"One of {', '.join(choice.kinds)}. {texts.get(field.name, '')}"
            yield ParameterHelp(name=choice.key, default=default, text=text, only=only)
        for value, option in choice.kinds.items():
            yield from _described(option, (f"{choice.key}={value}",) if choice.key else only)


def _default(field: "Field[Any]") -> str:
    if field.default is not MISSING:
        value = field.default
    elif field.default_factory is not MISSING:
        value = field.default_factory()
    else:
        return "required"
    return value if isinstance(value, str) else repr(value)


def _texts(kind: type) -> dict[str, str]:
    """Return what the docstrings of a class and of its bases say of their parameters."""
    texts: dict[str, str] = {}
    for owner in kind.__mro__:
        for name, text in _sections(inspect.getdoc(owner) if owner.__doc__ else None):
            if name not in texts or _ELSEWHERE.match(texts[name]):
                texts[name] = text
    return texts


def _sections(doc: str | None) -> Iterator[tuple[str, str]]:
    """Yield each parameter of a numpy-style docstring with its text."""
    match = re.search(r"^Parameters\n-+\n(.*?)(?=^\w[^\n]*\n-+\n|\Z)", doc or "", re.M | re.S)
    if match is None:
        return
    for entry in re.finditer(r"^(\S[^\n]*)\n((?:[ ]+[^\n]*\n?|\n)+)", match[1] + "\n", re.M):
        names, _, _ = entry[1].partition(" : ")
        text = " ".join(entry[2].split()).replace("``", "").replace("`", "")
        for name in re.split(r",\s*", names):
            yield name, text
