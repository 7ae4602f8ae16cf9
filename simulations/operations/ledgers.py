"""Sums up a node's ledgers: what was released, for which experiment, and what is left of a budget.

An experiment id comes from a server and is shown as the ledger has it: printable ASCII.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from flwr_privacy.accounting import Charge, fitting, spent
from flwr_privacy.errors import InvalidParameterError, check_choice
from flwr_privacy.pipeline.planned_release import UNPROVEN
from flwr_privacy.privacy.ledger import Entry, Ledger, Loss
from flwr_privacy.privacy.policy import UNITS, Policy

__all__ = [
    "CHARGE_COLUMNS",
    "Budget",
    "ExperimentTotals",
    "LedgerSummary",
    "charges",
    "ledger_files",
    "summary_of",
]

DAY = timedelta(days=1)
CHARGE_COLUMNS = (
    *("data_set", "number", "experiment_id", "phase", "server_round", "request", "scheme", "unit"),
    *(
        "time",
        "answered",
        "noise_multiplier",
        "neighbours",
        "mechanism",
        "sampling",
        "gap",
        "count",
    ),
    "digest",
)
"""What `charges` says of each."""


@dataclass(frozen=True, kw_only=True)
class ExperimentTotals:
    """The charges of one experiment to one data set, under one scheme and unit.

    Parameters
    ----------
    experiment_id, scheme, unit, neighbours : str
        For what they are.
    charged, answered : int
        How many there are, and how many have an answer.
    epsilon : float or None
        What they cost together; None if no accountant knows it.
    first, last : str
        Times of the first and the last one, in UTC.
    """

    experiment_id: str
    scheme: str
    unit: str
    neighbours: str
    charged: int
    answered: int
    epsilon: float | None
    first: str
    last: str

    @property
    def unanswered(self) -> int:
        """Charges without an answer, after a crash, a kill or a charged failure."""
        return self.charged - self.answered


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a ledger has spent, and what a policy leaves of it.

    Parameters
    ----------
    delta : float
        At which epsilon is computed: the policy's.
    neighbours : str
        For which neighbours all charges are counted: the policy's (`Policy.relation`).
    epsilon : float or None
        Of all charges together, which `max_epsilon` limits; None if no accountant knows it.
    epsilon_by_unit : dict of str to (float or None)
        The same for each unit of protection that was charged.
    max_epsilon, epsilon_left : float or None
        The policy's limit, and what is left of it; None without a limit. No release costs exactly
        what is left: the node computes the total with each new charge.
    releases, releases_today : int
        Charges so far, and within 24 hours.
    releases_left, releases_left_today : int or None
        What the policy still allows; None without a limit.
    proven : bool
        Whether the cost of every charge is proven. If not, a policy with `max_epsilon` allows
        nothing more.
    """

    delta: float
    neighbours: str
    epsilon: float | None
    epsilon_by_unit: dict[str, float | None]
    max_epsilon: float | None
    epsilon_left: float | None
    releases: int
    releases_today: int
    releases_left: int | None
    releases_left_today: int | None
    proven: bool


