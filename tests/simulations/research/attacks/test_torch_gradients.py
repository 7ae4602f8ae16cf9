import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.torch import get_arrays, initialise, train
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.attacks.gradient_matching import (
    infer_label,
    match_gradient,
    observed_gradient,
)
from flwr_privacy.simulations.research.attacks.torch_gradients import matching_loss, sigmoid_lenet


def gradient_of(model, records, labels):
    """The gradient of the mean cross entropy, by name, in float64."""
    wide = model.double()
    loss = functional.cross_entropy(wide(torch.tensor(records)), torch.tensor(labels))
    names = [name for name, _ in wide.named_parameters()]
    slopes = torch.autograd.grad(loss, list(wide.parameters()))
    return {name: slope.numpy() for name, slope in zip(names, slopes, strict=True)}


def test_the_derivative_of_the_loss_is_that_of_finite_differences():
    model = initialise(lambda: sigmoid_lenet((1, 6, 6), 4, (2, 1, 1)), 3)
    draws = np.random.default_rng(0)
    labels = np.array([2, 0])
    seen = gradient_of(model, draws.normal(size=(2, 36)), labels)
    loss = matching_loss(model, seen, labels)
    x = draws.normal(size=(2, 36))
    value, slope = loss(x)
    other = gradient_of(model, x, labels)
    distance = sum(float(((other[name] - seen[name]) ** 2).sum()) for name in seen)
    np.testing.assert_allclose(value, distance, rtol=1e-12)
    for _ in range(5):
        direction = draws.normal(size=x.shape)
        step = 1e-6 * direction
        numeric = (loss(x + step)[0] - loss(x - step)[0]) / 2e-6
        np.testing.assert_allclose((slope * direction).sum(), numeric, rtol=1e-5)


def test_the_image_and_the_label_behind_a_step_of_training_are_found():
    model = initialise(lambda: sigmoid_lenet((1, 8, 8), 10, (2, 1, 1)), 1)
    start = get_arrays(model)
    image = np.random.default_rng(4).uniform(size=(1, 64)).astype(np.float32)
    stepped = initialise(lambda: sigmoid_lenet((1, 8, 8), 10, (2, 1, 1)), 1)
    train(stepped, image, np.array([7]), learning_rate=0.1, seed=0)
    trained = get_arrays(stepped)
    seen = {n: observed_gradient(start[n], trained[n], learning_rate=0.1) for n in start}
    label = infer_label(seen[list(seen)[-2]])  # weight and bias of the last layer come last
    assert label == 7
    loss = matching_loss(model, seen, np.array([label]))
    found = match_gradient(loss, np.random.default_rng(5).normal(size=(1, 64)))
    assert np.mean((found.records - image) ** 2) < 1e-5
    wrong = matching_loss(model, seen, np.array([1]))
    missed = match_gradient(wrong, np.random.default_rng(5).normal(size=(1, 64)))
    assert missed.loss > 1e-3  # the label matters


def test_the_model_stays_as_it_was():
    model = initialise(lambda: sigmoid_lenet((1, 6, 6), 4), 3)
    before = get_arrays(model)
    loss = matching_loss(model, {n: np.zeros_like(a) for n, a in before.items()}, np.array([0]))
    loss(np.ones((1, 36)))
    for name, array in get_arrays(model).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("shape", "inputs"), [((1, 28, 28), 588), ((3, 32, 32), 768)])
def test_the_lenet_has_the_inputs_and_the_weights_of_the_authors(shape, inputs):
    model = initialise(lambda: sigmoid_lenet(shape, 10), 0)
    last = list(model.children())[-1]
    assert isinstance(last, nn.Linear)
    assert last.in_features == inputs
    weights = np.concatenate([array.reshape(-1) for array in get_arrays(model).values()])
    assert np.abs(weights).max() <= 0.5
    # A uniform law on [-0.5, 0.5]; 5 standard errors of mean and second moment.
    count = weights.size
    assert abs(weights.mean()) < 5 * np.sqrt(1 / 12 / count)
    assert abs((weights**2).mean() - 1 / 12) < 5 * np.sqrt(1 / 180 / count)
    assert model(torch.zeros(2, int(np.prod(shape)))).shape == (2, 10)


def test_a_gradient_of_another_model_is_refused():
    model = initialise(lambda: sigmoid_lenet((1, 6, 6), 4), 3)
    seen = {name: np.zeros_like(array) for name, array in get_arrays(model).items()}
    for broken in (
        dict(list(seen.items())[1:]),
        {**seen, "more": np.zeros(1)},
        {name: array[..., None] for name, array in seen.items()},
    ):
        with pytest.raises(InvalidParameterError, match="gradient"):
            matching_loss(model, broken, np.array([0]))
