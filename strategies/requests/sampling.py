"""Draws the clients of a round, and chooses the nodes that run simulated clients."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flwr_privacy.errors import check_integer
from flwr_privacy.wire.identity import derive_seed, fingerprints, places, stream

from .federation import Federation

__all__ = ["Sampler"]

logger = logging.getLogger("flwr.privacy")


class Sampler:
    """Draws clients of a federation.

    Parameters
    ----------
    federation : Federation
        Who there is.
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._fingerprints = fingerprints(federation.simulated)
        self._seats: dict[str, str] = {}  # simulated client: the worker that ran it last
        self._free: set[str] = set()  # simulated clients that left nothing there
        self._most = 0

    def sample_size(self, *, fraction: float, minimum: int) -> tuple[int, int]:
        """Return the size of a sample, and of the population that it is drawn from."""
        population = len(self._population())
        return max(math.floor(population * fraction + 1e-9), minimum), population

    def sample(
        self,
        seed: int | str,
        purpose: tuple[str | int, ...],
        *,
        fraction: float,
        minimum: int,
        busy: Collection[int] = (),
        without: Collection[str] = (),
        turns: Mapping[str, tuple[int, int]] | None = None,
    ) -> dict[int, list[str]]:
        """Draw clients without replacement.

        Every client has a place in a random order that depends on the seed, the purpose and its
        identity alone; the first ones that are there are taken. So who is absent changes no more
        than that somebody else comes in for it.

        Parameters
        ----------
        seed : int or str
            Root seed of the experiment.
        purpose : tuple
            What is drawn, e.g. ``("train", server_round)``.
        fraction : float
            Fraction of the clients that are connected, rounded down.
        minimum : int
            At least so many. If nodes left and fewer clients remain, all of them are taken.
        busy : collection of int
            Nodes that still owe an answer and are not asked.
        without : collection of str
            Clients that are not asked either; a node without a name goes by ``node-`` and its id.
        turns : dict, optional
            The round in which each client was last asked, and its place in that round: those that
            have waited longest come first, and before them those that were never asked.

        Returns
        -------
        dict
            For each node the clients that it runs. Simulated clients are shared out evenly; one
            that left something on its node keeps it while the node is connected. Nodes that have
            not said who they are run the client "".

        Raises
        ------
        InvalidParameterError
            If more are to be drawn than there ever were.
        """
        population = self._population()
        size, _ = self.sample_size(fraction=fraction, minimum=minimum)
        self._most = max(self._most, len(population))
        check_integer("clients per round", size, minimum=0, maximum=self._most)
        if size > len(population):
            logger.warning("%d clients to draw, %d are left", size, len(population))
        chosen: list[str | int] = []
        there = self._there(busy)
        left_out = len(without) + len(turns or ())
        order = self._order(
            population, derive_seed(seed, "sample", *purpose), likely=size + left_out
        )
        for who in order if turns is None else _by_turns(order, turns):
            if len(chosen) == size:
                break
            if _name(who) not in without and there(who):
                chosen.append(who)
        return self._assigned(chosen, busy)

    def draw(
        self,
        seed: int | str,
        purpose: tuple[str | int, ...],
        *,
        fraction: float,
        minimum: int,
        shares: Mapping[str, float] | None = None,
        busy: Collection[int] = (),
    ) -> tuple[dict[int, list[str]], dict[str, int]]:
        """Draw clients with replacement.

        In every draw each client has a random time that depends on the seed, the purpose and its
        identity alone, exponential with its share as rate; the first one is drawn. So who is absent
        changes no more than that somebody else comes in for it.

        Parameters
        ----------
        seed, purpose, fraction, minimum, busy
            As in `sample`; the fraction is that of the draws.
        shares : dict, optional
            How often each client is to be drawn, relative to the others; by default all alike.
            Clients without a share are not drawn.

        Returns
        -------
        assigned : dict
            For each node the clients that it runs.
        draws : dict
            How often each of them was drawn.
        """
        size, _ = self.sample_size(fraction=fraction, minimum=minimum)
        is_there = self._there(busy)
        there = [
            client
            for client in self._federation.clients()
            if is_there(client) and (shares is None or client in shares)
        ]
        rates = [1.0 if shares is None else shares[client] for client in there]
        draws: Counter[str] = Counter()
        if there and size:
            times = np.array(
                [
                    stream(seed, "draw", *purpose, client).exponential(size=size) / rate
                    for client, rate in zip(there, rates, strict=True)
                ]
            )
            draws.update(there[first] for first in times.argmin(axis=0))
        return self._assigned(draws, busy), dict(draws)

    def release(self, clients: Iterable[str]) -> None:
        """Let simulated clients run on other nodes, as they have no state on their last one."""
        self._free.update(clients)

    def _population(self) -> Sequence[str | int]:
        federation = self._federation
        return federation.clients() if federation.met else federation.connected

    def _order(
        self, population: Sequence[str | int], seed: int, *, likely: int
    ) -> Iterator[str | int]:
        """Yield a population in a random order, of which the first ones are likely to be all used.

        The others are put in order only if they are: a million of them take longer than a round.
        """
        simulated = population is self._federation.simulated
        prints = self._fingerprints if simulated else fingerprints(population)
        keys = places(seed, prints)
        last = np.iinfo(keys.dtype).max
        if 0 < likely < keys.size:
            last = np.partition(keys, likely - 1)[likely - 1]
        for part in (keys <= last, keys > last):
            indices = np.flatnonzero(part)
            for index in indices[np.argsort(keys[part], kind="stable")].tolist():
                yield population[index]

    def _there(self, busy: Collection[int]) -> Callable[[str | int], bool]:
        """Return a test whether a client is available: no node has an open request for it."""
        nodes = self._federation.nodes
        if not self._federation.cohorts:
            return lambda who: (who if isinstance(who, int) else nodes[who]) not in busy
        idle = any(nodes[worker] not in busy for worker in self._federation.workers())

        def there(who: str | int) -> bool:
            seat = self._seats.get(str(who))
            return idle and (seat not in nodes or nodes[seat] not in busy)

        return there

    def _assigned(
        self, chosen: Collection[str | int], busy: Collection[int]
    ) -> dict[int, list[str]]:
        """Return the chosen clients by the node that runs them."""
        nodes = self._federation.nodes
        if not self._federation.cohorts:
            return _by_node(
                (who, "") if isinstance(who, int) else (nodes[who], who) for who in chosen
            )
        workers = self._federation.workers()
        load = {worker: 0 for worker in workers if nodes[worker] not in busy}
        most = math.ceil(len(chosen) / max(1, len(load)))
        clients = sorted(map(str, chosen), key=lambda c: (self._may_move(c), len(c), c))
        for client in clients:  # first those who must stay
            seat = self._seats.get(client)
            if seat not in load:
                seat = min(load, key=lambda worker: (load[worker], worker))
            elif self._may_move(client) and load[seat] >= most:
                # What it keeps in files lies where the nodes that share its folder find it.
                others = [worker for worker in load if self._storage(worker) == self._storage(seat)]
                seat = min(others, key=lambda worker: (load[worker], worker))
            self._seats[client] = seat
            load[seat] += 1
        self._free.difference_update(clients)
        return _by_node((nodes[self._seats[client]], client) for client in clients)

    def _may_move(self, client: str) -> bool:
        return client in self._free or client not in self._seats

    def _storage(self, worker: str) -> Any:
        return self._federation.introductions[worker].get("storage")


def _name(who: str | int) -> str:
    return f"node-{who}" if isinstance(who, int) else who


def _by_turns(
    order: Iterable[str | int], turns: Mapping[str, tuple[int, int]]
) -> Iterator[str | int]:
    """Yield those who had no turn, and then the others, who have waited longest first."""
    had = []
    for who in order:
        if _name(who) in turns:
            had.append(who)
        else:
            yield who
    yield from sorted(had, key=lambda who: turns[_name(who)])


def _by_node(chosen: Iterable[tuple[int, str]]) -> dict[int, list[str]]:
    assigned: dict[int, list[str]] = {}
    for node, client in sorted(chosen, key=lambda entry: (len(entry[1]), entry[1], entry[0])):
        assigned.setdefault(node, []).append(client)
    return assigned
