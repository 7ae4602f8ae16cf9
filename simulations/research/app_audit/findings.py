"""What an audit finds: each finding names its adversary, and what chance alone would give."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flwr_privacy.errors import InvalidParameterError, check_choice

__all__ = ["PARTS", "VERDICTS", "Finding", "Table"]

PARTS = {
    "left": "What left each node",
    "rebuilt": "What can be rebuilt",
    "promise": "What the promise is worth",
    "advice": "What to do",
}
"""The parts of a report, and their headings."""

LEAK, NOTE, LEFT_OUT = "leak", "note", "left out"
REFUTED, NOT_REFUTED, CANNOT_TELL = "refuted", "not refuted", "cannot tell"

VERDICTS = (LEAK, REFUTED, NOT_REFUTED, CANNOT_TELL, NOTE, LEFT_OUT)
"""What a finding can be. "Private" is none of them."""


@dataclass(frozen=True)
class Table:
    """A table of a finding.

    Parameters
    ----------
    columns : sequence of str
        The headings.
    rows : sequence of sequences
        A cell for each column: text, a number, or None.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding.

    Parameters
    ----------
    part : str
        A key of `PARTS`.
    name : str
        Its name, unique in a report and the same in all reports.
    verdict : str
        One of `VERDICTS`.
    said : str
        The finding in a sentence or two.
    adversary : str
        Who learns it: what they see, and what they know.
    chance : str
        What somebody who saw nothing would reach, in the same measure.
    numbers : mapping of str to number, text or None
        What was measured.
    table : Table, optional
        More of it.
    pictures : mapping of str to str
        Captions by the name of a PNG file in the audit's folder.
    text : str, default ""
        Lines that stay as they are, as a diff.
    """

    part: str
    name: str
    verdict: str
    said: str
    adversary: str
    chance: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    table: Table | None = None
    pictures: Mapping[str, str] = field(default_factory=dict)
    text: str = ""

    def __post_init__(self) -> None:
        check_choice("part", self.part, tuple(PARTS))
        check_choice("verdict", self.verdict, VERDICTS)
        for name in ("said", "adversary", "chance"):
            if not getattr(self, name):
                raise InvalidParameterError(name, "", "a sentence: every finding says it")

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can hold of it, which is all."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Finding":
        """Return a finding as it was before `as_json`."""
        table = values.get("table")
        return cls(**{**values, "table": None if table is None else Table(**table)})
