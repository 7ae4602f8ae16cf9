"""The findings of a verification, the outcome that follows from them, and its exit code."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "FAILED",
    "OUTCOMES",
    "PASSED",
    "UNKNOWN",
    "Finding",
    "Outcome",
    "failed",
    "passed",
    "some",
    "unknown",
]

Result = Literal["passed", "failed", "not checkable"]

PASSED: Result = "passed"
FAILED: Result = "failed"
UNKNOWN: Result = "not checkable"

_SHOWN_NAMES = 3
_LONGEST_NAME = 64


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a verification came to.

    Parameters
    ----------
    name : str
        A word for programs.
    exit_code : int
        Exit code of the command.
    meaning : str
        What it means, as a sentence for people.
    """

    name: str
    exit_code: int
    meaning: str


OUTCOMES = {
    outcome.name: outcome
    for outcome in (
        # What is wrong comes first: the first of these that a finding has counts.
        Outcome(
            name="refused",
            exit_code=27,
            meaning="the card contradicts itself, or something that was compared with it: do not "
            "rely on it",
        ),
        Outcome(
            name="void",
            exit_code=25,
            meaning="the guarantee does not hold in this run: nothing is protected",
        ),
        Outcome(
            name="nothing",
            exit_code=24,
            meaning="there is nothing to verify: the card has no release with a stated epsilon",
        ),
        Outcome(
            name="policy",
            exit_code=26,
            meaning="what is promised is not what was asked for",
        ),
        # What is consistent, the best evidence first.
        Outcome(
            name="verified",
            exit_code=0,
            meaning="the charges are those that every client's node confirms, and none is missing",
        ),
        Outcome(
            name="simulated",
            exit_code=0,
            meaning="consistent; the clients are simulated, so there are no nodes whose word could "
            "be checked",
        ),
        Outcome(
            name="signed",
            exit_code=23,
            meaning="consistent up to heads that the nodes signed; later charges could be missing, "
            "because the server chose which heads to show (--head or --ledger: from the nodes)",
        ),
        Outcome(
            name="self-declared",
            exit_code=22,
            meaning="consistent with signed heads, but only the card says whose keys these are "
            "(--pins: the keys from the nodes' operators)",
        ),
        Outcome(
            name="consistent",
            exit_code=21,
            meaning="consistent with the server's own files; no node has confirmed it "
            "(--pins, --head and --ledger: evidence from the nodes)",
        ),
        Outcome(
            name="arithmetic",
            exit_code=20,
            meaning="the charges on the card give the epsilon that it states; whether charges are "
            "missing cannot be checked from a card alone",
        ),
    )
}
"""All outcomes by name."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Parameters
    ----------
    check : str
        A word for the check.
    result : {"passed", "failed", "not checkable"}
        Its result.
    detail : str
        What was found, or why it could not be checked.
    outcome : str, default "refused"
        The outcome that follows if it failed.
    """

    check: str
    result: Result
    detail: str
    outcome: str = "refused"


def passed(check: str, detail: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding(check=check, result=PASSED, detail=detail)


def unknown(check: str, detail: str) -> Finding:
    """Return the finding of a check that could not be made."""
    return Finding(check=check, result=UNKNOWN, detail=detail)


def failed(check: str, detail: str, outcome: str = "refused") -> Finding:
    """Return the finding of a check that failed."""
    return Finding(check=check, result=FAILED, detail=detail, outcome=outcome)


def some(names: Collection[str]) -> str:
    """Return some names of clients for a sentence; they may come from an adversary.

    Examples
    --------
    >>> some(["ward-7"]), some(["d", "c", "b", "a"])
    ("client 'ward-7'", "4 clients ('a', 'b', 'c', ...)")
    """
    shown: Sequence[str] = sorted(names)[:_SHOWN_NAMES]
    told = ", ".join(repr(name[:_LONGEST_NAME]) for name in shown)
    if len(names) == 1:
        return f"client {told}"
    return f"{len(names)} clients ({told}{', ...' if len(names) > len(shown) else ''})"
