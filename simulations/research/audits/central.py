"""What an audit hears of CentralDP: the models that are published, and who was asked.

The noise is in a sum, so in each round one client has a canary, and the others change nothing.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.accounting import Charge
from flwr_privacy.clients import CentralDPClient, SchemeClient, as_mod
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import (
    CentralDP,
    DistributedNoise,
    LoopOptions,
    SchemeStrategy,
    ServerNoise,
)
from flwr_privacy.wire.message import TRAIN

from .canaries import COUNTER, KINDS, MODEL, Canary, canary
from .claims import DELTA, claim_of, uncharged
from .observed import Coins, Released, Session, Vector
from .training import Heard, Model, crafted_app, listen

__all__ = [
    "NORM",
    "SIZES",
    "SUM_KINDS",
    "by_server",
    "central_sampled",
    "central_server",
    "central_shares",
    "charges_of",
    "in_shares",
    "loop_options",
    "published",
]

NORM = 0.5
"""Clipping norm of CentralDP."""

_NAMES = [name for name in MODEL if name != COUNTER]
SIZES = tuple(int(np.size(MODEL[name])) for name in _NAMES)
SUM_KINDS = [kind for kind in KINDS if kind not in ("fails", "NaN", "infinite")]


def central_server(
    *,
    epsilon: float = 1000.0,
    clients: int = 4,
    rounds: int = 10,
    strategy: type[CentralDP] = CentralDP,
    half: type[SchemeClient] = CentralDPClient,
    insecure_seed: int | None = None,
) -> Session:
    """Train with noise by a trusted server; the audit sees what it publishes.

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
    made = by_server(
        strategy, epsilon=epsilon, clients=clients, rounds=rounds, insecure_seed=insecure_seed
    )
    return _heard(
        made, half, epsilon=epsilon, clients=clients, rounds=rounds, insecure_seed=insecure_seed
    )


def central_shares(
    *,
    epsilon: float = 1000.0,
    clients: int = 4,
    rounds: int = 10,
    strategy: type[CentralDP] = CentralDP,
    half: type[SchemeClient] = CentralDPClient,
    insecure_seed: int | None = None,
) -> Session:
    """Train with noise in shares under a secure sum; the parameters are those of `central_server`.

    With fewer than five clients all have to be in a sum, and none colludes: the noise of the shares
    is then that of the charge, and no more.
    """
    made = in_shares(strategy, epsilon=epsilon, clients=clients, rounds=rounds)
    return _heard(
        made,
        half,
        epsilon=epsilon,
        clients=clients,
        rounds=rounds,
        insecure_seed=insecure_seed,
        ledgers=True,
    )


def central_sampled(
    *,
    rate: float = 0.4,
    clients: int = 30,
    rounds: int = 5,
    strategy: type[CentralDP] = CentralDP,
    half: type[SchemeClient] = CentralDPClient,
    insecure_seed: int | None = None,
) -> Session:
    """Train on secret Poisson samples of clients; the audit sees who was asked.

    That is no more than nodes and networks see, and the guarantee says that the adversary does not:
    the audit asks whether the samples are what the accountant takes them for.
    """
    epsilon = 60.0
    made = strategy(
        privacy=ServerNoise(
            epsilon=epsilon,
            delta=DELTA,
            clipping_norm=NORM,
            sampling="poisson",
            insecure_seed=insecure_seed,
        ),
        loop=loop_options(),
        fraction_train=rate,
        min_train_nodes=1,
        min_available_nodes=clients,
        rounds=rounds,
    )
    start = {"weight": np.zeros(8)}

    def train(client: str, server_round: int, model: Model) -> tuple[Model, int]:
        return model, 1

    app = crafted_app(train, [as_mod(half)])
    heard = listen(
        made,
        app,
        clients=clients,
        rounds=rounds,
        start=start,
        simulated=True,
        insecure_seed=insecure_seed,
    )
    thrown = np.zeros((rounds, clients), np.bool_)
    for server_round, client in heard.asked:
        thrown[server_round - 1, int(client)] = True
    return Session(
        releases=[],
        claim=claim_of(charges_of(made), budget=epsilon, turn=1.0),
        answered={TRAIN: len(published(heard, start))},
        coins=Coins(rate=rate, thrown=thrown),
    )


