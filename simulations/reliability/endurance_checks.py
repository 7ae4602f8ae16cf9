"""Measures memory, open files and ledgers, before and after a long training."""

import gc
import os
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from flwr_privacy.accounting import Charge, fitting, spent
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.ledger import Entry

__all__ = ["Account", "Gauge", "Held", "Mark", "account", "growth", "held", "size_of", "traced"]

_DESCRIPTORS, _PAGES, _TASKS = Path("/proc/self/fd"), Path("/proc/self/statm"), "/proc/self/task"
_PARTS = 5  # of a training; there is a mark at the end of each
_WINDOW = 10  # rounds before a mark, at most; the least of them counts: a fault holds more
_ROUNDING = 1e-9  # relative; what float64 may move a sum


# -- What a process holds ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Held:
    """Resources of a process besides memory.

    Parameters
    ----------
    descriptors : tuple of str
        What its open descriptors lead to; on Linux only.
    threads : tuple of str
        Names of its threads.
    processes : tuple of str
        Its children; on Linux only.
    """

    descriptors: tuple[str, ...]
    threads: tuple[str, ...]
    processes: tuple[str, ...]

    def leaked(self, after: "Held") -> list[str]:
        """Return, in words, what a later measurement has and this one has not."""
        return [
            f"{kind[:-1].removesuffix('e') if kind == 'processes' else kind[:-1]} left open: {name}"
            for kind in ("descriptors", "threads", "processes")
            for name in (Counter(getattr(after, kind)) - Counter(getattr(self, kind))).elements()
        ]

    def counts(self) -> str:
        """Return the three numbers."""
        return f"{len(self.descriptors)}, {len(self.threads)}, {len(self.processes)}"


def held() -> Held:
    """Return the resources that this process holds now."""
    gc.collect()  # what nobody refers to is no leak
    return Held(
        descriptors=tuple(sorted(_open_descriptors())),
        threads=tuple(sorted(thread.name for thread in threading.enumerate())),
        processes=tuple(
            sorted(
                child
                for path in Path(_TASKS).glob("*/children")
                for child in path.read_text(encoding="ascii").split()
            )
        ),
    )


def _open_descriptors() -> Iterator[str]:
    if not _DESCRIPTORS.is_dir():
        return
    for name in os.listdir(_DESCRIPTORS):
        try:
            yield os.readlink(_DESCRIPTORS / name)
        except FileNotFoundError:  # the one of the list itself
            continue


# -- Memory and time -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A measurement after some rounds.

    Parameters
    ----------
    server_round : int
        The last of them.
    traced : int
        Bytes of all Python objects and arrays since the training began.
    history : int
        How many of them the history and the charges take, which have a line for every round.
    resident : int
        Bytes of the process, by the operating system; 0 where it does not say.
    files : int
        Files that nodes and server keep, at most.
    seconds : float
        CPU time of a round, the middle one of those before.
    """

    server_round: int
    traced: int
    history: int
    resident: int
    files: int
    seconds: float

    @property
    def rest(self) -> int:
        """Bytes beside history and charges."""
        return self.traced - self.history


class Gauge:
    """Measures a training at the end of each fifth of its rounds.

    Parameters
    ----------
    rounds : int
        Rounds of the training.
    folder : Path
        Where nodes and server keep their files.
    history : callable
        Returns the objects that have a line for each round.
    """

    def __init__(self, *, rounds: int, folder: Path, history: Callable[[], object]) -> None:
        self._folder, self._history = folder, history
        self._ends = [rounds * part // _PARTS for part in range(1, _PARTS + 1)]
        self._window = max(1, min(_WINDOW, rounds // (2 * _PARTS)))
        self._taken: dict[int, Mark] = {}
        self._seconds = np.zeros(rounds + 1)  # all there from the start: it must not grow
        self._before = time.process_time()

    def look(self, server_round: int) -> None:
        """Measure after a round, if a measurement is due."""
        self._seconds[server_round] = time.process_time() - self._before
        for end in self._ends:
            if end - self._window < server_round <= end:
                self._take(server_round, end)
        self._before = time.process_time()

    def marks(self) -> tuple[Mark, ...]:
        """Return the measures so far."""
        return tuple(self._taken.values())

    def _take(self, server_round: int, end: int) -> None:
        _empty_caches()
        gc.collect()
        mark = Mark(
            server_round=end,
            traced=tracemalloc.get_traced_memory()[0],
            history=size_of(self._history()),
            resident=_resident(),
            files=sum(len(files) for _, _, files in os.walk(self._folder)),
            seconds=float(np.median(self._seconds[max(0, end - 4 * _WINDOW) : server_round + 1])),
        )
        before = self._taken.get(end, mark)
        least = mark if mark.rest < before.rest else before
        # Of files the most: a node that has just lost its own has fewer for a while.
        self._taken[end] = replace(least, files=max(mark.files, before.files))


def growth(marks: Sequence[Mark]) -> float:
    """Return by how many bytes a round grows what is no history: the median over all parts.

    What is there from some round on (a module that was loaded because of a fault) is in one part; a
    leak is in all of them.
    """
    slopes = [
        (later.rest - mark.rest) / (later.server_round - mark.server_round)
        for mark, later in pairwise(marks)
    ]
    return float(np.median(slopes)) if slopes else 0.0


def size_of(thing: object) -> int:
    """Return the bytes of an object with all that it holds: plain values, and objects of them."""
    seen: set[int] = set()
    waiting, size = [thing], 0
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, type | Path) or callable(value):
            continue
        seen.add(id(value))
        size += sys.getsizeof(value)
        if isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif hasattr(value, "__dict__"):
            waiting.append(vars(value))
    return size


def _empty_caches() -> None:
    """Empty the library's caches that are bounded: how full they are says nothing of growth."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "flwr_privacy":
            for thing in vars(module).values():
                if hasattr(thing, "cache_parameters") and thing.cache_parameters()["maxsize"]:
                    thing.cache_clear()


