"""Says how a run ended: rounds, accuracy, promise, where its files are, and what to do next."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr_privacy.errors import refusals
from flwr_privacy.privacy.guarantee import Guarantee

__all__ = ["ending", "in_words", "next_commands", "trained_rounds"]

_SHOWN_ROUNDS = 5
_MEASURED = {"server": "the server", "evaluate": "the clients"}
_LOW, _HIGH = "_low", "_high"  # endings of the names of an interval's ends
_FIRST = ("accuracy", "loss")  # of the metrics of a model; others are shown where these lack

Line = Mapping[str, Any]


def trained_rounds(lines: Sequence[Line]) -> int:
    """Return the number of rounds that gave a model: not those without a usable answer."""
    return sum(line["round"] > 0 and not line.get("skipped") for line in lines)


def ending(
    lines: Sequence[Line],
    *,
    planned: int,
    guarantee: Guarantee | None,
    stopped: str = "",
    card: Path | None = None,
    commands: Sequence[str] = (),
) -> list[str]:
    """Return the end of a run in words, one fact a line.

    Parameters
    ----------
    lines : sequence of dict
        The history of the rounds.
    planned : int
        Rounds that were asked for.
    guarantee : Guarantee, optional
        What the run promises.
    stopped : str, default ""
        Why the training ended early, where it did as planned.
    card : Path, optional
        The page of its privacy card.
    commands : sequence of str
        What to call next.

    Examples
    --------
    >>> lines = [
    ...     {"round": 1, "skipped": False, "server": {"accuracy": 0.81}},
    ...     {"round": 2, "skipped": True, "server": {"accuracy": 0.81}, "refused": {"declined": 3}},
    ... ]
    >>> nothing = Guarantee(scheme="fedavg", protects="nothing", adversary="nobody")
    >>> print(*ending(lines, planned=3, guarantee=nothing), sep=chr(10))
    trained: 1 of 3 rounds; no answer could be used in round 2 (refused: 3 declined)
    measured by the server after round 2: accuracy 0.81
    promise: fedavg protects nothing
    """
    early = f"; it ended early: {stopped}" if stopped else ""
    told = [_trained(lines, planned) + early, *_measured(lines)]
    if guarantee is not None:
        void = f"VOID: {guarantee.void}. Without that: " if guarantee.void else ""
        told.append(f"promise: {void}{guarantee.sentence()}")
        told += [f"budget: {budget}"] if (budget := guarantee.budget()) else []
    told += [f"card: {card}"] if card else []
    return [*told, *(f"next: {command}" for command in commands)]


def next_commands(run_dir: Path) -> tuple[str, str]:
    """Return what to call when a run is over: a check of its card, and its report."""
    folder = shlex.quote(str(run_dir))
    return f"flwr-privacy verify {folder}", f"flwr-privacy report {folder}"


def _trained(lines: Sequence[Line], planned: int) -> str:
    text = f"trained: {trained_rounds(lines)} of {planned} rounds"
    skipped = [line for line in lines if line["round"] > 0 and line.get("skipped")]
    if not skipped:
        return text
    few = ", ".join(str(line["round"]) for line in skipped[:_SHOWN_ROUNDS])
    few += ", ..." if len(skipped) > _SHOWN_ROUNDS else ""
    counts = [f"{count} {reason}" for reason, count in refusals(skipped).most_common()]
    why = f" (refused: {', '.join(counts)})" if counts else ""
    return f"{text}; no answer could be used in round {few}{why}"


def _measured(lines: Sequence[Line]) -> list[str]:
    """Return what the last evaluations found: the server's if there is one, and private ones."""
    told: list[str] = []
    for table, who in _MEASURED.items():
        for line in reversed(lines):
            found = line.get(table) or {}
            if not any(isinstance(value, int | float) for value in found.values()):
                continue
            private = any(name.endswith(_LOW) for name in found)
            if private:
                told.append(f"measured by {who} after round {line['round']}: {in_words(found)}")
            elif not told:
                found = {k: v for k, v in found.items() if isinstance(v, int | float)}
                shown = {name: found[name] for name in _FIRST if name in found} or found
                told.append(f"measured by {who} after round {line['round']}: {in_words(shown)}")
            break
    return told


def in_words(metrics: Mapping[str, Any]) -> str:
    """Return metrics as text, each with its interval if it has one, and lists as they are.

    Examples
    --------
    >>> in_words({"accuracy": 0.8123, "accuracy_low": 0.7, "accuracy_high": 0.9, "evaluated": 20.2})
    'accuracy 0.8123 (0.7 to 0.9), evaluated 20.2'
    >>> in_words({"label_histogram": [3.4, 7.0], "label_histogram_low": [0.0, 3.6]})
    'label_histogram 3.4 7'
    """
    told = []
    for name, value in metrics.items():
        if name.endswith((_LOW, _HIGH)):
            continue
        low, high = metrics.get(f"{name}{_LOW}"), metrics.get(f"{name}{_HIGH}")
        told.append(f"{name} {_shown(value)}")
        if isinstance(low, int | float) and isinstance(high, int | float):
            told[-1] += f" ({low:.4g} to {high:.4g})"
    return ", ".join(told)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{entry:.3g}" for entry in value)
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