def by_server(
    strategy: type[CentralDP],
    *,
    epsilon: float,
    clients: int,
    rounds: int,
    insecure_seed: int | None = None,
) -> CentralDP:
    """Return a strategy whose server adds the noise; updates are clipped to `NORM`."""
    return strategy(
        privacy=ServerNoise(
            epsilon=epsilon, delta=DELTA, clipping_norm=NORM, insecure_seed=insecure_seed
        ),
        loop=loop_options(),
        min_train_nodes=clients,
        min_available_nodes=clients,
        rounds=rounds,
    )


def in_shares(strategy: type[CentralDP], *, epsilon: float, clients: int, rounds: int) -> CentralDP:
    """Return a strategy whose clients add the noise in shares.

    As many collude as a node takes for granted, a fifth of the clients.
    """
    return strategy(
        privacy=DistributedNoise(epsilon=epsilon, delta=DELTA, clipping_norm=NORM),
        secure_sum=SecureSum(threshold=clients, colluders=clients // 5),
        loop=loop_options(),
        min_train_nodes=clients,
        min_available_nodes=clients,
        rounds=rounds,
    )


def loop_options() -> LoopOptions:
    """Return the loop of an audit: always the same experiment, and no card."""
    return LoopOptions(experiment_id="audit", seed=0, write_card=False)


def _heard(
    made: CentralDP,
    half: type[SchemeClient],
    *,
    epsilon: float,
    clients: int,
    rounds: int,
    insecure_seed: int | None,
    ledgers: bool = False,
) -> Session:
    def train(client: str, server_round: int, start: Model) -> tuple[Model, int]:
        own, name = _planted(server_round, clients)
        examples = 10 if client == name else 1
        return (own.after(start) if client == name else start), examples

    app = crafted_app(train, [as_mod(half)])
    heard = listen(
        made,
        app,
        clients=clients,
        rounds=rounds,
        start=MODEL,
        simulated=True,
        insecure_seed=insecure_seed,
    )
    charges = charges_of(made)
    steps = published(heard, MODEL)
    releases = []
    for place, update in enumerate(steps):
        own, _ = _planted(place + 1, clients)
        charge = charges[min(place, len(charges) - 1)]
        releases.append(
            Released(
                place=("sum", place + 1),
                kind=own.kind,
                values=update * clients,
                expected=own.expected,
                sigma=charge.noise_multiplier * 2 * NORM,
                blocks=SIZES,
                canary=own.direction,
                reach=own.reach,
                said=(_counter(heard),),
            )
        )
    return Session(
        releases=releases,
        claim=claim_of(charges, budget=epsilon, turn=2.0),
        answered={TRAIN: len(steps)},
        uncharged=uncharged(heard) if ledgers else (),
    )


def _planted(server_round: int, clients: int) -> tuple[Canary, str]:
    """Return the canary of a round, and who has it."""
    kind = SUM_KINDS[server_round % len(SUM_KINDS)]
    return canary(kind, NORM, "sum", server_round), str(server_round % clients)


def charges_of(made: SchemeStrategy) -> list[Charge]:
    """Return the charges that the server counts for a client that is asked every time."""
    return [release.charge for release in made.releases if release.phase == TRAIN]


def published(heard: Heard, start: Mapping[str, NDArray[Any]]) -> list[Vector]:
    """Return the steps from each published model to the next."""
    models = {reply.round: reply.start for reply in heard.replies if reply.phase == TRAIN}
    path = [models[server_round] for server_round in sorted(models)] + [heard.model]
    names = [name for name in start if name != COUNTER]
    flat = [np.concatenate([m[name].reshape(-1) for name in names]) for m in path]
    return [new - old for old, new in pairwise(flat)]


def _counter(heard: Heard) -> object:
    return heard.model[COUNTER].tolist() if COUNTER in heard.model else None
