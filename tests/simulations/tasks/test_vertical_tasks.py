"""Tasks whose clients have columns: their data, their server models, and what is refused."""

import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from flwr_privacy.clients.torch import mlp
from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.fedvs.data import ids_digest
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.app.server_app import app as server_app
from flwr_privacy.simulations.app.server_app import build_strategy, initial_arrays
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.runner.complete_settings import settings_of
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings, TrainingSettings
from flwr_privacy.simulations.settings.schemes import SCHEMES
from flwr_privacy.simulations.tasks import tasks, vertical_tasks
from flwr_privacy.simulations.tasks.data import load
from flwr_privacy.simulations.tasks.records import Dataset
from flwr_privacy.simulations.tasks.vertical_tasks import (
    VERTICAL_TASKS,
    VerticalTask,
    check_vertical,
    server_model_of,
    vertical_data,
    vertical_labels,
    vertical_part,
    vertical_task,
)

CLIENT_APP = "flwr_privacy.simulations.app.client_app:app"
DIGITS = vertical_task("digits-rows")
BUILT_IN = ("digits-rows", "breast-cancer")
BASELINES = ("split-wait", "split-ignore", "split-vafl", "split-wait-dp", "split-masked")


def parts(task, settings, clients=None):
    clients = clients or task.clients
    found = [vertical_part(task, settings, index, clients) for index in range(clients)]
    return [np.concatenate(side, axis=1) for side in zip(*found, strict=True)], found


def table(columns=5, rows=9, tests=4, seed=0):
    draws = np.random.default_rng(seed)
    return Dataset(
        features=draws.normal(3, 2, size=(rows, columns)).astype(np.float32),
        labels=np.arange(rows) % 2,
        test_features=draws.normal(3, 2, size=(tests, columns)).astype(np.float32),
        test_labels=np.arange(tests) % 2,
        classes=2,
    )


@pytest.fixture
def small(monkeypatch):
    """A task on a table of five columns, the last two of which stay together."""

    def make(**changes):
        data = table()
        monkeypatch.setattr(vertical_tasks, "load", lambda name, data_root: data)
        task = VerticalTask(
            name="small",
            dataset="small",
            description="",
            units=(1, 1, 1, 2),
            clients=3,
            server_model=partial(mlp, (64, 1)),
        )
        return replace(task, **changes), data

    return make


# -- Data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 3, 8])
def test_rows_of_digits_are_shared_out_in_their_order(clients):
    settings = Settings(task="digits-rows")
    (train, test), found = parts(DIGITS, settings, clients)
    digits = load("digits")
    np.testing.assert_allclose(train, digits.features, atol=1e-12)  # they are within [0, 1]
    np.testing.assert_allclose(test, digits.test_features, atol=1e-12)
    assert train.dtype == np.float64
    widths = [train.shape[1] for train, _ in found]
    rows = [len(part) for part in np.array_split(np.arange(8), clients)]
    assert widths == [8 * count for count in rows]


def test_a_column_of_a_table_is_standardised_by_the_training_rows_and_cut_off(small):
    task, data = small()
    data.features.flags.writeable = data.test_features.flags.writeable = True
    data.features[0, 0], data.test_features[0, 1] = 1000, -1000
    data.features[:, 2] = 7  # one value: nothing to divide by
    data.test_features[:, 2] = [7, 8, 7, 6]
    (train, test), found = parts(task, Settings(), 4)
    assert [part.shape[1] for part, _ in found] == [1, 1, 1, 2]
    wide = data.features.astype(float)
    mean, deviation = wide.mean(axis=0), wide.std(axis=0)
    for column in (0, 1, 3, 4):
        for scaled, raw in ((train, wide), (test, data.test_features)):
            expected = (raw[:, column] - mean[column]) / (3 * deviation[column])
            np.testing.assert_allclose(
                scaled[:, column], np.clip(expected, -1, 1), rtol=1e-9, atol=1e-9
            )
    assert test[0, 1] == -1
    assert not train[:, 2].any()
    np.testing.assert_allclose(test[:, 2], [0, 1 / 3, 0, -1 / 3])
    assert max(np.abs(train).max(), np.abs(test).max()) <= 1


