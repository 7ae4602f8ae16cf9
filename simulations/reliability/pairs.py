"""Two faults in one training: a random sample of all pairs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flwr_privacy.errors import check_integer
from flwr_privacy.wire.identity import stream

from .federations import SmallFederation
from .grid import FAULTS, Strike
from .matrix import Cell, clean_training, effective, silent_trainings, verdict_of
from .outages import exchanges
from .training import Outcome, train, with_fault

__all__ = ["Pair", "cell_of_pair", "draw_pair", "pairs"]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two faults, in one round at two clients or at one client in two phases.

    Parameters
    ----------
    seed : int
        What the pair is drawn from; `--pairs 1 --seed` of it repeats the pair.
    strikes : tuple of Strike
        The faults.
    """

    seed: int
    strikes: tuple[Strike, Strike]

    @property
    def faults(self) -> str:
        """The names of both faults."""
        return " and ".join(one.fault for one in self.strikes)

    @property
    def places(self) -> str:
        """Where both faults happen."""
        return " and ".join(
            f"{one.phase} (round {one.server_round}, client {one.client}, request {one.nth})"
            for one in self.strikes
        )


def draw_pair(clean: Outcome, *, seed: int, faults: Sequence[str] = tuple(FAULTS)) -> Pair:
    """Return the pair of faults that a seed gives.

    Parameters
    ----------
    clean : Outcome
        The training without a fault: its requests are what can be hit.
    seed : int
        Root of the draws.
    faults : sequence of str, optional
        Keys of `FAULTS` to choose from.
    """
    draws = stream(seed, "pair")
    requests = [one for strikes in exchanges(clean).values() for one in strikes]
    first = requests[int(draws.integers(len(requests)))]
    in_the_round = [
        one
        for one in requests
        if one.server_round == first.server_round and one.client != first.client
    ]
    at_the_client = [
        one for one in requests if one.client == first.client and one.phase != first.phase
    ]
    choices = [group for group in (in_the_round, at_the_client) if group]
    group = choices[int(draws.integers(len(choices)))]
    second = group[int(draws.integers(len(group)))]
    return Pair(
        seed=seed, strikes=(_any_fault(first, draws, faults), _any_fault(second, draws, faults))
    )


def _any_fault(strike: Strike, draws: np.random.Generator, faults: Sequence[str]) -> Strike:
    return with_fault(strike, faults[int(draws.integers(len(faults)))])


def cell_of_pair(federation: SmallFederation, clean: Outcome, pair: Pair) -> Cell:
    """Train with a pair of faults and return the cell.

    Where the server has nothing of either answer, a training that left the clients out must end at
    the model of the training in which both requests are lost.
    """
    outcome = train(federation, *pair.strikes)
    silent = silent_trainings(federation, effective(clean, outcome))
    verdict, why = verdict_of(clean, outcome, silent=silent)
    return Cell(fault=pair.faults, phase=pair.places, verdict=verdict, why=why)


def pairs(
    federation: SmallFederation,
    *,
    seed: int,
    count: int = 60,
    told: Callable[[Pair, Cell], None] = lambda pair, cell: None,
) -> list[Cell]:
    """Return a random sample of the pairs of faults of a federation.

    Parameters
    ----------
    federation : SmallFederation
        The scheme.
    seed : int
        The seed of the first pair; each other has the next.
    count : int, default 60
        How many pairs, at least 1.
    told : callable, optional
        Gets each pair and its cell when it is done.

    Raises
    ------
    RuntimeError
        As `clean_training`.
    """
    check_integer("pairs", count, minimum=1)
    check_integer("seed", seed, minimum=0)
    clean = clean_training(federation)
    cells = []
    for mine in range(seed, seed + count):
        pair = draw_pair(clean, seed=mine)
        cells.append(cell_of_pair(federation, clean, pair))
        told(pair, cells[-1])
    return cells
