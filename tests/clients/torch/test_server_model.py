"""The server's model of split learning: its steps against formulas and finite differences."""

import json
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from flwr_privacy.clients.torch import TorchServerModel, mlp
from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.fedvs.server_model import ServerModel


def rows(count=12, width=5, seed=0):
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def labels(count=12, classes=3):
    return np.arange(count) % classes


def softmax(scores):
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def normalised():
    """The paper's server model for credit cards, smaller."""
    return nn.Sequential(
        nn.Linear(5, 6),
        nn.BatchNorm1d(6),
        nn.Linear(6, 4),
        nn.ReLU(),
        nn.BatchNorm1d(4),
        weight_norm(nn.Linear(4, 1)),
    )


def test_it_is_a_central_model():
    server_model: ServerModel = TorchServerModel(partial(mlp, (5, 3)))
    assert set(server_model.initial()) == {"1.weight", "1.bias"}


def test_a_step_of_logistic_regression_is_that_of_its_formula():
    server_model = TorchServerModel(partial(mlp, (5, 3)))
    start, x, y = server_model.initial(), rows(), labels()
    weights, bias = start["1.weight"].astype(float), start["1.bias"].astype(float)
    chances = softmax(x @ weights.T + bias)
    slope = (chances - np.eye(3)[y]) / len(y)  # of the mean loss
    arrays, gradient, loss = server_model.step(start, x, y, 0.7)
    assert loss == pytest.approx(-np.log(chances[np.arange(12), y]).mean(), rel=1e-5)
    np.testing.assert_allclose(arrays["1.weight"], weights - 0.7 * slope.T @ x, atol=1e-6)
    np.testing.assert_allclose(arrays["1.bias"], bias - 0.7 * slope.sum(axis=0), atol=1e-6)
    np.testing.assert_allclose(gradient, slope @ weights, atol=1e-6)  # at the weights before
    assert gradient.dtype == np.float32
    assert gradient.shape == x.shape


def test_a_head_with_one_output_is_trained_by_the_binary_cross_entropy():
    server_model = TorchServerModel(partial(mlp, (5, 1)))
    start, x, y = server_model.initial(), rows(), labels(classes=2)
    logits = x @ start["1.weight"][0].astype(float) + start["1.bias"].astype(float)
    chances = 1 / (1 + np.exp(-logits))
    arrays, gradient, loss = server_model.step(start, x, y, 0.3)
    expected = -(y * np.log(chances) + (1 - y) * np.log(1 - chances)).mean()
    assert loss == pytest.approx(expected, rel=1e-5)
    slope = (chances - y) / len(y)
    np.testing.assert_allclose(gradient, slope[:, None] * start["1.weight"], atol=1e-6)
    np.testing.assert_allclose(
        arrays["1.weight"][0], start["1.weight"][0] - 0.3 * slope @ x, atol=1e-6
    )


@pytest.mark.parametrize("module_fn", [partial(mlp, (5, 8, 6, 3)), normalised])
def test_the_gradient_is_that_of_finite_differences(module_fn):
    classes = 2 if module_fn is normalised else 3
    server_model = TorchServerModel(module_fn)
    start, x, y = server_model.initial(), rows(seed=1), labels(classes=classes)
    _, gradient, _ = server_model.step(start, x, y, 0.0)
    wide = module_fn().double()
    wide.load_state_dict({name: torch.from_numpy(array) for name, array in start.items()})

    def loss(values):
        scores = wide.train()(torch.from_numpy(values)).detach()
        if classes == 2:
            truth = torch.from_numpy(y.astype(float))
            return float(functional.binary_cross_entropy_with_logits(scores[:, 0], truth))
        return float(functional.cross_entropy(scores, torch.from_numpy(y)))

    draws = np.random.default_rng(2)
    for _ in range(5):
        direction = 1e-6 * draws.normal(size=x.shape)
        numeric = (loss(x + direction) - loss(x - direction)) / 2
        assert (gradient * direction).sum() == pytest.approx(numeric, rel=2e-3, abs=1e-11)