def test_pixels_have_one_range_for_all_clients(small):
    task, data = small(pixels=True)
    (train, test), _ = parts(task, Settings())
    least, most = float(data.features.min()), float(data.features.max())
    np.testing.assert_allclose(train, (data.features - least) / (most - least), atol=1e-6)
    expected = np.clip((data.test_features - least) / (most - least), 0, 1)
    np.testing.assert_allclose(test, expected, atol=1e-6)
    assert train.min() == 0
    assert train.max() == 1


def test_units_stay_together(small):
    task, _ = small()
    widths = [vertical_part(task, Settings(), index, 2)[0].shape[1] for index in range(2)]
    assert widths == [2, 3]
    task, _ = small(each=True)
    with pytest.raises(InvalidParameterError, match="clients = 3: expected 4 for the task 'small'"):
        vertical_part(task, Settings(), 0, 3)
    for clients in (5, 6):
        with pytest.raises(InvalidParameterError, match=f"clients = {clients}: expected 4"):
            vertical_part(task, Settings(), 0, clients)


def test_all_clients_have_the_same_rows():
    settings = Settings(task="digits-rows", train_records=50, test_records=20, seed=4)
    (train, test), _ = parts(DIGITS, settings)
    labels, test_labels = vertical_labels(DIGITS, settings)
    assert train.shape == (50, 64)
    assert test.shape == (20, 64)
    digits = load("digits")
    known = {
        row.tobytes(): label for row, label in zip(digits.features, digits.labels, strict=True)
    }
    assert [known[row.tobytes()] for row in train.astype(np.float32)] == labels.tolist()
    known = {
        row.tobytes(): label
        for row, label in zip(digits.test_features, digits.test_labels, strict=True)
    }
    assert [known[row.tobytes()] for row in test.astype(np.float32)] == test_labels.tolist()
    other = vertical_labels(DIGITS, replace(settings, seed=5))[0]
    assert labels.tolist() != other.tolist()
    with pytest.raises(InvalidParameterError, match="train_records"):
        vertical_labels(DIGITS, replace(settings, train_records=1438))


