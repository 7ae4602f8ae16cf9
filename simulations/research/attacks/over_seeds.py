"""Repeats an attack with several seeds, and gives its numbers as ranges."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.table import Table

from .setup import AttackOptions, Report

__all__ = ["merged", "over_seeds"]

_NUMBER = re.compile(r"(?<![\w.)])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def over_seeds(
    attack: Callable[[AttackOptions], Report], options: AttackOptions, *, seeds: int
) -> Report:
    """Return what an attack finds with several seeds: each number that differs as a range.

    Parameters
    ----------
    attack : callable
        Attacks once.
    options : AttackOptions
        Its options, with the first seed: the only one whose pictures are kept.
    seeds : int
        How many seeds from there on.
    """
    first = attack(options)
    if seeds == 1:
        return first
    with TemporaryDirectory() as folder:
        others = [
            attack(replace(options, seed=options.seed + more, out=Path(folder)))
            for more in range(1, seeds)
        ]
    reports = [first, *others]
    return Report(
        tables=[_merged(same, seeds) for same in zip(*(r.tables for r in reports), strict=True)],
        legend=f"a to b: the least and the largest of {seeds} seeds\n{first.legend}",
        pictures=first.pictures,
        verdict="\n".join(map(merged, _lines([report.verdict for report in reports]))),
    )


def merged(texts: Sequence[str]) -> str:
    """Return one text for several that differ in their numbers; other differences side by side.

    Parameters
    ----------
    texts : sequence of str
        What was said in each case.

    Examples
    --------
    >>> merged(["3 of 20", "1 of 20", "11 of 20"])
    '1 to 11 of 20'
    >>> merged([">= 2.31 (0.4-0.9)", ">= 1.07 (0.4-0.8)"])
    '>= 1.07 to 2.31 (0.4-0.8 to 0.9)'
    >>> merged(["open", "protected", "open"])
    'open or protected'
    """
    distinct = list(dict.fromkeys(texts))
    if len({_NUMBER.sub("#", text) for text in distinct}) > 1:
        return " or ".join(distinct)
    ranges = map(_range, zip(*map(_NUMBER.findall, distinct), strict=True))
    return _NUMBER.sub(lambda _: next(ranges), distinct[0])


def _range(numbers: Sequence[str]) -> str:
    ends = min(numbers, key=float), max(numbers, key=float)
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _lines(texts: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the lines of some texts beside each other; all in one where their number differs."""
    lines = [text.splitlines() for text in texts]
    if len(set(map(len, lines))) > 1:
        return [tuple(texts)]
    return list(zip(*lines, strict=True))


def _merged(tables: Sequence[Table], seeds: int) -> Table:
    """Return one table for the tables of all seeds."""
    first = tables[0]
    found = Table(title=f"{first.title}, {seeds} seeds")
    for column in first.columns:
        found.add_column(column.header, justify=column.justify)
    cells = [[tuple(column.cells) for column in table.columns] for table in tables]
    for number, row in enumerate(first.rows):
        texts = [
            merged([str(table[place][number]) for table in cells])
            for place in range(len(first.columns))
        ]
        found.add_row(*texts, end_section=row.end_section)
    return found
