"""What the noise of all rounds of an M2FDP training was calibrated for, in a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from flwr_privacy.errors import CheckpointError, InvalidParameterError, check_choice
from flwr_privacy.evaluation import PrivateEvaluation
from flwr_privacy.evaluation.caps import ACCURACIES
from flwr_privacy.m2fdp import DeviceNoise, PaperNoise, RecordNoise, TierPrivacy, TierTree

__all__ = ["check_calibrated", "check_evaluated", "plain", "tree_of"]

_LONGEST_VALUE = 500  # characters of a value in a message


def plain(value: Any) -> Any:
    """Return a value as a checkpoint holds it: equal values stay equal after they were saved.

    Examples
    --------
    >>> from flwr_privacy.m2fdp import EventSchedule
    >>> plain(EventSchedule(steps=20, events={1: (5, 9)}))
    {'type': 'EventSchedule', 'steps': 20, 'events': {'1': [5, 9]}}
    """
    if is_dataclass(value):
        own = {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
        return {"type": type(value).__name__, **own}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


def tree_of(tree: TierTree) -> dict[str, Any]:
    """Return what noise depends on in a tree: secure aggregators, and the number of children."""
    above = [node for tier in tree.tiers[:-1] for node in tier]
    return {
        "trusted": [node for node in above if tree.secure(node)],
        # Breadth first: the numbers of children say who is whose child.
        "tree": [[node, len(tree.children(node))] for node in above],
    }


def check_calibrated(now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    """Refuse to go on with other values than those that noise was calibrated for.

    Raises
    ------
    CheckpointError
        If a value is another one.
    """
    for key, value in now.items():
        if then.get(key) != value:
            raise CheckpointError(
                f"the checkpoint was calibrated for {key} = {_shown(then.get(key))}, not "
                f"{_shown(value)}: the noise of the rounds that are done cannot be changed"
            )


def check_evaluated(privacy: TierPrivacy, evaluation: PrivateEvaluation | None) -> None:
    """Refuse an evaluation that has no share in a budget, or a loss that nobody can clip.

    Raises
    ------
    InvalidParameterError
        If it is one.
    """
    if evaluation is None:
        return
    if not isinstance(privacy, DeviceNoise | RecordNoise):
        kind, reason = type(privacy).__name__, "there is no budget to take a share of"
        if isinstance(privacy, PaperNoise):
            reason = "its noise does not keep a budget of which evaluations could have a share"
        raise InvalidParameterError(
            "evaluation", type(evaluation).__name__, f"None with {kind}: {reason}"
        )
    if isinstance(privacy, RecordNoise):
        check_choice("accuracy", evaluation.accuracy, ACCURACIES)
    if isinstance(privacy, RecordNoise) and evaluation.loss_cap is not None:
        raise InvalidParameterError(
            "loss_cap",
            evaluation.loss_cap,
            "None at record level: a mean of losses cannot be clipped record by record",
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
