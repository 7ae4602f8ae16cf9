"""A node whose mechanism is a noised sum, asked through the pipeline."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.pipeline import answer as pipeline
from flwr_privacy.pipeline.mechanism import Answer, Facts, Mechanism, Release, ReleasePlan
from flwr_privacy.pipeline.node_store import NodeStore
from flwr_privacy.pipeline.reply_cache import ReplyCache
from flwr_privacy.pipeline.request import Request
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.ledger import Ledger, Question
from flwr_privacy.privacy.policy import Policy
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.pins import Identity, Pins

QUESTION = Question(experiment_id="e", phase="train", server_round=1)
MODEL = {"w": np.zeros(2)}


@dataclass(frozen=True)
class Sum(Mechanism):
    """A toy: a number between -1 and 1 with noise."""

    zero: bool = True
    noise_multiplier: float = 2.0
    epsilon: float = 100.0
    parties: int = 0
    least_records: int = 0
    neighbours: str = "replace_one"

    def plan(self, start: Any, facts: Facts) -> ReleasePlan:
        if facts.records is not None and facts.records < self.least_records:
            raise InvalidParameterError("records", facts.records, "more")
        charge = (
            Charge(noise_multiplier=self.noise_multiplier, neighbours=self.neighbours)
            if self.noise_multiplier
            else None
        )
        return ReleasePlan(
            unit="user",
            charge=charge,
            epsilon=self.epsilon,
            delta=1e-5,
            noise_multiplier=self.noise_multiplier,
            sigma=self.noise_multiplier,
            parties=self.parties,
        )

    def measure(self, start: Any, outcome: Any) -> float:
        if not np.isfinite(outcome):
            raise DataError("not finite")
        return float(np.clip(outcome, -1, 1))

    def failed(self, start: Any) -> float | None:
        return 0.0 if self.zero else None

    def noise(self, measured: float, plan: ReleasePlan, random: SecureRandom) -> Answer:
        noise = random.uint64(1) if plan.charge is not None else np.zeros(1, np.uint64)
        return {"sum": np.array([measured]), "noise": noise}, {"metrics": {}}

    def accumulator(self, start: Any) -> WeightedMean:
        return WeightedMean({})


PINS = Pins(clients={name: Identity.generate().public for name in "bcd"})


def store_in(folder: Path, policy: Policy | None = None, *, durable: bool = True) -> NodeStore:
    return NodeStore(
        ledger=Ledger(folder / "a.ledger", data_set="a", durable=durable),
        replies=ReplyCache(folder / "a.replies", durable=durable, experiments=4),
        setups=ReplyCache(folder / "a.setups", durable=durable),
        policy=policy or Policy(allow_unprotected=["toy"]),
        client_id="a",
        simulated=not durable,
        folder=folder,
        sessions=folder / "a.secure-sum",
        identity=None,
        pins=PINS,
    )


def ask(
    store: NodeStore,
    work: Callable[[], Any] = lambda: 0.5,
    mechanism: Mechanism | None = None,
    *,
    question: Question = QUESTION,
    arrays: Any = MODEL,
    count: Callable[[], int] | None = None,
    given: dict[str, Any] | None = None,
    **fields: Any,
) -> Answer:
    summed = fields.get("summed", 0)
    own = {"summed": 0, "honest": summed, "certain": summed, "code-limit": 0, **fields}
    request = Request("toy", question, arrays, own)
    facts = None if count is None else (lambda: Facts(records=count()))
    release = Release(
        mechanism=mechanism or Sum(), work=lambda _, __: work(), facts=facts, **given or {}
    )
    return pipeline.answer(store, request, release)


def same(one: Answer, other: Answer) -> bool:
    return all(np.array_equal(one[0][name], other[0][name]) for name in ("sum", "noise"))


def fail(error: BaseException) -> Callable[[], Any]:
    def work() -> Any:
        raise error

    return work
