import threading

import numpy as np
import pytest
import torch

from flwr_privacy.clients.certificates.per_record_steps import PerRecordPlan, asked
from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.simulations.settings.run_settings import PartitionSettings, Settings
from flwr_privacy.simulations.tasks import lookup, tasks
from flwr_privacy.simulations.tasks.data import DATASETS, Dataset, load
from flwr_privacy.wire.identity import derive_seed

DIGITS = tasks.task("digits-mlp")
SETTINGS = Settings(training=DIGITS.training)

SHAPES = {
    "digits-mlp": (64,),
    "digits-linear": (64,),
    "mnist-mlp": (1, 28, 28),
    "mnist-cnn": (1, 28, 28),
    "fashion-cnn": (1, 28, 28),
    "cifar10-cnn": (3, 32, 32),
    "adult-linear": (108,),
    "cifar10-udp-cnn": (3, 32, 32),
    "adult-svm": (14,),
    "digits-svm": (64,),
    "fashion-svm": (1, 28, 28),
    "digits-rff": (200,),
    "digits-frozen": (200,),
    "mnist-rff": (2000,),
    "fashion-rff": (2000,),
}
"""Shape of what a task's model takes."""

RAW = {
    "digits-rff": (64,),
    "digits-frozen": (64,),
    "mnist-rff": (1, 28, 28),
    "fashion-rff": (1, 28, 28),
}
"""Shape of a record, where features are made of it."""


@pytest.mark.parametrize("name", list(tasks.TASKS))
def test_registry(name):
    task = tasks.task(name)
    assert task.name == name
    assert task.dataset in DATASETS
    logits = task.model()(torch.zeros(2, *SHAPES[name]))
    assert logits.shape == (2, 2 if name.startswith("adult") else 10)
    weights = sum(array.size for array in tasks.initial_arrays(task, 0).values())
    assert f"{weights:,} weights" in task.description


def test_unknown_task():
    with pytest.raises(InvalidParameterError, match=r"task = 'digit-mlp'.*nearest: 'digits-mlp'"):
        tasks.task("digit-mlp")


