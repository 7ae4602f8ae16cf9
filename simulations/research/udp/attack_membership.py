"""Membership inference on models trained with UDP.

Every place in the clients' data is one of two records, by a coin; the attack gets the final model,
which the real strategy and clients trained, and says which of the records were in the training.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from flwr_privacy.clients import UDPClient
from flwr_privacy.clients.torch import initialise, set_arrays
from flwr_privacy.errors import check_choice, check_integer
from flwr_privacy.simulations.research.attacks.audit import OneRunAudit, one_run_audit
from flwr_privacy.simulations.research.attacks.membership import (
    Membership,
    evaluate,
    likelihood_ratio,
    logit_confidence,
    loss_threshold,
)
from flwr_privacy.simulations.tasks import tasks
from flwr_privacy.strategies import UDP
from flwr_privacy.udp import RECORD_UNIT, UDPNoisePlan, sensitivity
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.identity import stream

from .training import DELTA, Records, budget, epsilon_spent, everybody, imitate, level, train_inline

__all__ = ["ALARMS", "RECORDS", "SHADOWS", "TASKS", "Inferred", "infer"]

TASKS = ("digits-mlp", "digits-linear")
"""Tasks that the attack trains."""

ALARMS = (0.01, 0.1)
RECORDS = 50  # of each client
SHADOWS = 16
_ROUNDS = 100
_STEP = 2.0  # learning rate
_CONFIDENCE = 0.99


@dataclass(frozen=True, kw_only=True, eq=False)
class Inferred:
    """The results of membership inference on a run.

    Parameters
    ----------
    mechanism : str
        What ran.
    ledger : float
        Epsilon by the ledger, infinite where there is no noise.
    accuracy : float
        The model's, on test records.
    members : ndarray of bool, shape (n,)
        Which records were in the training.
    scores : dict of str to ndarray
        Scores of the records, by attack.
    found : dict of str to Membership
        How well they tell members from others.
    one_run : dict of str to OneRunAudit
        What guesses between the two records of each place prove.
    """

    mechanism: str
    ledger: float
    accuracy: float
    members: NDArray[np.bool_]
    scores: dict[str, NDArray[np.float64]]
    found: dict[str, Membership]
    one_run: dict[str, OneRunAudit]


def infer(
    epsilon: float | None,
    *,
    task: str = TASKS[0],
    seed: int = 0,
    clients: int = 2,
    records: int = RECORDS,
    data_root: Path | None = None,
    rounds: int = _ROUNDS,
    shadows: int = SHADOWS,
) -> Inferred:
    """Train a task, and infer from its final model which records it was trained on.

    Parameters
    ----------
    epsilon : float, optional
        Budget, at delta 1e-5; None for no noise.
    task : str, default "digits-mlp"
        One of `TASKS`.
    seed : int, default 0
        Root of the draws; the noise is secret.
    clients, records : int, default 2 and 50
        Clients, and records of each.
    data_root : Path, optional
        Folder with the data sets that no library brings.
    rounds : int, default 100
        Rounds of the training.
    shadows : int, default 16
        Shadow models, which the attacker trains like the model: half of them on one record of each
        place, half on the other, for every place by itself.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.
    """
    chosen = tasks.task(check_choice("task", task, TASKS))
    data = tasks.all_records(chosen, data_root)
    check_integer("clients", clients, minimum=2, maximum=len(data.labels) // 2)
    check_integer("records", records, minimum=1, maximum=len(data.labels) // (2 * clients))
    check_integer("shadows", shadows, minimum=4)
    draws = stream(seed, "membership")
    places = clients * records
    pairs = draws.permutation(len(data.labels))[: 2 * places].reshape(2, places)
    both = pairs.reshape(-1)
    coins = draws.random(places) < 0.5
    order = draws.permuted(np.tile(np.arange(shadows)[:, None] % 2 == 0, places), axis=0)

    def parts(first: NDArray[np.bool_]) -> list[Records]:
        own = np.where(first, pairs[0], pairs[1]).reshape(clients, records)
        return [(data.features[part], data.labels[part]) for part in own]

    def confidences(arrays: Arrays) -> NDArray[np.float64]:
        logits = _outputs(chosen.model, arrays, data.features[both])
        return logit_confidence(logits, data.labels[both])

    strategy = UDP(privacy=level(epsilon, _STEP), **everybody(clients), rounds=rounds)
    start = partial(initialise, chosen.model, seed)
    model = train_inline(strategy, UDPClient, start, parts(coins), functional.cross_entropy, rounds)
    noise = 0.0
    if epsilon is not None:
        noise = UDPNoisePlan(**budget(epsilon), rounds=rounds, q=1.0).noise_multiplier
    sigma = noise * sensitivity(
        RECORD_UNIT, clipping_norm=1.0, learning_rate=_STEP, records=records
    )
    known = [
        confidences(
            imitate(
                start,
                parts(first),
                rounds,
                learning_rate=_STEP,
                sigma=sigma,
                draws=stream(seed, "shadow", place),
            )
        )
        for place, first in enumerate(order)
    ]
    members = np.concatenate([coins, ~coins])
    seen = confidences(model)
    inside = np.concatenate([order, ~order], axis=1)
    scores = {
        "loss": loss_threshold(np.logaddexp(0, -seen)),  # -ln p
        "LiRA": likelihood_ratio(seen, known, inside),
        "LiRA offline": likelihood_ratio(seen, known, inside, online=False),
    }
    test = _outputs(chosen.model, model, data.test_features).argmax(axis=1)
    return Inferred(
        mechanism="no noise" if epsilon is None else f"epsilon {epsilon:g}",
        ledger=epsilon_spent(strategy),
        accuracy=float((test == data.test_labels).mean()),
        members=members,
        scores=scores,
        found={
            name: evaluate(one, members, delta=DELTA, limits=ALARMS, confidence=_CONFIDENCE)
            for name, one in scores.items()
        },
        one_run={
            name: one_run_audit(
                one[:places] - one[places:],
                coins,
                guesses=places // 2,
                delta=DELTA,
                confidence=_CONFIDENCE,
            )
            for name, one in scores.items()
        },
    )


def _outputs(
    network: Callable[[], nn.Module], arrays: Arrays, features: NDArray[np.float32]
) -> NDArray[np.float64]:
    model = network()
    set_arrays(model, arrays)
    with torch.no_grad():
        outputs: NDArray[np.float64] = model(torch.tensor(features)).double().numpy()
    return outputs
