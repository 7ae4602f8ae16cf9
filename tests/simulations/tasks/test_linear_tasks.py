"""Classification by linear regression: its tasks, and ACFL on them as the command line runs it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from typer.testing import CliRunner

from flwr_privacy.acfl.encoding import check_data
from flwr_privacy.acfl.options import NoisedRecords, Weighting
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.app import client_app
from flwr_privacy.simulations.app.server_app import app as server_app
from flwr_privacy.simulations.app.server_app import build_strategy
from flwr_privacy.simulations.cli import app
from flwr_privacy.simulations.engines.inline import InlineGrid, run_inline
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.simulations.runner.complete_settings import settings_of
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import PartitionSettings, Settings
from flwr_privacy.simulations.tasks import tasks
from flwr_privacy.simulations.tasks.linear_tasks import LinearModel, half_squared_error
from flwr_privacy.wire.message import RECORD, Header

CLIENT_APP = "flwr_privacy.simulations.app.client_app:app"
LINEAR = ("digits-rff", "digits-frozen", "mnist-rff", "fashion-rff")
SMALL = ("digits-rff", "digits-frozen")
RFF = tasks.task("digits-rff")
ACFL = Settings(scheme="acfl", task="digits-rff", clients=4, training=RFF.training)


def table(name):
    """Return features and one-hot labels of all training records and of all test records."""
    task = tasks.task(name)
    data = tasks.dataset(task, Settings(task=name))
    embed = tasks.feature_map(task)
    return (
        embed(data.features),
        np.eye(10)[data.labels],
        embed(data.test_features),
        np.eye(10)[data.test_labels],
    )


def scores(weights, features, truth):
    """Return loss and accuracy, from numpy alone."""
    predicted = features @ weights
    hits = predicted.argmax(axis=1) == truth.argmax(axis=1)
    return 0.5 * np.square(predicted - truth).sum(axis=1).mean(), hits.mean()


def weights_of(run):
    with np.load(run.model_path) as archive:
        return archive["weights"]


def run(folder, settings, **engine):
    """Carry out a run inline, with noise from a seed."""
    made = RunFolder.create(folder, settings, engine="inline", nodes=settings.clients)
    run_inline(
        server_app,
        CLIENT_APP,
        nodes=settings.clients,
        run_config={"settings": settings.to_toml(), "run-dir": str(folder), "resume": False},
        insecure_seed=0,
        **engine,
    )
    return made


# -- Tasks ---------------------------------------------------------------------------------------


def test_those_with_features_are_linear():
    assert [name for name, task in tasks.TASKS.items() if task.features] == list(LINEAR)
    for name in LINEAR:
        task = tasks.task(name)
        (start,) = tasks.initial_arrays(task, 5).values()
        assert not start.any()
        made = task.model()
        assert [key for key, _ in made.named_parameters()] == ["weights"]
        assert list(made.state_dict()) == ["weights"]


def test_the_loss_is_half_the_squared_error_of_one_hot_labels():
    draws = np.random.default_rng(0)
    features, labels = draws.normal(size=(30, 7)), draws.integers(0, 4, 30)
    weights = draws.normal(size=(7, 4))
    model = LinearModel(7, 4)
    with torch.no_grad():
        model.weights.copy_(torch.from_numpy(weights))
    output = model(torch.from_numpy(features).float()).detach()
    expected, _ = scores(weights, features, np.eye(4)[labels])
    assert float(half_squared_error(output, torch.from_numpy(labels))) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize("name", SMALL)
def test_a_step_of_training_is_a_step_along_the_gradient(name):
    task = tasks.task(name)
    settings = Settings(task=name).with_values(
        {"training.batch_size": 2000, "training.learning_rate": 0.7}
    )
    draws = np.random.default_rng(1)
    weights = draws.normal(size=(200, 10)) / 10
    trained, examples, metrics = tasks.train_client(
        task, settings, {"weights": weights}, 0, 1, seed=0
    )
    X, Y, _, _ = table(name)
    assert examples == len(X)
    expected = weights - 0.7 * X.T @ (X @ weights - Y) / len(X)
    np.testing.assert_allclose(trained["weights"], expected, atol=1e-6)
    assert metrics["loss"] == pytest.approx(scores(weights, X, Y)[0], rel=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_evaluation_is_of_the_features_of_the_test_records(name):
    task = tasks.task(name)
    X, Y, test_X, test_Y = table(name)
    weights = np.linalg.solve(X.T @ X + np.eye(200), X.T @ Y)
    for _ in range(2):  # the features are kept from the first time
        found = tasks.evaluate_server(task, Settings(task=name), {"weights": weights})
        loss, accuracy = scores(weights, test_X, test_Y)
        assert found["loss"] == pytest.approx(loss, rel=1e-4)
        assert found["accuracy"] == accuracy
    _, own = tasks.evaluate_client(task, Settings(task=name), {"weights": weights}, 0, 1)
    assert own["accuracy"] == pytest.approx(scores(weights, X, Y)[1])
    some = Settings(task=name, validation_records=200)
    held = tasks.validation_loss(task, some, {"weights": weights})
    _, others = tasks.evaluate_client(task, some, {"weights": weights}, 0, 1)
    both = (200 * held + (len(X) - 200) * others["loss"]) / len(X)
    assert both == pytest.approx(scores(weights, X, Y)[0], rel=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_least_squares_reaches_what_the_description_of_the_tasks_says(name):
    X, Y, test_X, test_Y = table(name)
    weights = np.linalg.solve(X.T @ X + 0.1 * np.eye(200), X.T @ Y)
    assert scores(weights, test_X, test_Y)[1] >= 0.97


@pytest.mark.parametrize("name", SMALL)
def test_the_usual_step_is_stable_on_all_records_and_on_those_of_one_class(name):
    X, Y, _, _ = table(name)
    step = tasks.task(name).training.learning_rate
    for own in (X, *(X[Y[:, label] == 1] for label in range(10))):
        assert step * np.linalg.eigvalsh(own.T @ own / len(own))[-1] < 2


# -- What a scheme for linear regression gets of a task ------------------------------------------


def test_the_clients_have_all_records_with_one_hot_labels():
    settings = replace(ACFL, partition=PartitionSettings(kind="shards"))
    data = tasks.dataset(RFF, settings)
    parts = [tasks.regression_data(RFF, settings, index, 4) for index in range(4)]
    for index, (raw, truth) in enumerate(parts):
        same, labels = tasks.client_data(RFF, settings, index, 4)
        np.testing.assert_array_equal(raw, same)
        np.testing.assert_array_equal(truth, np.eye(10)[labels])
    counts = sum(truth.sum(axis=0) for _, truth in parts)
    left_out = len(data.labels) - sum(len(truth) for _, truth in parts)
    assert (np.bincount(data.labels) - counts).sum() == left_out < 8


@pytest.mark.parametrize("name", SMALL)
def test_the_bounds_hold_and_next_to_no_record_is_shortened(name):
    task = tasks.task(name)
    settings = replace(ACFL, task=name)
    known = tasks.regression_parameters(task, settings)
    X, Y, _, _ = table(name)
    kept, truth = check_data(
        X,
        Y,
        excess="clip",
        **{key: known[key] for key in ("feature_bound", "feature_norm", "label_bound")},
        label_norm=known["label_norm"],
        one_hot=known["one_hot"],
    )
    np.testing.assert_array_equal(truth, Y)
    changed = np.abs(kept - X).max(axis=1) > 1e-9
    assert changed.mean() < 0.001
    assert known["features"] == tasks.feature_map(task).identity
    assert known["learning_rate"] == task.training.learning_rate / 1437
    assert known["max_records"] == 2048


def test_records_of_images_are_hardly_ever_longer_than_their_bound():
    # The squared norm has mean 1 and variance 1 / (2 D): 4 % more would be five deviations.
    embed = tasks.feature_map(tasks.task("mnist-rff"))
    raw = np.random.default_rng(0).normal(size=(300, 1, 28, 28))
    squares = np.square(embed(raw)).sum(axis=1)
    error = 1 / np.sqrt(2 * 2000)
    assert squares.mean() == pytest.approx(1, abs=5 * error / np.sqrt(300))
    assert squares.std() == pytest.approx(error, rel=0.25)
    known = tasks.feature_map(RFF).norm
    assert known == pytest.approx(np.sqrt(2))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"task": "digits-mlp"}, "task = 'digits-mlp': expected a linear regression of features: "),
        ({"task": "digits-mlp"}, ", ".join(LINEAR)),
        ({"fraction_evaluate": 0.5}, "fraction_evaluate = 0.5: expected 0"),
        ({"strategy": {"one_hot": False}}, "nothing: they follow from the task 'digits-rff'"),
        ({"strategy": {"features": "raw"}}, "nothing: they follow from the task 'digits-rff'"),
        ({"strategy": {"seed": 1}}, "the scheme's own parameters only"),
        ({"strategy": {"batch": 1}}, "ACFL has no 'batch'"),
    ],
    ids=["task", "names", "evaluation", "labels", "features", "loop", "unknown"],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(changes, text):
    with pytest.raises(InvalidParameterError, match=text.replace("(", r"\(")):
        build_strategy(replace(ACFL, **changes), None)


def test_the_command_line_has_the_defaults_of_the_class(capsys):
    found = settings_of({"scheme": "acfl", "task": "digits-rff"})
    assert found.strategy == {}
    strategy = build_strategy(found, None)
    assert strategy.privacy == NoisedRecords()
    assert strategy.weighting == Weighting()
    assert strategy.descent._alpha == "horizon"
    plain = settings_of({"scheme": "acfl", "task": "digits-rff", "strategy.noise": "paper"})
    assert build_strategy(plain, None).descent._alpha == "estimated"
    fixed = settings_of({"scheme": "acfl", "task": "digits-rff", "strategy.alpha": 0})
    assert build_strategy(fixed, None).descent._alpha == 0


# -- Runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_without_noise_and_stragglers_it_is_gradient_descent_on_all_records(name, tmp_path):
    plain = {"noise": "none", "alpha": 0, "straggler_rate": 0.0, "ridge": 3.0}
    settings = replace(ACFL, task=name, rounds=5, strategy=plain)
    made = run(tmp_path / "run", settings)
    X, Y, test_X, test_Y = table(name)
    weights = np.zeros((200, 10))
    for line in made.rounds():
        loss, accuracy = scores(weights, test_X, test_Y)
        assert line["server"]["loss"] == pytest.approx(loss, rel=1e-5)
        assert line["server"]["accuracy"] == accuracy
        if line["round"] < 5:
            gradient = X.T @ (X @ weights - Y) + 3.0 * weights
            weights = weights - settings.training.learning_rate / len(X) * gradient
    found = weights_of(made)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("chosen", "step"), [({}, 2.0 / 1437), ({"learning_rate": 0.001}, 0.001)], ids=["task", "own"]
)
def test_the_step_is_the_tasks_unless_another_is_chosen(chosen, step, tmp_path):
    plain = {"noise": "none", "alpha": 0, **chosen}
    lines = run(tmp_path / "run", replace(ACFL, rounds=1, strategy=plain)).rounds()
    assert lines[1]["scheme"]["step"] == pytest.approx(step, rel=1e-12)


def test_fedavg_and_acfl_train_the_same_task(tmp_path):
    settings = replace(ACFL, scheme="fedavg", rounds=3)
    lines = run(tmp_path / "run", settings).rounds()
    assert lines[0]["server"]["accuracy"] < 0.2
    assert lines[-1]["server"]["accuracy"] > 0.85


def test_a_deadline_saves_virtual_time_and_the_model_learns_all_the_same(tmp_path):
    slow = {
        "stragglers.kind": "lognormal",
        "stragglers.slow_fraction": 0.3,
        "partition.kind": "shards",
        "strategy": {"noise": "paper", "mi_epsilon": 10.0},
    }
    waiting = replace(ACFL, clients=8, rounds=12).with_values(slow)
    all_of_them = run(tmp_path / "all", waiting).rounds()
    in_time = run(tmp_path / "deadline", replace(waiting, deadline=2.0)).rounds()
    assert sum(line["late"] for line in all_of_them[1:]) == 0
    assert sum(line["late"] for line in in_time[1:]) > 12
    # Both wait for everybody in the setup.
    assert in_time[0]["virtual_seconds"] == all_of_them[0]["virtual_seconds"] > 2
    assert in_time[-1]["virtual_seconds"] - in_time[0]["virtual_seconds"] <= 12 * 2.0
    assert all_of_them[-1]["virtual_seconds"] > 3 * in_time[-1]["virtual_seconds"]
    assert in_time[-1]["server"]["accuracy"] > 0.85
    assert in_time[-1]["scheme"]["straggler_rate"] > 0.2


def test_the_command_runs_with_no_other_option_and_keeps_to_the_budget(tmp_path):
    out = tmp_path / "run"
    command = ["run", "--scheme", "acfl", "--task", "digits-rff", "--engine", "inline"]
    done = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 11
    # Seven trainings with other noise ended at 0.88 to 0.91, with a standard deviation of 0.007.
    assert lines[-1]["server"]["accuracy"] > 0.75
    assert lines[-1]["scheme"]["epsilon"] <= 8
    assert RunFolder.open(out).settings.strategy == {}
    verified = CliRunner().invoke(app, ["verify", str(out)])
    assert verified.exit_code == 0, verified.output


def test_the_command_names_the_tasks_that_work():
    done = CliRunner().invoke(app, ["run", "--scheme", "acfl", "--engine", "inline"])
    assert isinstance(done.exception, InvalidParameterError)
    assert all(name in str(done.exception) for name in LINEAR)


# -- The client app ------------------------------------------------------------------------------


@pytest.fixture
def ask(monkeypatch):
    """Return what sends a message to one node, and how often its data were read."""
    read = []
    regression_data = tasks.regression_data

    def noted(*arguments):
        read.append(arguments)
        return regression_data(*arguments)

    monkeypatch.setattr(client_app.tasks, "regression_data", noted)
    config = {"settings": ACFL.to_toml(), "run-dir": "", "resume": False}
    grid = InlineGrid(client_app.app, 4, run_config=config)

    def send(content, message_type="train"):
        with acting_as_server(grid.run_id):
            node = next(iter(grid.get_node_ids()))
            (reply,) = grid.send_and_receive([Message(content, node, message_type)], timeout=5)
        return reply, len(read)

    yield send
    grid.close()


@pytest.mark.parametrize("message_type", ["train", "evaluate"])
def test_a_message_of_nobody_is_refused(ask, message_type):
    arrays = ArrayRecord({"weights": Array(np.zeros((200, 10)))})
    reply, read = ask(RecordDict({"arrays": arrays}), message_type)
    assert f"no record '{RECORD}'" in reply.error.reason
    assert read == 0


def test_a_greeting_reads_no_data(ask):
    header = Header(scheme="acfl", experiment_id="e", phase="hello", server_round=0)
    reply, read = ask(RecordDict({RECORD: ConfigRecord(header.write({}))}))
    assert not reply.has_error()
    assert read == 0
