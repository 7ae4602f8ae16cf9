"""What an audit hears of Flower's own differential privacy, by which readers compare.

Flower's strategies say a noise multiplier, and its local mod an epsilon for each answer. The audit
takes each at its word: so many answers with that noise, or that epsilon for a training.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from flwr_privacy.accounting import ADD_REMOVE, Charge

from .canaries import COUNTER, MODEL, Canary, canary
from .claims import DELTA, claim_of
from .observed import Claim, Released, Session
from .training import Heard, Model, crafted_app, listen

__all__ = ["flower_local", "flower_server"]

_NORM = 0.5
_FLOATS = [name for name in MODEL if name != COUNTER]
_SIZES = tuple(int(np.size(MODEL[name])) for name in _FLOATS)
_NOISE = 0.2  # noise multiplier of Flower's strategy
_START = {name: MODEL[name] for name in _FLOATS}
_WHOLE = {"table": np.zeros(1000, np.int64)}


def flower_server(
    *, kinds: Sequence[str] = ("whole",), clients: int = 4, rounds: int = 6
) -> Session:
    """Train under Flower's fixed clipping and noise by the server.

    Parameters
    ----------
    kinds : sequence of str
        The canaries, round after round.
    clients, rounds : int
        How many there are.
    """
    strategy = DifferentialPrivacyServerSideFixedClipping(
        _fedavg(clients),
        noise_multiplier=_NOISE,
        clipping_norm=_NORM,
        num_sampled_clients=clients,
    )

    def planted(server_round: int) -> Canary:
        return canary(kinds[server_round % len(kinds)], _NORM, "flower", server_round)

    def train(client: str, server_round: int, start: Model) -> tuple[Model, int]:
        if client != "0":  # Flower divides by the length of an update: it must not be zero
            return {name: values + 1e-12 for name, values in start.items()}, 1
        moved = planted(server_round).after({**start, COUNTER: MODEL[COUNTER]})
        return {name: moved[name] for name in start}, 1

    heard = listen(strategy, crafted_app(train), clients=clients, rounds=rounds, start=_START)
    models = {reply.round: reply.start for reply in heard.replies}
    path = [models[server_round] for server_round in sorted(models)] + [heard.model]
    releases = []
    for place, (old, new) in enumerate(pairwise(path)):
        own = planted(place + 1)
        with np.errstate(invalid="ignore"):
            update = np.concatenate([(new[n] - old[n]).reshape(-1) for n in _FLOATS])
        releases.append(
            Released(
                place=("sum", place + 1),
                kind=own.kind,
                values=update * clients,
                expected=own.expected,
                sigma=_NOISE * _NORM,
                blocks=_SIZES,
                canary=own.direction,
                reach=own.reach,
            )
        )
    charge = Charge(noise_multiplier=_NOISE, neighbours=ADD_REMOVE, count=len(releases))
    claim = claim_of([charge], budget=np.inf, turn=1.0)
    return Session(
        releases=releases,
        claim=Claim(**{**vars(claim), "charged": len(releases)}),
        answered={"train": len(releases)},
    )


def flower_local(
    *,
    epsilon: float = 8.0,
    arrays: Literal["floats", "integers"] = "floats",
    clients: int = 4,
    rounds: int = 10,
) -> Session:
    """Train under Flower's local mod, and take its epsilon for that of the training.

    Parameters
    ----------
    epsilon : float
        What the mod is told, at delta 1e-5.
    arrays : {"floats", "integers"}
        Of what the model is made.
    clients, rounds : int
        How many there are.
    """
    norm = _NORM if arrays == "floats" else 64.0
    mod = LocalDpMod(norm, 2 * norm, epsilon, DELTA)
    start = _START if arrays == "floats" else _WHOLE

    def train(client: str, server_round: int, model: Model) -> tuple[Model, int]:
        if arrays == "integers":  # within the norm: Flower cannot shorten integers
            return {name: values + 1 for name, values in model.items()}, 1
        moved = canary("whole", norm, client, server_round).after(
            {**model, COUNTER: MODEL[COUNTER]}
        )
        return {name: moved[name] for name in model}, 1

    app = crafted_app(train, [mod])
    heard = listen(_fedavg(clients), app, clients=clients, rounds=rounds, start=start)
    return Session(
        releases=_answers(heard, norm, epsilon),
        claim=Claim(epsilon=epsilon, delta=DELTA, budget=epsilon, charged=rounds, turn=2.0),
        answered={"train": rounds},
    )


def _fedavg(clients: int) -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)


def _answers(heard: Heard, norm: float, epsilon: float) -> list[Released]:
    sigma = 2 * norm * float(np.sqrt(2 * np.log(1.25 / DELTA))) / epsilon
    found = []
    for reply in heard.replies:
        update = np.concatenate(
            [
                (np.asarray(reply.arrays[name], np.float64) - reply.start[name]).reshape(-1)
                for name in reply.start
            ]
        )
        integers = "table" in reply.start
        own = None if integers else canary("whole", norm, reply.client, reply.round)
        found.append(
            Released(
                place=(reply.client, reply.round),
                kind="integers" if own is None else own.kind,
                values=update,
                expected=np.ones_like(update) if own is None else own.expected,
                sigma=sigma,
                blocks=(update.size,) if own is None else _SIZES,
                canary=None if own is None else own.direction,
                reach=0.0 if own is None else own.reach,
            )
        )
    return found
