"""UDP at record level, with the trainer that clips per record inside the user's training."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from apps import make, run_strategy
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flwr_privacy.clients import UDPClient, as_mod, numpy_client_app
from flwr_privacy.clients.torch import get_arrays, initialise, linear, set_arrays, train_per_record
from flwr_privacy.strategies import UDP
from flwr_privacy.udp import sensitivity

FEATURES, CLASSES, RECORDS = 6, 3, (20, 40, 60, 80)
OPTIONS: dict[str, Any] = {
    "unit": "record",
    "learning_rate": 0.5,
    "clipping_norm": 0.3,
    "seed": 1,
}


def model() -> torch.nn.Module:
    return initialise(lambda: linear(FEATURES, CLASSES), 0)


def data(client: int) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(client)
    size = RECORDS[client]
    return draws.normal(size=(size, FEATURES)).astype(np.float32), draws.integers(0, CLASSES, size)


def app(after: Any = lambda model: None, steps: int = 1) -> ClientApp:
    """A Message-API app that trains per record; `after` is what a user does beyond the step."""
    client_app = ClientApp(mods=[as_mod(UDPClient)])

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        net = model()
        arrays = message.content.array_records["arrays"]
        set_arrays(net, {name: array.numpy() for name, array in arrays.items()})
        features, labels = data(int(context.node_config["partition-id"]))
        for _ in range(steps):
            train_per_record(net, features, labels)
        after(net)
        trained = ArrayRecord({name: Array(array) for name, array in get_arrays(net).items()})
        metrics = MetricRecord({"num-examples": 999_999, "loss": 0.5})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    return client_app


def initial() -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in get_arrays(model()).items()})


@pytest.mark.usefixtures("no_pld")
def test_a_round_is_the_mean_of_the_steps_weighted_by_records() -> None:
    """With an epsilon without meaning, against the step of a loop over all records (F14, F22)."""
    strategy = make(UDP, **OPTIONS, epsilon=1e5)
    result = run_strategy(strategy, app(), arrays=initial(), num_rounds=1)
    assert result.history[1]["accumulated"] == 4
    total = [torch.zeros_like(p) for p in model().parameters()]
    net = model()
    for client in range(4):
        for x, y in zip(*data(client), strict=True):
            net.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                net(torch.tensor(x)[None]), torch.tensor([int(y)])
            )
            loss.backward()
            gradients = [p.grad for p in net.parameters()]
            norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
            for part, gradient in zip(total, gradients, strict=True):
                part += gradient * min(1, 0.3 / norm)
    sigma = result.history[1]["train"]["sigma"]
    for (name, start), part in zip(net.state_dict().items(), total, strict=True):
        expected = start.numpy() - 0.5 * part.numpy() / sum(RECORDS)
        np.testing.assert_allclose(result.arrays[name].numpy(), expected, atol=5 * sigma + 1e-6)


def test_the_noise_is_inverse_in_the_number_of_records() -> None:
    strategy = make(UDP, **OPTIONS, rounds=4)
    seen: dict[str, float] = {}

    class Watching(type(strategy)):  # type: ignore[misc]
        def take(self, mean: Any, reply: Any) -> None:
            seen[reply.client_id] = reply.metrics()["sigma"]
            assert reply.metrics()["num-examples"] == RECORDS[int(reply.client_id)]
            assert set(reply.metrics()) == {"num-examples", "sigma"}
            super().take(mean, reply)

    run_strategy(make(Watching, **OPTIONS, rounds=4), app(), arrays=initial(), num_rounds=1)
    for client, records in enumerate(RECORDS):
        exact = sensitivity("record", clipping_norm=0.3, learning_rate=0.5, records=records)
        z = seen[str(client)] / exact
        assert z == pytest.approx(seen["0"] / (0.3 / RECORDS[0]), rel=2e-3)
        assert z >= math.sqrt(4) / 2.1  # and not less than mu asks for


@pytest.mark.parametrize(
    ("client_app", "text", "paid"),
    [
        (lambda: app(steps=0), "did no per-record step", False),  # which a rehearsal shows
        (lambda: app(steps=2), "a per-record trainer 2 times", True),
        (lambda: app(after=_further), "returned other arrays", True),
    ],
)
def test_what_is_not_the_step_that_was_asked_for_is_refused(
    client_app: Any, text: str, paid: bool, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = make(UDP, **OPTIONS)
    result = run_strategy(strategy, client_app(), arrays=initial(), num_rounds=1)
    assert result.history[1]["refused"] == {"failed" if paid else "error": 4}
    assert result.history[1]["skipped"]
    assert [len(release.clients) for release in strategy.releases] == [4] * paid
    assert text in caplog.text


def _further(net: torch.nn.Module) -> None:
    with torch.no_grad():
        next(iter(net.parameters())).add_(1e-3)


class Trainer(NumPyClient):
    def __init__(self, client: int) -> None:
        self.client = client

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
        net = model()
        set_arrays(net, dict(zip(net.state_dict(), parameters, strict=True)))
        train_per_record(net, *data(self.client))
        return list(get_arrays(net).values()), 1, {}


def test_it_works_in_both_kinds_of_app_alike() -> None:
    options = {**OPTIONS, "experiment_id": "e", "rounds": 3}
    one = run_strategy(make(UDP, **options), app(), arrays=initial(), insecure_seed=3)
    numpy_app = numpy_client_app(
        lambda context: UDPClient(Trainer(int(context.node_config["partition-id"])), context)
    )
    other = run_strategy(make(UDP, **options), numpy_app, arrays=initial(), insecure_seed=3)
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(array.numpy(), other.arrays[name].numpy())


def test_secret_samples_of_the_records_cost_less() -> None:
    """At the same epsilon a Poisson sample needs more noise on the step than it saves by far less
    than the rate, which is why it is worth having."""
    sampled, full = (
        make(UDP, **OPTIONS, sampling_rate=0.1, rounds=20),
        make(UDP, **OPTIONS, rounds=20),
    )
    for strategy in (sampled, full):
        run_strategy(strategy, app(), arrays=initial(), num_rounds=1)
    assert sampled.terms is not None
    assert full.terms is not None
    assert sampled.terms.noise_multiplier < 0.5 * full.terms.noise_multiplier
    assert sampled.releases[0].charge.sampling == 0.1
    card = sampled.card(final=True)
    assert set(card.verify()) == {"rdp", "pld"}
    assert card.guarantee.accountant == "rdp"


def sigmas(**options: Any) -> tuple[UDP, dict[str, float]]:
    """The noise of each client in a round, and the strategy."""
    seen: dict[str, float] = {}

    class Watching(UDP):
        def take(self, mean: Any, reply: Any) -> None:
            seen[reply.client_id] = reply.metrics()["sigma"]
            super().take(mean, reply)

    strategy = make(Watching, **{**OPTIONS, **options}, rounds=4)
    run_strategy(strategy, app(), arrays=initial(), num_rounds=1)
    return strategy, seen


def test_the_noise_follows_the_steps() -> None:
    _, one = sigmas()
    several, noise = sigmas(local_epochs=2, batch_size=10)
    assert sorted(noise) == ["0", "1", "2", "3"]
    for client, records in enumerate(RECORDS):
        steps = 2 * records // 10
        share = (1 / 10 + steps - 1) * records
        assert noise[str(client)] / one[str(client)] == pytest.approx(share, rel=5e-3)
    assert "sensitivity_unproven" not in several.guarantee().text()


def test_an_unproven_sensitivity_is_asked_for_by_name_and_shown() -> None:
    _, one = sigmas()
    strategy, noise = sigmas(local_epochs=2, batch_size=10, sensitivity_bound="unproven")
    for client in noise:
        assert noise[client] / one[client] == pytest.approx(1, rel=5e-3)
    assert "sensitivity_unproven" in strategy.guarantee().text()


def test_a_convex_sensitivity_is_refused_for_several_outputs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, noise = sigmas(local_epochs=2, sensitivity_bound="convex")
    assert not noise
    assert "bound = 'convex': expected 'general' for this model" in caplog.text


def test_a_batch_larger_than_the_data_of_a_client_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, noise = sigmas(batch_size=30)
    assert sorted(noise) == ["1", "2", "3"]
    assert "batch_size = 30: expected at most the number of records, 20" in caplog.text
