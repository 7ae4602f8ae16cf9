"""The fault matrix as tables: on the screen, and as a page."""

from collections.abc import Mapping, Sequence

from flwr_privacy.simulations.reliability import VERDICTS, Cell
from flwr_privacy.simulations.reliability_grid import FAULTS

__all__ = ["page", "sections", "table"]

_TITLE = "# Reliability"

_ABOUT = """
Written by `flwr-privacy reliability`; nothing here is edited by hand. For each scheme a small
federation trains three rounds in one process (the inline engine), once without a fault and once for
each cell of its table with one fault, in the phase of the column and to one client. The noise is
from a seed, so that both trainings can be compared bit for bit.

In every cell, whatever it says, the ledger of each client has an entry for each different answer
that the client gave, and the server's privacy card has a charge for each answer that the card of
the undisturbed training has one for. A cell for which that is not so is a DEFECT. One thing is no
ledger's to know: what was released before somebody lost the file with it ("node lost"); entries
are counted from then on.

Not in the tables: the phase `sync` of MSPDQ, which is asked only without a secure sum, and the
phase `oracle` of FedVS, which is for simulations. UDP has the same phases where it protects
records.
"""

_REAL = """
The tests in `tests/test_deployment.py` start a SuperLink and SuperNodes as processes, with TLS: a
node is stopped and comes back; a node is killed in a run that is then interrupted, and nothing is
left behind; a SuperLink that is killed ends the run with an error. Processes that are killed at
each step of writing a charge are in `tests/flwr_privacy/test_ledger.py`.

In the tables here nodes and server are killed by taking from them what a process loses: a restarted
node has its files only, a server that goes on has its checkpoint. A lost message is told of at
once, as a SuperLink tells of one whose time is over; late and stale replies are waited for, up to
the deadline.
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
    lines = [["fault", *phases], ["---"] * (len(phases) + 1)]
    lines += [[fault, *(verdicts[fault, phase] for phase in phases)] for fault in faults]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sections(text: str) -> dict[str, str]:
    """Return the sections of a page by their titles, in order."""
    found = {}
    for part in text.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        found[title] = body.strip("\n")
    return found


def page(
    matrices: Mapping[str, Sequence[Cell]], *, order: Sequence[str] = (), earlier: str = ""
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
    """
    known = sections(earlier)
    tables = {
        title: table(matrices[title]) if title in matrices else known[title]
        for title in dict.fromkeys((*order, *matrices))
        if title in matrices or title in known
    }
    words = [f"- **{_escaped(name)}**: {text}." for name, text in VERDICTS.items()]
    kinds = [f"- **{name}**: {text}." for name, text in FAULTS.items()]
    parts = {
        "Words in the tables": "\n".join(words),
        "Faults": "Each happens once.\n\n" + "\n".join(kinds),
        "On real processes": _REAL.strip("\n"),
        **tables,
    }
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in parts.items())
    return f"{_TITLE}\n\n{_ABOUT.strip()}\n\n{text}\n"


def _escaped(name: str) -> str:
    return f"`{name}`" if name == "-" else name
