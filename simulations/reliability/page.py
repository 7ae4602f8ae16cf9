"""Prints the fault matrix and the long runs as tables, on the screen and as a page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flwr_privacy.simulations.reports.markdown import markdown_table
from flwr_privacy.wire.files import write_text

from .endurance import Endured, endure
from .endurance_faults import RATE
from .federations import FEDERATIONS
from .grid import FAULTS
from .matrix import VERDICTS, Cell

__all__ = ["REAL_FAULTS", "long_rows", "page", "sections", "table", "write_long_runs"]

_TITLE = "# Reliability"

_ABOUT = """
`flwr-privacy reliability` writes this page; do not edit it by hand. For each scheme a small
federation trains three rounds in one process (the inline engine): once without a fault, and once
for each cell of its table. There, one fault happens to one client, in the phase of the column. The
noise comes from a seed, so that both trainings can be compared bit for bit.

In every cell the ledger of each client has an entry for each different answer that the client
gave, and the server's privacy card has a charge for each answer that the card of the training
without a fault has one for. Otherwise the cell is a DEFECT. A client that has lost its files
("node lost") has lost its ledger with them: entries are counted from then on.

Two phases are not in the tables: `sync` of MSPDQ, which is sent only without a secure sum, and
`oracle` of FedVS, which is for simulations. UDP has the same phases where it protects records.
"""

_REAL = """
Each fault happens once more to processes that talk TLS: SuperNodes, a SuperLink and a ServerApp
under UDP. After every round the model is compared, bit for bit, with that of a training in one
process in which the clients that are left out do not answer (`tests/test_real_faults.py`, run by
`make test-deploy`). No command writes this table: its words are part of the program, and the same
tests compare them with what they find:
"""

REAL_FAULTS = {
    "lost request": (
        "it is never sent; also: the node is killed before it answers",
        "left out, nothing charged",
    ),
    "crash": (
        "the node is killed when its answer is charged and kept, not sent",
        "left out, charged; it is back in the next round",
    ),
    "drop, stale, stranger": (
        "the reply is thrown away, or another one or another sender in its place",
        "left out, charged",
    ),
    "late": ("the node answers when the round is over", "left out, charged"),
    "delay, reorder, duplicate": (
        "the reply waits for others, is held until the end, comes twice",
        "exact",
    ),
    "corrupt, nan, infinity, reshape": ("the reply is damaged on the node", "left out, charged"),
    "server killed": ("SIGKILL when all have replied; resumed", "exact: the same bytes come again"),
    "restarted, moved, node lost": (
        "ended in order and started; killed and started with a new key; the same without its files",
        "exact; without its files the ledger counts from then on",
    ),
    "disk full": (
        "the ledger's file leads to `/dev/full`",
        "left out, nothing charged, the node's log says why",
    ),
    "clock ahead": (
        "a year, in the ClientApp",
        "left out, charged: its answer would outlive the request, and the SuperLink refuses it",
    ),
    "clock behind": ("a year, in the ClientApp", "exact"),
    "a whole node's clock": (
        "a minute ahead, a year behind",
        "the SuperLink does not let it in, and it ends",
    ),
    "SuperLink killed": (
        "SIGKILL, started again at its port, with a database and without",
        "the run ends with an error; resumed: exact",
    ),
}
"""How each fault is made on real processes, and what becomes of it."""

_REAL_TOO = """
All five schemes and the secure sum end on such processes at exactly the models of the simulations,
with a charge for each answer (`tests/test_deployed_schemes.py`). M2FDP's messages and FedVS's
shares are read on the way in `tests/m2fdp/test_deployed.py` and `tests/fedvs/test_deployed.py`.
Processes are killed at each step of writing a charge in
`tests/flwr_privacy/privacy/test_ledger.py`.

In the tables of this page a killed node or server loses what its process had in memory: a
restarted node has its files only, a resumed server has its checkpoint. A lost message is reported
at once, as a SuperLink reports one whose time is over. Late and stale replies are waited for until
the deadline. No clock refuses answers here, as the clock of a SuperLink does.
"""

_LONG = "Long runs"
_ABOUT_LONG = f"""
`flwr-privacy reliability --rounds` writes this section. The same federations train for many
rounds. In about {RATE:.0%} of the rounds one of the faults above happens to one request; the seed
decides which. A killed server resumes from its checkpoint, in the same process, as a new run. Two
faults are left out where a client cannot outlive them: the loss of its files under a secure sum or
in FedVS, where the others know it by the key that it has lost; and a full disk where there is no
ledger.

`tracemalloc` counts Python's objects, without the library's bounded caches. The history has a line
per round and the charges have an entry per request; both are meant to grow, and are measured
apart. The rest may grow by no more than 256 bytes a round (the median of four parts), beside 32
KiB that Python keeps for reuse. The table also has the resident size of the process, with all that
libraries take past Python (torch, OpenBLAS, the allocator); no limit is set for it. Descriptors,
threads and child processes are counted before and after the training.

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
        *(
            "scheme",
            "objects after a fifth (MiB)",
            "at the end",
            "history and charges",
            "at the end",
        ),
        *(
            "growth of the rest (bytes a round)",
            "process (MiB)",
            "at the end",
            "CPU of a round (ms)",
        ),
        *("at the end", "files", "at the end", "descriptors, threads, processes", "afterwards"),
    ),
    "Ledgers": (
        *("scheme", "answers with a cost", "ledger entries", "largest epsilon of a ledger"),
        *("of the answers", "of the card"),
    ),
    "Faults that happened": ("scheme", "faults"),
}


