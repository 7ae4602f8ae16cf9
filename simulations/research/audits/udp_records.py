"""What an audit hears of UDP where records are protected: uploads, and secret samples."""

import numpy as np
import torch
from torch import Tensor, nn

from flwr_privacy.clients import SchemeClient, UDPClient, as_mod
from flwr_privacy.clients.torch import get_arrays, set_arrays, train_per_record
from flwr_privacy.strategies import UDP, RecordLevel
from flwr_privacy.wire.identity import stream

from .claims import DELTA, charge_of, charged, most_answered, uncharged
from .observed import Coins, Released, Session, Vector, clipped
from .training import Heard, Model, Reply, crafted_app, listen
from .udp import NORM, made_with, said_by, udp_claim, values_of

__all__ = ["MEMBERS", "RECORDS", "SIZES", "far_records", "members", "udp_records", "udp_sampled"]

_STEP = 0.8  # learning rate
RECORDS = 5
"""Records of a client."""

SIZES = (400, 60)
"""Sizes of the two arrays of the model."""

MEMBERS = 200
"""Records whose sampling is audited."""

_FAR = 1e6


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
    made = made_with(
        strategy,
        RecordLevel(epsilon=epsilon, delta=DELTA, clipping_norm=NORM, learning_rate=_STEP),
        clients=clients,
        rounds=rounds,
    )

    def train(client: str, server_round: int, start: Model) -> tuple[Model, int]:
        return _descended(far_records(client, server_round)[0], start)

    app = crafted_app(train, [as_mod(half)])
    heard = listen(
        made, app, clients=clients, rounds=rounds, start=_linear(), insecure_seed=insecure_seed
    )
    return Session(
        releases=[_step_upload(reply, heard) for reply in charged(heard)],
        claim=udp_claim(heard, budget=epsilon),
        answered=most_answered(heard),
        uncharged=uncharged(heard),
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
    made = made_with(
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
    features = members()

    def train(client: str, server_round: int, start: Model) -> tuple[Model, int]:
        return _descended(features, start)

    app = crafted_app(train, [as_mod(half)])
    heard = listen(
        made, app, clients=2, rounds=rounds, start=_linear(), insecure_seed=insecure_seed
    )
    rows = [values_of(reply)[:MEMBERS] for reply in heard.replies]
    pull = _STEP * NORM / (rate * MEMBERS)
    return Session(
        releases=[],
        claim=udp_claim(heard, budget=epsilon),
        answered=most_answered(heard),
        uncharged=uncharged(heard),
        coins=Coins(rate=rate, thrown=np.array([row < -pull / 2 for row in rows])),
    )


def _step_upload(reply: Reply, heard: Heard) -> Released:
    records, direction = far_records(reply.client, reply.round)
    steps = np.array([clipped(record, NORM) for record in records.astype(np.float64)])
    reach = _STEP * NORM / RECORDS
    return Released(
        place=(reply.client, reply.round),
        kind="a far record",
        values=values_of(reply),
        expected=-_STEP * steps.mean(axis=0),
        sigma=charge_of(heard, reply).noise_multiplier * 2 * reach,
        blocks=SIZES,
        canary=-direction,
        reach=reach,
        said=said_by(reply),
    )


def far_records(client: str, server_round: int) -> tuple[np.ndarray, Vector]:
    """Return the records of a client, the first of them far away, and its direction."""
    draws = stream(0, "records", client, server_round)
    features = draws.normal(size=(RECORDS, sum(SIZES))).astype(np.float32)
    features[1:] *= 0.1 * NORM / np.sqrt(features.shape[1])
    features[0] *= _FAR
    far = features[0].astype(np.float64)
    return features, far / np.linalg.norm(far)


def members() -> np.ndarray:
    """Return records that are far away, each along a weight of its own."""
    features = np.zeros((MEMBERS, sum(SIZES)), np.float32)
    features[np.arange(MEMBERS), np.arange(MEMBERS)] = _FAR
    return features


class _Linear(nn.Module):
    """A linear map to one number, with its weights in two arrays, from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(SIZES[0]))
        self.second = nn.Parameter(torch.zeros(SIZES[1]))

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
