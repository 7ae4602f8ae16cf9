"""Members: which records were trained on, from the models and from single uploads.

Members are records that clients trained on, and non-members records that they evaluated on; both
were seen from inside. Three scores are tried: minus the loss under the last model that was sent;
how far the loss fell since the first one, which tells a record that is easy from one that was
learned (a likelihood ratio with one model for each side); and, for an upload, the cosine of its
direction with the gradient of the record.

Sources: Yeom et al., "Privacy Risk in Machine Learning", CSF 2018 (loss threshold); Watson et al.,
"On the Importance of Difficulty Calibration in Membership Inference Attacks", ICLR 2022 (the
calibration); Li et al., "Effective Passive Membership Inference Attacks in Federated Learning
against Overparameterized Models", ICLR 2023 (the cosine).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta, norm
from torch import nn

from flwr_privacy.clients.torch.computing import one_thread
from flwr_privacy.simulations.research.attacks.membership import (
    Membership,
    evaluate,
    loss_threshold,
)

from ..findings import LEAK, NOTE, Finding, Table
from ..transcript import Training
from .case import Case, Clock, digest
from .evidence import sent_model
from .networks import filled, record_gradients, record_losses, trained_names
from .reports import EVERYBODY, SERVER, SIGNIFICANCE, left_out

__all__ = ["Records", "auc_interval", "members", "members_of_uploads", "records_of"]

Vectors = NDArray[np.float64]

_LEAST = 20  # members, and non-members, below which nothing is said
_LEAST_FOR_RATE = 100  # non-members for a false positive rate of 1 %
_LIMIT = 0.01
_CONFIDENCE = 1 - 2 * SIGNIFICANCE  # of intervals with two sides
_QUANTILE = float(norm.isf(SIGNIFICANCE))
_MIXED = 0.05  # share of the evaluated records that were trained on, above which it is no test
_EACH = 24  # members and non-members of a client whose gradients are taken
_BATCH = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Records:
    """Records of which it is known whether they are members.

    Parameters
    ----------
    inputs, labels : ndarray
        The records.
    members : ndarray of bool
        Which were trained on.
    nodes : ndarray of int
        Whose they are.
    """

    inputs: NDArray[np.float64]
    labels: NDArray[np.float64]
    members: NDArray[np.bool_]
    nodes: NDArray[np.int64]

    def of(self, node: int, most: int) -> "Records":
        """Return the first members and non-members of a node, and their number at most."""
        places = [
            place
            for kind in (True, False)
            for place in np.flatnonzero((self.members == kind) & (self.nodes == node))[:most]
        ]
        return Records(
            inputs=self.inputs[places],
            labels=self.labels[places],
            members=self.members[places],
            nodes=self.nodes[places],
        )


def records_of(case: Case) -> Records | str:
    """Return the records of all clients, in an order that says nothing; or why there are none."""
    trained: dict[bytes, tuple[int, NDArray[np.float64], NDArray[np.float64]]] = {}
    tested: dict[bytes, tuple[int, NDArray[np.float64], NDArray[np.float64]]] = {}
    for one in case.as_is.exchanges:
        _collect(trained, one.node, one.training)
        _collect(tested, one.node, one.evaluated)
    both = set(trained) & set(tested)
    if not tested:
        return "the clients take no loss of records that they do not train on, so there are none"
    if len(both) > _MIXED * len(tested):
        return "the clients evaluate on records that they train on"
    found = [(*trained[name], True) for name in sorted(trained)]
    found += [(*tested[name], False) for name in sorted(set(tested) - both)]
    shapes = {(row.shape, label.shape) for _, row, label, _ in found}
    if len(shapes) > 1:
        return "the records have several shapes"
    order = case.draws("members").permutation(len(found))
    nodes, inputs, labels, members = zip(*[found[place] for place in order], strict=True)
    kinds = np.array(members)
    if min(kinds.sum(), (~kinds).sum()) < _LEAST:
        return f"there are fewer than {_LEAST} records of each kind with their labels"
    return Records(
        inputs=np.array(inputs), labels=np.array(labels), members=kinds, nodes=np.array(nodes)
    )


def members(case: Case, records: Records) -> Finding:
    """Tell members from the models of the first and the last round."""
    name = "members by loss"
    shapes = case.shapes or {}
    models = [
        model
        for one in case.as_is.exchanges
        if (model := sent_model(one, shapes)) is not None
        and one.kind.partition(".")[0] in ("train", "evaluate")
    ]
    first, last = (_losses(filled(case.model, m).eval(), records) for m in (models[0], models[-1]))
    scores = {
        "loss under the last model": loss_threshold(last),
        "loss that fell since the first model": first - last,
    }
    before = _measured(loss_threshold(first), records.members)
    return _finding(name, records, scores, EVERYBODY, control=before.auc)


def members_of_uploads(case: Case, records: Records, clock: Clock) -> Finding:
    """Tell each client's members from its last upload, by directions."""
    name = "members by the direction of an upload"
    uploads = {one.exchange.node: one.upload for one in case.trained(case.as_is)}
    parts: list[tuple[Records, Vectors]] = []
    for node, upload in sorted(uploads.items()):
        own = records.of(node, _EACH)
        if own.members.all() or not own.members.any():
            continue
        model = filled(case.model, upload.start).eval()
        found = _cosines(model, upload.change, own, clock)
        if found is None:
            break
        # Clients are compared with themselves: their updates have lengths and angles of their own.
        parts.append((own, (found - found.mean()) / max(float(found.std()), 1e-12)))
    if not parts:
        return left_out(
            name, "no client has an upload, members and non-members, or no time was left"
        )
    order = case.draws("uploads").permutation(sum(len(s) for _, s in parts))
    together = Records(
        inputs=np.concatenate([r.inputs for r, _ in parts])[order],
        labels=np.concatenate([r.labels for r, _ in parts])[order],
        members=np.concatenate([r.members for r, _ in parts])[order],
        nodes=np.concatenate([r.nodes for r, _ in parts])[order],
    )
    if min(together.members.sum(), (~together.members).sum()) < _LEAST:
        return left_out(name, f"there are fewer than {_LEAST} records of each kind")
    scores = {"cosine with the upload": np.concatenate([s for _, s in parts])[order]}
    return _finding(name, together, scores, SERVER, control=0.5)