def test_the_identities_of_the_rows_are_their_places():
    settings = Settings(task="digits-rows", train_records=50, seed=4)
    first, second = (vertical_data(DIGITS, settings, index, 8) for index in (0, 5))
    for part in ("train", "test"):
        assert ids_digest(first.ids[part]) == ids_digest(second.ids[part])
    digits = load("digits")
    for place, row in zip(first.ids["train"], first.parts["train"], strict=True):
        kept = digits.features[int(place.removeprefix("train "))]
        np.testing.assert_allclose(row, kept[:8], atol=1e-12)
    other = vertical_data(DIGITS, replace(settings, seed=5), 0, 8)
    assert ids_digest(first.ids["train"]) != ids_digest(other.ids["train"])
    whole = vertical_data(DIGITS, Settings(task="digits-rows"), 0, 8)
    assert whole.ids["train"][:2] == ["train 0", "train 1"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_those_that_need_no_files_need_none(name):
    task = vertical_task(name)
    (train, test), _ = parts(task, Settings(task=name))
    labels, test_labels = vertical_labels(task, Settings(task=name))
    assert len(train) == len(labels)
    assert len(test) == len(test_labels)
    for side in (train, test):
        assert side.min() >= (0 if task.pixels else -1)
        assert side.max() <= 1


@pytest.mark.parametrize("name", sorted(set(VERTICAL_TASKS) - set(BUILT_IN)))
def test_the_others_say_that_files_are_missing(name):
    with pytest.raises(DataError, match="--data-root"):
        check_vertical(Settings(task=name))


@pytest.mark.skipif("FLWR_PRIVACY_DATA" not in os.environ, reason="FLWR_PRIVACY_DATA is not set")
@pytest.mark.parametrize(
    ("name", "rows", "tests", "widths", "ones"),
    [
        ("digits-rows", 1437, 360, {8}, None),
        ("fashion-rows", 60_000, 10_000, {28}, None),
        ("mnist-rows", 60_000, 10_000, {28}, None),
        ("mfeat-views", 1200, 800, {240, 76, 216, 47, 64, 6}, None),
        ("msrc-views", 168, 42, {24, 576, 512, 256, 254}, None),
        ("credit", 24_000, 6000, {2, 3}, 0.2212),
        ("parkinsons", 136, 59, {2, 3}, 147 / 195),
        ("breast-cancer", 455, 114, {10}, 357 / 569),
    ],
)
def test_published_sizes(name, rows, tests, widths, ones):
    settings = Settings(task=name, data_root=os.environ["FLWR_PRIVACY_DATA"])
    task = vertical_task(name)
    (train, test), found = parts(task, settings)
    assert len(train) == rows
    assert len(test) == tests
    assert {part.shape[1] for part, _ in found} == widths
    assert train.shape[1] == test.shape[1] == sum(task.units)
    for side in (train, test):
        assert side.min() >= (0 if task.pixels else -1)
        assert side.max() <= 1
    if not task.pixels:
        assert np.abs(train).max() > 0.9  # the range is used
        assert np.median(train.std(axis=0)) == pytest.approx(1 / 3, abs=0.05)
    labels, test_labels = vertical_labels(task, settings)
    if ones is not None:
        for side in (labels, test_labels):
            assert side.mean() == pytest.approx(ones, abs=0.02)
    # No column is the label, or nearly.
    for column in train.T if len(task.units) < 60 else ():
        if column.std() > 0:
            assert abs(np.corrcoef(column, labels == labels.max())[0, 1]) < 0.9


# -- Server models ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VERTICAL_TASKS)
def test_central_models_take_embeddings_and_learn(name):
    task = vertical_task(name)
    server_model = server_model_of(task, Settings(task=name))
    arrays = server_model.initial()
    binary = task.dataset in ("credit", "parkinsons", "breast-cancer")
    draws = np.random.default_rng(0)
    rows = draws.normal(size=(64, task.embedding)).astype(np.float32)
    labels = (rows[:, 0] > 0).astype(int)
    classes = 7 if task.dataset == "msrc" else 10
    assert server_model.scores(arrays, rows).shape == (64, 1 if binary else classes)
    first = server_model.step(arrays, rows, labels, 0.0)[2]
    for _ in range(100):
        arrays, _, loss = server_model.step(arrays, rows, labels, 0.1)
    assert loss < first / 2
    assert ("auc" in server_model.metrics(arrays, rows, labels)) == binary


def test_the_central_model_for_credit_cards_is_the_papers():
    module = vertical_task("credit").server_model(64)
    names = [type(layer).__name__ for layer in module]
    assert names[:5] == ["Linear", "BatchNorm1d", "Linear", "ReLU", "BatchNorm1d"]
    assert names[5] == "ParametrizedLinear"
    arrays = server_model_of(vertical_task("credit"), Settings(task="credit")).initial()
    assert "1.running_mean" in arrays
    assert any("parametrizations.weight" in name for name in arrays)


def test_the_seed_and_the_embedding_decide_on_the_central_model():
    settings = Settings(task="digits-rows", strategy={"embedding": 16})
    narrow = server_model_of(DIGITS, settings).initial()
    assert narrow["1.weight"].shape == (64, 16)
    same, other = (
        server_model_of(DIGITS, replace(settings, seed=seed)).initial()["1.weight"]
        for seed in (0, 1)
    )
    np.testing.assert_array_equal(same, narrow["1.weight"])
    assert (same != other).any()
    with pytest.raises(InvalidParameterError, match="embedding"):
        server_model_of(DIGITS, Settings(strategy={"embedding": 0}))


# -- What goes with what -------------------------------------------------------------------------


def test_units_and_clients_fit():
    for task in VERTICAL_TASKS.values():
        assert task.clients <= len(task.units)
        assert not task.each or task.clients == len(task.units)
    assert not set(VERTICAL_TASKS) & set(tasks.TASKS)


@pytest.mark.parametrize("scheme", ["fedvs", *BASELINES])
def test_a_scheme_for_columns_refuses_a_task_of_records(scheme):
    for name in ("digits-mlp", "fashion-rff"):
        with pytest.raises(InvalidParameterError) as error:
            tasks.task_of(Settings(scheme=scheme, task=name))
        for part in (f"task = '{name}'", f"'{scheme}'", "columns", *VERTICAL_TASKS):
            assert part in str(error.value)
    with pytest.raises(InvalidParameterError, match="nearest: 'fashion-rows'"):
        tasks.task_of(Settings(scheme=scheme, task="fashion-row"))


@pytest.mark.parametrize("scheme", [name for name, s in SCHEMES.items() if not s.vertical])
def test_a_scheme_for_records_refuses_a_task_of_columns(scheme):
    settings = Settings(scheme=scheme, task="digits-rows")
    for refuse in (tasks.check_data, lambda settings: build_strategy(settings, None)):
        with pytest.raises(InvalidParameterError) as error:
            refuse(settings)
        for part in ("task = 'digits-rows'", f"'{scheme}'", "records", *tasks.TASKS):
            assert part in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clients": 9}, "clients = 9: expected at most 8 for the task 'digits-rows'"),
        ({"partition.kind": "shards"}, "partition"),
        ({"training.epochs": 2}, "training.epochs = 2"),
        ({"training.decay": 0.1}, "training.decay = 0.1"),
        ({"fraction_evaluate": 0.5}, "fraction_evaluate"),
        ({"validation_records": 10}, "validation_records"),
        ({"clients": 8, "per_round": 4}, "per_round"),
    ],
)
def test_settings_without_a_meaning_are_refused(values, message):
    settings = Settings(scheme="fedvs", task="digits-rows").with_values(values)
    with pytest.raises(InvalidParameterError, match=message):
        tasks.check_data(settings)


