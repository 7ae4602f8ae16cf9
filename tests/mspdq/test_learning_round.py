"""A learning round by the classes of both ends is one of the inline engine."""

from dataclasses import astuple
from functools import cache
from typing import Any

import numpy as np
import pytest
from mixing_rounds import learning_round
from mixing_training import EXACT, Wire, reference, run, trained, vector

from flwr_privacy.mspdq import MIX, SYNC
from flwr_privacy.privacy.ledger import Question
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.strategies import MSP, MSPDQ, LoopOptions
from flwr_privacy.wire.message import TRAIN

SEED, CLIENTS, STEPS = 7, 4, 4
METHODS: dict[str, tuple[type[MSP], dict[str, Any]]] = {
    "MSP": (MSP, {}),
    "MSP, as printed": (MSP, {"paper": True, "replacement": False}),
    "MSP, random couplings": (MSP, {"coupling": "random"}),
    "MSP, three hidden": (MSP, {"m": 3, "gamma": 0.2}),
    "MSP, normalized": (MSP, {"m": 3, "mass": "normalized"}),
    "MSP, secret m": (MSP, {"m": 3, "m_mode": "iid", "gamma": 0.2}),
    "MSP, Laplace split": (MSP, {"split": "laplace", "scale": 0.5}),
    "MSPDQ": (MSPDQ, {}),
    "MSPDQ, as printed": (MSPDQ, {"paper": True, "replacement": False, "bits": 6}),
    "MSPDQ, one split, own widths": (MSPDQ, {"mixing_start": "reference", "interval": "self"}),
    "MSPDQ, global, linf": (MSPDQ, {"mixing_start": "global", "interval": "linf", "bits": 6}),
    "MSPDQ, global, fixed": (MSPDQ, {"mixing_start": "global", "interval": "fixed", "pi": 40.0}),
    "MSPDQ, secret m": (MSPDQ, {"m": 3, "m_mode": "iid", "gamma": 0.2}),
    "MSPDQ, secret m, global": (
        MSPDQ,
        {"m": 3, "m_mode": "iid", "gamma": 0.2, "mixing_start": "global", "interval": "self"},
    ),
    "MSPDQ, global, bound": (MSPDQ, {"mixing_start": "global", "interval": "bound", "bound": 9.0}),
    "MSPDQ, saturated": (MSPDQ, {"mixing_start": "global", "interval": "fixed", "pi": 0.5}),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_learning_round_is_that_of_the_inline_engine(method: str) -> None:
    """Same seed: splits, roundings, widths, averages and the model."""
    kind, options = METHODS[method]
    loop = LoopOptions(seed=SEED, experiment_id="e")
    strategy, wire = kind(mixing_rounds=STEPS, loop=loop, **options), Wire()
    result = run(strategy, insecure_seed=SEED, before=wire)
    terms = strategy.terms

    @cache
    def of(client: str, phase: str, request: int) -> SecureRandom:
        question = Question(experiment_id="e", phase=phase, server_round=1, request=request)
        return SecureRandom.insecure(SEED, "mixing", client, *astuple(question))

    def random(client: str, k: int) -> SecureRandom:
        """Return what a node draws message k from."""
        phase, request = MIX, k - 1
        if k == 0 or (k == 1 and terms.leaps):
            phase, request = (SYNC if k and terms.start == "reference" else TRAIN), 0
        elif terms.leaps:
            request = k - 2
        return of(client, phase, request)

    models = np.stack([trained(client) for client in range(CLIENTS)])
    seen = learning_round(
        terms,
        models,
        random,
        start=vector(EXACT),
        intervals=strategy.intervals if isinstance(strategy, MSPDQ) else None,
        referred=int(reference(SEED)),
    )
    sent = {
        head["step"]: vector(message.content["arrays"])
        for head, message in wire.asked
        if head["phase"] == MIX
    }
    assert len(sent) == STEPS - terms.leaps
    for k, average in sent.items():
        np.testing.assert_allclose(average, seen.averages[k], rtol=0, atol=1e-9)
    np.testing.assert_allclose(vector(result.arrays), seen.averages[-1], rtol=0, atol=1e-9)
    scheme = result.history[1]["scheme"]
    assert scheme["mixing_rounds"] == STEPS
    if terms.levels:
        assert scheme["width"] == pytest.approx(seen.widths.max(), rel=1e-9)
        assert scheme["saturated"] == seen.saturated
        assert (seen.saturated > 0) == (method == "MSPDQ, saturated")
    else:
        first = np.stack([wire.first()[str(client)] for client in range(CLIENTS)])
        np.testing.assert_allclose(first, seen.heard[0], rtol=0, atol=1e-9)
