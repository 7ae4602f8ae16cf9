"""Reads the logs of Flower's processes: which exceptions ended an app."""

import re
from pathlib import Path

__all__ = ["exceptions_in", "plain"]

_FRAME = re.compile(r'\s+File "(.+)", line (\d+), in (.+)')
_COLOUR = r"\x1b\[[0-9;]*m"
_WORKER = rf"^(?:{_COLOUR})?\(\w*\s*pid=[^)]*\)(?:{_COLOUR})? ?"
_DECORATION = re.compile(rf"{_WORKER}|{_COLOUR}|[╭╮╰╯│─]", re.MULTILINE)


def exceptions_in(log: str) -> list[str]:
    """Return the exceptions of the tracebacks in a log, each once, causes first.

    Examples
    --------
    >>> exceptions_in('''Traceback (most recent call last):
    ...   File "/app/server.py", line 11, in main
    ...     raise ValueError("no data")
    ... ValueError: no data
    ... ''')
    ['ValueError: no data (server.py, line 11, in main)']
    """
    found: dict[str, None] = {}
    frame: re.Match[str] | None = None
    for line in plain(log).splitlines():
        if match := _FRAME.match(line):
            frame = match
        elif frame is not None and line and not line[0].isspace():
            path, number, function = frame.groups()
            found[f"{line} ({Path(path).name}, line {number}, in {function})"] = None
            frame = None
    return list(found)


def plain(text: str) -> str:
    """Return a log without colours, `flwr`'s frames and the prefix of Ray's workers."""
    lines = _DECORATION.sub("", text).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip())
