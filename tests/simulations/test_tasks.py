import threading

import numpy as np
import pytest
import torch

from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.identity import derive_seed
from flwr_privacy.simulations import tasks
from flwr_privacy.simulations.data import DATASETS, load
from flwr_privacy.simulations.settings import PartitionSettings, Settings

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
}


@pytest.mark.parametrize("name", list(tasks.TASKS))
def test_registry(name):
    task = tasks.task(name)
    assert task.name == name
    assert task.dataset in DATASETS
    logits = task.model()(torch.zeros(2, *SHAPES[name]))
    assert logits.shape == (2, 2 if name == "adult-linear" else 10)
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


def federated(settings, *, rounds, clients=10):
    arrays = tasks.initial_arrays(DIGITS, settings.seed)
    for server_round in range(rounds):
        replies = [
            tasks.train_client(
                DIGITS,
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
    return tasks.evaluate_server(DIGITS, settings, arrays)["accuracy"]