def test_what_the_clients_hold_is_told():
    settings = Settings(scheme="fedvs", task="digits-rows", clients=3)
    told = "3 clients, 16 to 24 columns each of 1437 training and 360 test records"
    assert tasks.check_data(settings) == told
    assert str(tasks.check_data(replace(settings, clients=None))).startswith("8 clients, 8 to 8")


@pytest.mark.parametrize("scheme", ["fedvs", *BASELINES])
def test_the_strategy_gets_what_follows_from_the_task(scheme):
    settings = Settings(
        scheme=scheme,
        task="digits-rows",
        clients=8,
        training=TrainingSettings(learning_rate=0.7, batch_size=24),
    )
    strategy = build_strategy(settings, None)
    for part, expected in zip(("train", "test"), vertical_labels(DIGITS, settings), strict=True):
        np.testing.assert_array_equal(strategy._labels[part], expected)
    assert strategy.learning_rate == 0.7
    assert strategy._client_rate == 0.7 * DIGITS.client_rate
    assert strategy.batch_size == 24
    assert strategy.data.order == DIGITS.order
    assert strategy.embedding == DIGITS.embedding
    chosen = {"learning_rate": 0.2, "batch_size": 8, "order": 1, "embedding": 16}
    strategy = build_strategy(replace(settings, strategy=chosen), None)
    assert (strategy.learning_rate, strategy.batch_size, strategy.data.order) == (0.2, 8, 1)
    start = initial_arrays(replace(settings, strategy=chosen))
    assert start["1.weight"].numpy().shape == (64, strategy.embedding)
    for name in ("labels", "test_labels", "server_model"):
        with pytest.raises(InvalidParameterError, match=f"strategy = \\['{name}'\\].*digits-rows"):
            build_strategy(replace(settings, strategy={name: 1}), None)
    with pytest.raises(InvalidParameterError, match="no_such"):
        build_strategy(replace(settings, strategy={"no_such": 1}), None)


