"""What an audit hears of CentralDP with correlated noise: the models that are published.

Multiplied by the factor C, the rounds' noise is to be independent, and as large as the charges say.
A factor that is not applied, applied twice, or whose state is lost on the way leaves noise that two
of these products have in common.
"""

import math

import numpy as np

from flwr_privacy.central_dp.correlated.options import BLT, BandedMF
from flwr_privacy.clients import CentralDPClient, SchemeClient, as_mod
from flwr_privacy.strategies import CentralDP, ServerNoise
from flwr_privacy.wire.message import TRAIN

from .canaries import MODEL, canary
from .central import NORM, SIZES, SUM_KINDS, loop_options, published
from .claims import DELTA, claim_of
from .observed import Released, Session
from .training import Model, crafted_app, listen

__all__ = ["central_correlated"]


def central_correlated(
    *,
    epsilon: float = 1000.0,
    clients: int = 5,
    rounds: int = 10,
    correlated: BandedMF | BLT | None = None,
    strategy: type[CentralDP] = CentralDP,
    half: type[SchemeClient] = CentralDPClient,
    insecure_seed: int | None = None,
) -> Session:
    """Train with one client in each round, in turns; the audit sees what the server publishes.

    Parameters
    ----------
    epsilon : float
        Budget, at delta 1e-5.
    clients, rounds : int
        How many there are.
    correlated : BandedMF or BLT, optional
        The factor; by default `BandedMF`.
    strategy, half : type
        The halves of the scheme.
    insecure_seed : int, optional
        Seed of the noise, for tests.
    """
    correlated = correlated or BandedMF()
    turns = math.ceil(rounds / clients)
    factor = correlated.factor(rounds=rounds, separation=clients, participations=turns)
    column = factor.column(rounds)
    made = strategy(
        privacy=ServerNoise(
            epsilon=epsilon,
            delta=DELTA,
            clipping_norm=NORM,
            sampling="balanced",
            correlated=correlated,
            insecure_seed=insecure_seed,
        ),
        loop=loop_options(),
        fraction_train=1 / clients,
        min_train_nodes=1,
        min_available_nodes=clients,
        rounds=rounds,
    )
    planted = [
        canary(SUM_KINDS[place % len(SUM_KINDS)], NORM, "sum", place)
        for place in range(1, rounds + 1)
    ]

    def train(client: str, server_round: int, start: Model) -> tuple[Model, int]:
        return planted[server_round - 1].after(start), 1

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
    first = next(release.charge for release in made.releases)
    sigma = first.noise_multiplier * float(np.linalg.norm(column)) * 2 * NORM
    steps = np.array(published(heard, MODEL))
    updates = np.array([own.expected for own in planted])
    releases = [
        Released(
            place=("product", place + 1),
            kind=own.kind,
            values=column[: place + 1][::-1] @ steps[: place + 1],
            expected=column[: place + 1][::-1] @ updates[: place + 1],
            sigma=sigma,
            blocks=SIZES,
            canary=own.direction,
            reach=own.reach,
        )
        for place, own in enumerate(planted)
    ]
    client = made.releases[0].clients[0]
    charges = [release.charge for release in made.releases if client in release.clients]
    return Session(
        releases=releases,
        claim=claim_of(charges, budget=epsilon, turn=2.0),
        answered={TRAIN: len(charges)},
    )
