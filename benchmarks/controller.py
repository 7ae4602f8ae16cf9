"""The row of M2FDP's controller: one decision, against the loops that it spares.

The rival works the same objective out at one point after the other, in plain Python. Both must
choose the same point. A run has one controller, which decides before each round; what does not
depend on the steps that are left it works out once, for its first decision.
"""

import math
import time
from collections.abc import Iterator

from flwr_privacy.m2fdp.control.controller import AdaptiveController, Decision
from flwr_privacy.m2fdp.tree.tree import TierTree

from .report import Comparison

__all__ = ["controller"]

FANOUTS, RATIOS = (2, 4, 4, 8), (0.5, 0.0, 1.0)
MAX_STEPS, MAX_DEVICES, TOTAL_STEPS, EVENTS = 40, 8, 4000, 3
PARAMETERS, SAMPLING, EPSILON, DELTA = 7840, 0.05, 1.0, 1e-5
WEIGHTS = (1.0, 1.0, 1e-4)
REPETITIONS = 20
BUDGET = 5e-3  # seconds

Point = tuple[int, int, int]


def controller() -> Iterator[Comparison]:
    """Compare a decision with nested loops, and with its budget."""
    tree = TierTree.of_fanouts(FANOUTS, p=RATIOS)
    first, again, loops = [], [], []
    for number in range(REPETITIONS + 1):
        left = TOTAL_STEPS - number
        chooses = AdaptiveController.of(
            tree,
            parameters=PARAMETERS,
            total_steps=TOTAL_STEPS,
            max_steps=MAX_STEPS,
            weights=WEIGHTS,
            normalise=False,
            nu="printed",
            active_tiers="all",
            events={1: EVENTS},
            sampling_rate=SAMPLING,
            epsilon=EPSILON,
            delta=DELTA,
        )
        began = time.perf_counter()
        decision = chooses.decide(left)
        first_done = time.perf_counter()
        repeated = chooses.decide(left)
        done = time.perf_counter()
        best = _loops(left)
        loops_done = time.perf_counter()
        if not best == _point(decision) == _point(repeated):
            raise RuntimeError(f"{left} steps left: {_point(decision)}, the loops have {best}")
        if number > 0:  # the first imports what it needs
            first.append(first_done - began)
            again.append(done - first_done)
            loops.append(loops_done - done)
    what = f"M2FDP's decision, {MAX_STEPS} x {MAX_DEVICES} x {MAX_DEVICES} points"
    rival = "nested loops in plain Python, same points"
    budget = "5 ms, the budget for it"
    yield Comparison(what=what, rival=rival, ours=again, theirs=loops, at_least=100)
    for name, ours in ((what, again), ("the first decision, which makes tables", first)):
        yield Comparison(what=name, rival=budget, ours=ours, theirs=[BUDGET], at_most=1.0)
    yield Comparison(
        what="the first decision, which makes tables", rival=rival, ours=first, theirs=loops
    )


def _point(decision: Decision) -> Point:
    return decision.steps, decision.secure, decision.insecure


def _loops(left: int) -> Point:
    """Return the best steps and participation of the tree, half of which is secure."""
    wireless, wired = 32 * PARAMETERS / 35e6, 32 * PARAMETERS / 100e6
    first, second, third = FANOUTS[0], FANOUTS[0] * FANOUTS[1], math.prod(FANOUTS[:3])
    between, half = second + third, third // 2
    scale = 8 * 4 * PARAMETERS * SAMPLING**2 * math.log(1 / DELTA) / EPSILON**2
    best, found = math.inf, (0, 0, 0)
    for s_sec in range(MAX_DEVICES, 0, -1):
        for s_ins in range(MAX_DEVICES, 0, -1):
            for steps in range(1, min(MAX_STEPS, left) + 1):
                uploads = half * (s_sec + s_ins) + between
                energy = (1 + EVENTS) * uploads * 10**-0.6 * wireless + first * 10**0.8 * wired
                energy += steps * half * (s_sec + s_ins) * 1e-3
                seconds = (1 + EVENTS) * uploads * wireless + first * wired + steps * 0.2
                nu = scale * steps**4 * _noise(s_sec, s_ins)
                rounds = left / steps
                value = WEIGHTS[0] * rounds * energy + WEIGHTS[1] * rounds * seconds
                value += WEIGHTS[2] * nu
                if value < best * (1 - 1e-12):
                    best, found = value, (steps, s_sec, s_ins)
    return found


def _noise(s_sec: int, s_ins: int) -> float:
    """Return the sum over the tiers of the noise term."""
    depth = len(FANOUTS)
    p = (0.0, *RATIOS, 1.0)
    secure, insecure = (0, *FANOUTS[1:-1], s_sec), (0, *FANOUTS[1:-1], s_ins)
    total = 0.0
    for tier in range(1, depth + 1):
        terms, reach, averaged = 0.0, 1.0, 1
        for m in range(tier, depth + 1):
            below = math.prod((secure if m == 1 else insecure)[m:])
            entered = reach * p[m] / (averaged * below**2)
            terms += entered * (2 if m == tier else 1)  # A and B, C at the devices
            if m < depth:
                reach *= 1 - p[m]
                averaged *= insecure[m]
        total += (1 - p[tier - 1]) ** 2 * terms
    return total
