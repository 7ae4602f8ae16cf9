"""A noise committee of five, its terms, and deployed nodes that know it."""

from pathlib import Path
from typing import Any

from apps import MODEL
from flwr.app import Context, RecordDict
from pinned import pinned_nodes

from flwr_privacy.central_dp.correlated.options import BandedMF
from flwr_privacy.central_dp.plan import CentralDPNoisePlan
from flwr_privacy.central_dp.terms import CentralDPTerms
from flwr_privacy.clients import CentralDPClient, Trained
from flwr_privacy.wire.fields import write

MEMBERS = [f"m{i}" for i in range(5)]
POLICY = f"noise_members = {MEMBERS}\n"
SUM: dict[str, Any] = {
    "summed": 3,
    "honest": 3,
    "certain": 3,
    "code-limit": 2**31 - 1,
    "needed": MEMBERS,
    "withstood": 2,
}
"""What a node knows of the secure sum."""


def plan_of(**changes: Any) -> CentralDPNoisePlan:
    """Return a plan for 20 rounds with a quarter of the clients in each: 5 rounds of a client."""
    usual: dict[str, Any] = {
        "noise": "distributed",
        "sampling": "balanced",
        "epsilon": 8.0,
        "delta": 1e-5,
        "rounds": 20,
        "q": 0.25,
        "correlated": BandedMF(),
        "members": 5,
    }
    return CentralDPNoisePlan(**{**usual, **changes})


PLAN = plan_of()


def terms_of(block: int = 1, *, clipping_norm: float = 1.0) -> CentralDPTerms:
    """Return the terms of a round."""
    return PLAN.terms(clipping_norm, members=MEMBERS, block=block)


class Node:
    """One deployed node, asked directly; each question comes to a new process."""

    def __init__(self, folder: Path, name: str = "ward-7", *, policy: str = POLICY) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        self.name, self.trained = name, 0
        others = [member for member in MEMBERS if member != name]
        config = pinned_nodes(self.folder, [name, *others], policy=policy)[0]
        self.config = {**config, "privacy-state": str(self.folder)}

    def context(self) -> Context:
        return Context(
            run_id=1, node_id=1, node_config=self.config, state=RecordDict(), run_config={}
        )

    def ask(
        self,
        server_round: int,
        terms: CentralDPTerms | None = None,
        arrays: Any = MODEL,
        **own: Any,
    ) -> Any:
        """Return the answer to a round's training, by default of the block from round 1 on."""

        def train(start: Any) -> Trained:
            self.trained += 1
            return Trained({n: a + (1.0 if a.ndim else 1) for n, a in start.items()}, {})

        question = {"experiment-id": "e", "round": server_round, "request": 0, **SUM}
        fields = {**write(terms or terms_of()), **question, **own}
        return CentralDPClient(None, self.context()).handle("train", arrays, fields, train)
