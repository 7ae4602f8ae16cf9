"""What a scheme's question may ask of the local training: steps, a step size, other batches."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from flwr_privacy.clients.certificates.poisson_steps import PoissonPlan, asked_steps
from flwr_privacy.clients.torch import get_arrays, set_arrays, train, train_poisson
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.app.server_app import app as server_app
from flwr_privacy.simulations.engines.inline import InlineGrid, run_inline
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.tasks import tasks
from flwr_privacy.wire.identity import derive_seed

CLIENT_APP = "flwr_privacy.simulations.app.client_app:app"
DIGITS = tasks.task("digits-linear")
SETTINGS = Settings(task="digits-linear", training=DIGITS.training, clients=10, seed=3)
ARRAYS = tasks.initial_arrays(DIGITS, 0)
POISSON = PoissonPlan(sampling_rate=0.2, steps=4)


def same(first, second):
    return all(np.array_equal(first[name], second[name]) for name in first)


def trained(*, settings=SETTINGS, client=0, seed=5, **asked):
    return tasks.train_client(DIGITS, settings, ARRAYS, client, 10, seed=seed, **asked)[0]


def fresh():
    model = DIGITS.model()
    set_arrays(model, ARRAYS)
    return model


def oracle(client=0, **settings):
    """Weights after `train` on a client's records."""
    model = fresh()
    features, labels = tasks.client_data(DIGITS, SETTINGS, client, 10)
    train(model, features, labels, **settings)
    return get_arrays(model)


# -- One training --------------------------------------------------------------------------------


def test_steps_take_the_place_of_passes():
    expected = oracle(steps=5, batch_size=16, learning_rate=0.3, seed=5)
    assert same(trained(steps=5), expected)
    many = SETTINGS.with_values({"training.epochs": 4})
    assert same(trained(settings=many, steps=5), expected)
    assert not same(trained(), expected)  # nine steps: 144 records in batches of 16
    assert same(trained(), trained(steps=9))


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_the_scale_multiplies_the_step_of_the_round(scale):
    falling = SETTINGS.with_values({"training.decay": 1.0})
    found = trained(settings=falling, server_round=3, scale=scale)
    expected = oracle(batch_size=16, learning_rate=scale * 0.1, seed=5)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-7)


def test_the_perturbation_is_handed_on():
    expected = oracle(batch_size=16, learning_rate=0.3, seed=5, perturbation=0.2)
    assert same(trained(perturbation=0.2), expected)
    assert not same(trained(), expected)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"steps": 0}, "steps = 0: expected an integer of at least 1"),
        ({"steps": 2.5}, "steps = 2.5: expected an integer"),
        ({"scale": -1.0}, "scale = -1.0: expected a finite number of at least 0"),
        ({"perturbation": -1.0}, "perturbation = -1.0: expected a finite number of at least 0"),
    ],
)
def test_what_cannot_be_asked(asked, text):
    with pytest.raises(InvalidParameterError, match=text):
        trained(**asked)


def test_poisson_steps_are_done_where_a_scheme_asks_for_them():
    with asked_steps(POISSON, SecureRandom.insecure(0, "test")) as request:
        found, examples, metrics = tasks.train_client(
            DIGITS, SETTINGS, ARRAYS, 0, 10, seed=5, scale=0.5
        )
    assert (examples, metrics) == (144, {})  # no loss: it would tell of the records
    request.certificate.check(ARRAYS.values(), found.values())
    model = fresh()
    with asked_steps(POISSON, SecureRandom.insecure(0, "test")):
        train_poisson(model, *tasks.client_data(DIGITS, SETTINGS, 0, 10), learning_rate=0.15)
    assert same(found, get_arrays(model))


@pytest.mark.parametrize("name", ["digits-mlp", "digits-svm", "digits-rff", "digits-frozen"])
def test_every_kind_of_task_does_poisson_steps(name):
    task = tasks.task(name)
    arrays = tasks.initial_arrays(task, 0)
    settings = Settings(task=name, training=task.training)
    with asked_steps(POISSON) as request:
        found, _, _ = tasks.train_client(task, settings, arrays, 0, 10, seed=5, perturbation=0.1)
    request.certificate.check(arrays.values(), found.values())
    assert not same(found, arrays)