def table(cells: Sequence[Cell]) -> str:
    """Return the cells of a scheme as a table in Markdown: a line per fault, a column per phase.

    Raises
    ------
    KeyError
        If a cell is missing.
    """
    phases = list(dict.fromkeys(cell.phase for cell in cells))
    faults = list(dict.fromkeys(cell.fault for cell in cells))
    verdicts = {(cell.fault, cell.phase): cell.verdict for cell in cells}
    rows = [[fault, *(verdicts[fault, phase] for phase in phases)] for fault in faults]
    return markdown_table(["fault", *phases], rows)


def sections(text: str) -> dict[str, str]:
    """Return the sections of a page by their titles, in order."""
    found = {}
    for part in text.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        found[title] = body.strip("\n")
    return found


def long_rows(found: Endured) -> dict[str, list[str]]:
    """Return what became of a long run, as a row of each table."""
    first, last = (found.marks[0], found.marks[-1]) if found.marks else (None, None)
    measures = ["-"] * 11
    if first is not None and last is not None:
        measures = [
            *(f"{mark.traced / 2**20:.2f}" for mark in (first, last)),
            *(f"{mark.history / 2**20:.2f}" for mark in (first, last)),
            f"{found.growth:.0f}",
            *(f"{mark.resident / 2**20:.0f}" for mark in (first, last)),
            *(f"{mark.seconds * 1000:.0f}" for mark in (first, last)),
            *(str(mark.files) for mark in (first, last)),
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
            found.before.counts(),
            found.after.counts(),
        ],
        "Ledgers": [
            answers,
            entries,
            *(f"{epsilon:.6g}" if entries else "-" for epsilon in highest),
        ],
        "Faults that happened": [
            ", ".join(f"{name} {found.faults[name]}" for name in FAULTS if found.faults[name]),
        ],
    }
    return {name: [found.title, *map(str, row)] for name, row in rows.items()}


def write_long_runs(
    schemes: Sequence[str],
    *,
    rounds: int,
    seed: int,
    out: Path,
    say: Callable[[str], None],
) -> list[str]:
    """Carry out long runs and write the page after each; return what must not be.

    Parameters
    ----------
    schemes : sequence of str
        Keys of `FEDERATIONS`.
    rounds, seed : int
        As those of `endure`.
    out : Path
        The page; if it is there, it keeps what it says of other things.
    say : callable
        Gets the lines for the screen.
    """
    order = [federation.title for federation in FEDERATIONS.values()]
    defects = []
    for scheme in schemes:
        found = endure(scheme, rounds=rounds, seed=seed)
        for name, row in long_rows(found).items():
            columns = _LONG_TABLES[name][1:]
            told = ", ".join(f"{c}: {v}" for c, v in zip(columns, row[1:], strict=True))
            say(f"{found.title}: {told}")
        earlier = out.read_text(encoding="utf-8") if out.exists() else ""
        write_text(out, page({}, order=order, earlier=earlier, long=[found]))
        defects += [f"{found.title}: {line}" for line in found.wrong]
    return defects


def page(
    matrices: Mapping[str, Sequence[Cell]],
    *,
    order: Sequence[str] = (),
    earlier: str = "",
    long: Sequence[Endured] = (),
) -> str:
    """Return the page.

    Parameters
    ----------
    matrices : Mapping
        The cells of each scheme, by its title.
    order : sequence of str, optional
        Titles of all schemes.
    earlier : str, optional
        The page as it was; it keeps the tables of schemes that have no cells here.
    long : sequence of Endured, optional
        Long runs.
    """
    known = sections(earlier)
    tables = {
        title: table(matrices[title]) if title in matrices else known[title]
        for title in dict.fromkeys((*order, *matrices))
        if title in matrices or title in known
    }
    words = [f"- **{_escaped(name)}**: {text}." for name, text in VERDICTS.items()]
    kinds = [f"- **{name}**: {text}." for name, text in FAULTS.items()]
    runs = _long_section(long, order=order, earlier=known.get(_LONG, ""))
    parts = {
        "Words in the tables": "\n".join(words),
        "Faults": "Each happens once.\n\n" + "\n".join(kinds),
        "On real processes": _real(),
        **({_LONG: runs} if runs else {}),
        **tables,
    }
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in parts.items())
    return f"{_TITLE}\n\n{_ABOUT.strip()}\n\n{text}\n"


def _long_section(long: Sequence[Endured], *, order: Sequence[str], earlier: str) -> str:
    """Return the section of the long runs, with the earlier rows of other schemes; or nothing."""
    rows: dict[str, dict[str, list[str]]] = {name: {} for name in _LONG_TABLES}
    for part in earlier.split("\n### ")[1:]:
        name, _, body = part.partition("\n")
        lines = [line.strip("| ").split(" | ") for line in body.strip().splitlines()[2:]]
        if name in rows:
            rows[name] |= {line[0]: line for line in lines}
    for found in long:
        for name, row in long_rows(found).items():
            rows[name][found.title] = row
    if not any(rows.values()):
        return ""
    text = [_ABOUT_LONG.strip()]
    for name, columns in _LONG_TABLES.items():
        ranked = [rows[name][title] for title in order if title in rows[name]]
        text.append(f"### {name}\n\n{markdown_table(columns, ranked)}")
    return "\n\n".join(text)


def _real() -> str:
    rows = [(fault, *words) for fault, words in REAL_FAULTS.items()]
    table = markdown_table(("fault", "how", "what becomes of it"), rows)
    return "\n\n".join([_REAL.strip("\n"), table, _REAL_TOO.strip("\n")])


def _escaped(name: str) -> str:
    return f"`{name}`" if name == "-" else name