def auc_interval(found: Membership, members: NDArray[np.bool_]) -> tuple[float, float, float]:
    """Return the AUC and its 99.8 % interval: low, itself, high.

    The standard error is that of Hanley and McNeil, "The meaning and use of the area under a ROC
    curve", Radiology 1982.
    """
    area = found.auc
    inside, outside = int(members.sum()), int((~members).sum())
    one, two = area / (2 - area), 2 * area**2 / (1 + area)
    variance = (
        area * (1 - area) + (inside - 1) * (one - area**2) + (outside - 1) * (two - area**2)
    ) / (inside * outside)
    # Of a perfect score the formula has no variance left; one record in each kind is.
    variance = max(variance, 0.25 / min(inside, outside) ** 2)
    reach = _QUANTILE * math.sqrt(variance)
    return max(0.0, area - reach), area, min(1.0, area + reach)


def _finding(
    name: str,
    records: Records,
    scores: Mapping[str, Vectors],
    adversary: str,
    *,
    control: float,
) -> Finding:
    rows: list[list[Any]] = []
    leaks = []
    enough = int((~records.members).sum()) >= _LEAST_FOR_RATE
    for score, values in scores.items():
        found = _measured(values, records.members)
        low, area, high = auc_interval(found, records.members)
        rate = found.rates[0]
        rates = [rate.tpr, rate.low, rate.high] if enough else [None] * 3
        rows.append([score, *(_rounded(v) for v in (area, low, high, *rates))])
        if low > max(0.5, control) or (enough and rate.low > _alarms(records.members)):
            leaks.append(score)
    best = max(rows, key=lambda row: row[1])
    said = f"The best score, {best[0]}, tells members from others with an AUC of {best[1]:.2f}"
    said += f" (99.8 % interval {best[2]:.2f} to {best[3]:.2f})"
    if enough:
        said += f"; at 1 % of false alarms it finds {best[4]:.0%} of them"
    if not leaks:
        said += ". No score is surely above chance; shadow models or more rounds may be"
    inside = int(records.members.sum())
    return Finding(
        part="rebuilt",
        name=name,
        verdict=LEAK if leaks else NOTE,
        said=said + ".",
        adversary=adversary,
        chance=f"an AUC of 0.5 and {_LIMIT:.0%} of the members"
        + ("" if enough else " (too few non-members for the latter)")
        + (f"; before the training the AUC is {control:.2f}" if adversary is EVERYBODY else ""),
        numbers={
            "members": inside,
            "non-members": len(records.members) - inside,
            "best AUC": best[1],
            "before the training": control,
        },
        table=Table(
            ("score", "AUC", "from", "to", "found at 1 % of false alarms", "from", "to"),
            rows,
        ),
    )


def _alarms(members: NDArray[np.bool_]) -> float:
    """Return what the rate of false alarms surely stays below, where it is 1 % of those seen.

    The threshold is an order statistic of the non-members, so their rate has a beta law.
    """
    outside = int((~members).sum())
    allowed = int(_LIMIT * outside)
    return float(beta.isf(SIGNIFICANCE, allowed + 1, outside - allowed))


def _collect(
    into: dict[bytes, tuple[int, NDArray[np.float64], NDArray[np.float64]]],
    node: int,
    seen: Training | None,
) -> None:
    if seen is not None and 0 < len(seen.labels) == len(seen.inputs):
        for row, label in zip(seen.inputs, seen.labels, strict=True):
            into.setdefault(digest(row), (node, row, np.asarray(label)))


def _losses(model: nn.Module, records: Records) -> Vectors:
    parts = []
    with torch.no_grad(), one_thread():
        for at in range(0, len(records.labels), _BATCH):
            place = slice(at, at + _BATCH)
            parts.append(record_losses(model, records.inputs[place], records.labels[place]).numpy())
    losses: Vectors = np.concatenate(parts).astype(np.float64)
    return losses


def _cosines(
    model: nn.Module, change: Mapping[str, Vectors], records: Records, clock: Clock
) -> Vectors | None:
    """Return the cosine of a change with the step that each record asks for; None without time."""
    names = trained_names(model, change)
    seen = torch.cat([torch.tensor(-change[name]).reshape(-1) for name in names])
    found = []
    for own in record_gradients(model, names, records.inputs, records.labels):
        if not clock.left:
            return None
        found.append(float(own @ seen / (own.norm() * seen.norm() + 1e-30)))
    return np.array(found)


def _measured(scores: Vectors, members: NDArray[np.bool_]) -> Membership:
    return evaluate(scores, members, delta=0.0, limits=(_LIMIT,), confidence=_CONFIDENCE)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
