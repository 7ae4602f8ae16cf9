"""The sections of the page that hold rows of each scheme: outages, two faults, long runs."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flwr_privacy.simulations.reports.markdown import markdown_table

from .endurance import Endured
from .endurance_faults import RATE
from .matrix import REFUSED, VERDICTS, Cell
from .outages import LOST

__all__ = [
    "LONG",
    "OUTAGES",
    "PAIRS",
    "ROWS",
    "RowSection",
    "Rows",
    "escaped",
    "long_rows",
    "outage_rows",
    "pair_rows",
]

Rows = Mapping[str, Sequence[Sequence[str]]]
"""Rows by the name of their table; each row begins with the title of a scheme."""

OUTAGES, PAIRS, LONG = "Outages", "Two faults", "Long runs"


def escaped(name: str) -> str:
    """Return a verdict as the page has it: a dash alone would begin a list."""
    return f"`{name}`" if name == "-" else name


@dataclass(frozen=True, kw_only=True)
class RowSection:
    """A section that holds rows of each scheme.

    Parameters
    ----------
    about : str
        What it says before its tables.
    tables : Mapping
        The columns of each table by its name.
    """

    about: str
    tables: Mapping[str, Sequence[str]]

    def text(self, new: Rows, *, order: Sequence[str], earlier: str) -> str:
        """Return the section, with the earlier rows of schemes that have no new ones; or nothing.

        Parameters
        ----------
        new : Mapping
            The new rows.
        order : sequence of str
            Titles of all schemes.
        earlier : str
            The section as it was.
        """
        before = _rows(earlier)
        mine = {row[0] for rows in new.values() for row in rows}
        parts, empty = [self.about.strip()], True
        for name, columns in self.tables.items():
            rows = [row for row in before.get(name, ()) if row[0] not in mine]
            rows += [list(row) for row in new.get(name, ())]
            ranked = [row for title in order for row in rows if row[0] == title]
            empty = empty and not ranked
            parts.append(f"### {name}\n\n{markdown_table(columns, ranked)}")
        return "" if empty else "\n\n".join(parts)


_ABOUT_LONG = f"""
`flwr-privacy reliability --rounds` writes this section. The same federations train for many
rounds. In about {RATE:.0%} of the rounds one of the faults above happens to one request; the seed
decides which. A killed server resumes from its checkpoint, in the same process, as a new run. Two
faults are left out where a client cannot outlive them: the loss of its files under a secure sum or
in FedVS, where the others know it by the key that it has lost; and a full disk where there is no
ledger.

Two numbers in a cell are those after a fifth of the rounds and at the end. `tracemalloc` counts
Python's objects, without the library's bounded caches. The history has a line per round and the
charges have an entry per request; both are meant to grow, and are measured apart. The rest may grow
by no more than 256 bytes a round (the median of four parts), beside 32 KiB that Python keeps for
reuse. No limit is set for the resident size of the process, which has all that libraries take past
Python. Descriptors, threads and child processes are counted before and after the training.

For every client the entries of its ledger are compared with the answers that left its client half,
round by round, and epsilon is computed afresh from these answers, each at the cost that the
server's card has for it. The ledger never has less. It may have more for a device whose answers
leave its zone as an average: it is charged before anybody knows whether one leaves. Answers before
a node lost its ledger are not counted for that ledger. The server's card is read from its file and
verified; for every client it has at least what the client's answers cost.
"""
_LONG_TABLES = {
    "Rounds": (
        *("scheme", "rounds", "seed", "faults", "with all clients", "with fewer", "skipped"),
        *("nodes restarted", "server killed and resumed", "verdict"),
    ),
    "Memory and what a process holds": (
        *("scheme", "objects (MiB)", "history and charges (MiB)"),
        *("growth of the rest (bytes a round)", "process (MiB)", "CPU of a round (ms)", "files"),
        "descriptors, threads, processes",
    ),
    "Ledgers": (
        *("scheme", "answers with a cost", "ledger entries", "largest epsilon of a ledger"),
        *("of the answers", "of the card"),
    ),
}

_LOST = "\n".join(f"- **{name}**: {text}." for name, text in LOST.items())
_ABOUT_OUTAGES = f"""
`flwr-privacy reliability --outage` writes this section. An exchange is one request of the server to
its clients and their answers. Each exchange of the training without a fault is lost once:

{_LOST}

