"""Writes rows as a table for a terminal, as CSV, or as JSON."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

__all__ = ["csv_text", "json_text", "table"]

_FORMULA = ("=", "+", "-", "@")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows below the names of their columns; numbers stand to the right.

    Examples
    --------
    >>> print(table(["client", "bytes"], [["ward-7", 1200], ["ward-10", 8]]))
    client   bytes
    ward-7    1200
    ward-10      8
    """
    texts = [list(columns), *([_text(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    right = [
        bool(rows) and all(isinstance(row[i], int | float | None) for row in rows)
        for i in range(len(columns))
    ]
    lines = (
        "  ".join(
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(line, widths, right, strict=True)
        )
        for line in texts
    )
    return "\n".join(line.rstrip() for line in lines)


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows as CSV with a line of names; None is an empty field.

    A text that a spreadsheet would compute (an experiment id comes from a server) gets an
    apostrophe in front.

    Examples
    --------
    >>> print(csv_text(["experiment"], [["=1+1"]]), end="")
    experiment
    '=1+1
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_harmless(value) for value in row] for row in rows)
    return text.getvalue()


def json_text(document: Any) -> str:
    """Return a document as JSON, with a line end."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in _FORMULA else value


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
