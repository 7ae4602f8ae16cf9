"""A logger of rounds: what TensorBoard, MLflow or Weights & Biases are given of a training."""

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

__all__ = ["RoundLogger", "numbers_of"]


@runtime_checkable
class RoundLogger(Protocol):
    """Takes the numbers of each round, such as for a dashboard.

    It gets what ``metrics.jsonl`` has and nothing else. That file is for its owner alone, because
    under Poisson sampling the number of clients in a round is secret: a logger must not send the
    numbers to anybody from whom that is to be kept.

    Examples
    --------
    >>> class Printing:
    ...     def log(self, server_round, metrics):
    ...         print(server_round, metrics["server/accuracy"])
    ...
    ...     def close(self):
    ...         print("closed")
    >>> isinstance(Printing(), RoundLogger)
    True
    """

    def log(self, server_round: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of a round, by name: ``server/accuracy``, ``bytes_up`` and so on.

        Parameters
        ----------
        server_round : int
            The round; 0 before the training. A resumed run may log a round again.
        metrics : mapping of str to float
            What is a finite number of the round's line in ``metrics.jsonl``.
        """
        ...

    def close(self) -> None:
        """Take note that the training has ended, in whichever way."""
        ...


def numbers_of(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of a round's line; names of tables are put before with a slash.

    Parameters
    ----------
    line : mapping
        A line of ``metrics.jsonl``.
    prefix : str, default ""
        Stands before each name.

    Examples
    --------
    >>> numbers_of({"round": 3, "server": {"loss": 0.5, "accuracy": None}, "skipped": False})
    {'server/loss': 0.5}
    """
    numbers: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            numbers |= numbers_of(value, f"{prefix}{key}/")
        elif (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and (prefix or key != "round")
        ):
            numbers[prefix + key] = float(value)
    return numbers
