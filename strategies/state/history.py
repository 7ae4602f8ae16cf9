"""The history of the rounds, written as one JSON line per round."""

import json
import logging
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from flwr_privacy.errors import CheckpointError
from flwr_privacy.wire.files import PRIVATE, open_private, write_text
from flwr_privacy.wire.message import EVALUATE, INSECURE, TRAIN

from .run_files import content_of

__all__ = ["History"]

logger = logging.getLogger("flwr.privacy")

Line = dict[str, Any]


class History:
    """The rounds of an experiment, kept in memory and, if asked, as lines of a file.

    Parameters
    ----------
    path : Path, optional
        File for the lines, one JSON document each; written as the rounds end. Only its owner can
        read it: under Poisson sampling the number of clients in a round is secret.
    on_round : callable, optional
        Called with each new line.
    """

    def __init__(
        self, path: Path | None = None, on_round: Callable[[Line], None] | None = None
    ) -> None:
        self.lines: list[Line] = []
        self._encoded: list[str] = []  # the same, as the file has them
        self._path = path
        self._on_round = on_round

    def restart(self, text: str = "") -> None:
        """Begin with the lines of an earlier run; later lines of the file are dropped."""
        self._encoded = text.splitlines(keepends=True)
        self.lines = [json.loads(entry) for entry in self._encoded]
        if self._path is not None:
            write_text(self._path, text, mode=PRIVATE)

    def written(self) -> list[Line]:
        """Return the whole lines of the file, which may be newer than the checkpoint.

        A last line that was cut when the run was killed is left out.

        Raises
        ------
        CheckpointError
            If another line is damaged, or the file cannot be read.
        """
        content = None if self._path is None else content_of(self._path)
        if content is None:
            return []
        lines: list[Line] = []
        whole = content.rpartition(b"\n")[0]
        for number, entry in enumerate(whole.splitlines(), start=1):
            try:
                line = json.loads(entry)
                line["round"] = int(line["round"])
            except (ValueError, TypeError, KeyError) as error:
                text = f"{self._path} is damaged: its line {number} is of no round"
                raise CheckpointError(text) from error
            lines.append(line)
        return lines

    def text_with(self, *lines: Line) -> str:
        """Return all lines as the file has them, and some more."""
        return "".join([*self._encoded, *map(_encode, lines)])

    def add(self, line: Line) -> None:
        """Append the line of a round."""
        self.lines.append(line)
        if self._path is not None:
            self._encoded.append(_encode(line))
            with open(self._path, "a", encoding="utf-8", opener=open_private) as file:
                file.write(self._encoded[-1])
        if self._on_round is not None:
            self._on_round(line)


def log(line: Line, *, of_the_app: Collection[str], spent: str) -> None:
    """Log how a round ended, with the metrics as Flower's own strategies log them.

    Parameters
    ----------
    line : dict
        The line of the round.
    of_the_app : collection of str
        Phases whose metrics are the app's own.
    spent : str
        What is spent of the budget, and what is left; empty without one.
    """
    if line.get("skipped"):
        logger.warning(
            "round %d skipped, the model stays as it was (%d clients were asked)",
            line["round"],
            line.get("asked", 0),
        )
    logger.info("round %d/%d%s", line["round"], line["rounds"], spent and f": {spent}")
    for phase in (TRAIN, EVALUATE):
        own = {k: v for k, v in line.get(phase, {}).items() if k != INSECURE}
        if own and phase in of_the_app:
            logger.info("\t└──> Aggregated MetricRecord: %s", own)
    if line["server"]:
        logger.info("\t└──> MetricRecord: %s", line["server"])


def plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return metrics as JSON values; numbers that are not finite become null."""
    return {key: _finite(value) for key, value in metrics.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if math.isfinite(value) else None


def _encode(line: Line) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
