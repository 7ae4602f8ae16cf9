"""What an audit hears of UDP where all data of a user are protected; it needs no torch."""

from typing import Any

import numpy as np

from flwr_privacy.clients import SchemeClient, UDPClient, as_mod
from flwr_privacy.privacy.failures import FAILED_NAME
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.strategies import UDP, LoopOptions, UserLevel

from .canaries import COUNTER, KINDS, MODEL, Canary, canary
from .claims import DELTA, charge_of, charged, claim_of, most_answered, uncharged
from .observed import Claim, Released, Session, Vector
from .training import Heard, Model, Reply, crafted_app, listen

__all__ = ["NORM", "made_with", "said_by", "udp_claim", "udp_users", "users", "values_of"]

NORM = 0.5
"""Clipping norm of UDP."""

_GRID_BITS = 18  # so that even updates that are far too long have codes
_NAMES = [name for name in MODEL if name != COUNTER]
_SIZES = tuple(int(np.size(MODEL[name])) for name in _NAMES)


def udp_users(
    *,
    epsilon: float = 1000.0,
    clients: int = 3,
    rounds: int = 7,
    strategy: type[UDP] = UDP,
    half: type[SchemeClient] = UDPClient,
    insecure_seed: int | None = None,
) -> Session:
    """Train UDP at user level with canaries, and return what its server hears.

    Parameters
    ----------
    epsilon : float
        Budget, at delta 1e-5.
    clients, rounds : int
        How many there are.
    strategy, half : type
        The halves of the scheme.
    insecure_seed : int, optional
        Seed of the noise, for tests.
    """
    made = users(strategy, epsilon=epsilon, clients=clients, rounds=rounds)

    def train(client: str, server_round: int, start: Model) -> tuple[Model, int]:
        return _planted(client, server_round).after(start), int(client) + 1

    app = crafted_app(train, [as_mod(half)])
    heard = listen(
        made, app, clients=clients, rounds=rounds, start=MODEL, insecure_seed=insecure_seed
    )
    return Session(
        releases=[_upload(reply, heard) for reply in charged(heard)],
        claim=udp_claim(heard, budget=epsilon),
        answered=most_answered(heard),
        uncharged=uncharged(heard),
        silent=tuple(_planted(client, of).kind for of, client in heard.unanswered),
        weights={r.client: float(str(r.metrics["num-examples"])) for r in heard.replies},
    )


def users(strategy: type[UDP], *, epsilon: float, clients: int, rounds: int) -> UDP:
    """Return a strategy at user level; updates are clipped to `NORM`."""
    privacy = UserLevel(epsilon=epsilon, delta=DELTA, clipping_norm=NORM, grid_bits=_GRID_BITS)
    return made_with(strategy, privacy, clients=clients, rounds=rounds)


def made_with(strategy: type[UDP], privacy: Any, *, clients: int, rounds: int) -> UDP:
    """Return a strategy that asks all clients in each round."""
    return strategy(
        privacy=privacy,
        loop=LoopOptions(experiment_id="audit", seed=0, write_card=False),
        min_train_nodes=clients,
        min_available_nodes=clients,
        rounds=rounds,
    )


def udp_claim(heard: Heard, *, budget: float) -> Claim:
    """Return what the ledger claims of the client that was charged most."""
    charges = max(heard.charges.values(), key=len, default=[])
    return claim_of(charges, budget=budget, turn=2.0)  # data are replaced


def _planted(client: str, server_round: int) -> Canary:
    """Return the canary of a client in a round."""
    kind = KINDS[(int(client) + 3 * server_round) % len(KINDS)]
    return canary(kind, NORM, client, server_round)


def values_of(reply: Reply) -> Vector:
    """Return the floats of an upload, in units of the weights."""
    codes = [np.asarray(a, np.float64).reshape(-1) for a in reply.arrays.values()]
    return np.concatenate(codes) * CodeGrid(reply.fields["grid"]).step


def _upload(reply: Reply, heard: Heard) -> Released:
    own = _planted(reply.client, reply.round)
    expected, blocks, direction = own.expected, _SIZES, own.direction
    known = [*_NAMES]
    if FAILED_NAME in reply.arrays:
        known.append(FAILED_NAME)
        expected = np.append(expected, NORM if own.fails else 0.0)
        direction = np.append(direction, 0.0)
        blocks = (*blocks, 1)
    codes = [np.asarray(reply.arrays[name], np.float64).reshape(-1) for name in known]
    others = {name: a.tolist() for name, a in reply.arrays.items() if name not in known}
    return Released(
        place=(reply.client, reply.round),
        kind=own.kind,
        values=np.concatenate(codes) * CodeGrid(reply.fields["grid"]).step,
        expected=expected,
        sigma=charge_of(heard, reply).noise_multiplier * 2 * NORM,
        blocks=blocks,
        canary=direction,
        reach=own.reach,
        said=(sorted(others.items()), *said_by(reply)),
    )


def said_by(reply: Reply) -> tuple[object, ...]:
    """Return what else is in an answer: what a node says of its noise follows from the question."""
    metrics = {name: value for name, value in reply.metrics.items() if name != "sigma"}
    return sorted(metrics.items()), sorted(reply.said.items())
