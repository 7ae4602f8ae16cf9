"""Which part of a torch model is trained, and how it is loaded."""

from typing import Any

import numpy as np
import pytest
import torch
from adapted import TRAINED, network
from flwr.app import ArrayRecord
from torch import nn

from flwr_privacy.clients.certificates.frozen_weights import FrozenRequest, asked_frozen
from flwr_privacy.clients.torch import (
    get_arrays,
    load_trainable,
    trainable_names,
    trainable_state,
)
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.wire.arrays import array_digest
from flwr_privacy.wire.frozen import drawn_like, frozen_digest


def part(model: nn.Module) -> dict[str, Any]:
    return {name: array for name, array in get_arrays(model).items() if name in TRAINED}


def digest_of(model: nn.Module, names: list[str] = TRAINED) -> bytes:
    arrays = get_arrays(model)
    return frozen_digest({n: array_digest(a) for n, a in arrays.items() if n not in names})


@pytest.mark.parametrize(
    "made", [ArrayRecord, dict, lambda state: [tensor.numpy() for tensor in state.values()]]
)
def test_arrays_come_in_every_form_that_apps_have(made: Any) -> None:
    one, other = network(7), network(8)
    load_trainable(one, made(trainable_state(other)))
    moved = get_arrays(one)
    assert all((moved[name] == array).all() for name, array in part(other).items())
    rest = [name for name in moved if name not in TRAINED]
    assert all((moved[name] == get_arrays(network(7))[name]).all() for name in rest)


def test_statistics_go_with_the_layer_that_is_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    for frozen in (model[0], model[2]):
        frozen.requires_grad_(False)
    own = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert trainable_names(model) == [f"1.{name}" for name in own]


def test_tied_weights_travel_under_both_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 1))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    assert trainable_names(model) == ["0.weight", "1.weight"]


def test_a_model_of_which_nothing_is_trained_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="requires_grad is on"):
        trainable_names(network().requires_grad_(False))


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ([np.zeros(3, np.float32)], "the number of arrays = 1: expected 4, one for each"),
        ({"5.weight": np.zeros(3)}, r"arrays = \['5.weight'\]: expected names of the model"),
        ({"2.bias": np.zeros(40)}, r"requires_grad of \['2.bias'\] = False: expected True"),
        ({"3.bias": np.zeros(3)}, r"requires_grad of \['0.lora_A.* = True: expected False"),
        (
            {**part(network()), "3.bias": np.zeros(4, np.float32)},
            r"arrays\['3.bias'\] = 'shape \(4,\)': expected shape \(3,\)",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_change_nothing(arrays: Any, text: str) -> None:
    model = network()
    with pytest.raises(InvalidParameterError, match=text):
        load_trainable(model, arrays)
    assert all((get_arrays(network())[n] == a).all() for n, a in get_arrays(model).items())


def test_values_count_where_numpy_lacks_the_type() -> None:
    """A node may keep its base model in bfloat16, the server has the same values in float32."""
    model = network()
    model[2].weight.data = model[2].weight.data.bfloat16().float()
    expected = digest_of(model)
    model[2].weight.data = model[2].weight.data.bfloat16()
    request = FrozenRequest(expected, TRAINED)
    with asked_frozen(request):
        load_trainable(model, part(network()))
    assert request.check_loaded().changed() == []


@pytest.mark.parametrize("change", ["value", "name", "type"])
def test_every_change_of_the_frozen_weights_is_another_base_model(change: str) -> None:
    model = network()
    expected = digest_of(model)
    if change == "value":
        with torch.no_grad():
            model[2].bias[3] += 1e-6
    elif change == "type":
        model[2].double()
    else:
        model[2].register_buffer("scale", torch.ones(1))
    with asked_frozen(FrozenRequest(expected, TRAINED)), pytest.raises(InvalidParameterError):
        load_trainable(model, part(network()))


def test_a_scope_without_a_model_is_refused() -> None:
    with asked_frozen(FrozenRequest(bytes(32), TRAINED)) as request:
        pass
    with pytest.raises(ProtocolError, match="load_trainable"):
        request.check_loaded()


def test_steps_outside_of_a_scope_leave_no_trace() -> None:
    model = network()
    request = FrozenRequest(digest_of(model), TRAINED, rehearsed=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    start = part(model)
    with asked_frozen(request):
        load_trainable(model, start)
    optimizer.step()
    with pytest.raises(ProtocolError, match="did not train"):
        request.trained(start, start)


def test_an_optimiser_that_moves_nothing_yet_is_one() -> None:
    """The step size of a warm-up begins at zero."""
    model = network()
    start = part(model)
    request = FrozenRequest(digest_of(model), TRAINED, rehearsed=True)
    with asked_frozen(request):
        load_trainable(model, start)
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0).step()
        assert list(request.trained(start, get_arrays(model))) == list(start)


def test_made_up_arrays_are_always_the_same_and_nowhere_zero() -> None:
    arrays = {**part(network()), "steps": np.array(3)}
    one, other = drawn_like(arrays), drawn_like(arrays)
    for name, array in one.items():
        assert (array == other[name]).all()
        assert (array.dtype, array.shape) == (arrays[name].dtype, arrays[name].shape)
        assert name == "steps" or array.all()