def test_initial_arrays_are_seeded():
    one, same, other = (tasks.initial_arrays(DIGITS, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["1.weight"], other["1.weight"])


def test_client_data_is_the_clients_own_copy():
    everything = [tasks.client_data(DIGITS, SETTINGS, index, 7) for index in range(7)]
    assert sum(len(labels) for _, labels in everything) == 1437
    rows = np.concatenate([features for features, _ in everything])
    whole = load("digits").features
    assert np.array_equal(np.unique(rows, axis=0), np.unique(whole, axis=0))
    features, _ = everything[0]
    features[:] = 0
    again, _ = tasks.client_data(DIGITS, SETTINGS, 0, 7)
    assert again.any()


@pytest.mark.parametrize("index", [-1, 7])
def test_no_such_client(index):
    with pytest.raises(InvalidParameterError, match=f"client = {index}.*from 0 to 6"):
        tasks.client_data(DIGITS, SETTINGS, index, 7)


def test_missing_data():
    with pytest.raises(DataError, match="--data-root"):
        tasks.evaluate_server(tasks.task("mnist-mlp"), Settings(), {})


def test_check_data():
    assert tasks.check_data(Settings()) is None
    skewed = Settings(clients=10, partition=PartitionSettings(kind="labels", labels=1))
    assert "only one class" in str(tasks.check_data(skewed))
    with pytest.raises(DataError, match="ask for fewer clients"):
        tasks.check_data(Settings(clients=5000))
    with pytest.raises(DataError, match="--data-root"):
        tasks.check_data(Settings(task="mnist-mlp"))
    with pytest.raises(InvalidParameterError, match="task = 'none'"):
        tasks.check_data(Settings(task="none"))


def test_some_of_the_records():
    some = SETTINGS.with_values({"train_records": 200, "test_records": 50})
    data, whole = tasks.dataset(DIGITS, some), load("digits")
    assert data.features.shape == (200, 64)
    assert data.test_features.shape == (50, 64)
    # They are records of the whole with their labels, each once.
    for features, labels, all_features, all_labels in (
        (data.features, data.labels, whole.features, whole.labels),
        (data.test_features, data.test_labels, whole.test_features, whole.test_labels),
    ):
        rows = {row.tobytes(): label for row, label in zip(all_features, all_labels, strict=True)}
        found = {row.tobytes(): label for row, label in zip(features, labels, strict=True)}
        assert len(found) == len(labels)
        assert found.items() <= rows.items()
    sizes = [len(tasks.client_data(DIGITS, some, index, 7)[1]) for index in range(7)]
    assert sum(sizes) == 200
    assert "28 to 29 records" in str(tasks.check_data(some.with_values({"clients": 7})))
    # The seed draws them, and each number by itself.
    assert tasks.dataset(DIGITS, some) is data
    other = tasks.dataset(DIGITS, some.with_values({"seed": 1}))
    assert not np.array_equal(other.features, data.features)
    fewer = tasks.dataset(DIGITS, some.with_values({"test_records": 10}))
    assert np.array_equal(fewer.features, data.features)
    assert np.array_equal(fewer.test_features, data.test_features[:10])
    assert tasks.dataset(DIGITS, SETTINGS) is whole


@pytest.mark.parametrize(("name", "most"), [("train_records", 1437), ("test_records", 360)])
def test_more_records_than_there_are(name, most):
    tasks.dataset(DIGITS, SETTINGS.with_values({name: most}))
    with pytest.raises(InvalidParameterError, match=f"{name} = {most + 1}: .* at most {most}"):
        tasks.check_data(SETTINGS.with_values({name: most + 1}))
    with pytest.raises(InvalidParameterError, match=f"{name} = 0: .* at least 1"):
        SETTINGS.with_values({name: 0})


def test_client_without_data():
    with pytest.raises(DataError, match="ask for fewer clients"):
        tasks.client_data(DIGITS, SETTINGS, 0, 5000)


def test_training_starts_from_the_arrays_alone():
    arrays = tasks.initial_arrays(DIGITS, 0)
    before = {name: array.copy() for name, array in arrays.items()}
    first, examples, metrics = tasks.train_client(DIGITS, SETTINGS, arrays, 0, 10, seed=5)
    assert examples == 144
    assert set(metrics) == {"loss"}
    tasks.train_client(DIGITS, SETTINGS, first, 1, 10, seed=6)
    tasks.evaluate_server(DIGITS, SETTINGS, first)
    again, _, same = tasks.train_client(DIGITS, SETTINGS, arrays, 0, 10, seed=5)
    assert same == metrics
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert all(np.array_equal(arrays[name], before[name]) for name in arrays)
    assert not np.array_equal(first["1.weight"], arrays["1.weight"])


def test_training_settings_count():
    arrays = tasks.initial_arrays(DIGITS, 0)
    still = SETTINGS.with_values({"training.learning_rate": 0.0})
    trained, _, _ = tasks.train_client(DIGITS, still, arrays, 0, 10, seed=5)
    assert all(np.array_equal(trained[name], arrays[name]) for name in arrays)


def test_the_step_falls_from_round_to_round():
    arrays = tasks.initial_arrays(DIGITS, 0)
    falling = SETTINGS.with_values({"training.learning_rate": 0.1, "training.decay": 0.5})
    for server_round in (1, 2, 9):  # the schedule 1 / (5 (t + 1))
        rate = 1 / (5 * (server_round + 1))
        constant = SETTINGS.with_values({"training.learning_rate": rate})
        expected, _, _ = tasks.train_client(DIGITS, constant, arrays, 0, 10, seed=5)
        found, _, _ = tasks.train_client(
            DIGITS, falling, arrays, 0, 10, seed=5, server_round=server_round
        )
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-6)


