"""Transcripts that a test writes by itself, without a process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from flwr_privacy.simulations.engines.inline.flower_internals import records_to_bytes
from flwr_privacy.simulations.research.app_audit.transcript import (
    Training,
    Transcript,
    TranscriptWriter,
)

Write = Callable[..., None]


class Written:
    """A transcript in a folder, exchange by exchange."""

    def __init__(self, folder: Path) -> None:
        self.writer = TranscriptWriter(folder)
        self.folder = folder

    def exchange(
        self,
        *,
        start: np.ndarray | None = None,
        left: np.ndarray | None = None,
        inner: np.ndarray | None = None,
        metrics: dict[str, Any] | None = None,
        reply: RecordDict | None = None,
        error: str | None = None,
        training: Training | None = None,
        round: int = 1,
        node: int = 0,
        kind: str = "train",
    ) -> None:
        """Add an answer: the model `start` was sent, `inner` was trained, and `left` left."""
        start = np.zeros(1, np.float32) if start is None else start
        asked = RecordDict({"arrays": ArrayRecord([start])})
        if reply is None:
            reply = RecordDict({} if left is None else {"arrays": ArrayRecord([left])})
            if metrics:
                reply["metrics"] = MetricRecord(metrics)
        files = {"request": self._keep(asked), "inner_request": self._keep(asked)}
        if error is None:
            files["reply"] = self._keep(reply)
        if inner is not None:
            files["inner_reply"] = self._keep(RecordDict({"arrays": ArrayRecord([inner])}))
        if training is not None:
            files["training"] = self.writer.keep_training(training)
        self.writer.write(
            round=round, kind=kind, node=node, error=error, seconds=0.0, sizes=[1, 1], files=files
        )

    def done(self, **about: Any) -> Transcript:
        """End it, and read it."""
        self.writer.close({"ended": "whole", "error": "", "mods": [], "network": [], **about})
        return Transcript(self.folder)

    def _keep(self, content: RecordDict) -> str:
        return self.writer.keep(records_to_bytes(content))[0]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "transcript")