def test_what_tells_a_baseline_from_the_others_is_not_chosen():
    settings = Settings(scheme="split-wait", task="digits-rows", clients=8)
    with pytest.raises(InvalidParameterError, match=r"strategy = \['method'\]"):
        build_strategy(replace(settings, strategy={"method": "vafl"}), None)
    for scheme, method in zip(
        BASELINES, ("wait", "ignore", "vafl", "wait-dp", "wait"), strict=True
    ):
        strategy = build_strategy(replace(settings, scheme=scheme), None)
        assert strategy.method.name == method
        assert (strategy.secure_sum is not None) == (scheme == "split-masked")
    assert strategy.secure_sum.threshold == 8  # of all clients or none
    own = SecureSum(threshold=5)
    strategy = build_strategy(replace(settings, scheme="split-masked", secure_sum=own), None)
    assert strategy.secure_sum is own


def test_the_command_line_takes_the_tasks_clients_and_training(capsys):
    found = settings_of({"scheme": "fedvs", "task": "digits-rows"})
    assert found.clients == 8
    assert found.training == DIGITS.training
    assert "8 clients, 8 to 8 columns" in capsys.readouterr().out
    values = {"scheme": "fedvs", "task": "digits-rows", "clients": 4, "K": 1}
    found = settings_of({**values, "training.learning_rate": 0.5})
    assert found.clients == 4
    assert found.training.learning_rate == 0.5
    assert found.strategy == {"K": 1}
    with pytest.raises(InvalidParameterError, match=r"task = 'digits-mlp'.*digits-rows"):
        settings_of({"scheme": "fedvs"})


# -- Runs ----------------------------------------------------------------------------------------


def run(folder, settings, nodes):
    """Carry out a run inline, with secrets from a seed."""
    made = RunFolder.create(folder, settings, engine="inline", nodes=nodes)
    state = folder / "clients"
    state.mkdir()
    run_inline(
        server_app,
        CLIENT_APP,
        nodes=nodes,
        run_config={"settings": settings.to_toml(), "run-dir": str(folder), "resume": False},
        state=state,
        insecure_seed=0,
    )
    return made


def small_run(scheme, **values):
    settings = Settings(
        scheme=scheme,
        task="digits-rows",
        clients=4,
        rounds=3,
        train_records=40,
        test_records=20,
        training=TrainingSettings(learning_rate=0.5, batch_size=10),
        strategy={"embedding": 8, **({"K": 1} if scheme == "fedvs" else {})},
    )
    return settings.with_values(values)


@pytest.mark.parametrize("scheme", ["fedvs", *BASELINES])
def test_a_run_through_the_app_is_judged_and_leaves_its_central_model(scheme, tmp_path):
    settings = small_run(scheme, **{"strategy.delays": True})
    made = run(tmp_path / "run", settings, nodes=4)
    lines = made.rounds()
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert not any(line["skipped"] for line in lines[1:])
    assert set(lines[-1]["server"]) == {"loss", "accuracy"}  # on the test rows
    times = [line["virtual_seconds"] for line in lines]
    assert times == sorted(times)
    assert times[-1] > 0
    with np.load(made.model_path) as model:
        start = server_model_of(DIGITS, settings).initial()
        assert set(model) == set(start)
        assert any((model[name] != array).any() for name, array in start.items())


@pytest.mark.parametrize("scheme", ["fedvs", "split-masked"])
def test_nodes_may_play_several_clients(scheme, tmp_path):
    made = run(tmp_path / "run", small_run(scheme), nodes=2)
    last = made.rounds()[-1]
    assert last["asked"] == 4
    assert set(last["server"]) == {"loss", "accuracy"}


def test_fedvs_learns_through_the_app(tmp_path):
    settings = Settings(
        scheme="fedvs",
        task="breast-cancer",
        clients=3,
        rounds=50,
        training=TrainingSettings(learning_rate=1.0),
        strategy={"K": 1},
    )
    lines = run(tmp_path / "run", settings, nodes=3).rounds()
    judged = lines[-1]["server"]
    assert set(judged) == {"loss", "accuracy", "auc", "f1"}
    assert judged["accuracy"] > 0.9  # in plain floats 0.974
    assert judged["auc"] > 0.97


def test_the_papers_version_is_agreed_to_by_simulated_clients(tmp_path):
    settings = small_run("fedvs", **{"strategy.paper": True})
    lines = run(tmp_path / "run", settings, nodes=4).rounds()
    assert not any(line["skipped"] for line in lines[1:])
