"""Prints for a node's operator what its ledgers were charged, and which charges had no answer."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.ledger import Entry, Ledger

__all__ = ["what_was_charged"]

SHOWN = 5
"""Questions that are named of those that were never answered."""


def what_was_charged(path: Path) -> Iterator[str]:
    """Yield lines that sum up a ledger, or all ledgers of a folder.

    Parameters
    ----------
    path : Path
        ``<data set>.ledger``, or the folder that a node names as ``privacy-state``.

    Raises
    ------
    InvalidParameterError
        If there is none.
    LedgerError
        If one cannot be read.
    """
    files = sorted(path.glob("*.ledger")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise InvalidParameterError("path", str(path), "a ledger, or a folder with ledgers")
    for file in files:
        yield from _lines(Ledger(file, data_set=file.stem))


def _lines(ledger: Ledger) -> Iterator[str]:
    entries, unanswered = ledger.entries(), ledger.unanswered()
    yield f"{ledger.data_set}: {_counts(len(entries), len(unanswered))}"
    charged, missing = Counter(map(_experiment, entries)), Counter(map(_experiment, unanswered))
    for experiment, count in charged.items():
        name, scheme, unit = experiment
        line = f"  experiment {name}, {scheme}, {unit}: {_counts(count, missing[experiment])}"
        named = [_question(entry) for entry in unanswered if _experiment(entry) == experiment]
        if named:
            line += f" ({'; '.join(named[:SHOWN])}{'; ...' if len(named) > SHOWN else ''})"
        yield line


def _counts(charged: int, unanswered: int) -> str:
    return f"{charged} charged, {charged - unanswered} answered, {unanswered} never answered"


def _experiment(entry: Entry) -> tuple[str, str, str]:
    return entry.question.experiment_id, entry.scheme, entry.unit


def _question(entry: Entry) -> str:
    question = entry.question
    return f"{question.phase} of round {question.server_round}, {entry.time}"
