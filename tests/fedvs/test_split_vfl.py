"""The rivals of FedVS on the same loop: what each waits for, and whom it gives gradients."""

import math
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import vertical
from apps import make, model_of
from conformance import OwnClientConformance
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from grid_tap import tapped
from vertical import ROWS, Wire, arrays_in

from flwr_privacy.clients import split_vfl_client_app
from flwr_privacy.errors import CheckpointError, InvalidParameterError
from flwr_privacy.fedvs.network import expand, initial_weights
from flwr_privacy.fedvs.rows import batch_of, order
from flwr_privacy.fedvs.split_vfl import noisy
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import SplitVFL
from flwr_privacy.wire.identity import derive_seed

CLIENTS = 4
NAMES = [str(index) for index in range(CLIENTS)]


class TestConformance(OwnClientConformance):
    strategy = SplitVFL
    on_ray: ClassVar[bool] = False
    fraction: ClassVar[float] = 1.0  # all clients take part
    engine: ClassVar[dict[str, Any]] = {"insecure_seed": 5}
    options: ClassVar[dict[str, Any]] = {
        **{k: v for k, v in vertical.options(4).items() if k not in ("K", "T")},
        "experiment_id": "e",
        "method": "ignore",  # those who do not answer are left out
    }

    def app(self) -> ClientApp:
        return vertical.app(4, make=split_vfl_client_app)

    def run(self, **changes: Any) -> Any:
        if "run_dir" in changes:
            state = changes["run_dir"] / "nodes"
            state.mkdir(exist_ok=True)
            changes["state"] = state
        return super().run(**changes)

    def arrays(self) -> ArrayRecord:
        return vertical.arrays()


def reference(rounds: int, who: list[int]) -> dict[str, np.ndarray]:
    """Train by hand with some of the clients, from the weights that the seed gives them."""
    train, _, labels, _ = vertical.digits(CLIENTS)
    server_model = vertical.LinearServerModel()
    arrays: Any = server_model.initial()
    places = order(len(labels), derive_seed("e", "vertical rows", "train"))
    data = {n: expand(train[n], 2)[places] for n in who}
    weights = {}
    for n in who:
        random = SecureRandom.insecure(5, "initial weights", str(n), "e", "train", 1, 0)
        weights[n] = initial_weights(data[n].shape[1], vertical.EMBEDDING, random)
    for server_round in range(1, rounds + 1):
        rows = batch_of(len(labels), 8, derive_seed(3, "vertical batches"), server_round)
        embedding = sum(data[n][rows].astype(np.float64) @ weights[n] for n in who) / len(who)
        arrays, gradient, _ = server_model.step(
            arrays, embedding.astype(np.float32), labels[places][rows], 0.5
        )
        for n in who:
            weights[n] -= 4.0 * data[n][rows].T @ gradient.astype(np.float64) / len(who)
    return arrays


def near(result: Any, expected: dict[str, np.ndarray], *, atol: float) -> None:
    for name, array in model_of(result.arrays).items():
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=atol)


def test_waiting_for_all_is_split_learning() -> None:
    result = vertical.train_split(CLIENTS, experiment_id="e", num_rounds=6)
    near(result, reference(6, [0, 1, 2, 3]), atol=1e-5)


def test_ignored_stragglers_are_never_asked_and_are_in_no_mean() -> None:
    result = vertical.train_split(
        CLIENTS, experiment_id="e", num_rounds=6, method="ignore", fast=["0", "2"]
    )
    near(result, reference(6, [0, 2]), atol=1e-5)
    assert [line["asked"] for line in result.history[1:]] == [2] * 6


def test_delays_say_who_is_fast() -> None:
    result = vertical.train_split(CLIENTS, num_rounds=3, method="ignore", delays=True)
    assert [line["asked"] for line in result.history[1:]] == [2] * 3
    waited = vertical.train_split(CLIENTS, num_rounds=3, delays=True)
    assert waited.history[-1]["virtual_seconds"] > 3 * result.history[-1]["virtual_seconds"]