@dataclass(frozen=True, kw_only=True)
class LedgerSummary:
    """What a ledger holds.

    Parameters
    ----------
    path : Path
        The file.
    data_set : str
        The data set that it is about.
    experiments : tuple of ExperimentTotals
        In the order of their first charges.
    unanswered : tuple of Entry
        Charges without an answer.
    losses : tuple of Loss
        When the operator went on without charges that are missing, oldest first.
    budget : Budget
        What is spent and left.
    """

    path: Path
    data_set: str
    experiments: tuple[ExperimentTotals, ...]
    unanswered: tuple[Entry, ...]
    losses: tuple[Loss, ...]
    budget: Budget

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain values, for JSON."""
        return {
            "ledger": str(self.path),
            "data_set": self.data_set,
            "experiments": [
                {**asdict(one), "unanswered": one.unanswered} for one in self.experiments
            ],
            "losses": [asdict(loss) for loss in self.losses],
            "budget": asdict(self.budget),
        }


def ledger_files(state: Path, data_set: str | None = None) -> list[Path]:
    """Return the ledgers of a state folder, or that of one data set.

    Raises
    ------
    InvalidParameterError
        If there is none.
    """
    found = sorted(state.glob("*.ledger")) if os.path.isdir(state) else []
    files = {file.stem: file for file in found}
    if not files:
        raise InvalidParameterError("--state", str(state), "a node's state folder with ledgers")
    if data_set is None:
        return list(files.values())
    return [files[check_choice("--data-set", data_set, files)]]


def summary_of(
    file: Path, policy: Policy | None = None, witness: Path | None = None
) -> LedgerSummary:
    """Return what a ledger holds.

    Parameters
    ----------
    file : Path
        ``<data set>.ledger``.
    policy : Policy, optional
        Its node's limits; by default none.
    witness : Path, optional
        Folder of the ledger's witness; by default it is not compared with any.

    Raises
    ------
    LedgerError
        If it cannot be read, or lacks what its witness has seen.
    """
    ledger, policy = Ledger(file, data_set=file.stem, witness=witness).view(), policy or Policy()
    entries, answered = ledger.entries(), ledger.answered()
    unanswered = tuple(entry for n, entry in enumerate(entries) if n not in answered)
    missing = Counter(map(_experiment, unanswered))
    groups: dict[tuple[str, str, str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(_experiment(entry), []).append(entry)
    totals = tuple(
        ExperimentTotals(
            experiment_id=key[0],
            scheme=key[1],
            unit=key[2],
            neighbours=key[3],
            charged=len(group),
            answered=len(group) - missing[key],
            epsilon=_epsilon([entry.charge for entry in group], policy.delta),
            first=min(entry.time for entry in group),
            last=max(entry.time for entry in group),
        )
        for key, group in groups.items()
    )
    return LedgerSummary(
        path=file,
        data_set=file.stem,
        experiments=totals,
        unanswered=unanswered,
        losses=ledger.losses(),
        budget=_budget(entries, policy),
    )


def charges(file: Path) -> list[dict[str, Any]]:
    """Return every charge of a ledger as flat values, in order.

    Raises
    ------
    LedgerError
        If it cannot be read.
    """
    ledger = Ledger(file, data_set=file.stem).view()
    answered = ledger.answered()
    rows = []
    for number, entry in enumerate(ledger.entries()):
        values = entry.to_dict()
        charge = values.pop("charge")
        own = {"data_set": file.stem, "number": number, "answered": number in answered}
        row = {**own, **values, **charge}
        rows.append({column: row[column] for column in CHARGE_COLUMNS})
    return rows


def _budget(entries: Sequence[Entry], policy: Policy) -> Budget:
    epsilon = _counted(entries, policy)
    now = datetime.now(UTC)
    today = sum(now - datetime.fromisoformat(entry.time) < DAY for entry in entries)
    return Budget(
        delta=policy.delta,
        neighbours=policy.relation,
        epsilon=epsilon,
        epsilon_by_unit={
            unit: _counted(of_unit, policy)
            for unit in UNITS
            if (of_unit := [entry for entry in entries if entry.unit == unit])
        },
        max_epsilon=policy.max_epsilon,
        epsilon_left=None
        if policy.max_epsilon is None or epsilon is None
        else max(0.0, policy.max_epsilon - epsilon),
        releases=len(entries),
        releases_today=today,
        releases_left=_left(policy.max_releases, len(entries)),
        releases_left_today=_left(policy.max_releases_per_day, today),
        proven=not any(entry.scheme.endswith(UNPROVEN) for entry in entries),
    )


def _left(limit: int | None, used: int) -> int | None:
    return None if limit is None else max(0, limit - used)


def _counted(entries: Sequence[Entry], policy: Policy) -> float | None:
    """Return what charges cost together, as a policy counts; None if nothing bounds it."""
    try:
        return _epsilon(policy.counted(entry.charge for entry in entries), policy.delta)
    except InvalidParameterError:  # charged for neighbours that the policy does not count
        return None


def _epsilon(own: Sequence[Charge], delta: float) -> float | None:
    """Return what charges cost together; None if no accountant knows it, or it has no bound."""
    try:
        found = spent(own, delta=delta, accountant=fitting(own))
    except InvalidParameterError:  # sampled Laplace noise
        return None
    return found if math.isfinite(found) else None


def _experiment(entry: Entry) -> tuple[str, str, str, str]:
    own = entry.question.experiment_id, entry.scheme
    return (*own, entry.unit, entry.charge.neighbours)
