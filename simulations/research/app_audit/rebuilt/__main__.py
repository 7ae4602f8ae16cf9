"""Attacks what left the nodes of an app, without a network: a process of its own.

`python -m flwr_privacy.simulations.research.app_audit.rebuilt` reads from its input what to attack:
``as_is`` and ``few``, folders of transcripts (``few`` may be null); ``seconds``, ``seed``; ``out``,
a folder that gets ``findings.json`` and pictures; ``model``, "module:function" or null.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from flwr_privacy.errors import InvalidParameterError

from ..findings import Finding
from ..offline import disconnect
from ..transcript import Transcript
from .case import Case, Clock
from .from_app import label_histograms, number_of_records
from .from_few import labels_of_few, rows
from .inverted import inverted
from .members import members, members_of_uploads, records_of
from .networks import filled, linear_inputs, load_model, record_losses
from .reports import left_out

__all__ = ["main", "rebuilt"]

FINDINGS = "findings.json"

_OF_FEW = "rows of linear layers", "labels of few records", "gradient inversion"
_OF_MEMBERS = "members by loss", "members by the direction of an upload"
_INVERSION = 0.7  # of the time


def rebuilt(
    *,
    as_is: Path,
    few: Path | None,
    seconds: float,
    seed: int,
    out: Path,
    model: str | None = None,
) -> Iterator[Finding]:
    """Return what can be rebuilt from what left the nodes, one finding after the other.

    Parameters
    ----------
    as_is : Path
        Transcript of the app as it is.
    few : Path or None
        Transcript in which clients have few records; without it those attacks are left out.
    seconds : float
        Time for all attacks together; each search ends at its share of it.
    seed : int
        Root of all draws.
    out : Path
        Folder for pictures.
    model : str, optional
        "module:function" of a function that returns the app's torch module; by default it is the
        one that a client trained.
    """
    clock = Clock(seconds)
    whole, small = Transcript(as_is), None if few is None else Transcript(few)
    try:
        case = Case(
            as_is=whole, few=small, model=load_model(whole.model, model), seed=seed, out=out
        )
    except InvalidParameterError as error:
        blind = Case(as_is=whole, few=small, model=nn.Identity(), seed=seed, out=out)
        names = (*_OF_FEW, "label histograms", *_OF_MEMBERS)
        yield number_of_records(blind)
        yield from (left_out(name, _reason(error)) for name in names)
        return
    yield number_of_records(case)
    why = _unfit(case)
    if why:
        names = (*_OF_FEW, "label histograms", *_OF_MEMBERS)
        yield from (left_out(name, why) for name in names)
        return
    yield label_histograms(case)
    yield from _members(case, clock.part(1 - _INVERSION))
    yield from _of_few(case, clock)


def _members(case: Case, clock: Clock) -> Iterator[Finding]:
    records = records_of(case)
    if isinstance(records, str):
        yield from (left_out(name, records) for name in _OF_MEMBERS)
        return
    yield members(case, records)
    yield members_of_uploads(case, records, clock)


def _of_few(case: Case, clock: Clock) -> Iterator[Finding]:
    if case.few is None:
        yield from (left_out(name, "no clients with few records were run") for name in _OF_FEW)
        return
    if not any(True for _ in case.trained(case.few)):
        why = case.unreadable(case.few)
        yield from (left_out(name, why) for name in _OF_FEW)
        return
    yield rows(case)
    yield labels_of_few(case)
    yield inverted(case, clock)


def _unfit(case: Case) -> str:
    """Return why the module cannot be used; an empty text where it can."""
    if case.shapes is None:
        return "the arrays that the server sends do not fit the torch module that a client trains"
    for one in case.as_is.trainings():
        training = one.training
        if training is not None and len(training.inputs) and len(training.labels):
            try:
                net = filled(case.model, {})
                linear_inputs(net, training.inputs)
                record_losses(net, training.inputs, training.labels)
            # The app's own module runs here, in float64, and may raise anything.
            except Exception as error:  # noqa: BLE001
                return f"the module cannot be run on what it was trained on ({_reason(error)})"
            return ""
    return "no records with their labels were seen in a torch training"


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def main() -> None:
    """Read what to attack, attack it, and write the findings."""
    asked: dict[str, Any] = json.load(sys.stdin)
    disconnect()
    out = Path(asked["out"])
    out.mkdir(parents=True, exist_ok=True)
    few = None if asked["few"] is None else Path(asked["few"])
    found: list[dict[str, Any]] = []
    for finding in rebuilt(**{**asked, "as_is": Path(asked["as_is"]), "few": few, "out": out}):
        found.append(finding.as_json())
        part = out / f"{FINDINGS}.part"  # whoever ends this process finds whole findings
        part.write_text(json.dumps(found, indent=1), encoding="utf-8")
        part.replace(out / FINDINGS)


if __name__ == "__main__":
    main()