def test_with_next_to_no_noise_wait_dp_is_wait() -> None:
    result = vertical.train_split(
        CLIENTS, experiment_id="e", num_rounds=6, method="wait-dp", epsilon=1e7
    )
    near(result, reference(6, [0, 1, 2, 3]), atol=1e-3)
    noised = vertical.train_split(
        CLIENTS, experiment_id="e", num_rounds=6, method="wait-dp", epsilon=1.0
    )
    far = model_of(noised.arrays)["A"] - model_of(result.arrays)["A"]
    assert np.abs(far).max() > 0.05


def embeddings(**changes: Any) -> dict[str, np.ndarray]:
    """Return what each client sends in the first round, in which a batch is all rows."""
    wire = Wire()
    vertical.train_split(CLIENTS, experiment_id="e", num_rounds=1, before=wire, **changes)
    return {
        client: arrays_in(message)["embedding"].astype(np.float64)
        for client, message in wire.of(wire.said, "train")
    }


@pytest.mark.parametrize("clip", [None, 0.25])
def test_the_noise_of_wait_dp_is_laplace_noise_of_the_spread_over_epsilon(
    clip: float | None,
) -> None:
    """What clients send has it, not only the function that draws it."""
    plain = embeddings(batch_size=ROWS)
    noised = embeddings(batch_size=ROWS, method="wait-dp", epsilon=4.0, clip=clip)
    sizes = []
    for client, sent in noised.items():
        own = plain[client] if clip is None else np.clip(plain[client], -clip, clip)
        spread = np.ptp(own) if clip is None else 2 * clip
        sizes.append(np.abs(sent - own).ravel() / (spread / 4.0))
    found = np.concatenate(sizes)  # |Laplace| is exponential
    assert abs(found.mean() - 1) < 4 / math.sqrt(len(found))
    assert len(set(np.round(found, 6))) > 0.95 * len(found)


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_noise_has_the_law_that_its_name_says(scale: float) -> None:
    embedding = np.zeros((400, 50))
    embedding[0, 0] = 4.0 * scale  # the spread
    random = SecureRandom.insecure(0, "test noise")
    noise = (noisy(embedding, epsilon=4.0, clip=0.0, random=random) - embedding) / scale
    n = noise.size
    assert abs(noise.mean()) < 4.5 * math.sqrt(2 / n)
    assert abs(np.abs(noise).mean() - 1) < 4.5 / math.sqrt(n)
    for t in (0.5, 1.0, 3.0):
        p = math.exp(-t)
        assert abs((np.abs(noise) > t).mean() - p) < 4.5 * math.sqrt(p * (1 - p) / n)


def test_vafl_takes_the_last_embeddings_of_the_others() -> None:
    """By hand, from the embeddings that clients sent: their last ones of every row."""
    wire, given = Wire(), _Given()
    delays = _Fixed({"0": 1.0, "1": 1.6, "2": 2.7, "3": 10.0})
    vertical.train_split(
        CLIENTS, num_rounds=9, method="vafl", batch_size=ROWS, stragglers=delays,
        server_model=given, before=wire,
    )  # fmt: skip
    kept = {
        client: arrays_in(message)["embedding"] for client, message in wire.of(wire.said, "embed")
        if message.content["flwr-privacy"]["round"] == 0
    }  # fmt: skip
    came = wire.of(wire.said, "train")
    assert Counter(client for client, _ in came) == {"0": 5, "1": 3, "2": 1}
    for (client, message), embedding in zip(came, given.embeddings, strict=True):
        before, kept[client] = kept[client], arrays_in(message)["embedding"]
        mean = np.mean([kept[name].astype(np.float64) for name in NAMES], axis=0)
        np.testing.assert_allclose(embedding, mean, rtol=0, atol=1e-6)
    assert np.abs(before - kept[client]).max() > 1e-3


class _Given(vertical.LinearServerModel):
    """A server model that keeps the embeddings of its steps."""

    def __init__(self) -> None:
        self.embeddings: list[np.ndarray] = []

    def step(self, arrays: Any, embedding: np.ndarray, *more: Any) -> Any:
        self.embeddings.append(embedding)
        return super().step(arrays, embedding, *more)


def test_a_masked_sum_is_that_of_wait_up_to_its_grid() -> None:
    secure = SecureSum(threshold=CLIENTS, value_range=16.0, bits=28)
    result = vertical.train_split(CLIENTS, experiment_id="e", num_rounds=6, secure_sum=secure)
    near(result, reference(6, [0, 1, 2, 3]), atol=1e-4)


