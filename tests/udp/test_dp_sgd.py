"""UDP with DP-SGD: the user's own loop under a server, its charges, and what is refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from apps import run_strategy
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_privacy.accounting import spent
from flwr_privacy.clients import UDPClient, as_mod, numpy_client_app
from flwr_privacy.clients.torch import get_arrays, initialise, mlp, private_training, set_arrays
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import DPSGD, UDP, LinearNoise
from flwr_privacy.udp import PrivateStepsTerms

FEATURES, CLASSES, RECORDS = 6, 3, (40, 60, 80, 100)
TRAINS = {"sampling_rate": 0.2, "steps": 10}


def model() -> nn.Module:
    return initialise(lambda: mlp([FEATURES, 8, CLASSES]), 0)


def initial() -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in get_arrays(model()).items()})


def data(client: int) -> TensorDataset:
    draws = torch.Generator().manual_seed(client)
    features = torch.randn(RECORDS[client], FEATURES, generator=draws)
    return TensorDataset(features, features[:, :CLASSES].argmax(dim=1))


def descend(net: nn.Module, context: Context, *, optimizer: Any, epochs: int = 2) -> None:
    """The loop of an app."""
    loader: Any = DataLoader(data(int(context.node_config["partition-id"])), batch_size=8)
    net, optimizer, loader = private_training(net, optimizer(net.parameters()), loader, context)
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for features, labels in loader:
            optimizer.zero_grad()
            loss = criterion(net(features), labels)
            loss.backward()
            optimizer.step()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def app(optimizer: Any = sgd, epochs: int = 2, after: Any = lambda net: None) -> ClientApp:
    client_app = ClientApp(mods=[as_mod(UDPClient)])

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        net = model()
        arrays = message.content.array_records["arrays"]
        set_arrays(net, {name: array.numpy() for name, array in arrays.items()})
        descend(net, context, optimizer=optimizer, epochs=epochs)
        after(net)
        trained = ArrayRecord({name: Array(array) for name, array in get_arrays(net).items()})
        metrics = MetricRecord({"num-examples": 999_999, "loss": 0.5})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    return client_app


class Trainer(NumPyClient):
    def __init__(self, context: Context) -> None:
        self.context = context

    def fit(self, parameters: Any, config: Any) -> Any:
        net = model()
        set_arrays(net, dict(zip(get_arrays(net), parameters, strict=True)))
        descend(net, self.context, optimizer=sgd)
        return list(get_arrays(net).values()), 1, {}


def numpy_app() -> ClientApp:
    return numpy_client_app(lambda context: UDPClient(Trainer(context), context))


def accuracy(arrays: ArrayRecord) -> float:
    net = model()
    set_arrays(net, {name: array.numpy() for name, array in arrays.items()})
    features, labels = data(3).tensors
    return float((net(features).argmax(dim=1) == labels).float().mean())


def same_model(arrays: ArrayRecord) -> bool:
    return all(
        np.array_equal(array.numpy(), start.numpy())
        for array, start in zip(arrays.values(), initial().values(), strict=True)
    )


OPTIMISERS = {
    "sgd": sgd,
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
}


@pytest.mark.parametrize("optimizer", OPTIMISERS)
def test_a_loop_of_the_users_own_learns_with_any_optimiser(optimizer: str) -> None:
    strategy = UDP(privacy=DPSGD(epsilon=50.0, **TRAINS))
    result = run_strategy(strategy, app(OPTIMISERS[optimizer]), arrays=initial(), num_rounds=3)
    assert accuracy(initial()) < 0.45
    assert accuracy(result.arrays) > 0.6


def test_all_steps_are_charged_once_for_a_round_and_stay_within_the_budget(
    tmp_path: Path,
) -> None:
    strategy = UDP(privacy=DPSGD(epsilon=4.0, delta=1e-5, **TRAINS))
    run_strategy(strategy, app(), arrays=initial(), num_rounds=2, state=tmp_path)
    assert isinstance(strategy.terms, PrivateStepsTerms)
    entries = Ledger(tmp_path / "0.ledger", data_set="0").entries()
    assert [entry.charge for entry in entries] == [strategy.terms.charge()] * 2
    assert all(entry.unit == "record" for entry in entries)
    charge = entries[0].charge
    assert (charge.count, charge.sampling, charge.neighbours) == (10, 0.2, "replace_one")
    total = spent([charge] * 2, delta=1e-5, accountant="rdp")
    assert 3.9 < total <= 4.0
    assert strategy.card().epsilon("rdp") == pytest.approx(total, rel=1e-9)


def test_both_kinds_of_app_weigh_clients_by_their_records() -> None:
    """Without noise and with all records in the only step: the mean of gradients of all records."""
    for client_app in (app(epochs=1), numpy_app()):
        privacy = DPSGD(noise="none", sampling_rate=1.0, steps=1, clipping_norm=0.05)
        result = run_strategy(UDP(privacy=privacy), client_app, arrays=initial(), num_rounds=1)
        by_hand = model()
        start = [p.detach().clone() for p in by_hand.parameters()]
        total = [torch.zeros_like(p) for p in start]
        for client in range(4):
            for feature, label in data(client):
                by_hand.zero_grad()
                nn.functional.cross_entropy(by_hand(feature[None]), label[None]).backward()
                norm = math.hypot(*(float(p.grad.norm()) for p in by_hand.parameters()))
                for whole, p in zip(total, by_hand.parameters(), strict=True):
                    whole += p.grad * min(1.0, 0.05 / norm)
        arrays = [array.numpy() for array in result.arrays.values()]
        for array, before, whole in zip(arrays, start, total, strict=True):
            np.testing.assert_allclose(
                array, before - 0.3 * whole / sum(RECORDS), rtol=1e-4, atol=1e-6
            )


def test_a_secure_sum_hides_single_updates_beside_the_noise() -> None:
    strategy = UDP(privacy=DPSGD(epsilon=50.0, **TRAINS), secure_sum=SecureSum())
    result = run_strategy(strategy, app(), arrays=initial(), num_rounds=1, timeout=30)
    assert not same_model(result.arrays)
    assert [release.charge.count for release in strategy.releases] == [10]


def test_the_guarantee_names_record_neighbours_and_what_is_assumed() -> None:
    text = str(UDP(privacy=DPSGD(**TRAINS)).guarantee())
    assert "one record of one client is replaced by another" in text
    assert "private_training" in text
    assert "kernel" in text


CHEATS = {
    "stops early": (lambda: app(epochs=1), "all the steps that were asked for"),
    "chooses weights": (
        lambda: app(after=lambda net: next(net.parameters()).data.mul_(0.5)),
        "than the last private step",
    ),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_loop_that_stops_early_or_chooses_weights_gives_nothing(
    cheat: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_app, text = CHEATS[cheat]
    strategy = UDP(privacy=DPSGD(epsilon=50.0, **TRAINS))
    result = run_strategy(strategy, make_app(), arrays=initial(), num_rounds=1)
    assert same_model(result.arrays)
    assert text in caplog.text
    assert not strategy.releases  # a rehearsal found it


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="None with DPSGD"):
        UDP(privacy=DPSGD(**TRAINS), schedule=LinearNoise())
    with pytest.raises(InvalidParameterError, match="learning_rate"):
        DPSGD(learning_rate=0.1, **TRAINS)  # type: ignore[call-arg]
