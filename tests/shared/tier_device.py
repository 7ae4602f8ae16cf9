"""One device of M2FDP, and the questions that a server puts to it."""

from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from flwr.app import Context, RecordDict

from flwr_privacy.clients import M2FDPClient
from flwr_privacy.clients.node.base import Trained
from flwr_privacy.m2fdp import M2FDPTerms
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.ledger import Entry, Ledger
from flwr_privacy.wire.fields import write

Fields = dict[str, Any]
GRID = CodeGrid(-24)
START = {"w": np.linspace(-1, 1, 6).reshape(2, 3), "b": np.zeros(2), "n": np.array(3)}
TERMS: Fields = {
    "unit": "user",
    "noise_multiplier": 0.5,
    "epsilon": 1e3,
    "delta": 1e-5,
    "grid": GRID.exponent,
    "period": 0,
    "law": "worst",
    "growth": 1.0,
    "depth": 2,
    "clipping_norm": 0.5,
    "steps": 2,
    "parent": "ward",
    "noised": True,
    "sealed": False,
    "event": 0,
    "tier": 0,
}
OPEN = {"noised": False}
NONE = {"noised": False, "noise_multiplier": 0.0}


def terms(**changes: Any) -> M2FDPTerms:
    return M2FDPTerms(**{**TERMS, **changes})


class Node:
    """One node, asked without a server, with what it keeps."""

    def __init__(
        self, folder: Path, policy: Fields | None = None, name: str = "a", **config: Any
    ) -> None:
        self.folder, self.name = folder, name
        self.trainings = 0
        (folder / "policy.toml").write_text(tomli_w.dumps(policy or {}))
        self.config: Fields = {
            "client-id": name,
            "privacy-state": str(folder),
            "privacy-policy": str(folder / "policy.toml"),
            **config,
        }

    def train(self, start: Any) -> Trained:
        """Move every float by the same, far beyond any clipping norm."""
        self.trainings += 1
        moved = {k: v + 7 if v.dtype.kind == "f" else v for k, v in start.items()}
        return Trained(moved, {"num-examples": 5, "loss": 0.25})

    def ask(
        self,
        asked: M2FDPTerms | None = None,
        *,
        train: Any = None,
        phase: str = "train",
        **changes: Any,
    ) -> tuple[Fields, Fields]:
        place = {"experiment-id": "e", "round": 1, "request": 0, "summed": 0, "code-limit": 0}
        fields = {**place, **write(asked or terms())}
        fields |= {key.replace("_", "-"): value for key, value in changes.items()}
        context = Context(1, 1, self.config, RecordDict(), {})
        client = M2FDPClient(None, context)
        arrays, own = client.handle(phase, START, fields, train or self.train)
        return dict(arrays), own

    def entries(self) -> list[Entry]:
        return list(Ledger(self.folder / f"{self.name}.ledger", data_set=self.name).entries())


def simulated(folder: Path, policy: Fields | None = None) -> Node:
    return Node(folder, policy, **{"privacy-simulated": True})


def vector(arrays: Fields) -> Any:
    return GRID.step * np.concatenate([arrays["w"].reshape(-1), arrays["b"]])