def test_a_masked_sum_waits_for_everybody() -> None:
    secure = SecureSum(threshold=CLIENTS, value_range=16.0)
    fault = Fault(kind="drop", client="2", server_round=2)
    result = vertical.train_split(
        CLIENTS, num_rounds=3, secure_sum=secure, deadline=0.5, faults=[fault]
    )
    assert [line["skipped"] for line in result.history[1:]] == [False, True, False]


def asked_one_by_one(**changes: Any) -> list[str]:
    """Train under vafl; return which node was asked for the embeddings of a batch, in order."""
    asked: list[str] = []

    def ask(message: Message) -> None:
        if message.content["flwr-privacy"]["phase"] == "train":
            asked.append(names[message.metadata.dst_node_id])

    def listen(grid: Any) -> None:
        names.update(zip(sorted(grid.get_node_ids()), NAMES, strict=True))
        tapped(ask)(grid)

    names: dict[int, str] = {}
    strategy = make(
        SplitVFL,
        method="vafl",
        **{k: v for k, v in vertical.options(CLIENTS).items() if k not in ("K", "T")},
        **changes,
    )
    vertical.run_strategy(
        strategy,
        vertical.app(CLIENTS, make=split_vfl_client_app),
        arrays=vertical.arrays(),
        nodes=CLIENTS,
        insecure_seed=5,
        num_rounds=24,
        before=listen,
    )
    return asked


class _Fixed:
    """Delays that are the same in every round."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def finish_time(self, *, client_id: str, **_: Any) -> float:
        return self.seconds[client_id]

    def race(self, clients: Any, **_: Any) -> tuple[set[str], float]:
        return set(), max(self.seconds[client] for client in clients)


def test_F26_equal_clients_arrive_in_turns() -> None:
    asked = asked_one_by_one()
    assert all(sorted(asked[i : i + 4]) == NAMES for i in range(0, 24, 4))
    assert asked == asked[:4] * 6


def test_F26_a_slow_client_arrives_seldom_and_nobody_waits_for_it() -> None:
    delays = _Fixed({"0": 1.0, "1": 1.0, "2": 1.0, "3": 5.5})
    counts = Counter(asked_one_by_one(stragglers=delays))
    slow, *others = sorted(counts.values())
    assert (slow, len(others)) == (1, 3)
    assert min(others) >= 7


def test_vafl_cannot_be_resumed_and_the_others_can(tmp_path: Path) -> None:
    for method, fails in (("wait", False), ("vafl", True)):
        folder = tmp_path / method
        (folder / "nodes").mkdir(parents=True)
        common: dict[str, Any] = {
            "method": method,
            "experiment_id": "e",
            "run_dir": folder,
            "state": folder / "nodes",
        }
        vertical.train_split(CLIENTS, num_rounds=2, **common)
        if fails:
            with pytest.raises(CheckpointError, match="cannot be resumed"):
                vertical.train_split(CLIENTS, num_rounds=4, resume=True, **common)
            continue
        resumed = vertical.train_split(CLIENTS, num_rounds=4, resume=True, **common)
        near(resumed, reference(4, [0, 1, 2, 3]), atol=1e-5)


def test_another_training_of_the_same_name_begins_anew(tmp_path: Path) -> None:
    common: dict[str, Any] = {"experiment_id": "e", "state": tmp_path, "num_rounds": 3}
    once = vertical.train_split(CLIENTS, **common)
    again = vertical.train_split(CLIENTS, **common)
    near(again, model_of(once.arrays), atol=1e-6)  # from the same seed: as if it were the first


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"method": "hurry"}, "method"),
        ({"method": "wait-dp", "epsilon": 0.0}, "epsilon"),
        ({"method": "wait-dp", "clip": -1.0}, "clip"),
        ({"method": "vafl", "secure_sum": SecureSum()}, "method"),
        ({"order": {"0": 1, "1": 2}}, "order"),
        ({"quorum": 2}, "quorum"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{parameter} ="):
        vertical.train_split(CLIENTS, **changes)