def test_threads_do_not_share_a_model():
    arrays = tasks.initial_arrays(DIGITS, 0)
    expected = {
        index: tasks.train_client(DIGITS, SETTINGS, arrays, index, 10, seed=1)[0]
        for index in range(4)
    }
    found = {}

    def work(index):
        for _ in range(5):
            found[index] = tasks.train_client(DIGITS, SETTINGS, arrays, index, 10, seed=1)[0]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(4):
        for name, array in expected[index].items():
            np.testing.assert_allclose(found[index][name], array, atol=1e-5)


def test_arrays_of_another_model():
    with pytest.raises(InvalidParameterError, match="missing"):
        tasks.evaluate_server(DIGITS, SETTINGS, {"w": np.zeros(3)})


def test_evaluate_client():
    arrays = tasks.initial_arrays(DIGITS, 0)
    examples, metrics = tasks.evaluate_client(DIGITS, SETTINGS, arrays, 3, 10)
    assert examples == 144
    assert set(metrics) == {"loss", "accuracy"}


@pytest.mark.parametrize("seed", [0, 1])
def test_federated_averaging_learns_digits(seed):
    settings = Settings(training=DIGITS.training, seed=seed)
    assert federated(settings, rounds=12) > 0.9


def test_clients_with_one_class_train_and_evaluate():
    settings = Settings(
        training=DIGITS.training, partition=PartitionSettings(kind="labels", labels=1)
    )
    arrays = tasks.initial_arrays(DIGITS, 0)
    trained, _, metrics = tasks.train_client(DIGITS, settings, arrays, 0, 10, seed=0)
    assert np.isfinite(metrics["loss"])
    _, own = tasks.evaluate_client(DIGITS, settings, trained, 0, 10)
    assert own["accuracy"] == 1
    assert federated(settings, rounds=2) > 0.1


# -- Losses, single records and public records ---------------------------------------------------


@pytest.fixture
def any_data(monkeypatch):
    """Let every task have the same 60 records, which are of the right shape."""

    def put(name):
        rng = np.random.default_rng(1)
        labels = rng.integers(0, 2, 90)
        shape = RAW.get(name, SHAPES[name])
        features = rng.normal(size=(90, *shape)).astype(np.float32)
        features[:, 0] += 2.0 * labels.reshape(-1, *[1] * (features.ndim - 2))
        held = Dataset(
            features=features[:60],
            labels=labels[:60],
            test_features=features[60:],
            test_labels=labels[60:],
            classes=2,
        )
        monkeypatch.setattr(lookup, "load", lambda *args, **kwargs: held)
        return held

    return put


@pytest.mark.parametrize("name", list(tasks.TASKS))
def test_every_task_trains_by_batches_and_by_records(name, any_data):
    any_data(name)
    task = tasks.task(name)
    settings = Settings(training=task.training)
    arrays = tasks.initial_arrays(task, 0)
    trained, examples, metrics = tasks.train_client(task, settings, arrays, 0, 3, seed=0)
    assert (examples, set(metrics)) == (20, {"loss"})
    assert any((trained[key] != arrays[key]).any() for key in arrays)
    with asked(PerRecordPlan(clipping_norm=0.5, learning_rate=0.1)) as request:
        stepped, examples, metrics = tasks.train_client(task, settings, arrays, 0, 3, seed=0)
    assert (examples, metrics) == (20, {})
    request.certificate.check(arrays.values(), stepped.values())
    moved = np.sqrt(sum(np.square(stepped[key] - arrays[key]).sum() for key in arrays))
    assert 0 < moved <= 0.05 * 1.001
    assert set(tasks.evaluate_server(task, settings, trained)) == {"loss", "accuracy"}


