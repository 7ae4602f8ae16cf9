"""Audits UDP's noise through the real strategy and the real client, by canaries.

A client has m canaries, each one of two opposite records, by a coin. The model is linear
and its loss is its output, so the gradient of a record is the record: canary j pulls at weight j
alone, with all that the clipping allows, and the server reads +1 or -1 there, plus noise. It is the
worst case of a replaced record. What the guesses prove
(`flwr_privacy.simulations.research.attacks.audit`) stands beside what the client's ledger says. A
client that adds a third of the noise and charges for all of it has to be flagged, and the correct
one to pass:

- The confidence is 99 %. A correct mechanism is flagged with a chance of at most 1 % by each of the
  two audits: in 1000 simulated runs each at epsilon 1, 2 and 4 (delta 1e-5), never by the one-run
  audit, whose bound is far from tight for Gaussian noise, and 31 times of 3000 by the Gaussian one.
- Of 4000 canaries the 1000 that stand out most are guessed. With a third of the noise the one-run
  audit flagged 995, 1000 and 1000 of these runs, and the Gaussian one all. At larger epsilon the
  one-run audit sees too little: its ceiling is 5.4, and noise takes from it. Only the Gaussian
  audit, which assumes independent Gaussian channels, goes on.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_privacy.clients import UDPClient
from flwr_privacy.clients.node.base import Train
from flwr_privacy.errors import check_integer
from flwr_privacy.pipeline.mechanism import Answer, Release, ReleasePlan
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.attacks.audit import (
    GaussianAudit,
    OneRunAudit,
    gaussian_audit,
    largest_epsilon,
    one_run_audit,
)
from flwr_privacy.simulations.research.attacks.one_run_fdp import FDPAudit, fdp_audit
from flwr_privacy.strategies import UDP
from flwr_privacy.strategies.requests.instruction import Instruction, noting
from flwr_privacy.strategies.requests.request_log import ClientReply
from flwr_privacy.udp import UDPTerms
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.identity import stream
from flwr_privacy.wire.message import Fields

from .training import DELTA, Records, epsilon_spent, everybody, level, train_inline

__all__ = [
    "BROKEN",
    "CEILING",
    "CONFIDENCE",
    "GUESSES",
    "ROUNDS",
    "Audited",
    "WeakNoiseUDPClient",
    "audit",
]

BROKEN = 3.0
"""How many times too small the broken client's noise is."""

CONFIDENCE = 0.99
ROUNDS = 20
_CANARIES, GUESSES = 4000, 1000
CEILING = largest_epsilon(GUESSES, confidence=CONFIDENCE)
"""What so many guesses prove if all are right, at delta 0."""

_OTHERS = 64  # records of a client without canaries


@dataclass(frozen=True, kw_only=True)
class _WeakNoise(UDPTerms):
    """A mechanism whose noise is less than its plan says."""

    def noise(self, measured: Any, plan: ReleasePlan, random: SecureRandom) -> Answer:
        """Return the answer with too little noise."""
        weak = replace(self, noise_multiplier=self.noise_multiplier / BROKEN)
        return UDPTerms.noise(weak, measured, plan, random)


