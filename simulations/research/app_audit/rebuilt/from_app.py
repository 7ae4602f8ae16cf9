"""Findings from the app as it is: which labels a client has more of, how many records."""

import re
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from ..findings import LEAK, NOTE, Finding, Table
from ..transcript import Exchange
from .case import Case, Trained
from .from_few import last_layer
from .labels import class_moves, label_shares
from .reports import SERVER, SIGNIFICANCE, left_out

__all__ = ["label_histograms", "number_of_records"]

Vectors = NDArray[np.float64]

_COUNTS = re.compile(r"num.?examples|num.?samples|n.?samples|dataset.?size|num.?records", re.I)
_CLIENTS = 3  # of a round, from which on one can be compared with the others
_TRIALS = 4999


def number_of_records(case: Case) -> Finding:
    """Say whether clients tell how many records they have."""
    name = "number of records"
    told: dict[str, list[tuple[int | None, float]]] = defaultdict(list)
    nodes = set()
    for one in case.as_is.trainings():
        nodes.add(one.node)
        for metric, value in _counts(one):
            true = None if one.training is None else one.training.records
            told[metric].append((true, value))
    if not nodes:
        return left_out(name, "no client trained")
    if not told:
        return Finding(
            part="rebuilt",
            name=name,
            verdict=NOTE,
            said="No number with the name of a count is sent. The size of an update may still "
            "tell it; this was not tried.",
            adversary=SERVER,
            chance="not measured",
            numbers={"clients": len(nodes)},
        )
    rows = [
        [
            metric,
            len(pairs),
            sum(true == value for true, value in pairs),
            min(value for _, value in pairs),
            max(value for _, value in pairs),
        ]
        for metric, pairs in sorted(told.items())
    ]
    most = max(len(pairs) for pairs in told.values())
    if not any(_tells(pairs) for pairs in told.values()):
        return Finding(
            part="rebuilt",
            name=name,
            verdict=NOTE,
            said=f"All clients send the same {', '.join(sorted(told))}, which is not the number of "
            "records that any of them trained on.",
            adversary=SERVER,
            chance="none: it is in the message",
            numbers={"clients": len(nodes)},
        )
    return Finding(
        part="rebuilt",
        name=name,
        verdict=LEAK,
        said=f"{most} answers of {len(nodes)} clients say how many records they have, in the clear "
        f"({', '.join(sorted(told))}).",
        adversary=SERVER,
        chance="none: it is in the message",
        numbers={"clients": len(nodes), "answers that tell": most},
        table=Table(
            ("metric", "answers", "equal to the records trained on", "least", "most"), rows
        ),
    )


def _tells(pairs: list[tuple[int | None, float]]) -> bool:
    """Tell whether some answers' counts differ, or are the true ones, or may be."""
    same = len({value for _, value in pairs}) == 1
    return not same or any(true is None or true == value for true, value in pairs)


def label_histograms(case: Case) -> Finding:
    """Say how well the updates tell which labels a client has more of than the others."""
    name = "label histograms"
    moved: dict[int, dict[int, tuple[Vectors, Vectors]]] = defaultdict(dict)
    for one in case.trained(case.as_is):
        pair = _moves_and_shares(case, one)
        if pair is not None:
            moved[one.exchange.round][one.exchange.node] = pair
    if not moved and not any(True for _ in case.trained(case.as_is)):
        return left_out(name, case.unreadable(case.as_is))
    rounds = {r: list(those.values()) for r, those in moved.items() if len(those) >= _CLIENTS}
    if not rounds:
        return left_out(
            name, f"no round has updates of {_CLIENTS} clients with labels that are classes"
        )
    above = [_less_mean([moves for moves, _ in those]) for those in rounds.values()]
    truth = [_less_mean([shares for _, shares in those]) for those in rounds.values()]
    if not any(np.any(part) for part in truth):
        return left_out(name, "all clients have the same labels")
    found = _correlation(above, truth)
    draws = case.draws("histograms")
    by_chance = [
        _correlation(above, [part[draws.permutation(len(part))] for part in truth])
        for _ in range(_TRIALS)
    ]
    p = (1 + sum(value >= found for value in by_chance)) / (1 + _TRIALS)
    signs, clear = _signs(above, truth)
    errors = [_gap(label_shares(m), s) for those in rounds.values() for m, s in those]
    blind = [_gap(s.mean(0), own) for s in map(_shares, rounds.values()) for own in s]
    leaks = p < SIGNIFICANCE and found > 0
    said = (
        f"Whether a client has more or less of a label than the average one is right in {signs} of "
        f"{clear} cases, from the last layer's update; the correlation with the truth is "
        f"{found:.2f}"
    )
    return Finding(
        part="rebuilt",
        name=name,
        verdict=LEAK if leaks else NOTE,
        said=said + ("." if leaks else ": no more than chance."),
        adversary=SERVER,
        chance=f"half of the cases, and a correlation of 0; with the clients exchanged, {p:.2g} of "
        "the trials reach what was found",
        numbers={
            "right": signs,
            "cases": clear,
            "correlation": found,
            "p": p,
            "error of the histogram": float(np.mean(errors)),
            "error of the average client's": float(np.mean(blind)),
        },
    )


def _counts(one: Exchange) -> list[tuple[str, float]]:
    """Return the numbers of an answer whose name is that of a count."""
    return [
        (name, float(value))
        for record in ({} if one.reply is None else one.reply).values()
        for name, value in record.items()
        if isinstance(value, int | float) and _COUNTS.search(name)
    ]


def _moves_and_shares(case: Case, one: Trained) -> tuple[Vectors, Vectors] | None:
    """Return what the last layer's update says of the classes, and their shares."""
    if not one.training.histogram or not len(one.training.inputs):
        return None
    layer, classes = last_layer(case, one)
    moves = None if layer is None else class_moves(one.upload, layer)
    if moves is None or classes < 2 or max(one.training.histogram) >= classes:
        return None
    counts = np.zeros(classes)
    for label, count in one.training.histogram.items():
        counts[max(0, label)] += count
    return moves, counts / counts.sum()


def _less_mean(rows: list[Vectors]) -> Vectors:
    table = np.array(rows)
    less: Vectors = table - table.mean(axis=0)
    return less


def _correlation(one: list[Vectors], two: list[Vectors]) -> float:
    """Return the correlation of all rounds; each round has a unit of its own."""
    pairs = [(a / max(float(np.linalg.norm(a)), 1e-300), b) for a, b in zip(one, two, strict=True)]
    first, second = (np.concatenate([part[i].reshape(-1) for part in pairs]) for i in (0, 1))
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / lengths if lengths else 0.0


def _signs(one: list[Vectors], two: list[Vectors]) -> tuple[int, int]:
    """Return how many signs agree, and how many there are."""
    agree = sum(int(np.count_nonzero(a * b > 0)) for a, b in zip(one, two, strict=True))
    return agree, sum(int(np.count_nonzero(b)) for b in two)


def _shares(those: list[tuple[Vectors, Vectors]]) -> Vectors:
    return np.array([shares for _, shares in those])


def _gap(one: Vectors, two: Vectors) -> float:
    """Return the total variation distance of two histograms, from 0 to 1."""
    return float(np.abs(one - two).sum()) / 2