def test_the_penalty_of_the_svm_is_clipped_with_its_record(any_data):
    held = any_data("adult-svm")
    task = tasks.task("adult-svm")
    rng = np.random.default_rng(2)
    arrays = {
        "layer.weight": rng.normal(size=(1, 14)).astype(np.float32) * 3,
        "layer.bias": np.array([0.5], dtype=np.float32),
    }
    weight, bias = arrays["layer.weight"][0].astype(float), 0.5
    with asked(PerRecordPlan(clipping_norm=1.0, learning_rate=0.1)):
        stepped, _, _ = tasks.train_client(task, Settings(), arrays, 0, 1, seed=0)
    signs = 2.0 * held.labels - 1
    active = signs * (held.features @ weight + bias) < 1
    assert 0 < active.sum() < 60
    slopes = 0.01 * np.append(weight, 0) - (active * signs)[:, None] * np.append(
        held.features, np.ones((60, 1)), axis=1
    )
    slopes /= np.maximum(1, np.linalg.norm(slopes, axis=1))[:, None]
    expected = np.append(weight, bias) - 0.1 * slopes.mean(axis=0)
    found = np.append(stepped["layer.weight"], stepped["layer.bias"])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # One step on all records at once, and the loss on the test records.
    settings = Settings().with_values({"training.batch_size": 60, "training.learning_rate": 0.1})
    whole, _, metrics = tasks.train_client(task, settings, arrays, 0, 1, seed=0)
    margins = signs * (held.features @ weight + bias)
    penalty = 0.005 * np.square(weight).sum()
    assert metrics["loss"] == pytest.approx(penalty + np.maximum(0, 1 - margins).mean(), rel=1e-5)
    raw = 0.01 * weight - ((margins < 1) * signs) @ held.features / 60
    np.testing.assert_allclose(whole["layer.weight"][0], weight - 0.1 * raw, atol=1e-5)
    test_signs = 2.0 * held.test_labels - 1
    test_margins = test_signs * (held.test_features @ weight + bias)
    scores = tasks.evaluate_server(task, Settings(), arrays)
    expected_loss = penalty + np.maximum(0, 1 - test_margins).mean()
    assert scores["loss"] == pytest.approx(expected_loss, rel=1e-5)
    assert scores["accuracy"] == (test_margins > 0).mean()


def squared_hinge_of(weights, features, labels):
    """Loss and gradient of one-vs-rest support vectors, one class after the other."""
    total, slopes = 0.0, []
    for own, vector in enumerate(weights):
        signs = np.where(labels == own, 1.0, -1.0)
        short = np.maximum(0, 1 - signs * (features @ vector))
        total += np.square(short).mean()
        slopes.append(-2 * (short * signs) @ features / len(labels))
    return total, np.array(slopes)


def test_the_svm_of_ten_classes_is_ten_support_vectors_without_bias():
    task = tasks.task("digits-svm")
    arrays = tasks.initial_arrays(task, 0)
    assert {name: array.shape for name, array in arrays.items()} == {"1.weight": (10, 64)}
    weights = arrays["1.weight"].astype(float) * 4
    data = load("digits")
    settings = Settings().with_values(
        {"training.batch_size": 1437, "training.learning_rate": 0.01, "clients": 1}
    )
    start = {"1.weight": weights}
    trained, _, metrics = tasks.train_client(task, settings, start, 0, 1, seed=0)
    loss, slopes = squared_hinge_of(weights, data.features, data.labels)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(trained["1.weight"], weights - 0.01 * slopes, atol=1e-6)
    scores = tasks.evaluate_server(task, settings, start)
    expected, _ = squared_hinge_of(weights, data.test_features, data.test_labels)
    assert scores["loss"] == pytest.approx(expected, rel=1e-5)
    hits = (data.test_features @ weights.T).argmax(axis=1) == data.test_labels
    assert scores["accuracy"] == hits.mean()


