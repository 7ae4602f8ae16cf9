"""A witness of a ledger on another volume: how long the ledger was, and the hash over all of it.

After each write to the ledger the witness is written too. A ledger that was set back to an older
copy, cut, deleted or replaced does not contain what the witness has seen, and is refused.

Guarantee. Adversary: whoever can change, replace or delete the ledger's file and not the witness's.
Covered: every change to what was in the ledger when the last write to it returned. Not covered:
whoever changes both, such as a copy of the whole machine that is put back.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from flwr_privacy.errors import LedgerError, check_integer
from flwr_privacy.wire.files import DamagedFileError, read_checksummed, write_checksummed

from .journal import Journal

__all__ = ["Seen", "Witness"]

_MAGIC = b"flwr-privacy witness 1\n"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a witness has seen of a ledger.

    Parameters
    ----------
    length : int
        Bytes of the file.
    charges : int
        Charges in it.
    chain : str
        The hash over these bytes: 64 hexadecimal digits.

    Raises
    ------
    InvalidParameterError
        If a number is not allowed.
    """

    length: int
    charges: int
    chain: str

    def __post_init__(self) -> None:
        check_integer("length", self.length, minimum=0)
        check_integer("charges", self.charges, minimum=0)

    @classmethod
    def of(cls, journal: Journal) -> "Seen":
        """Return what there is to see of a ledger."""
        return cls(length=len(journal.content), charges=journal.count, chain=journal.chain().hex())


class Witness:
    """The witness of a data set's ledger.

    Parameters
    ----------
    folder : Path
        An existing folder, on another volume than the ledger: what sets back the one must not set
        back the other.
    data_set : str
        Name of the data set: the file is ``<data set>.witness``. No two nodes have one folder.
    durable : bool
        Whether it outlives a power cut.

    Raises
    ------
    LedgerError
        If there is no such folder.
    """

    def __init__(self, folder: Path, *, data_set: str, durable: bool = True) -> None:
        if not folder.is_dir():
            raise LedgerError(f"the witness has no folder: there is no folder {folder}")
        self.path = folder / f"{data_set}.witness"
        self.durable = durable

    def seen(self) -> Seen | None:
        """Return what was seen of the ledger; None if nothing was.

        Raises
        ------
        LedgerError
            If it cannot be read or is damaged.
        """
        try:
            return Seen(**json.loads(read_checksummed(self.path, _MAGIC)))
        except FileNotFoundError:
            return None
        except (DamagedFileError, ValueError, TypeError) as error:
            text = error if isinstance(error, DamagedFileError) else "is malformed"
            raise LedgerError(f"the witness {self.path} {text}") from error
        except OSError as error:
            raise LedgerError(
                f"the witness {self.path} cannot be read: {error.strerror}"
            ) from error

    def write(self, seen: Seen) -> None:
        """Write what is seen of the ledger.

        Raises
        ------
        LedgerError
            If it cannot be written.
        """
        content = json.dumps(vars(seen)).encode("ascii")
        try:
            write_checksummed(self.path, _MAGIC, content, durable=self.durable)
        except OSError as error:
            raise LedgerError(
                f"the witness {self.path} cannot be written: {error.strerror}"
            ) from error

    def check(self, seen: Seen | None, journal: Journal) -> None:
        """Refuse a ledger that does not contain what was seen of it.

        Parameters
        ----------
        seen : Seen or None
            What `seen` said before the ledger was read: it may be written at the same time.
        journal : Journal
            The ledger.

        Raises
        ------
        LedgerError
            If it does not.
        """
        missing = self.missing(seen, journal)
        if missing:
            command = "witness` begins one" if seen is None else "accept-loss` goes on without them"
            raise journal.error(f"{missing}. `flwr-privacy ledger {command}")

    def missing(self, seen: Seen | None, journal: Journal) -> str:
        """Return what of a ledger is missing, to be written after the ledger's name; or nothing."""
        if seen is None:
            if not journal.content:
                return ""
            return f"has {journal.count} charges, and its witness {self.path} is not there"
        saw = f"its witness saw {seen.charges} charges"
        if seen.length > 0 and not journal.content:
            return f"is gone or empty, and {saw}"
        if seen.length > len(journal.content):
            return f"was set back to an older state: {saw}, it has {journal.count}"
        if journal.chain(seen.length).hex() != seen.chain:
            return f"is another branch: {saw}, not all of which it has (it has {journal.count})"
        return ""
