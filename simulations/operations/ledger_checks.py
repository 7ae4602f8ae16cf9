"""Checks a node's ledgers: lines, witness, rights, clock, and whether the policy allows them."""

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from flwr_privacy.errors import DeclinedError, LedgerError
from flwr_privacy.pipeline.planned_release import UNPROVEN
from flwr_privacy.privacy.ledger import Entry, Ledger
from flwr_privacy.privacy.policy import Policy

from .checks import FAIL, OK, WARN, Check, others_may
from .ledger_rebuild import check_lines
from .ledger_text import loss_text
from .ledgers import LedgerSummary, ledger_files, summary_of

__all__ = ["check_ledgers"]

CLOCK_ROOM = timedelta(minutes=5)
NEARLY_SPENT = 0.9
_ROUNDING = 1e-9  # relative; what float64 may move a sum of charges


def check_ledgers(
    state: Path,
    policy: Policy | None = None,
    data_set: str | None = None,
    witness: Path | None = None,
) -> list[Check]:
    """Check the ledgers of a state folder, or that of one data set.

    Parameters
    ----------
    state : Path
        The folder that a node names as ``privacy-state``.
    policy : Policy, optional
        The node's limits; by default the charges are not compared with any.
    data_set : str, optional
        The data set.
    witness : Path, optional
        The folder that a node names as ``privacy-witness``; by default the ledgers are not compared
        with any.

    Raises
    ------
    InvalidParameterError
        If there is no ledger.
    """
    files = ledger_files(state, data_set)
    return [check for file in files for check in _checks(file, policy, witness)]


def _checks(file: Path, policy: Policy | None, witness: Path | None) -> Iterator[Check]:
    name = f"ledger {file.stem}"
    try:
        yield _rights(name, file)
        summary = summary_of(file, policy, witness)
        ledger = Ledger(file, data_set=file.stem).view()
        check_lines(file, ledger)
        entries = ledger.entries()
    except LedgerError as error:
        yield Check(name, FAIL, str(error))
        return
    except OSError as error:
        yield Check(name, FAIL, f"{file} cannot be read: {error.strerror}")
        return
    told = (
        "no witness is named that could miss some" if witness is None else "its witness misses none"
    )
    yield Check(name, OK, f"{len(entries)} charges can be read, and {told}")
    yield from (Check(name, WARN, loss_text(loss)) for loss in summary.losses)
    yield _answers(name, summary)
    yield _clock(name, entries)
    if policy is not None:
        yield from _budget(name, summary, policy)
        yield _allowed(name, entries, policy)


def _rights(name: str, file: Path) -> Check:
    folder = file.resolve().parent
    if others_may(file):
        return Check(name, FAIL, f"other users may use it: chmod 600 {file}")
    if others_may(folder, "w"):
        return Check(name, FAIL, f"other users may replace it: chmod 700 {folder}")
    if os.stat(file).st_nlink > 1:
        return Check(name, FAIL, "the file has a second name (a hard link), which has its own lock")
    return Check(name, OK, "its owner alone may use it")


def _answers(name: str, summary: LedgerSummary) -> Check:
    if not summary.unanswered:
        return Check(name, OK, "every charge has its answer")
    last = summary.unanswered[-1]
    return Check(
        name,
        WARN,
        f"{len(summary.unanswered)} charges without an answer, after a crash, a kill or a training "
        f"that failed (the last one: {last.question.phase} of round {last.question.server_round}, "
        f"{last.time}); the log of the node at that time says why",
    )


def _clock(name: str, entries: tuple[Entry, ...]) -> Check:
    now = datetime.now(UTC)
    ahead = [e.time for e in entries if datetime.fromisoformat(e.time) > now + CLOCK_ROOM]
    if ahead:
        detail = f"a charge of {max(ahead)} is in the future: this clock is or was wrong"
        return Check(name, WARN, f"{detail} (max_releases_per_day counts by it)")
    return Check(name, OK, "no charge is in the future")


def _budget(name: str, summary: LedgerSummary, policy: Policy) -> Iterator[Check]:
    budget = summary.budget
    if policy.max_epsilon is None:
        yield Check(name, WARN, "the policy has no max_epsilon: nothing limits what is released")
    elif budget.epsilon is None:
        yield Check(name, FAIL, "no accountant bounds the charges: max_epsilon is not kept")
    elif not budget.proven:
        yield Check(
            name,
            WARN,
            "it has releases whose cost is not proven: under max_epsilon nothing more is released",
        )
    else:
        text = f"epsilon {budget.epsilon:.4g} of {policy.max_epsilon:.4g} at delta {policy.delta:g}"
        if budget.epsilon > policy.max_epsilon * (1 + _ROUNDING):
            yield Check(name, FAIL, f"{text}: more than the policy allows was released")
        elif budget.epsilon >= NEARLY_SPENT * policy.max_epsilon:
            yield Check(name, WARN, f"{text}: nearly spent")
        else:
            yield Check(name, OK, text)
    for limit, used, key in (
        (policy.max_releases, budget.releases, "max_releases"),
        (policy.max_releases_per_day, budget.releases_today, "max_releases_per_day"),
    ):
        if limit is not None:
            status = FAIL if used > limit else WARN if used == limit else OK
            yield Check(name, status, f"{used} of {key} = {limit}")


def _allowed(name: str, entries: tuple[Entry, ...], policy: Policy) -> Check:
    """Compare each charge with the policy as it is now; it may have been another one then."""
    refused: list[str] = []
    for entry in entries:
        try:
            policy.check(
                scheme=entry.scheme.removesuffix(UNPROVEN),
                unit=entry.unit,
                noise_multiplier=entry.charge.noise_multiplier,
                neighbours=entry.charge.neighbours,
            )
        except DeclinedError as error:
            refused.append(str(error))
    if refused:
        detail = f"{len(refused)} charges that the policy does not allow now ({refused[-1]})"
        return Check(name, WARN, detail)
    return Check(
        name, OK, "the policy allows the noise, scheme, unit and neighbours of every charge"
    )
