"""The fault matrix: trains with each fault in each phase, and gives each training a verdict."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from flwr_privacy.wire.message import HELLO

from .federations import SmallFederation, Spot
from .grid import FAULTS, Strike
from .training import Outcome, strike_at, train

__all__ = [
    "DEFECT",
    "LEFT_OUT",
    "REFUSED",
    "SKIPPED",
    "VERDICTS",
    "Cell",
    "cell_of",
    "clean_training",
    "effective",
    "matrix",
    "silencing",
    "silent_trainings",
    "verdict_of",
]

VERDICTS = {
    "exact": "the model and its history are those of a training without the fault, bit for bit",
    "left out": "a round, an evaluation or the training went on without the client, and the "
    "history or the log says so. Where the answer is lost or damaged, the model is bit for bit "
    "that of a training in which the request is lost. After a damaged hello, or one in another "
    "node's name, the server asks the client again in a later round",
    "skipped": "a round was given up, the model stayed as it was, and the history says so",
    "refused": "the training ended with an error of the library that says why",
    "-": "the fault cannot happen here: the reply has nothing of the kind, or nothing is written "
    "to a ledger",
    "DEFECT": "none of these, or a ledger has fewer entries than answers were released",
}

EXACT, LEFT_OUT, SKIPPED, REFUSED, NOTHING, DEFECT = VERDICTS

_SILENCING = frozenset(
    {"drop", "crash", "stranger", "corrupt", "nan", "infinity", "reshape", "disk full"}
)
"""Faults after which the server has nothing of the answer: as if it had asked nothing."""

_COUNTS = ("asked", "answered", "accumulated", "evaluated")
_SCHEME_COUNTS = ("dealers", "answers", "sum_opened", "sum_dealers", "sum_cohort")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the matrix.

    Parameters
    ----------
    fault, phase : str
        What happened, and where.
    verdict : str
        A key of `VERDICTS`.
    why : str, default ""
        What is wrong, or what the error says.
    """

    fault: str
    phase: str
    verdict: str
    why: str = ""


def verdict_of(
    clean: Outcome, outcome: Outcome, *, silent: Iterable[Outcome] | None = None
) -> tuple[str, str]:
    """Return the verdict on a training with faults, and why.

    Parameters
    ----------
    clean : Outcome
        The training without them.
    outcome : Outcome
        The training with them.
    silent : iterable of Outcome, optional
        Trainings in which the requests are lost there: `silent_trainings`. With them, one that left
        the clients out must end at the model of one of them, where nothing of the answers came.
    """
    if missing := _undercounted(clean, outcome):
        return DEFECT, missing
    if outcome.broken:
        return DEFECT, outcome.error
    if outcome.error:
        return REFUSED, outcome.error
    if not outcome.struck:
        return DEFECT, "the fault did not happen"
    strikes = effective(clean, outcome)
    if not strikes:
        return NOTHING, ""
    if not all(np.isfinite(array).all() for array in outcome.model.values()):
        return DEFECT, "the model is not finite"
    if _same(clean, outcome):
        return EXACT, ""
    lines = list(zip(clean.history, outcome.history, strict=False))
    if any(mine.get("skipped") and not was.get("skipped") for was, mine in lines):
        return SKIPPED, ""
    if any(_fewer(was, mine) for was, mine in lines) or set(outcome.warnings) - set(clean.warnings):
        if (
            silent is not None
            and silencing(strikes)
            and not any(_same_model(one, outcome) for one in silent)
        ):
            return DEFECT, "the model is not that of a training in which the request is lost"
        return LEFT_OUT, ""
    return DEFECT, "the model or its history is another one, and nothing says why"


def effective(clean: Outcome, outcome: Outcome) -> list[Strike]:
    """Return the faults that happened and had something to damage, or a ledger to keep closed."""
    charged = {place[:2] for place in clean.charges}
    return [
        one
        for one in outcome.struck
        if one not in outcome.empty
        and (one.fault != "disk full" or (one.client, one.phase) in charged)
    ]


def silent_trainings(federation: SmallFederation, strikes: Sequence[Strike]) -> Iterator[Outcome]:
    """Yield the trainings in which requests are lost: each once, or whenever it is sent."""
    for again in product((False, True), repeat=len(strikes)):
        yield train(
            federation,
            *(
                replace(one, fault="lost request", again=ever)
                for one, ever in zip(strikes, again, strict=True)
            ),
        )


def silencing(strikes: Sequence[Strike]) -> bool:
    """Tell whether the server has nothing of any of the answers, as if it had not asked."""
    return all(
        strike.fault in _SILENCING
        and not (strike.phase == HELLO and strike.fault in ("corrupt", "stranger"))
        for strike in strikes
    )


