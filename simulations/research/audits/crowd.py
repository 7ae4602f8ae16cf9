"""Crowds of canaries: each client has one, at right angles to all others, one way by a coin.

A federation of k clients says as much of a mechanism as k federations with one canary each: where
clients add the noise there are k mechanisms, and in a sum directions at right angles do not disturb
each other. So a crowd bounds epsilons as small as those of real trainings.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flwr_privacy.accounting import Charge
from flwr_privacy.clients import CentralDPClient, M2FDPClient, SchemeClient, UDPClient, as_mod
from flwr_privacy.errors import check_choice, check_integer
from flwr_privacy.privacy.failures import FAILED_NAME
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.strategies import M2FDP, UDP, CentralDP, SchemeStrategy
from flwr_privacy.wire.identity import stream

from . import central, m2fdp, udp
from .claims import charge_of, charged, claim_of, most_answered, uncharged
from .observed import Guessed, Released, Session, Vector
from .training import Heard, Model, Reply, crafted_app, listen

__all__ = ["CROWDS", "crowd"]

_DIMENSION = 600
_START = {"weight": np.zeros(_DIMENSION)}
_FAR = 1e6


@dataclass(frozen=True, kw_only=True, eq=False)
class _Federation:
    """The halves of a scheme, and what its releases are.

    Parameters
    ----------
    strategy, half
        The halves.
    norm : float
        Clipping norm.
    summed : bool, default False
        Whether sums are released, as the steps from model to model, and not uploads.
    ledgers : bool, default False
        Whether the nodes are charged for sums.
    factor : float, default 1.0
        What such a step is multiplied by.
    share : float, default 1.0
        How much of an update is in what comes out.
    surplus : float, default 1.0
        How many times larger the noise is than paid for, as some of it is not counted on.
    """

    strategy: SchemeStrategy
    half: type[SchemeClient]
    norm: float
    summed: bool = False
    ledgers: bool = False
    factor: float = 1.0
    share: float = 1.0
    surplus: float = 1.0

    def released(self, heard: Heard, signed: Vector) -> list[Released]:
        """Return the releases of a training with canaries in some directions."""
        if not self.summed:
            return [
                self._upload(reply, heard, signed[int(reply.client)]) for reply in charged(heard)
            ]
        charges = self.charges(heard)
        reach = self.norm * self.share
        return [
            Released(
                place=("sum", place),
                kind="a crowd",
                values=step * self.factor,
                expected=reach * signed.sum(axis=0),
                sigma=charges[place].noise_multiplier * 2 * reach * self.surplus,
                blocks=(_DIMENSION,),
                canary=signed,
                reach=reach,
            )
            for place, step in enumerate(central.published(heard, _START))
        ]

    def charges(self, heard: Heard) -> list[Charge]:
        """Return the charges of a client; those that the server counts where nodes have none."""
        own = max(heard.charges.values(), key=len, default=[])
        return own or central.charges_of(self.strategy)

    def _upload(self, reply: Reply, heard: Heard, direction: Vector) -> Released:
        step = CodeGrid(reply.fields["grid"]).step
        names = sorted(reply.arrays, key=lambda name: name == FAILED_NAME)
        values = step * np.concatenate(
            [np.asarray(reply.arrays[name], np.float64).reshape(-1) for name in names]
        )
        pull = np.zeros_like(values)
        pull[:_DIMENSION] = direction
        return Released(
            place=(reply.client, reply.round),
            kind="a crowd",
            values=values,
            expected=self.norm * pull,
            sigma=charge_of(heard, reply).noise_multiplier * 2 * self.norm,
            blocks=tuple(size for size in (_DIMENSION, values.size - _DIMENSION) if size),
            canary=pull,
            reach=self.norm,
        )


@dataclass(frozen=True, kw_only=True)
class _Size:
    """Of a crowd: its budget, and how many clients and rounds there are."""

    epsilon: float
    clients: int
    rounds: int


Halves = tuple[type[Any], type[SchemeClient]]
"""A strategy, and its client half."""


def _udp(size: _Size, strategy: type[UDP], half: type[SchemeClient]) -> _Federation:
    made = udp.users(strategy, **vars(size))
    return _Federation(strategy=made, half=half, norm=udp.NORM)


def _server(size: _Size, strategy: type[CentralDP], half: type[SchemeClient]) -> _Federation:
    made = central.by_server(strategy, **vars(size))
    return _Federation(
        strategy=made, half=half, norm=central.NORM, summed=True, factor=size.clients
    )


def _shares(size: _Size, strategy: type[CentralDP], half: type[SchemeClient]) -> _Federation:
    made = central.in_shares(strategy, **vars(size))
    honest = size.clients - size.clients // 5
    return _Federation(
        strategy=made,
        half=half,
        norm=central.NORM,
        summed=True,
        ledgers=True,
        factor=size.clients,
        surplus=math.sqrt(size.clients / honest),
    )


def _devices(size: _Size, strategy: type[M2FDP], half: type[SchemeClient]) -> _Federation:
    made = m2fdp.of_tree(strategy, (size.clients, 1), epsilon=size.epsilon, trusted=False)
    return _Federation(strategy=made, half=half, norm=m2fdp.NORM)


def _zone(size: _Size, strategy: type[M2FDP], half: type[SchemeClient]) -> _Federation:
    made = m2fdp.of_tree(strategy, (1, size.clients), epsilon=size.epsilon, trusted=True)
    return _Federation(
        strategy=made,
        half=half,
        norm=m2fdp.NORM,
        summed=True,
        ledgers=True,
        share=1 / size.clients,
    )


_MADE: Mapping[str, tuple[Callable[..., _Federation], Halves]] = {
    "udp, users": (_udp, (UDP, UDPClient)),
    "central-dp, server": (_server, (CentralDP, CentralDPClient)),
    "central-dp, shares": (_shares, (CentralDP, CentralDPClient)),
    "m2fdp, devices": (_devices, (M2FDP, M2FDPClient)),
    "m2fdp, zone": (_zone, (M2FDP, M2FDPClient)),
}

CROWDS = tuple(_MADE)
"""The schemes that protect all data of a client."""


def crowd(
    name: str,
    *,
    epsilon: float,
    clients: int,
    rounds: int = 2,
    seed: int = 0,
    strategy: type[SchemeStrategy] | None = None,
    half: type[SchemeClient] | None = None,
) -> Session:
    """Train a crowd of canaries.

    Parameters
    ----------
    name : str
        One of `CROWDS`.
    epsilon : float
        Budget, at delta 1e-5.
    clients, rounds : int
        How many there are; at most half as many clients as the model has weights.
    seed : int, default 0
        Root of directions and coins; the noise is secret.
    strategy, half : type, optional
        The halves of the scheme, where they are not those of this package.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """
    check_choice("name", name, CROWDS)
    check_integer("clients", clients, minimum=4, maximum=_DIMENSION // 2)
    build, (own_strategy, own_half) = _MADE[name]
    size = _Size(epsilon=epsilon, clients=clients, rounds=rounds)
    federation = build(size, strategy or own_strategy, half or own_half)
    draws = stream(seed, "crowd").normal(size=(_DIMENSION, clients))
    directions = np.linalg.qr(draws)[0].T
    coins = stream(seed, "coins").random(clients) < 0.5
    signed = np.where(coins, 1.0, -1.0)[:, None] * directions

    def train(client: str, server_round: int, start: Model) -> tuple[Model, int]:
        return {"weight": start["weight"] + _FAR * federation.norm * signed[int(client)]}, 1

    heard = listen(
        federation.strategy,
        crafted_app(train, [as_mod(federation.half)]),
        clients=clients,
        rounds=rounds,
        start=_START,
        simulated=federation.summed,
    )
    releases = federation.released(heard, signed)
    answered = {"train": len(releases)} if federation.summed else most_answered(heard)
    total = np.sum([r.values[:_DIMENSION] for r in releases], axis=0)
    seen = np.tile(total, (clients, 1))
    if not federation.summed:  # each in its own uploads
        seen = np.zeros((clients, _DIMENSION))
        for release in releases:
            seen[int(release.place[0])] += release.values[:_DIMENSION]
    return Session(
        releases=releases,
        claim=claim_of(federation.charges(heard), budget=epsilon, turn=2.0),
        answered=answered,
        uncharged=uncharged(heard) if federation.ledgers or not federation.summed else (),
        guessed=Guessed(
            coins=coins,
            directions=directions,
            scores=np.sum(directions * seen, axis=1),
            total=total,
        ),
    )
