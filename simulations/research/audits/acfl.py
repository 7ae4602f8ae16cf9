"""What an audit hears of ACFL: the coded data set and the gradients of each client.

Each client has a record whose features and labels lie far beyond their bounds, among others.
"""

import numpy as np
from flwr.app import Context

from flwr_privacy.clients import ACFLClient, SchemeClient
from flwr_privacy.clients.node.adapters import own_client_app
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.strategies import ACFL, DataBounds, LoopOptions, NoisedRecords
from flwr_privacy.wire.identity import stream

from .claims import DELTA, charge_of, charged, claim_of, most_answered, uncharged
from .observed import Released, Session, Vector, clipped
from .training import Heard, Reply, listen

__all__ = ["acfl_records"]

_FEATURES, _LABELS, _RECORDS = 24, 4, 3
_NORM = 0.3  # bound of the gradient of a record
_SIZE_SHARE = 0.1  # weight of the norm of a gradient beside it, by the specification
_ROUNDING = 1e-3  # what the sensitivity of a gradient has for rounding, by the specification
_SETUP = "setup"
_FAR = 1e6
_START = {"W": np.zeros((_FEATURES, _LABELS))}


def acfl_records(
    *,
    epsilon: float = 1000.0,
    clients: int = 4,
    rounds: int = 5,
    strategy: type[ACFL] = ACFL,
    half: type[SchemeClient] = ACFLClient,
    insecure_seed: int | None = None,
) -> Session:
    """Train with noise for records in the setup and in all gradients.

    Parameters
    ----------
    epsilon : float
        Budget of a record, at delta 1e-5.
    clients, rounds : int
        How many there are.
    strategy, half : type
        The halves of the scheme.
    insecure_seed : int, optional
        Seed of the noise, for tests.
    """
    made = strategy(
        privacy=NoisedRecords(epsilon=epsilon, delta=DELTA, clipping_norm=_NORM),
        data=DataBounds(
            feature_bound=1.0, feature_norm=1.0, label_bound=1.0, label_norm=1.0, max_records=16
        ),
        learning_rate=1e-3,
        loop=LoopOptions(experiment_id="audit", seed=0, write_card=False),
        min_train_nodes=clients,
        min_available_nodes=clients,
        rounds=rounds,
    )

    def client(data: object, context: Context) -> SchemeClient:
        return half(data, context, excess="clip")  # type: ignore[call-arg, arg-type]

    app = own_client_app(client, lambda context: _data(str(context.node_config["client-id"])))
    heard = listen(
        made, app, clients=clients, rounds=rounds, start=_START, insecure_seed=insecure_seed
    )
    charges = max(heard.charges.values(), key=len, default=[])
    return Session(
        releases=[_released(reply, heard) for reply in charged(heard)],
        claim=claim_of(charges, budget=epsilon, turn=1.0),
        answered=most_answered(heard),
        uncharged=uncharged(heard),
    )


def _data(client: str) -> tuple[Vector, Vector]:
    """Return features and labels of a client; the first record lies far away.

    Its entries are alike but for signs, so that cutting entries and shortening rows agree.
    """
    draws = stream(0, "audit records", client)
    features = draws.normal(size=(_RECORDS, _FEATURES)) / 10
    labels = draws.normal(size=(_RECORDS, _LABELS)) / 10
    features[0] = _FAR * np.sign(features[0])
    labels[0] = _FAR * np.sign(labels[0])
    return features, labels


def _bounded(client: str) -> tuple[Vector, Vector]:
    features, labels = _data(client)
    return (
        np.array([clipped(row, 1.0) for row in features]),
        np.array([clipped(row, 1.0) for row in labels]),
    )


def _released(reply: Reply, heard: Heard) -> Released:
    step = CodeGrid(reply.fields["grid"]).step
    values = step * np.concatenate(
        [np.asarray(codes, np.float64).reshape(-1) for codes in reply.arrays.values()]
    )
    own = _setup(reply) if reply.phase == _SETUP else _gradient(reply)
    expected, moved, apart, blocks = own
    reach = float(np.linalg.norm(moved))
    multiplier = charge_of(heard, reply).noise_multiplier
    return Released(
        place=(reply.client, reply.round, reply.phase),
        kind=f"a far record, {reply.phase}",
        values=values,
        expected=expected,
        sigma=multiplier * apart,
        blocks=blocks,
        canary=moved / reach,
        reach=reach,
        phase=reply.phase,
    )


def _setup(reply: Reply) -> tuple[Vector, Vector, float | Vector, tuple[int, ...]]:
    """Return the moments, what the far record adds, the bound of that, and the arrays' sizes."""
    X, Y = _bounded(reply.client)
    blocks = (_FEATURES**2, _FEATURES * _LABELS)
    expected = np.concatenate([(X.T @ X).reshape(-1), (X.T @ Y).reshape(-1)])
    moved = np.concatenate([np.outer(X[0], X[0]).reshape(-1), np.outer(X[0], Y[0]).reshape(-1)])
    # One charge for both moments: with equal shares each has the root of two times its noise.
    sigmas = [float(reply.fields[name]) for name in ("sigma-features", "sigma-labels")]
    paid = 1 / np.hypot(1 / sigmas[0], 1 / sigmas[1])
    apart = np.concatenate([np.full(n, s / paid) for n, s in zip(blocks, sigmas, strict=True)])
    return expected, moved, apart, blocks


def _gradient(reply: Reply) -> tuple[Vector, Vector, float | Vector, tuple[int, ...]]:
    """Return the same of the sum of clipped gradients, and of a share of its norm."""
    (model,) = reply.start.values()
    X, Y = _bounded(reply.client)
    parts = np.array(
        [clipped(np.outer(x, x @ model - y).reshape(-1), _NORM) for x, y in zip(X, Y, strict=True)]
    )
    total = parts.sum(axis=0)
    expected = np.append(total, _SIZE_SHARE * np.linalg.norm(total))
    without = total - parts[0]
    moved = expected - np.append(without, _SIZE_SHARE * np.linalg.norm(without))
    apart = _NORM * (1 + _ROUNDING) * float(np.hypot(1, _SIZE_SHARE))
    return expected, moved, apart, (_FEATURES * _LABELS, 1)
