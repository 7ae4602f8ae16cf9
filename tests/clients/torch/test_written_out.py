"""Steps whose gradients are written out do what autograd does; what they do not know is its."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from flwr_privacy.clients.torch import train
from flwr_privacy.clients.torch.gradient_descent.descent import Descent, descend
from flwr_privacy.clients.torch.gradient_descent.written_out import WrittenOut
from flwr_privacy.clients.torch.models import cnn, mlp


def _images() -> nn.Sequential:
    return mlp([36, 12, 5])


def _deep() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 7, bias=False), nn.Sigmoid())
    return nn.Sequential(nn.Linear(36, 9), nn.ReLU(inplace=True), inner, nn.Linear(7, 5), nn.ReLU())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": _images,
    "nested": lambda: nn.Sequential(nn.Flatten(), _deep()),
    "two activations": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.ReLU(), nn.Linear(8, 5)
    ),
    "logistic": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 5)),
}


def _made(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return build().to(dtype)


def _records(dtype: torch.dtype = torch.float32, count: int = 23) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    inputs = torch.randn((count, 1, 6, 6), generator=draws).to(dtype)
    return inputs, torch.randint(5, (count,), generator=draws)


def _by_autograd(model: nn.Module, inputs: Tensor, targets: Tensor, rate: float) -> Tensor:
    value = functional.cross_entropy(model(inputs), targets)
    value.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(rate * parameter.grad)
            parameter.grad = None
    return value.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_autograd(name: str, dtype: torch.dtype) -> None:
    inputs, targets = _records(dtype)
    ours, theirs = _made(MODELS[name], dtype), _made(MODELS[name], dtype)
    written = WrittenOut.of(ours, functional.cross_entropy, inputs, targets)
    assert written is not None

    for place in range(0, 23, 4):
        batch = slice(place, place + 4)
        value = written.step(inputs[batch], targets[batch], 0.5)
        expected = _by_autograd(theirs, inputs[batch], targets[batch], 0.5)
        torch.testing.assert_close(value, expected)

    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    start = _made(MODELS[name], dtype).state_dict()
    assert all(not torch.equal(start[key], tensor) for key, tensor in ours.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_autograd(name: str) -> None:
    inputs, targets = _records()
    ours, theirs = _made(MODELS[name]), _made(MODELS[name])
    written = WrittenOut.of(ours, nn.CrossEntropyLoss(), inputs, targets)
    assert written is not None

    written.backward(inputs, targets)
    functional.cross_entropy(theirs(inputs), targets).backward()  # type: ignore[no-untyped-call]

    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


class _OwnLinear(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs)


def _tied() -> nn.Module:
    layer = nn.Linear(36, 36)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer)


def _frozen() -> nn.Module:
    model = _images()
    next(model.parameters()).requires_grad_(False)
    return model


def _hooked() -> nn.Module:
    model = _images()
    model[1].register_forward_hook(lambda *_: None)
    return model


def _own_forward() -> nn.Module:
    model = _images()
    model.forward = lambda inputs: inputs  # type: ignore[method-assign]
    return model


def _hooked_weight() -> nn.Module:
    model = _images()
    next(model.parameters()).register_hook(lambda gradient: 0 * gradient)
    return model


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Dropout()),
    "statistics": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5)),
    "convolutions": lambda: cnn(5, size=16),
    "a layer of the user's": lambda: nn.Sequential(nn.Flatten(), _OwnLinear(36, 5)),
    "a parametrisation": lambda: nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(36, 5))),
    "tied": _tied,
    "frozen": _frozen,
    "a hook": _hooked,
    "a hook of a weight": _hooked_weight,
    "a forward of its own": _own_forward,
    "no flattening": lambda: nn.Sequential(nn.Linear(36, 5)),
    "other sizes": lambda: nn.Sequential(nn.Flatten(), nn.Linear(35, 5)),
    "other numbers": lambda: _images().double(),
    "an activation first": lambda: nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(36, 5)),
    "no layer": lambda: nn.Sequential(nn.Flatten()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_autograds(name: str) -> None:
    assert WrittenOut.of(OTHERS[name](), functional.cross_entropy, *_records()) is None


@functools.wraps(functional.cross_entropy)
def _wrapped(outputs: Tensor, targets: Tensor) -> Tensor:
    return 2 * functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.ones(5)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(ignore_index=2),
        nn.NLLLoss(),
        _wrapped,
        lambda outputs, targets: functional.cross_entropy(outputs, targets),
    ],
)
def test_other_losses_are_autograds(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert WrittenOut.of(_images(), loss, *_records()) is None


def test_what_looks_on_sees_autograd() -> None:
    inputs, targets = _records()
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda part, *_: seen.append(part))
    try:
        _trained(inputs, targets)
    finally:
        handle.remove()
    assert seen

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert WrittenOut.of(_images(), functional.cross_entropy, inputs, targets) is None


def test_shares_of_classes_are_autograds() -> None:
    inputs, targets = _records()
    shares = functional.one_hot(targets, 5).float()
    assert WrittenOut.of(_images(), functional.cross_entropy, inputs, shares) is None


def test_records_that_cross_entropy_leaves_out_are_left_out() -> None:
    inputs, targets = _records()
    targets[::3] = -100
    ours, theirs = _made(_images), _made(_images)

    train(ours, inputs.numpy(), targets.numpy(), batch_size=23, learning_rate=0.5, epochs=1, seed=1)
    _by_autograd(theirs, inputs, targets, 0.5)

    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_a_class_that_is_none_is_the_error_that_it_was() -> None:
    inputs, targets = _records()
    targets[2] = 5
    with pytest.raises(IndexError, match="Target 5 is out of bounds"):
        _trained(inputs, targets)


@pytest.mark.parametrize("bad", [5, -3, None])
def test_a_step_that_cannot_be_done_is_left_out(bad: int | None) -> None:
    inputs, targets = _records()
    if bad is None:
        inputs[9] = torch.nan
    else:
        targets[9] = bad
    ours, theirs = _made(_images), _made(_images)
    batches = [torch.arange(place, place + 4) for place in range(0, 20, 4)]

    descent = _descent(ours, inputs, targets, batches)
    for batch in batches:
        if 9 not in batch:
            _by_autograd(theirs, inputs[batch], targets[batch], 0.5)

    assert descent.left_out == 1
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_another_record_in_another_step_changes_no_bit() -> None:
    inputs, targets = _records()
    other = targets.clone()
    other[9] = -100
    batches = [torch.arange(4), torch.tensor([9]), torch.arange(10, 16)]
    models = [_made(_images), _made(_images)]
    for model, labels in zip(models, (targets, other), strict=True):
        _descent(model, inputs, labels, batches[:1] + batches[2:])

    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def _descent(model: nn.Module, inputs: Tensor, targets: Tensor, batches: list[Tensor]) -> Descent:
    return descend(
        model,
        inputs.numpy(),
        targets.numpy(),
        batches,
        learning_rate=0.5,
        perturbation=0.0,
        seed=0,
        loss=functional.cross_entropy,
        device="cpu",
        total=True,
    )


def _trained(inputs: Tensor, targets: Tensor) -> None:
    train(_made(_images), inputs.numpy(), targets.numpy(), batch_size=8, learning_rate=0.1, seed=1)
