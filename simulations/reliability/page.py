"""Prints what became of trainings with faults as tables, on the screen and as a page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flwr_privacy.simulations.reports.markdown import markdown_table
from flwr_privacy.wire.files import write_text

from .endurance import endure
from .federations import FEDERATIONS
from .grid import FAULTS
from .matrix import DEFECT, VERDICTS, Cell
from .outages import outages
from .page_sections import (
    LONG,
    OUTAGES,
    PAIRS,
    ROWS,
    Rows,
    escaped,
    long_rows,
    outage_rows,
    pair_rows,
)
from .pairs import pairs

__all__ = [
    "LONG",
    "OUTAGES",
    "PAIRS",
    "REAL_FAULTS",
    "Found",
    "long_run_of",
    "outages_of",
    "page",
    "pairs_of",
    "sections",
    "table",
    "write_rows",
]

_TITLE = "# Reliability"

_ABOUT = """
After this page you know what becomes of a training, and of the clients' ledgers, if a message is
lost or damaged, a process is killed or a disk is full. In short: the round goes on without the
client; a killed server resumes at its checkpoint; a ledger never has fewer charges than answers
were released. Where a scheme needs all clients before the first round, a fault of one of them
ends the training with an error that says why: in the setup of FedVS, in that of ACFL under a secure
sum, and in the hello of M2FDP with aggregators. What to do then is in
[deployment.md](deployment.md#when-something-fails).

`flwr-privacy reliability` writes this page; do not edit it by hand. For each scheme a small
federation trains three rounds in one process (the inline engine): once without a fault, and once
for each cell of its table, in which one fault happens to one client in the phase of the column. The
noise comes from a seed, so that both trainings can be compared bit for bit. A cell is a DEFECT if
the ledger of a client lacks an entry for one of its answers, or the privacy card lacks a charge
that it has without the fault.

A killed node loses what its process had in memory and keeps its files; a resumed server has its
checkpoint. A client that has lost its files ("node lost") has lost its ledger: the server finds
that it was set back and refuses it ([privacy.md](privacy.md#a-ledger-that-was-set-back)). A lost
message is reported at once, as a SuperLink reports one whose time is over. Late and stale replies
are waited for until the deadline.

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
    "restarted, moved": (
        "ended in order and started; killed and started with a new key",
        "exact",
    ),
    "node lost": (
        "killed and started with a new key and without its files",
        "left out, from the next round on and by name: its ledger was set back",
    ),
    "disk full": (
        "what is written to the ledger goes to `/dev/full`",
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
`tests/flwr_privacy/privacy/ledger/test_ledger.py`.

**Changed messages.** `tests/every_scheme/test_fuzz.py` changes messages of this page's trainings
at random, requests and replies, for a minute in each run of the tests; the seed is printed. With
`FLWR_PRIVACY_FUZZ_SECONDS=1300` it changed 102,704 messages. All led to counted refusals, or to one
error of this library, and nothing else.
"""


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


Found = tuple[list[str], Rows, list[str]]
"""Lines for the screen, rows for the page, and what must not be."""


def long_run_of(name: str, *, rounds: int, seed: int) -> Found:
    """Carry out a long run of a federation; the parameters are those of `endure`."""
    found = endure(name, rounds=rounds, seed=seed)
    rows = long_rows(found)
    lines = [told for table in rows for told in _told(LONG, table, rows)]
    return lines, rows, [f"{found.title}: {line}" for line in found.wrong]


def outages_of(name: str) -> Found:
    """Lose each exchange of a federation."""
    title = FEDERATIONS[name].title
    cells = outages(FEDERATIONS[name])
    rows = outage_rows(title, cells)
    wrong = [
        f"{title}, {cell.fault}, {cell.phase}: {cell.why}"
        for cell in cells
        if cell.verdict == DEFECT
    ]
    return [told for table in rows for told in _told(OUTAGES, table, rows)], rows, wrong


def pairs_of(name: str, *, seed: int, count: int) -> Found:
    """Try pairs of faults in a federation; the parameters are those of `pairs`."""
    title = FEDERATIONS[name].title
    cells = pairs(FEDERATIONS[name], seed=seed, count=count)
    rows = pair_rows(title, cells, seed=seed)
    wrong = [
        f"{title}, {cell.fault}, {cell.phase}: {cell.why}\nTo repeat it: flwr-privacy reliability "
        f"--scheme {name} --pairs 1 --seed {mine} --out pair.md"
        for mine, cell in enumerate(cells, seed)
        if cell.verdict == DEFECT
    ]
    return _told(PAIRS, "Pairs", rows), rows, wrong


def write_rows(
    section: str,
    schemes: Sequence[str],
    found_of: Callable[[str], Found],
    *,
    out: Path,
    say: Callable[[str], None],
) -> list[str]:
    """Train the schemes and write the page after each; return what must not be.

    Parameters
    ----------
    section : str
        A key of `ROWS`.
    schemes : sequence of str
        Keys of `FEDERATIONS`.
    found_of : callable
        Trains a scheme and returns what it found.
    out : Path
        The page; if it is there, it keeps what it says of other things.
    say : callable
        Gets the lines for the screen.
    """
    order = [federation.title for federation in FEDERATIONS.values()]
    defects = []
    for scheme in schemes:
        lines, rows, wrong = found_of(scheme)
        for line in lines:
            say(line)
        earlier = out.read_text(encoding="utf-8") if out.exists() else ""
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page({}, order=order, earlier=earlier, rows={section: rows}))
        defects += wrong
    return defects


def _told(section: str, table: str, rows: Rows) -> list[str]:
    """Return the rows of a table as lines for the screen."""
    columns = ROWS[section].tables[table][1:]
    return [
        f"{title}: {', '.join(f'{c}: {v}' for c, v in zip(columns, values, strict=True))}"
        for title, *values in rows[table]
    ]


def page(
    matrices: Mapping[str, Sequence[Cell]],
    *,
    order: Sequence[str] = (),
    earlier: str = "",
    rows: Mapping[str, Rows] | None = None,
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
    rows : Mapping, optional
        New rows by the section of `ROWS`; each section keeps the rows of schemes that have none.
    """
    known = sections(earlier)
    tables = {
        title: table(matrices[title]) if title in matrices else known[title]
        for title in dict.fromkeys((*order, *matrices))
        if title in matrices or title in known
    }
    words = [f"- **{escaped(name)}**: {text}." for name, text in VERDICTS.items()]
    kinds = [f"- **{name}**: {text}." for name, text in FAULTS.items()]
    in_rows = {
        title: section.text((rows or {}).get(title, {}), order=order, earlier=known.get(title, ""))
        for title, section in ROWS.items()
    }
    parts = {
        "Words in the tables": "\n".join(words),
        "Faults": "Each happens once.\n\n" + "\n".join(kinds),
        "On real processes": _real(),
        **{title: body for title, body in in_rows.items() if body},
        **tables,
    }
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in parts.items())
    return f"{_TITLE}\n\n{_ABOUT.strip()}\n\n{text}\n"


def _real() -> str:
    rows = [(fault, *words) for fault, words in REAL_FAULTS.items()]
    table = markdown_table(("fault", "how", "what becomes of it"), rows)
    return "\n\n".join([_REAL.strip("\n"), table, _REAL_TOO.strip("\n")])
