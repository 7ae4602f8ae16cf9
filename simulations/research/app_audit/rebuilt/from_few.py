"""Findings from clients with few records: their rows, their labels, their inputs."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from ..findings import LEAK, NOTE, Finding, Table
from . import labels as label_attack
from .case import Case, Trained
from .linear_rows import EXACT, LEVEL, candidates, compared
from .networks import filled, linear_inputs
from .reports import SERVER, SIGNIFICANCE, left_out

__all__ = ["labels_of_few", "last_layer", "rows"]

_LEAST_WIDTH = 4  # inputs of a layer below which a candidate may be exact by chance
_TRIALS = 4999  # of guessing


@dataclass
class _Row:
    """A row of a table in the making."""

    total: int = 0
    exact: int = 0
    near: int = 0
    missed: int = 0
    errors: list[float] = field(default_factory=list)
    similarities: list[float] = field(default_factory=list)
    guessed: list[float] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)


def rows(case: Case) -> Finding:
    """Say which inputs of the first linear layer can be read from the updates of few records."""
    name = "rows of linear layers"
    table: dict[tuple[int, str], _Row] = defaultdict(_Row)
    raw = True
    widths = set()
    for one in _trained(case):
        net = filled(case.model, one.upload.start)
        truths = linear_inputs(net, one.training.inputs)
        others = case.others(one.training.inputs)
        guesses = linear_inputs(net, others) if len(others) else {}
        layers, raw = _first_layers(truths, one)
        for layer in layers:
            truth = truths[layer]
            widths.add(truth.shape[1])
            blind = guesses.get(layer, np.zeros((0, truth.shape[1])))
            found = compared(candidates(one.upload, layer), truth, blind)
            row = table[one.training.records, layer]
            row.total += len(truth)
            row.exact += int(found.exact.sum())
            row.near += int(found.near.sum())
            row.missed += int(found.missed.sum())
            row.errors += found.errors.tolist()
            row.similarities += found.similarities.tolist()
            row.guessed += found.guessed.tolist()
            row.kinds.add(one.kind)
    if not table:
        return left_out(name, "no upload of a client with few records has a linear layer's update")
    parts = list(table.values())
    total, exact, near, missed = (
        sum(getattr(part, value) for part in parts)
        for value in ("total", "exact", "near", "missed")
    )
    p = float(binom.sf(near - 1, near + missed, 0.5)) if near else 1.0
    leaks = (exact > 0 and min(widths) >= _LEAST_WIDTH) or p < SIGNIFICANCE
    what = "records" if raw else "records' features (what the layers before make of them)"
    said = (
        f"{exact} of {total} {what} are exact rows of the update of {_named(table)}, at 1 to "
        f"{max(records for records, _ in table)} records a client; {near} come to a similarity of "
        f"{LEVEL} that no guess has."
    )
    if not leaks:
        said += " This attack found no more than guessing does; better ones may."
    return Finding(
        part="rebuilt",
        name=name,
        verdict=LEAK if leaks else NOTE,
        said=said,
        adversary=SERVER,
        chance=f"as many records of other clients as there are candidates: {missed} of {total} "
        f"come to {LEVEL} where the attack does not, none is exact",
        numbers={
            "records": total,
            "exact": exact,
            "recovered": near,
            "guessed alone": missed,
            "p": p,
            "exact below": EXACT,
        },
        table=Table(
            ("records", "layer", "seen", "exact", "error", "similarity", "by guessing", "upload"),
            [
                [
                    records,
                    layer,
                    row.total,
                    row.exact,
                    _short(row.errors),
                    _short(row.similarities),
                    _short(row.guessed),
                    "; ".join(sorted(row.kinds)),
                ]
                for (records, layer), row in sorted(table.items())
            ],
        ),
    )


def labels_of_few(case: Case) -> Finding:
    """Say how many labels of few records can be read from the updates."""
    name = "labels of few records"
    right: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    seen: list[tuple[int, NDArray[np.int64]]] = []
    classes = 0
    for one in _trained(case):
        layer, classes = last_layer(case, one)
        moves = None if layer is None else label_attack.class_moves(one.upload, layer)
        truth = one.training.labels
        whole = truth.ndim == 1 and np.issubdtype(truth.dtype, np.integer)
        if moves is None or not whole or len(truth) != one.training.records:
            continue
        if len(truth) == 0 or truth.max() >= len(moves) or len(moves) < 2:
            continue
        counts = np.bincount(truth, minlength=len(moves))
        found = label_attack.overlap(label_attack.label_counts(moves, len(truth)), counts)
        row = right[len(truth)]
        row[0] += 1
        row[1] += len(truth)
        row[2] += found
        seen.append((len(truth), counts))
    if not seen:
        return left_out(name, "no labels that are classes, or no last linear layer, were seen")
    totals, most = _guesses(case, seen, classes)
    total, found = sum(n for n, _ in seen), sum(row[2] for row in right.values())
    p = (1 + int(np.count_nonzero(totals >= found))) / (1 + len(totals))
    chance = max(float(totals.mean()), most)
    leaks = p < SIGNIFICANCE and found > most
    return Finding(
        part="rebuilt",
        name=name,
        verdict=LEAK if leaks else NOTE,
        said=f"{found} of {total} labels of clients with few records follow from the update of the "
        "last layer alone" + ("." if leaks else ": no more than by guessing."),
        adversary=SERVER,
        chance=f"{chance:.1f} of {total}: the better of drawing labels as often as all clients "
        f"have them, and of saying the most frequent one; p = {p:.2g}",
        numbers={"records": total, "right": found, "by guessing": chance, "p": p},
        table=Table(
            ("records", "clients", "labels", "right"),
            [[records, *values] for records, values in sorted(right.items())],
        ),
    )


def last_layer(case: Case, one: Trained) -> tuple[str | None, int]:
    """Return the name of the linear layer that is used last, and its number of outputs."""
    net = filled(case.model, one.upload.start)
    layers = list(linear_inputs(net, one.training.inputs))
    layer = layers[-1] if layers else None
    weight = None if layer is None else one.upload.start.get(f"{layer}.weight")
    return (None, 0) if weight is None else (layer, len(weight))


def _trained(case: Case) -> Iterator[Trained]:
    """Return the trainings on so few records that all of them were kept."""
    if case.few is not None:
        for one in case.trained(case.few):
            if 0 < one.training.records == len(one.training.inputs):
                yield one


def _first_layers(truths: dict[str, NDArray[Any]], one: Trained) -> tuple[list[str], bool]:
    """Return the layers that see the records as they are, or else the first of all."""
    uploaded = [name for name in truths if f"{name}.weight" in one.upload.change]
    flat = one.training.inputs.reshape(len(one.training.inputs), -1).astype(np.float64)
    raw = [n for n in uploaded if truths[n].shape == flat.shape and np.allclose(truths[n], flat)]
    return (raw, True) if raw else (uploaded[:1], False)


def _guesses(
    case: Case, seen: list[tuple[int, NDArray[np.int64]]], classes: int
) -> tuple[NDArray[np.int64], float]:
    """Return totals of right labels: of many guesses, and of the most frequent label."""
    frequency = np.zeros(classes)
    for one in case.as_is.trainings():
        if one.training is not None:
            for label, count in one.training.histogram.items():
                if 0 <= label < classes:
                    frequency[label] += count
    frequency = frequency / frequency.sum() if frequency.any() else np.full(classes, 1 / classes)
    draws = case.draws("labels")
    totals = np.zeros(_TRIALS, np.int64)
    for records, counts in seen:
        guessed = draws.multinomial(records, frequency, size=_TRIALS)
        totals += np.minimum(guessed, counts).sum(axis=1)
    likeliest = int(frequency.argmax())
    return totals, float(sum(counts[likeliest] for _, counts in seen))


def _named(table: dict[tuple[int, str], _Row]) -> str:
    return " and ".join(sorted({f"`{layer or 'the model'}`" for _, layer in table}))


def _short(values: list[float]) -> float:
    return float(f"{float(np.median(values)):.3g}")
