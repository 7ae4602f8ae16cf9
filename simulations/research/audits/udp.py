"""What an audit hears of UDP: uploads of users, and of records, and its secret samples."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flwr_privacy.clients import SchemeClient, UDPClient, as_mod
from flwr_privacy.clients.torch import get_arrays, set_arrays, train_per_record
from flwr_privacy.privacy.failures import FAILED_NAME
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.strategies import UDP, LoopOptions, RecordLevel, UserLevel
from flwr_privacy.wire.identity import stream

from .canaries import COUNTER, KINDS, MODEL, Canary, canary
from .claims import DELTA, charge_of, claim_of, most_answered
from .observed import Claim, Coins, Released, Session, Vector, clipped
from .training import Heard, Model, Reply, crafted_app, listen

__all__ = ["NORM", "udp_records", "udp_sampled", "udp_users", "users"]

NORM = 0.5
"""Clipping norm of UDP."""

_GRID_BITS = 18  # so that even updates that are far too long have codes
_NAMES = [name for name in MODEL if name != COUNTER]
_SIZES = tuple(int(np.size(MODEL[name])) for name in _NAMES)
_STEP = 0.8  # learning rate, at record level
_RECORDS = 5
_ARRAYS = (400, 60)  # sizes of the two arrays of a model, at record level
_FAR = 1e6
_MEMBERS = 200  # records whose sampling is audited


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
        releases=[_upload(reply, heard) for reply in heard.replies],
        claim=_claim(heard, budget=epsilon),
        answered=most_answered(heard),
        silent=tuple(_planted(client, of).kind for of, client in heard.unanswered),
        weights={r.client: float(str(r.metrics["num-examples"])) for r in heard.replies},
    )


def udp_records(
    *,
    epsilon: float = 1000.0,
    clients: int = 3,
    rounds: int = 7,
    strategy: type[UDP] = UDP,
    half: type[SchemeClient] = UDPClient,
    insecure_seed: int | None = None,
) -> Session:
    """Train UDP at record level, with a record in each client whose gradient is far too long.

    The gradient of a record is the record: the loss of the model is its output, which is linear.
    """
    made = _made(
        strategy,
        RecordLevel(epsilon=epsilon, delta=DELTA, clipping_norm=NORM, learning_rate=_STEP),
        clients=clients,
        rounds=rounds,
    )

    def train(client: str, server_round: int, start: Model) -> tuple[Model, int]:
        return _descended(_records(client, server_round)[0], start)

    app = crafted_app(train, [as_mod(half)])
    heard = listen(
        made, app, clients=clients, rounds=rounds, start=_linear(), insecure_seed=insecure_seed
    )
    return Session(
        releases=[_step_upload(reply, heard) for reply in heard.replies],
        claim=_claim(heard, budget=epsilon),
        answered=most_answered(heard),
        weights={r.client: float(str(r.metrics["num-examples"])) for r in heard.replies},
    )


def udp_sampled(
    *,
    rate: float = 0.3,
    rounds: int = 6,
    strategy: type[UDP] = UDP,
    half: type[SchemeClient] = UDPClient,
    insecure_seed: int | None = None,
) -> Session:
    """Train UDP on secret samples of records, each of which pulls at a weight of its own.

    The noise is so small that the audit reads off who was sampled.
    """
    epsilon = 1e5
    made = _made(
        strategy,
        RecordLevel(
            epsilon=epsilon,
            delta=DELTA,
            clipping_norm=NORM,
            learning_rate=_STEP,
            sampling_rate=rate,
        ),
        clients=2,
        rounds=rounds,
    )
    features = np.zeros((_MEMBERS, sum(_ARRAYS)), np.float32)
    features[np.arange(_MEMBERS), np.arange(_MEMBERS)] = _FAR

    def train(client: str, server_round: int, start: Model) -> tuple[Model, int]:
        return _descended(features, start)

    app = crafted_app(train, [as_mod(half)])
    heard = listen(
        made, app, clients=2, rounds=rounds, start=_linear(), insecure_seed=insecure_seed
    )
    rows = [_values(reply)[:_MEMBERS] for reply in heard.replies]
    pull = _STEP * NORM / (rate * _MEMBERS)
    return Session(
        releases=[],
        claim=_claim(heard, budget=epsilon),
        answered=most_answered(heard),
        coins=Coins(rate=rate, thrown=np.array([row < -pull / 2 for row in rows])),
    )


def users(strategy: type[UDP], *, epsilon: float, clients: int, rounds: int) -> UDP:
    """Return a strategy at user level; updates are clipped to `NORM`."""
    privacy = UserLevel(epsilon=epsilon, delta=DELTA, clipping_norm=NORM, grid_bits=_GRID_BITS)
    return _made(strategy, privacy, clients=clients, rounds=rounds)


def _made(strategy: type[UDP], privacy: Any, *, clients: int, rounds: int) -> UDP:
    return strategy(
        privacy=privacy,
        loop=LoopOptions(experiment_id="audit", seed=0, write_card=False),
        min_train_nodes=clients,
        min_available_nodes=clients,
        rounds=rounds,
    )


def _claim(heard: Heard, *, budget: float) -> Claim:
    charges = max(heard.charges.values(), key=len, default=[])
    return claim_of(charges, budget=budget, turn=2.0)  # data are replaced


def _planted(client: str, server_round: int) -> Canary:
    """Return the canary of a client in a round."""
    kind = KINDS[(int(client) + 3 * server_round) % len(KINDS)]
    return canary(kind, NORM, client, server_round)


def _values(reply: Reply) -> Vector:
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
        said=(sorted(others.items()), *_said(reply)),
    )


def _step_upload(reply: Reply, heard: Heard) -> Released:
    records, direction = _records(reply.client, reply.round)
    steps = np.array([clipped(record, NORM) for record in records.astype(np.float64)])
    reach = _STEP * NORM / _RECORDS
    return Released(
        place=(reply.client, reply.round),
        kind="a far record",
        values=_values(reply),
        expected=-_STEP * steps.mean(axis=0),
        sigma=charge_of(heard, reply).noise_multiplier * 2 * reach,
        blocks=_ARRAYS,
        canary=-direction,
        reach=reach,
        said=_said(reply),
    )


def _said(reply: Reply) -> tuple[object, ...]:
    # What a node says of its own noise follows from the question.
    metrics = {name: value for name, value in reply.metrics.items() if name != "sigma"}
    return sorted(metrics.items()), sorted(reply.said.items())


def _records(client: str, server_round: int) -> tuple[np.ndarray, Vector]:
    """Return the records of a client, the first of them far away, and its direction."""
    draws = stream(0, "records", client, server_round)
    features = draws.normal(size=(_RECORDS, sum(_ARRAYS))).astype(np.float32)
    features[1:] *= 0.1 * NORM / np.sqrt(features.shape[1])
    features[0] *= _FAR
    far = features[0].astype(np.float64)
    return features, far / np.linalg.norm(far)


class _Linear(nn.Module):
    """A linear map to one number, with its weights in two arrays, from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(_ARRAYS[0]))
        self.second = nn.Parameter(torch.zeros(_ARRAYS[1]))

    def forward(self, records: Tensor) -> Tensor:
        return records @ torch.cat([self.first, self.second])


def _linear() -> Model:
    return dict(get_arrays(_Linear()))


def _descended(features: np.ndarray, start: Model) -> tuple[Model, int]:
    model = _Linear()
    set_arrays(model, start)
    labels = np.zeros(len(features), np.int64)
    train_per_record(model, features, labels, loss=_own_output)
    return dict(get_arrays(model)), len(features)


def _own_output(output: Tensor, _: Tensor) -> Tensor:
    return output.sum()