def test_a_loss_of_the_users_own_is_taken():
    def squared(scores, truth):
        return (scores - functional.one_hot(truth, 3)).square().sum(dim=1).mean() / 2

    server_model = TorchServerModel(partial(mlp, (5, 3)), loss=squared)
    start, x, y = server_model.initial(), rows(), labels()
    residual = server_model.scores(start, x) - np.eye(3)[y]
    _, gradient, loss = server_model.step(start, x, y, 0.1)
    assert loss == pytest.approx(np.square(residual).sum(axis=1).mean() / 2, rel=1e-5)
    np.testing.assert_allclose(gradient, residual @ start["1.weight"] / len(y), atol=1e-6)


def test_the_weights_given_stay_as_they_are_and_none_are_kept():
    server_model = TorchServerModel(normalised)
    start, x, y = server_model.initial(), rows(), labels(classes=2)
    before = {name: array.copy() for name, array in start.items()}
    once, gradient, loss = server_model.step(start, x, y, 0.5)
    for name, array in before.items():
        np.testing.assert_array_equal(start[name], array)
    server_model.step(once, x, y, 0.5)
    again, same_gradient, same_loss = server_model.step(start, x, y, 0.5)
    np.testing.assert_array_equal(gradient, same_gradient)
    assert loss == same_loss
    for name in once:
        np.testing.assert_array_equal(once[name], again[name])
    initial = server_model.initial()
    initial["0.weight"][:] = 0
    assert server_model.initial()["0.weight"].any()


def test_the_statistics_of_batchnorm_are_among_the_weights():
    server_model = TorchServerModel(normalised)
    start, x, y = server_model.initial(), rows(count=40), labels(count=40, classes=2)
    arrays, _, _ = server_model.step(start, x, y, 0.0)
    hidden = x @ start["0.weight"].T + start["0.bias"]
    np.testing.assert_allclose(arrays["1.running_mean"], 0.1 * hidden.mean(axis=0), atol=1e-6)
    expected = 0.9 + 0.1 * hidden.var(axis=0, ddof=1)
    np.testing.assert_allclose(arrays["1.running_var"], expected, atol=1e-5)
    # What is judged is judged by these, row for row.
    whole = server_model.scores(arrays, x)
    np.testing.assert_allclose(server_model.scores(arrays, x[3:4]), whole[3:4], rtol=1e-5)


def test_a_step_on_a_single_row_takes_the_statistics_of_before():
    server_model = TorchServerModel(normalised)
    start = server_model.step(server_model.initial(), rows(), labels(classes=2), 0.1)[0]
    arrays, gradient, loss = server_model.step(start, rows(count=1), np.array([1]), 0.1)
    score = server_model.scores(start, rows(count=1))[0, 0]
    assert loss == pytest.approx(np.log1p(np.exp(-score)), rel=1e-5)
    np.testing.assert_array_equal(arrays["1.running_mean"], start["1.running_mean"])
    assert gradient.any()
    assert (arrays["0.weight"] != start["0.weight"]).any()


def test_it_learns():
    x = rows(count=200)
    y = (x @ rows(count=5, width=3, seed=7)).argmax(axis=1)
    server_model = TorchServerModel(partial(mlp, (5, 16, 3)))
    arrays = server_model.initial()
    before = server_model.metrics(arrays, x, y)
    for _ in range(200):
        arrays, _, _ = server_model.step(arrays, x, y, 0.5)
    after = server_model.metrics(arrays, x, y)
    assert set(after) == {"loss", "accuracy"}
    assert after["accuracy"] > 0.95 > before["accuracy"]
    assert after["loss"] < 0.2 < before["loss"]


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("threshold", [0.5, 0.3])
def test_metrics_of_two_classes_are_those_of_scikit_learn(outputs, threshold):
    server_model = TorchServerModel(partial(mlp, (5, outputs)), threshold=threshold)
    start, x = server_model.initial(), rows(count=60)
    x[1::3] = x[::3]  # ties
    y = np.random.default_rng(3).integers(0, 2, 60)
    scores = server_model.scores(start, x)
    assert scores.shape == (60, outputs)
    margins = scores[:, 0] if outputs == 1 else scores[:, 1] - scores[:, 0]
    chances = 1 / (1 + np.exp(-margins.astype(float)))
    found = server_model.metrics(start, x, y)
    assert set(found) == {"loss", "accuracy", "f1", "auc"}
    taken = chances >= threshold
    assert found["accuracy"] == accuracy_score(y, taken)
    assert found["f1"] == pytest.approx(f1_score(y, taken))
    assert found["auc"] == pytest.approx(roc_auc_score(y, margins))
    expected = -np.log(np.where(y == 1, chances, 1 - chances)).mean()
    assert found["loss"] == pytest.approx(expected, rel=1e-5)