def test_the_loss_of_the_svm_is_as_smooth_and_convex_as_it_says():
    rng = np.random.default_rng(3)
    for _ in range(200):
        record = rng.normal(size=(1, 5))
        label = rng.integers(0, 4, 1)
        one, two = rng.normal(size=(2, 4, 5)) * 2
        (first, slope), (second, other) = (
            squared_hinge_of(point, record, label) for point in (one, two)
        )
        apart = np.linalg.norm(one - two)
        smoothness = 2 * np.square(record).sum()
        assert np.linalg.norm(slope - other) <= smoothness * apart * (1 + 1e-9)
        assert second >= first + (slope * (two - one)).sum() - 1e-9


def test_the_svm_learns_digits():
    settings = Settings(training=tasks.task("digits-svm").training)
    assert federated(settings, rounds=12, task=tasks.task("digits-svm")) > 0.9


def test_public_records_are_taken_from_the_training_before_the_split():
    some = SETTINGS.with_values({"validation_records": 100, "clients": 7})
    arrays = tasks.initial_arrays(DIGITS, 0)
    data, whole = tasks.dataset(DIGITS, some), load("digits")
    assert data.features.shape == (1337, 64)
    assert np.array_equal(data.test_features[:, 0].sum(), whole.test_features[:, 0].sum())
    assert sum(len(tasks.client_data(DIGITS, some, index, 7)[1]) for index in range(7)) == 1337
    # The loss of the two parts together is that of all training records.
    everywhere = SETTINGS.with_values({"clients": 1})
    _, all_of_them = tasks.evaluate_client(DIGITS, everywhere, arrays, 0, 1)
    _, clients = tasks.evaluate_client(DIGITS, some, arrays, 0, 1)
    held = tasks.validation_loss(DIGITS, some, arrays)
    both = (1337 * clients["loss"] + 100 * held) / 1437
    assert all_of_them["loss"] == pytest.approx(both, rel=1e-5)
    # The clients' records do not depend on them, as long as there are enough.
    fewer = {"train_records": 500}
    with_them = tasks.dataset(DIGITS, some.with_values(fewer))
    assert np.array_equal(
        with_them.features, tasks.dataset(DIGITS, SETTINGS.with_values(fewer)).features
    )
    # Without that setting: the test records.
    test_loss = tasks.evaluate_server(DIGITS, SETTINGS, arrays)["loss"]
    assert tasks.validation_loss(DIGITS, SETTINGS, arrays) == test_loss


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"validation_records": 1437}, "validation_records = 1437: .* at most 1436"),
        (
            {"validation_records": 100, "train_records": 1338},
            "train_records = 1338: .* at most 1337",
        ),
    ],
)
def test_more_public_records_than_there_are(more, text):
    with pytest.raises(InvalidParameterError, match=text):
        tasks.check_data(SETTINGS.with_values(more))


def federated(settings, *, rounds, clients=10, task=DIGITS):
    arrays = tasks.initial_arrays(task, settings.seed)
    for server_round in range(rounds):
        replies = [
            tasks.train_client(
                task,
                settings,
                arrays,
                index,
                clients,
                seed=derive_seed(settings.seed, "train", str(index), server_round),
            )
            for index in range(clients)
        ]
        weights = [examples for _, examples, _ in replies]
        arrays = {
            name: np.average(
                [reply[name] for reply, _, _ in replies], axis=0, weights=weights
            ).astype(np.float32)
            for name in arrays
        }
    return tasks.evaluate_server(task, settings, arrays)["accuracy"]


def test_a_part_of_a_model_is_trained_and_the_rest_is_that_of_the_seed():
    start = tasks.initial_arrays(DIGITS, SETTINGS.seed)
    part = {name: array + 1 for name, array in start.items() if name.startswith("3.")}
    arrays, _, _ = tasks.train_client(DIGITS, SETTINGS, part, 0, 10, seed=1)
    for name, array in start.items():
        assert (arrays[name] == array).all() == (name not in part), name
    assert tasks.evaluate_client(DIGITS, SETTINGS, part, 0, 10)[1]["loss"] > 0
