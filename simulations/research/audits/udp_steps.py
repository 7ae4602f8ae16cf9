"""What an audit hears of UDP where noise is in the steps of the clients' own loops (DP-SGD)."""

import math

import numpy as np
import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_privacy.clients import SchemeClient, UDPClient, as_mod
from flwr_privacy.clients.torch import get_arrays, private_training, set_arrays
from flwr_privacy.strategies import DPSGD, UDP
from flwr_privacy.udp.private_steps import UPDATE_GRID

from .claims import DELTA, charge_of, charged, most_answered, uncharged
from .observed import Coins, Released, Session, Vector, clipped
from .training import Heard, Model, Reply, crafted_app, listen
from .udp import NORM, made_with, said_by, udp_claim
from .udp_records import MEMBERS, RECORDS, SIZES, far_records, members

__all__ = ["udp_steps", "udp_steps_sampled"]

_RATE = 0.8  # learning rate
_STEPS = 4


def udp_steps(
    *,
    epsilon: float = 1000.0,
    clients: int = 3,
    rounds: int = 7,
    strategy: type[UDP] = UDP,
    half: type[SchemeClient] = UDPClient,
    insecure_seed: int | None = None,
) -> Session:
    """Train with private steps on all records, one of which has a gradient that is far too long.

    The gradient of a record is the record, as the loss of the model is its output, which is linear.
    So the update of all steps is the sum of their noises and a known vector.
    """
    made = made_with(
        strategy,
        DPSGD(epsilon=epsilon, delta=DELTA, clipping_norm=NORM, sampling_rate=1.0, steps=_STEPS),
        clients=clients,
        rounds=rounds,
    )

    def train(client: str, server_round: int, start: Model) -> tuple[Model, int]:
        return _descended(client, far_records(client, server_round)[0], start)

    app = crafted_app(train, [as_mod(half)])
    heard = listen(
        made, app, clients=clients, rounds=rounds, start=_start(), insecure_seed=insecure_seed
    )
    return Session(
        releases=[_update(reply, heard) for reply in charged(heard)],
        claim=udp_claim(heard, budget=epsilon),
        answered=most_answered(heard),
        uncharged=uncharged(heard),
        weights={r.client: float(str(r.metrics["num-examples"])) for r in heard.replies},
    )


def udp_steps_sampled(
    *,
    rate: float = 0.3,
    rounds: int = 6,
    strategy: type[UDP] = UDP,
    half: type[SchemeClient] = UDPClient,
    insecure_seed: int | None = None,
) -> Session:
    """Train with one private step on a secret sample of records, each with a weight of its own.

    The noise is so small that the audit reads off who was sampled.
    """
    epsilon = 1e5
    made = made_with(
        strategy,
        DPSGD(epsilon=epsilon, delta=DELTA, clipping_norm=NORM, sampling_rate=rate, steps=1),
        clients=2,
        rounds=rounds,
    )
    features = members()

    def train(client: str, server_round: int, start: Model) -> tuple[Model, int]:
        return _descended(client, features, start)

    app = crafted_app(train, [as_mod(half)])
    heard = listen(made, app, clients=2, rounds=rounds, start=_start(), insecure_seed=insecure_seed)
    rows = [_values(reply)[:MEMBERS] for reply in heard.replies]
    pull = _RATE * NORM / (rate * MEMBERS)
    return Session(
        releases=[],
        claim=udp_claim(heard, budget=epsilon),
        answered=most_answered(heard),
        uncharged=uncharged(heard),
        coins=Coins(rate=rate, thrown=np.array([row < -pull / 2 for row in rows])),
    )


def _update(reply: Reply, heard: Heard) -> Released:
    records, direction = far_records(reply.client, reply.round)
    gradients = np.array([clipped(record, NORM) for record in records.astype(np.float64)])
    reach = _RATE * NORM * _STEPS / RECORDS
    step = charge_of(heard, reply)
    return Released(
        place=(reply.client, reply.round),
        kind="a far record in every step",
        values=_values(reply),
        expected=-_RATE * _STEPS * gradients.mean(axis=0),
        sigma=step.noise_multiplier * 2 * reach / math.sqrt(step.count),
        blocks=SIZES,
        canary=-direction,
        reach=reach,
        said=said_by(reply),
    )


def _values(reply: Reply) -> Vector:
    """Return the floats of an update."""
    codes = [np.asarray(a, np.float64).reshape(-1) for a in reply.arrays.values()]
    return np.concatenate(codes) * UPDATE_GRID.step


class _Linear(nn.Module):
    """A linear map to one number, with its weights in two arrays, from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZES[0], 1, bias=False)
        self.second = nn.Linear(SIZES[1], 1, bias=False)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, records: Tensor) -> Tensor:
        first = SIZES[0]
        out: Tensor = self.first(records[:, :first]) + self.second(records[:, first:])
        return out


def _start() -> Model:
    return dict(get_arrays(_Linear()))


def _descended(client: str, features: np.ndarray, start: Model) -> tuple[Model, int]:
    """Train as an app does."""
    model: nn.Module = _Linear()
    set_arrays(model, start)
    context = Context(0, 0, {"client-id": client}, RecordDict(), {})
    loader = DataLoader(TensorDataset(torch.from_numpy(features)))
    sgd = torch.optim.SGD(model.parameters(), lr=_RATE)
    model, optimizer, batches = private_training(model, sgd, loader, context)
    for _ in range(batches.passes):
        for (batch,) in batches:
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
    return dict(get_arrays(model)), len(features)
