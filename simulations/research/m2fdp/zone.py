"""What members of a trusted zone of M2FDP find in each other's averages.

Clients with a few digits each train in a zone, through the real strategy and the real client. A
member keeps what it is sent: after a clean event the average of all, from which it takes off what
it sent itself (`flwr_privacy.simulations.research.m2fdp.trust_zone`); without clean events the next
global model, which is noised.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.clients import M2FDPClient
from flwr_privacy.m2fdp import EventSchedule, TierTree
from flwr_privacy.privacy.updates import Update, clip
from flwr_privacy.simulations.research.attacks.inversion import Recovery
from flwr_privacy.simulations.research.attacks.setup import AttackSetup, listen
from flwr_privacy.simulations.research.secure_sum.attack import invert
from flwr_privacy.strategies import M2FDP, DeviceNoise, WorstDrift
from flwr_privacy.wire.message import TRAIN

from .trust_zone import sibling_view

__all__ = ["DELTA", "EPSILON", "Sight", "sights"]

EPSILON, DELTA = 8.0, 1e-5
"""Budget of the noise on what leaves the zone."""

_CLIPPING_NORM = 1.0
_ZONES = (2, 3, 5)

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sight:
    """What members of a zone recover from the average of all.

    Parameters
    ----------
    name : str
        Who looks at what.
    errors : ndarray, shape (others,)
        Error of the updates of the others, relative to them.
    recovery : Recovery
        How near the records of the others were come to.
    found : ndarray, shape (records, features)
        The candidates nearest to them.
    first : int
        Number of the first client that is looked at.
    """

    name: str
    errors: Vector
    recovery: Recovery
    found: Vector
    first: int


def sights(setup: AttackSetup) -> list[Sight]:
    """Return what members see, in zones of several sizes, with and without clean events.

    Parameters
    ----------
    setup : AttackSetup
        The clients, two or more; the first ones are the zone.

    Returns
    -------
    list of Sight
        A zone of two first, with a clean event and without, then larger ones up to all clients.
    """
    clients = len(setup.labels)
    uploads = np.array([_upload(setup, index) for index in range(clients)])
    found = []
    for size in sorted({size for size in (*_ZONES, clients) if size <= clients}):
        average = _sent(setup, size, clean_events=True)
        found.append(_look(setup, f"1 of {size}", uploads[:size], average, 1))
        if size == clients and size > 2:
            name = f"{size - 1} of {size}"
            found.append(_look(setup, name, uploads[:size], average, size - 1))
        if size == 2:
            noised = _sent(setup, size, clean_events=False)
            found.append(_look(setup, "1 of 2, no clean event", uploads[:2], noised, 1))
    return found


def _sent(setup: AttackSetup, size: int, *, clean_events: bool) -> Vector:
    """Return what a member is sent after the first local step, less what it started from."""
    strategy = M2FDP(
        tree=TierTree.of_fanouts((1, size), p=1.0),
        privacy=DeviceNoise(
            epsilon=EPSILON,
            delta=DELTA,
            clipping_norm=_CLIPPING_NORM,
            clean_events=WorstDrift() if clean_events else None,
        ),
        schedule=EventSchedule(steps=2, events={1: 1}) if clean_events else EventSchedule(),
        min_train_nodes=size,
        min_available_nodes=size,
    )
    exchanges, model = listen(setup, strategy, M2FDPClient, clients=size)
    if not clean_events:
        return _update(setup, model)
    asked = [exchange.sent for exchange in exchanges[0] if exchange.phase == TRAIN]
    return _update(setup, asked[1])


def _upload(setup: AttackSetup, index: int) -> Vector:
    """Return the update that a client sends: it knows its own."""
    update = _update(setup, setup.train(index, setup.start))
    clip(update, _CLIPPING_NORM)
    return update


def _update(setup: AttackSetup, model: Mapping[str, NDArray[Any]]) -> Vector:
    return Update.between(setup.start, model, list(setup.start)).vector


def _look(setup: AttackSetup, name: str, uploads: Vector, average: Vector, together: int) -> Sight:
    """Return what the first so many members make of the average."""
    size = len(uploads)
    own = uploads[:together].mean(axis=0)
    view = sibling_view([average], [own], weight=together / size)
    layout = Update(np.empty(0), {n: np.shape(array) for n, array in setup.start.items()})
    candidates = invert(setup, layout.arrays(view.updates[0]))
    matches = setup.matches(candidates, together, size)
    guesses = setup.matches(setup.guesses, together, size)
    return Sight(
        name=name,
        errors=view.errors(uploads[together:, None])[:, 0],
        recovery=Recovery(similarities=matches.similarities, guessed=guesses.similarities),
        found=matches.found,
        first=together,
    )