def test_there_is_no_area_where_all_rows_are_of_one_class():
    server_model = TorchServerModel(partial(mlp, (5, 1)))
    start = server_model.initial()
    start["1.bias"][:] = -100  # none is taken for class 1
    found = server_model.metrics(start, rows(), np.zeros(12, dtype=int))
    assert set(found) == {"loss", "accuracy", "f1"}
    assert found["accuracy"] == 1
    assert found["f1"] == 0


def test_the_seed_decides_on_the_weights_and_torchs_generator_stays():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, same, other = (
        TorchServerModel(partial(mlp, (5, 3)), seed=s).initial() for s in (1, 1, 2)
    )
    torch.testing.assert_close(torch.random.get_rng_state(), before, rtol=0, atol=0)
    np.testing.assert_array_equal(first["1.weight"], same["1.weight"])
    assert (first["1.weight"] != other["1.weight"]).any()


PROGRAM = """
import json, sys
from functools import partial
import numpy as np, torch
from flwr_privacy.clients.torch import TorchServerModel, mlp
torch.set_num_threads(int(sys.argv[1]))
server_model = TorchServerModel(partial(mlp, (64, 64, 32, 10)), seed=3)
x = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)
arrays = server_model.initial()
for _ in range(5):
    arrays, gradient, loss = server_model.step(arrays, x, np.arange(256) % 10, 0.1)
print(json.dumps([gradient.tobytes().hex(), loss, arrays["1.weight"].tobytes().hex()]))
"""


def test_every_process_finds_the_same_bits_whatever_its_threads():
    first, second = (
        subprocess.run(
            [sys.executable, "-c", PROGRAM, threads], capture_output=True, check=True, text=True
        ).stdout
        for threads in ("1", "2")
    )
    assert json.loads(first) == json.loads(second)


@pytest.mark.parametrize("use", ["step", "metrics"])
def test_what_does_not_fit_is_refused(use):
    server_model = TorchServerModel(partial(mlp, (5, 3)))

    def work(x, y, arrays=None):
        more = (0.1,) if use == "step" else ()
        getattr(server_model, use)(
            server_model.initial() if arrays is None else arrays, x, y, *more
        )

    with pytest.raises(InvalidParameterError, match=r"embedding = 'shape \(12, 4\)'"):
        work(rows(width=4), labels())
    with pytest.raises(InvalidParameterError, match="embedding"):
        work(rows()[:, :, None], labels())
    with pytest.raises(InvalidParameterError, match="embedding"):
        work(np.full((2, 5), "a"), labels(2))
    with pytest.raises(DataError, match="no rows"):
        work(rows(count=0), labels(0))
    with pytest.raises(DataError, match="12 rows but labels of shape"):
        work(rows(), labels(11))
    for wrong in (labels() + 1, labels() - 1, labels() + 0.5):
        with pytest.raises(DataError, match="integers from 0 to 2"):
            work(rows(), wrong)
    with pytest.raises(InvalidParameterError, match=r"missing: \['1.bias'\]"):
        work(rows(), labels(), {"1.weight": np.zeros((3, 5))})


def test_parameters_are_checked():
    module_fn = partial(mlp, (5, 1))
    for threshold in (0, 1, float("nan"), "0.5"):
        with pytest.raises(InvalidParameterError, match="threshold"):
            TorchServerModel(module_fn, threshold=threshold)
    with pytest.raises(InvalidParameterError, match="seed"):
        TorchServerModel(module_fn, seed=-1)
    server_model = TorchServerModel(module_fn)
    with pytest.raises(InvalidParameterError, match="learning_rate"):
        server_model.step(server_model.initial(), rows(), labels(classes=2), -0.1)
    # Of one class the cross entropy is zero, and nothing would be learnt.
    server_model = TorchServerModel(module_fn, loss=functional.cross_entropy)
    with pytest.raises(InvalidParameterError, match="one output"):
        server_model.step(server_model.initial(), rows(), labels(classes=2), 0.1)
    flat = TorchServerModel(lambda: nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)))
    with pytest.raises(InvalidParameterError, match="classes"):
        flat.scores(flat.initial(), rows())
