"""What an audit hears of M2FDP: of devices that trust nobody, and of a zone that trusts its own."""

from itertools import pairwise

import numpy as np

from flwr_privacy.clients import M2FDPClient, SchemeClient, as_mod
from flwr_privacy.m2fdp import EventSchedule, TierTree
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.strategies import M2FDP, DeviceNoise, LoopOptions

from .canaries import COUNTER, KINDS, MODEL, Canary, canary
from .claims import DELTA, charge_of, charged, claim_of, most_answered, uncharged
from .observed import Claim, Released, Session
from .training import Heard, Model, Reply, crafted_app, listen

__all__ = ["NORM", "m2fdp_devices", "m2fdp_zone", "of_tree"]

NORM = 0.5
"""Clipping norm of M2FDP."""

_NAMES = [name for name in MODEL if name != COUNTER]
_SIZES = tuple(int(np.size(MODEL[name])) for name in _NAMES)


def m2fdp_devices(
    *,
    epsilon: float = 1000.0,
    clients: int = 3,
    rounds: int = 7,
    strategy: type[M2FDP] = M2FDP,
    half: type[SchemeClient] = M2FDPClient,
    insecure_seed: int | None = None,
) -> Session:
    """Train devices whose parents nobody trusts: each adds its own noise.

    Parameters
    ----------
    epsilon : float
        Budget of a device, at delta 1e-5.
    clients, rounds : int
        How many there are.
    strategy, half : type
        The halves of the scheme.
    insecure_seed : int, optional
        Seed of the noise, for tests.
    """
    heard = _trained(
        strategy,
        half,
        (clients, 1),
        epsilon=epsilon,
        rounds=rounds,
        trusted=False,
        insecure_seed=insecure_seed,
    )
    releases = []
    for reply in charged(heard):
        own = _planted(reply.client, reply.round)
        codes = [np.asarray(reply.arrays[name], np.float64).reshape(-1) for name in _NAMES]
        releases.append(
            Released(
                place=(reply.client, reply.round),
                kind=own.kind,
                values=np.concatenate(codes) * CodeGrid(reply.fields["grid"]).step,
                expected=own.expected,
                sigma=charge_of(heard, reply).noise_multiplier * 2 * NORM,
                blocks=_SIZES,
                canary=own.direction,
                reach=own.reach,
                said=(sorted(set(reply.arrays) - set(_NAMES)), *_said(reply)),
            )
        )
    return Session(
        releases=releases,
        claim=_claim(heard, epsilon),
        answered=most_answered(heard),
        uncharged=uncharged(heard),
        silent=tuple(_planted(client, of).kind for of, client in heard.unanswered),
        weights={r.client: float(str(r.metrics["num-examples"])) for r in heard.replies},
    )


def m2fdp_zone(
    *,
    epsilon: float = 1000.0,
    clients: int = 4,
    rounds: int = 10,
    strategy: type[M2FDP] = M2FDP,
    half: type[SchemeClient] = M2FDPClient,
    insecure_seed: int | None = None,
) -> Session:
    """Train devices under one aggregator that they trust; the audit sees what leaves the zone.

    The parameters are those of `m2fdp_devices`. In each round one device has a canary.
    """
    heard = _trained(
        strategy,
        half,
        (1, clients),
        epsilon=epsilon,
        rounds=rounds,
        trusted=True,
        insecure_seed=insecure_seed,
    )
    models = {reply.round: reply.start for reply in heard.replies}
    path = [models[server_round] for server_round in sorted(models)] + [heard.model]
    releases = []
    for place, (old, new) in enumerate(pairwise(path)):
        name, server_round = str((place + 1) % clients), place + 1
        own = _in_zone(server_round, clients)
        charges = heard.charges.get(name, [])
        if not charges:
            continue  # `uncharged` says so
        charge = charges[min(place, len(charges) - 1)]
        releases.append(
            Released(
                place=("zone", server_round),
                kind=own.kind,
                values=np.concatenate([(new[n] - old[n]).reshape(-1) for n in _NAMES]),
                expected=own.expected / clients,
                sigma=charge.noise_multiplier * 2 * NORM / clients,
                blocks=_SIZES,
                canary=own.direction,
                reach=own.reach / clients,
                said=(int(new[COUNTER]),),
            )
        )
    return Session(
        releases=releases,
        claim=_claim(heard, epsilon),
        answered={"train": len(path) - 1},
        uncharged=uncharged(heard),
    )


def _trained(
    strategy: type[M2FDP],
    half: type[SchemeClient],
    fanouts: tuple[int, int],
    *,
    epsilon: float,
    rounds: int,
    trusted: bool,
    insecure_seed: int | None,
) -> Heard:
    clients = fanouts[0] * fanouts[1]
    # Where nobody is trusted, only the clients draw noise.
    seed = insecure_seed if trusted else None
    made = of_tree(strategy, fanouts, epsilon=epsilon, trusted=trusted, insecure_seed=seed)

    def train(client: str, server_round: int, start: Model) -> tuple[Model, int]:
        if trusted and int(client) != server_round % clients:
            return start, 1
        own = _in_zone(server_round, clients) if trusted else _planted(client, server_round)
        return own.after(start), int(client) + 1

    app = crafted_app(train, [as_mod(half)])
    # Codes without noise leave a node only sealed, or where it is simulated, as the zone is here.
    return listen(
        made,
        app,
        clients=clients,
        rounds=rounds,
        start=MODEL,
        simulated=trusted,
        insecure_seed=insecure_seed,
    )


def of_tree(
    strategy: type[M2FDP],
    fanouts: tuple[int, int],
    *,
    epsilon: float,
    trusted: bool,
    insecure_seed: int | None = None,
) -> M2FDP:
    """Return a strategy over a tree with one tier of aggregators; a step is clipped to `NORM`."""
    clients = fanouts[0] * fanouts[1]
    return strategy(
        tree=TierTree.of_fanouts(fanouts, p=1.0 if trusted else None),
        privacy=DeviceNoise(epsilon=epsilon, delta=DELTA, clipping_norm=NORM),
        schedule=EventSchedule(),
        loop=LoopOptions(experiment_id="audit", seed=0, write_card=False),
        min_train_nodes=clients,
        min_available_nodes=clients,
        insecure_seed=insecure_seed,
    )


def _planted(client: str, server_round: int) -> Canary:
    """Return the canary of a device that trusts nobody."""
    kind = KINDS[(int(client) + 3 * server_round) % len(KINDS)]
    return canary(kind, NORM, client, server_round)


def _in_zone(server_round: int, clients: int) -> Canary:
    """Return the canary of a zone. None fails: a simulated device then takes no part."""
    kinds = [kind for kind in KINDS if kind != "fails"]
    return canary(kinds[server_round % len(kinds)], NORM, server_round % clients, server_round)


def _claim(heard: Heard, epsilon: float) -> Claim:
    charges = max(heard.charges.values(), key=len, default=[])
    return claim_of(charges, budget=epsilon, turn=2.0)


def _said(reply: Reply) -> tuple[object, ...]:
    return sorted(reply.metrics.items()), sorted(reply.said.items())
