"""Tables in Markdown, for pages that programs write into docs/."""

from collections.abc import Iterable, Sequence

__all__ = ["markdown_table"]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a vertical bar in a cell becomes a slash.

    Examples
    --------
    >>> print(markdown_table(["curve", "loss"], [["FedAvg", "0.1"]]))
    | curve | loss |
    | --- | --- |
    | FedAvg | 0.1 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(c.replace('|', '/') for c in line)} |" for line in lines)