# -- The client app ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ask():
    """Return what sends a question to the first node, and gives its weights or its error."""
    config = {"settings": SETTINGS.to_toml(), "run-dir": "", "resume": False}
    grid = InlineGrid(CLIENT_APP, 10, run_config=config)

    def send(**asked):
        content = RecordDict(
            {
                "arrays": ArrayRecord({name: Array(a) for name, a in ARRAYS.items()}),
                "config": ConfigRecord(
                    {"server-round": 2, **{key.replace("_", "-"): v for key, v in asked.items()}}
                ),
            }
        )
        with acting_as_server(grid.run_id):
            node = next(iter(grid.get_node_ids()))
            (reply,) = grid.send_and_receive([Message(content, node, "train")], timeout=30)
        if reply.has_error():
            return reply.error.reason
        return {name: a.numpy() for name, a in reply.content["arrays"].items()}

    yield send
    grid.close()


def seed(*purpose):
    return derive_seed(3, "train", "0", 2, *purpose)


def test_a_question_without_the_keys_trains_as_ever(ask):
    expected = oracle(epochs=1, batch_size=16, learning_rate=0.3, seed=seed())
    assert same(ask(), expected)
    assert same(ask(segment=0), expected)


def test_the_keys_of_a_question_reach_the_training(ask):
    found = ask(local_steps=3, learning_rate_scale=0.5, classifier_noise=0.1)
    expected = oracle(steps=3, batch_size=16, learning_rate=0.15, perturbation=0.1, seed=seed())
    assert same(found, expected)


def test_each_segment_of_a_round_has_batches_of_its_own(ask):
    segments = [ask(local_steps=3, segment=index) for index in range(3)]
    for index in (1, 2):
        expected = oracle(steps=3, batch_size=16, learning_rate=0.3, seed=seed(index))
        assert same(segments[index], expected)
    assert not any(same(segments[a], segments[b]) for a, b in ((0, 1), (1, 2), (0, 2)))


def test_a_question_that_asks_for_nonsense_gets_an_error(ask):
    assert "steps = 0: expected an integer of at least 1" in ask(local_steps=0)
    assert "scale = -1.0: expected a finite number" in ask(learning_rate_scale=-1.0)


# -- A run ---------------------------------------------------------------------------------------


TREE = {"unit": "device", "fanouts": [2, 4], "p": 0.5}


def run(folder, **strategy):
    settings = Settings(
        scheme="m2fdp",
        task="digits-svm",
        clients=8,
        rounds=2,
        training=tasks.task("digits-svm").training,
        strategy={**TREE, "steps": 4, "epsilon": 50.0, **strategy},
    )
    made = RunFolder.create(folder, settings, engine="inline", nodes=8)
    run_inline(
        server_app,
        CLIENT_APP,
        nodes=8,
        run_config={"settings": settings.to_toml(), "run-dir": str(folder), "resume": False},
        insecure_seed=0,
    )
    return made.rounds()[1:]


@pytest.mark.usefixtures("no_pld")
def test_m2fdp_by_records_trains_on_poisson_batches(tmp_path, monkeypatch):
    plans = []
    train_poisson = tasks.train_poisson

    def noted(*arguments, **settings):
        done = train_poisson(*arguments, **settings)
        plans.append(done.plan)
        return done

    monkeypatch.setattr(tasks, "train_poisson", noted)
    rounds = run(tmp_path / "run", unit="record", sampling_rate=0.1, events=2)
    assert [line["accumulated"] for line in rounds] == [8, 8]
    assert all(line["scheme"]["noise_var"] > 0 for line in rounds)
    # The devices of the secure edge are asked once a round, those of the other after each event.
    assert {plan.sampling_rate for plan in plans} == {0.1}
    assert sorted(plan.steps for plan in plans) == [*[2] * 16, *[4] * 8]


def test_m2fdp_by_devices_trains_so_many_steps(tmp_path, monkeypatch):
    asked = []
    train_by_batches = tasks.train

    def noted(*arguments, **settings):
        asked.append((settings["steps"], settings["seed"]))
        return train_by_batches(*arguments, **settings)

    monkeypatch.setattr(tasks, "train", noted)
    run(tmp_path / "run", events=2)
    assert sorted(steps for steps, _ in asked) == [*[2] * 16, *[4] * 8]
    assert len({seed for _, seed in asked}) == len(asked)  # no batches come twice