def cell_of(
    federation: SmallFederation,
    clean: Outcome,
    spot: Spot,
    fault: str,
    *,
    silent: Iterable[Outcome] | None = None,
) -> Cell:
    """Train for one cell and return it; the parameters are those of `verdict_of`."""
    outcome = train(federation, strike_at(spot, fault))
    verdict, why = verdict_of(clean, outcome, silent=silent)
    return Cell(fault=fault, phase=spot.name or spot.phase, verdict=verdict, why=why)


def clean_training(federation: SmallFederation) -> Outcome:
    """Return the training without a fault.

    Raises
    ------
    RuntimeError
        If it fails, or ends at the model that it begins with: who is left out would not be missed.
    """
    clean = train(federation)
    if clean.error:
        raise RuntimeError(f"{federation.title}: without a fault it ends with {clean.error}")
    untrained = {name: array.numpy() for name, array in federation.arrays().items()}
    if _same_model(clean, Outcome(model=untrained)):
        raise RuntimeError(f"{federation.title}: the training does not move the model")
    return clean


def matrix(
    federation: SmallFederation,
    *,
    faults: Sequence[str] = tuple(FAULTS),
    told: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """Return all cells of a federation, or those of some faults.

    Parameters
    ----------
    federation : SmallFederation
        The scheme.
    faults : sequence of str
        Keys of `FAULTS`.
    told : callable, optional
        Gets each cell when it is done.

    Raises
    ------
    RuntimeError
        If the training without a fault is of no use, as in `clean_training`, or asks nothing in
        one of the phases.
    """
    clean = clean_training(federation)
    asked = {key[1:3] for key in clean.asked}
    cells = []
    for spot in federation.spots:
        if (spot.phase, spot.server_round) not in asked:
            raise RuntimeError(f"{federation.title}: no request of phase {spot.phase}")
        silent = list(silent_trainings(federation, [strike_at(spot, "lost request")]))
        for fault in faults:
            cells.append(cell_of(federation, clean, spot, fault, silent=silent))
            told(cells[-1])
    return cells


def _undercounted(clean: Outcome, outcome: Outcome) -> str:
    """Return whose ledger, or which answer of the card, does not have what was released.

    Where several answers of a round cost one charge without a fault (sealed ones, which leave
    their zone as one average), one charge covers one answer to each of them.
    """
    charged = {place[:2] for place in clean.charges}
    shared = {place[:2] for place, charge in clean.charges.items() if _given(clean, place) > charge}
    for place in sorted({key[:3] for key in outcome.answers}):
        if place[:2] not in charged:
            continue
        client, phase, server_round = place
        given = _given(outcome, place, each=place[:2] not in shared)
        if given > outcome.charges[place]:
            return (
                f"round {server_round}: client {client} gave {given} answers of phase {phase}, "
                f"its ledger has {outcome.charges[place]}"
            )
    carded = {key[:2] for key in clean.carded}
    carded -= {key[:2] for key in clean.requests - clean.carded}
    told = {key for key in outcome.requests if key[:2] in carded}
    if not outcome.error and (missing := told - outcome.carded):
        return f"the privacy card lacks {sorted(missing)}"
    return ""


def _given(outcome: Outcome, place: tuple[str, str, int], *, each: bool = True) -> int:
    """Return how many answers of a round were given: to all requests, or the most to one."""
    counts = [count for key, count in outcome.answers.items() if key[:3] == place]
    return sum(counts) if each else max(counts, default=0)


def _same(clean: Outcome, outcome: Outcome) -> bool:
    told = ("round", "skipped", "train", "evaluate", "server")
    return (
        _same_model(clean, outcome)
        and len(clean.history) == len(outcome.history)
        and all(
            {key: was.get(key) for key in told} == {key: mine.get(key) for key in told}
            for was, mine in zip(clean.history, outcome.history, strict=True)
        )
    )


def _same_model(one: Outcome, other: Outcome) -> bool:
    return one.model.keys() == other.model.keys() and all(
        array.dtype == one.model[name].dtype and np.array_equal(array, one.model[name])
        for name, array in other.model.items()
    )


def _fewer(was: Mapping[str, Any], mine: Mapping[str, Any]) -> bool:
    """Tell whether a line of the history says that somebody was left out."""
    if any(mine.get(key, 0) < was.get(key, 0) for key in _COUNTS):
        return True
    if mine.get("refused") or mine.get("late", 0) > was.get("late", 0):
        return True
    numbers, before = mine.get("scheme", {}), was.get("scheme", {})
    return any(numbers.get(key, 0) < before.get(key, 0) for key in _SCHEME_COUNTS)
