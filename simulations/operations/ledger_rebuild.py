"""Rebuilds ledgers from their records: to check every line of one, or to convert an old file."""

import json
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from flwr_privacy.accounting import ADD_REMOVE, REPLACE_ONE
from flwr_privacy.pipeline.planned_release import UNPROVEN
from flwr_privacy.privacy.ledger import Entry, Ledger, LedgerView, Loss
from flwr_privacy.privacy.ledger.journal import Journal
from flwr_privacy.privacy.policy import UNITS
from flwr_privacy.wire.files import DamagedFileError, node_file, read_checksummed, write_file
from flwr_privacy.wire.message import EVALUATE, TRAIN

__all__ = ["OLD", "check_lines", "convert"]

OLD = ".v2"
"""Ends the name of the old file that `convert` leaves beside the new one."""

_NEIGHBOURS_2 = {
    **dict.fromkeys(product(("udp", "central-dp"), UNITS, (TRAIN, EVALUATE)), REPLACE_ONE),
    ("m2fdp", "user", TRAIN): REPLACE_ONE,
    **dict.fromkeys([("m2fdp", "record", TRAIN), ("acfl", "record", TRAIN)], ADD_REMOVE),
}
"""By scheme, unit and phase: over which neighbours' distance the noise of version 2 was counted.

Without secret samples: with them a charge stood for several relations.
"""

_MAGIC_2 = b"flwr-privacy ledger\n"


class _UnknownNeighboursError(Exception):
    """A charge of version 2 is of a kind that may be for several neighbours."""


def check_lines(file: Path, ledger: LedgerView) -> None:
    """Check every line of a ledger: numbers, heads, marks and totals.

    A node reads the last lines, and trusts the hashes that vouch for the others.

    Raises
    ------
    LedgerError
        If a line is not what its ledger would have written.
    """
    rebuilt = Journal(file, file.stem)
    for record in ledger.records():
        _add(rebuilt, record)
    if rebuilt.content != ledger.content:
        pairs = zip(rebuilt.content, ledger.content, strict=False)
        place = next((n for n, (a, b) in enumerate(pairs) if a != b), len(rebuilt.content))
        raise rebuilt.error(f"is damaged: from byte {place} on it has other lines than its charges")


def convert(file: Path) -> int:
    """Replace a ledger of version 2 by one of version 3; the old file stays as ``*.ledger.v2``.

    Returns
    -------
    int
        Number of its charges.

    Raises
    ------
    LedgerError
        If it has another version, is damaged, or there is an old file already.
    """
    old = file.with_name(file.name + OLD)
    with Ledger(file, data_set=file.stem).held():
        journal = Journal(file, file.stem)
        with node_file(file, "the privacy ledger"):
            try:
                for record in _records_2(file.stem, read_checksummed(file, _MAGIC_2)):
                    _add(journal, record)
            except _UnknownNeighboursError:
                raise DamagedFileError(
                    f"cannot be converted: version 2 does not say for which neighbours its charge "
                    f"{journal.count} is. Keep the file, begin a new ledger, and lower max_epsilon "
                    "by what this one has"
                ) from None
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                # Without the error's text: it has the values, and they stay here.
                raise DamagedFileError("is malformed, or no ledger of version 2") from error
            os.link(file, old)
            write_file(file, [journal.content], durable=True)
    return journal.count


def _add(journal: Journal, record: Entry | int | Loss) -> None:
    if isinstance(record, Entry):
        lines = journal.charged(record)
    elif isinstance(record, Loss):
        lines = journal.lost(record)
    else:
        lines = journal.answered(record)
    journal.extend(lines)


def _records_2(data_set: str, content: bytes) -> Iterator[Entry | int]:
    """Yield the charges, and the numbers of those that were answered, of a file of version 2."""
    first, *lines = content.splitlines()
    if json.loads(first) != {"version": 2, "data_set": data_set} or not content.endswith(b"\n"):
        raise ValueError("another version or data set")
    for line in lines:
        values = json.loads(line)
        yield values["answered"] if set(values) == {"answered"} else _entry_2(values)


def _entry_2(values: dict[str, Any]) -> Entry:
    """Return a charge of version 2, which does not say for which neighbours it is."""
    scheme = values["scheme"].removesuffix(UNPROVEN)
    phase = EVALUATE if values["phase"] == EVALUATE else TRAIN
    relation = _NEIGHBOURS_2.get((scheme, values["unit"], phase))
    charge = values["charge"]
    if relation is None or charge["sampling"] < 1 or "neighbours" in charge:
        raise _UnknownNeighboursError
    return Entry.from_dict({**values, "charge": {**charge, "neighbours": relation}})
