"""Calibration: the noise for a target epsilon, searched by PLD, and in closed form.

By PLD both sides look for the noise of rounds with Poisson sampling; that of dp-accounting is its
own search with its own accountant. Both may keep what they can reuse, so each search has another
target, a thousandth apart. In closed form it is the noise of the first round under each mode.
"""

import time
import warnings
from collections.abc import Callable, Iterator

from dp_accounting import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    calibrate_dp_mechanism,
)
from dp_accounting.pld import PLDAccountant

from flwr_privacy.accounting import ADD_REMOVE, REPLACE_ONE, noise_multiplier
from flwr_privacy.simulations.research.udp.noise_theory import sigma_zcdp
from flwr_privacy.udp import participations, sigma_paper

from .report import Comparison

__all__ = ["calibration"]

ROUNDS, SAMPLING, EPSILON, DELTA = 1000, 0.1, 4.0, 1e-5
REPETITIONS = 5
CLOSED_REPETITIONS = 200
LARGEST_DIFFERENCE = 1e-3
BUDGET = 1e-3  # seconds

RIVAL = "dp-accounting's calibrate_dp_mechanism with PLDAccountant"

CLOSED: dict[str, Callable[[float], float]] = {
    "paper": lambda e: sigma_paper(rounds=ROUNDS, q=SAMPLING, epsilon=e, delta=DELTA),
    "zcdp": lambda e: sigma_zcdp(rounds=ROUNDS, q=SAMPLING, epsilon=e, delta=DELTA),
    "gdp": lambda e: _closed(e, round(SAMPLING * ROUNDS)),
    "gdp_fixed": lambda e: _closed(e, participations(ROUNDS, SAMPLING)),
    "gdp_worst": lambda e: _closed(e, ROUNDS),
}
"""Noise multiplier from epsilon, by mode of UDP."""


def _closed(epsilon: float, releases: int) -> float:
    return noise_multiplier(epsilon=epsilon, delta=DELTA, releases=releases, neighbours=REPLACE_ONE)


def calibration() -> Iterator[Comparison]:
    """Compare our calibration with dp-accounting's."""
    targets = [EPSILON * (1 + number / 1000) for number in range(REPETITIONS + 1)]
    ours, theirs, again = [], [], []
    for number, target in enumerate(targets):
        sides = [_ours, _theirs] if number % 2 else [_theirs, _ours]
        found = {side: _timed(side, target) for side in sides}
        (seconds, mine), (rival_seconds, rivals) = found[_ours], found[_theirs]
        if abs(mine / rivals - 1) > LARGEST_DIFFERENCE:
            raise RuntimeError(f"noise for epsilon {target}: {mine}, dp-accounting's is {rivals}")
        repeated, kept = _timed(_ours, target)
        if kept != mine:
            raise RuntimeError(f"noise for epsilon {target}: {mine}, then {kept}")
        if number > 0:  # the first imports what it needs
            ours.append(seconds)
            theirs.append(rival_seconds)
            again.append(repeated)
    what = f"calibrate {ROUNDS} rounds, q {SAMPLING:g}"
    yield Comparison(what=what, rival=RIVAL, ours=ours, theirs=theirs, at_most=1.0)
    yield Comparison(
        what=f"{what}, asked again", rival="our first answer", ours=again, theirs=ours, at_most=0.01
    )
    for mode, closed in CLOSED.items():
        yield Comparison(
            what=f"noise of a round, {mode}",
            rival="1 ms, the budget for it",
            ours=[
                _timed(closed, EPSILON * (1 + number / 1000))[0]
                for number in range(CLOSED_REPETITIONS)
            ],
            theirs=[BUDGET],
            at_most=1.0,
        )


def _timed(function: Callable[[float], float], epsilon: float) -> tuple[float, float]:
    began = time.perf_counter()
    result = function(epsilon)
    return time.perf_counter() - began, result


def _ours(epsilon: float) -> float:
    return noise_multiplier(
        epsilon=epsilon,
        delta=DELTA,
        releases=ROUNDS,
        neighbours=ADD_REMOVE,
        sampling=SAMPLING,
        accountant="pld",
    )


def _theirs(epsilon: float) -> float:
    def event(z: float) -> SelfComposedDpEvent:
        return SelfComposedDpEvent(PoissonSampledDpEvent(SAMPLING, GaussianDpEvent(z)), ROUNDS)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overflows where its search begins, without noise
        return float(calibrate_dp_mechanism(PLDAccountant, event, epsilon, DELTA))