Where all replies are lost and the training goes on, its model is bit for bit that of the training
in which all requests are lost. The error of a training that ends names the phase, or says that
clients or answers are missing. Otherwise the cell is a DEFECT.
"""
_ABOUT_PAIRS = """
`flwr-privacy reliability --pairs` writes this section. Two of the faults above happen in one
training: to two clients in one round, or to one client in two phases. There are too many pairs to
try all. Each pair is drawn from a seed of its own: the first from the seed in the table, the others
from the seeds that follow. Where the server has nothing of the answers and the training goes on,
its model is bit for bit that of the training in which the requests are lost. A fault may prevent
the other one, because the server does not ask the client again: the verdict is then on the first.
"""

ROWS = {
    OUTAGES: RowSection(
        about=_ABOUT_OUTAGES,
        tables={
            "What became of the trainings": (
                "scheme",
                "lost",
                "exchanges",
                *map(escaped, VERDICTS),
            ),
            "Errors": ("scheme", "lost", "exchange", "error"),
        },
    ),
    PAIRS: RowSection(
        about=_ABOUT_PAIRS,
        tables={"Pairs": ("scheme", "seed", "pairs", *map(escaped, VERDICTS))},
    ),
    LONG: RowSection(about=_ABOUT_LONG, tables=_LONG_TABLES),
}
"""The sections by their titles, in the order of the page."""


def outage_rows(title: str, cells: Sequence[Cell]) -> Rows:
    """Return what became of outages, as rows of each table."""
    counts = [
        [title, lost, *_counts([cell for cell in cells if cell.fault == lost])] for lost in LOST
    ]
    errors = [
        # Node ids and sessions are random; the page is the same in each run.
        [title, cell.fault, cell.phase, re.sub("[0-9a-f]{12,}", "...", cell.why)]
        for cell in cells
        if cell.verdict == REFUSED
    ]
    return {"What became of the trainings": counts, "Errors": errors}


def pair_rows(title: str, cells: Sequence[Cell], *, seed: int) -> Rows:
    """Return what became of pairs of faults, as rows of their table."""
    return {"Pairs": [[title, str(seed), *_counts(cells)]]}


def long_rows(found: Endured) -> Rows:
    """Return what became of a long run, as rows of each table."""
    first, last = (found.marks[0], found.marks[-1]) if found.marks else (None, None)
    measures = ["-"] * 6
    if first is not None and last is not None:
        measures = [
            f"{first.traced / 2**20:.2f} to {last.traced / 2**20:.2f}",
            f"{first.history / 2**20:.2f} to {last.history / 2**20:.2f}",
            f"{found.growth:.0f}",
            f"{first.resident / 2**20:.0f} to {last.resident / 2**20:.0f}",
            f"{first.seconds * 1000:.0f} to {last.seconds * 1000:.0f}",
            f"{first.files} to {last.files}",
        ]
    highest = [
        max((getattr(mine, name) for mine in found.accounts), default=0.0)
        for name in ("spent", "recomputed", "stated")
    ]
    answers = sum(mine.released for mine in found.accounts)
    entries = sum(mine.entries for mine in found.accounts)
    rows: dict[str, list[object]] = {
        "Rounds": [
            *(found.rounds, found.seed, sum(found.faults.values())),
            *(found.rounds - found.fewer - found.skipped, found.fewer, found.skipped),
            *(found.restarts, found.faults["server killed"]),
            "DEFECT" if found.wrong else "as it was",
        ],
        "Memory and what a process holds": [
            *measures,
            f"{found.before.counts()}; afterwards {found.after.counts()}",
        ],
        "Ledgers": [
            answers,
            entries,
            *(f"{epsilon:.6g}" if entries else "-" for epsilon in highest),
        ],
    }
    return {name: [[found.title, *map(str, row)]] for name, row in rows.items()}


def _counts(cells: Sequence[Cell]) -> list[str]:
    verdicts = Counter(cell.verdict for cell in cells)
    return [str(len(cells)), *(str(verdicts[name]) for name in VERDICTS)]


def _rows(section: str) -> dict[str, list[list[str]]]:
    """Return the rows of the tables of a section."""
    found = {}
    for part in section.split("\n### ")[1:]:
        name, _, body = part.partition("\n")
        lines = body.strip().splitlines()[2:]
        found[name] = [line.strip("| ").split(" | ") for line in lines]
    return found