class WeakNoiseUDPClient(UDPClient):
    """A defective client: it adds a third of the noise that it charges for.

    It serves to show that the audit finds such a thing.
    """

    def release(self, phase: str, arrays: Arrays, fields: Fields, train: Train) -> Release:
        """Return the release of a training, with the defect in its mechanism."""
        release = super().release(phase, arrays, fields, train)
        return replace(release, mechanism=_WeakNoise(**vars(release.mechanism)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Audited:
    """The results of an audit of a run.

    Parameters
    ----------
    mechanism : str
        What ran.
    ledger : float
        Epsilon by the ledger, infinite where there is no noise.
    scores : ndarray, shape (m,)
        What the server read of each canary, in units of a canary: the coin, 1 or -1, plus noise.
    coins : ndarray of bool, shape (m,)
        The coins.
    one_run : OneRunAudit
        What holds for any mechanism.
    fdp : FDPAudit
        What holds for any mechanism whose claim is a Gaussian trade-off curve.
    gaussian : GaussianAudit
        What holds if the channels of the canaries are independent and Gaussian.
    """

    mechanism: str
    ledger: float
    scores: NDArray[np.float64]
    coins: NDArray[np.bool_]
    one_run: OneRunAudit
    fdp: FDPAudit
    gaussian: GaussianAudit

    @property
    def flagged(self) -> bool:
        """Whether an audit refutes the ledger."""
        proven = (self.one_run.epsilon, self.fdp.epsilon, self.gaussian.epsilon)
        return max(proven) > self.ledger

    @property
    def verdict(self) -> str:
        """The same in words, with a star if only the Gaussian audit refutes it."""
        if math.isinf(self.ledger):
            return "no guarantee"
        if not self.flagged:
            return "passes"
        sure = max(self.one_run.epsilon, self.fdp.epsilon)
        return "FLAGGED" if sure > self.ledger else "FLAGGED*"


def audit(
    epsilon: float | None,
    *,
    client: type[UDPClient] = UDPClient,
    seed: int = 0,
    canaries: int = _CANARIES,
    guesses: int = GUESSES,
    rounds: int = ROUNDS,
    clients: int = 2,
) -> Audited:
    """Audit a training at record level.

    Parameters
    ----------
    epsilon : float, optional
        Budget, at delta 1e-5; None for no noise.
    client : type, default UDPClient
        The client half.
    seed : int, default 0
        Root of the coins; the noise is secret.
    canaries, guesses, rounds : int
        Coins, those that the one-run audit guesses, and rounds of the training.
    clients : int, default 2
        Clients; the first has the canaries, the others have ordinary records.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.
    """
    check_integer("clients", clients, minimum=2)
    check_integer("guesses", guesses, minimum=1, maximum=canaries)
    coins = stream(seed, "coins").random(canaries) < 0.5
    signs = np.where(coins, 1, -1).astype(np.float32)
    data: list[Records] = [(np.diag(signs), np.zeros(canaries, np.int64))]
    for other in range(1, clients):
        features = stream(seed, "others", other).normal(size=(_OTHERS, canaries))
        data.append((features.astype(np.float32), np.zeros(_OTHERS, np.int64)))
    strategy = _ListeningUDP(privacy=level(epsilon), **everybody(clients), rounds=rounds)
    train_inline(strategy, client, lambda: _Pull(canaries), data, _own_output, rounds)
    # A step goes against the gradient, by 1 / m for a canary.
    scores = -np.mean(strategy.updates, axis=0) * canaries
    return Audited(
        mechanism=_mechanism(epsilon, client),
        ledger=epsilon_spent(strategy),
        scores=scores,
        coins=coins,
        one_run=one_run_audit(scores, coins, guesses=guesses, delta=DELTA, confidence=CONFIDENCE),
        fdp=fdp_audit(scores, coins, guesses=guesses, delta=DELTA, confidence=CONFIDENCE),
        gaussian=gaussian_audit(scores, coins, threshold=0, delta=DELTA, confidence=CONFIDENCE),
    )


class _ListeningUDP(UDP):
    """Keeps what the server reads in the uploads of the first client: its updates."""

    def _build(self) -> None:
        super()._build()
        self.updates: list[NDArray[np.float64]] = []

    def instruct(self, server_round: int) -> Instruction:
        """Ask as UDP does; note the answers of the first client."""
        told = super().instruct(server_round)
        step = CodeGrid(told.fields["grid"]).step

        def note(reply: ClientReply) -> None:
            if reply.client_id == "0":
                (codes,) = reply.arrays().values()
                self.updates.append(np.asarray(codes, np.float64).reshape(-1) * step)

        return noting(told, self.take, note)


class _Pull(nn.Module):
    """A linear map to one number, without a bias, from zero."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features))

    def forward(self, records: Tensor) -> Tensor:
        return records @ self.weight


def _own_output(output: Tensor, _: Tensor) -> Tensor:
    return output.sum()


def _mechanism(epsilon: float | None, client: type[UDPClient]) -> str:
    if epsilon is None:
        return "no noise"
    broken = issubclass(client, WeakNoiseUDPClient)
    return f"epsilon {epsilon:g}" + (f", noise/{BROKEN:g}" if broken else "")
