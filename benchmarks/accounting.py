"""The budget check of a round, ``would_exceed``, under Poisson sampling.

Flower's accountant replays its history at every check, about 0.1 s per round of it, so it is
measured after 20 rounds and ours after 200: the ratio is too small by a factor of ten.
"""

import time
from collections.abc import Iterator

from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyAccountant,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
)

from flwr_privacy.strategies.flower_accountant import FlowerAccountant

from .report import Comparison

__all__ = ["accounting"]

ROUNDS, RIVAL_ROUNDS = 200, 20
CHECKS, RIVAL_CHECKS = 1000, 3
CONFIG = PrivacyConfig(
    target_delta=1e-5,
    population_size=1000,
    neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    sampling_method=SamplingMethod.POISSON,
    max_epsilon=8.0,
)
ROUND = GaussianPrivacyEvent(noise_multiplier=1.0, sample_size=50, population_size=1000)


def accounting() -> Iterator[Comparison]:
    """Compare our budget check with Flower's."""
    ours, rival = FlowerAccountant(CONFIG), RdpAccountant(CONFIG)
    for number in range(ROUNDS):
        ours.compose(ROUND)
        if number < RIVAL_ROUNDS:
            rival.compose(ROUND)
    _check_same(rival)
    yield Comparison(
        what=f"budget check after {ROUNDS} Poisson rounds",
        rival=f"Flower's RdpAccountant.would_exceed after {RIVAL_ROUNDS} rounds only",
        ours=_seconds(ours, CHECKS),
        theirs=_seconds(rival, RIVAL_CHECKS),
        at_least=100.0,
    )


def _seconds(accountant: PrivacyAccountant, checks: int) -> list[float]:
    seconds = []
    for _ in range(checks):
        began = time.perf_counter()
        accountant.would_exceed(ROUND)
        seconds.append(time.perf_counter() - began)
    return seconds


def _check_same(rival: PrivacyAccountant) -> None:
    """Both must compute the same, up to the orders that they look at."""
    ours = FlowerAccountant(CONFIG)
    ours.compose(ROUND, RIVAL_ROUNDS)
    mine, theirs = ours.get_epsilon(1e-5), rival.get_epsilon(1e-5)
    if not 0.99 * theirs <= mine <= theirs * (1 + 1e-9):
        raise RuntimeError(f"epsilon {mine} after {RIVAL_ROUNDS} rounds, Flower's is {theirs}")