def _resident() -> int:
    if not _PAGES.exists():
        return 0
    return int(_PAGES.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def traced() -> Iterator[None]:
    """Trace allocations, unless tracing is on already."""
    if tracemalloc.is_tracing():
        yield
        return
    tracemalloc.start(1)
    try:
        yield
    finally:
        tracemalloc.stop()


# -- Ledgers -------------------------------------------------------------------------------------

Place = tuple[str, int]
"""Phase and round."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """A client's ledger beside what it released.

    Parameters
    ----------
    client : str
        The client.
    released : int
        Answers that cost it something.
    entries : int
        Entries of its ledger.
    spent : float
        Epsilon of the ledger.
    recomputed : float
        Epsilon of the answers, each at what it costs by the server's card.
    stated : float
        Epsilon of the client by the server's card.
    wrong : list of str
        Where they disagree.
    """

    client: str
    released: int
    entries: int
    spent: float
    recomputed: float
    stated: float
    wrong: list[str] = field(default_factory=list)


def account(
    client: str,
    released: Mapping[Place, int],
    entries: Mapping[Place, Sequence[Entry]],
    card: PrivacyCard,
    *,
    on_card: bool = True,
    spare: bool = False,
) -> Account:
    """Compare a client's ledger, the server's card, and what a witness saw released.

    Parameters
    ----------
    client : str
        The client.
    released : Mapping
        How many answers of each phase and round left, as far as they cost something.
    entries : Mapping
        Entries of the ledger by phase and round.
    card : PrivacyCard
        The server's card.
    on_card : bool, default True
        Whether the card says what the client spent; not of a node that releases for others.
    spare : bool, default False
        Whether the ledger may have more than what left; where it is charged before it is known
        whether anything leaves.
    """
    costs: dict[Place, list[Charge]] = {}
    for release in card.releases:
        if client in release.clients:
            place = release.phase, release.server_round
            costs.setdefault(place, []).append(release.charge)
    wrong, recomputed = [], []
    for place in sorted(released.keys() | entries.keys()):
        count, mine = released.get(place, 0), [e.charge for e in entries.get(place, ())]
        told = f"client {client}, phase {place[0]}, round {place[1]}"
        if len(mine) < count:
            wrong.append(f"{told}: {count} answers, {len(mine)} entries in the ledger")
        elif len(mine) > count and not spare:
            wrong.append(f"{told}: {len(mine)} entries in the ledger, {count} answers")
        known = costs.get(place, []) if on_card else mine
        if len(known) < count:
            wrong.append(f"{told}: {count} answers, {len(known)} charges in the card")
        recomputed += known[:count]
    delta = card.guarantee.delta
    whole = [entry.charge for them in entries.values() for entry in them]
    numbers = {
        "spent": _epsilon(whole, delta),
        "recomputed": _epsilon(recomputed, delta),
        "stated": _epsilon([c for them in costs.values() for c in them], delta),
    }
    least = numbers["recomputed"] * (1 - _ROUNDING)
    most = numbers["recomputed"] * (1 + _ROUNDING)
    if numbers["spent"] < least or (not spare and numbers["spent"] > most):
        wrong.append(
            f"client {client}: the ledger gives epsilon {numbers['spent']}, its answers "
            f"{numbers['recomputed']}"
        )
    if on_card and numbers["stated"] < least:
        wrong.append(f"client {client}: the card gives epsilon {numbers['stated']}, less than that")
    return Account(
        client=client,
        released=sum(released.values()),
        entries=len(whole),
        wrong=wrong,
        **numbers,
    )


def _epsilon(charges: Iterable[Charge], delta: float | None) -> float:
    listed = list(charges)
    if delta is None or not listed:
        return 0.0
    return spent(listed, delta=delta, accountant=fitting(listed))
