import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from flwr_privacy.clients.torch import (
    cnn,
    evaluate,
    get_arrays,
    initialise,
    linear,
    mlp,
    set_arrays,
    train,
)
from flwr_privacy.clients.torch.computing import allotted_device
from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.wire.identity import derive_seed


def records(n=100, features=6, classes=3):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, features)).astype(np.float32)
    return x, (x @ rng.normal(size=(features, classes))).argmax(axis=1)


@pytest.mark.parametrize(
    ("model", "shape", "classes"),
    [
        (mlp([784, 16, 10]), (1, 28, 28), 10),
        (mlp([5, 4, 3, 2]), (5,), 2),
        (cnn(10), (1, 28, 28), 10),
        (cnn(7, channels=3, size=32), (3, 32, 32), 7),
        (linear(108, 2), (108,), 2),
    ],
)
def test_shapes(model, shape, classes):
    assert model(torch.zeros(4, *shape)).shape == (4, classes)
    assert isinstance(model[-1], nn.Linear)


def test_mlp_needs_two_sizes():
    with pytest.raises(InvalidParameterError, match="sizes = "):
        mlp([3])


@pytest.mark.parametrize("size", [12, 30, 33])
def test_cnn_takes_images_that_come_out_even(size):
    with pytest.raises(InvalidParameterError, match=f"size = {size}: expected a multiple of 4"):
        cnn(10, size=size)


def test_initialise_leaves_the_global_generator():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    initialise(lambda: mlp([6, 4, 3]), 1)
    assert torch.equal(torch.rand(3), expected)


def test_initialise_is_seeded():
    one, same, other = (
        get_arrays(initialise(lambda: mlp([6, 3]), seed)) for seed in (1, 1, 2**63 - 1)
    )
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["1.weight"], other["1.weight"])


def test_arrays_there_and_back():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    arrays = get_arrays(model)
    assert arrays["1.num_batches_tracked"].shape == ()
    arrays["1.num_batches_tracked"] = np.array(7)
    arrays["0.weight"] = np.arange(6, dtype=np.float64).reshape(2, 3)
    set_arrays(model, arrays)
    back = get_arrays(model)
    assert list(back) == list(model.state_dict())
    assert back["0.weight"].dtype == np.float32
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)


def test_arrays_are_copies():
    model = linear(2, 2)
    arrays = get_arrays(model)
    before = arrays["1.bias"].copy()
    train(model, *records(features=2, classes=2), seed=0)
    assert np.array_equal(arrays["1.bias"], before)
    for array in arrays.values():
        array.flags.writeable = False
    set_arrays(model, arrays)
    train(model, *records(features=2, classes=2), seed=0)
    assert np.array_equal(arrays["1.bias"], before)


def test_set_arrays_names_what_is_wrong():
    model = linear(2, 2)
    arrays = get_arrays(model)
    bias = arrays.pop("1.bias")
    with pytest.raises(InvalidParameterError, match=r"missing: \['1.bias'\], unknown: \['b'\]"):
        set_arrays(model, {**arrays, "b": bias})
    with pytest.raises(InvalidParameterError, match=r"'1.bias'.*shape \(3,\).*shape \(2,\)"):
        set_arrays(model, {"1.weight": np.zeros((2, 2)), "1.bias": np.zeros(3)})
    assert np.array_equal(get_arrays(model)["1.weight"], arrays["1.weight"])


def normalised():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("factory", [lambda: mlp([6, 8, 3]), normalised], ids=["mlp", "norm"])
def test_train_equals_torch_optim(factory):
    features, labels = records()
    model, oracle = (initialise(factory, 0) for _ in range(2))
    train(model, features, labels, epochs=2, batch_size=16, learning_rate=0.2, seed=9)
    optimiser = torch.optim.SGD(oracle.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(9)
    x, y = torch.tensor(features), torch.tensor(labels)
    for _ in range(2):
        for batch in torch.randperm(100, generator=generator).split(16):
            optimiser.zero_grad()
            nn.functional.cross_entropy(oracle(x[batch]), y[batch]).backward()
            optimiser.step()
    expected = get_arrays(oracle)
    for name, array in get_arrays(model).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-6)


def test_loss_is_the_mean_over_records():
    features, labels = records(n=33)
    model = initialise(lambda: linear(6, 3), 0)
    expected = evaluate(model, features, labels)["loss"]
    assert train(model, features, labels, learning_rate=0.0, seed=0) == pytest.approx(expected)


def test_training_learns():
    features, labels = records(n=300)
    model = initialise(lambda: linear(6, 3), 0)
    train(model, features, labels, epochs=20, learning_rate=0.5, seed=0)
    assert evaluate(model, features, labels)["accuracy"] > 0.95


@pytest.mark.parametrize("epochs", [1, 3])
def test_steps_of_whole_passes_are_the_passes(epochs):
    features, labels = records()
    model, oracle = (initialise(lambda: mlp([6, 8, 3]), 0) for _ in range(2))
    settings = {"batch_size": 16, "learning_rate": 0.2, "seed": 9}
    found = train(model, features, labels, steps=7 * epochs, **settings)
    assert found == train(oracle, features, labels, epochs=epochs, **settings)
    expected = get_arrays(oracle)
    assert all(np.array_equal(array, expected[name]) for name, array in get_arrays(model).items())


@pytest.mark.parametrize(
    ("steps", "sizes"), [(1, [16]), (7, [16] * 6 + [4]), (9, [16] * 6 + [4] + [16] * 2)]
)
def test_steps_end_in_the_middle_of_a_pass(steps, sizes):
    features, labels = records()
    places = np.arange(100)
    seen = []

    def loss(outputs, batch):
        seen.append(batch.tolist())
        return nn.functional.cross_entropy(outputs, torch.tensor(labels)[batch])

    train(linear(6, 3), features, places, steps=steps, batch_size=16, epochs=5, seed=9, loss=loss)
    assert [len(batch) for batch in seen] == sizes
    first_pass = [place for batch in seen[:7] for place in batch]
    assert len(set(first_pass)) == len(first_pass)  # none comes twice before all have come
    generator = torch.Generator().manual_seed(9)
    order = torch.cat([torch.randperm(100, generator=generator) for _ in range(2)]).tolist()
    assert [place for batch in seen for place in batch] == order[: sum(sizes)]


def test_perturbation_adds_the_gradient_at_a_moved_last_layer():
    features, labels = records()
    model, oracle = (initialise(lambda: mlp([6, 8, 3]), 0) for _ in range(2))
    settings = {"batch_size": 25, "learning_rate": 0.2, "seed": 9}
    train(model, features, labels, steps=5, perturbation=0.3, **settings)
    order = torch.Generator().manual_seed(9)
    noise = torch.Generator().manual_seed(derive_seed(9, "perturbation"))
    x, y = torch.tensor(features), torch.tensor(labels)
    batches = [b for _ in range(2) for b in torch.randperm(100, generator=order).split(25)][:5]
    last = [oracle[3].weight, oracle[3].bias]
    moves = []
    for batch in batches:
        at_place = torch.autograd.grad(
            nn.functional.cross_entropy(oracle(x[batch]), y[batch]), oracle.parameters()
        )
        moves.append([0.3 * torch.randn(p.shape, generator=noise) for p in last])
        with torch.no_grad():
            kept = [p.clone() for p in last]
            for p, move in zip(last, moves[-1], strict=True):
                p.add_(move)
        moved = torch.autograd.grad(
            nn.functional.cross_entropy(oracle(x[batch]), y[batch]), oracle.parameters()
        )
        with torch.no_grad():
            for p, value in zip(last, kept, strict=True):
                p.copy_(value)
            for p, first, second in zip(oracle.parameters(), at_place, moved, strict=True):
                p.sub_(0.2 * (first + second))
    assert not torch.equal(moves[0][0], moves[1][0])  # a sample for each step
    expected = get_arrays(oracle)
    for name, array in get_arrays(model).items():
        np.testing.assert_allclose(array, expected[name], atol=2e-6)


def test_perturbation_is_seeded_and_leaves_the_order_and_the_loss_that_is_told():
    def trained(seed=4, **more):
        model = initialise(lambda: mlp([6, 8, 3]), 0)
        told = train(model, *records(), learning_rate=more.pop("rate", 0.1), seed=seed, **more)
        return get_arrays(model)["1.weight"], told

    first, _ = trained(perturbation=0.5)
    assert np.array_equal(first, trained(perturbation=0.5)[0])
    assert not np.array_equal(first, trained()[0])
    # Where nothing moves, the loss is that of the weights as they are.
    assert trained(rate=0.0, perturbation=0.5)[1] == trained(rate=0.0)[1]


def test_perturbation_is_of_the_last_layer_that_is_trained():
    model = mlp([6, 8, 3])
    model[3].requires_grad_(False)
    seen = []
    model[1].register_forward_hook(lambda layer, inputs, output: seen.append(layer.weight.detach()))
    train(model, *records(), steps=1, batch_size=100, perturbation=2.0, learning_rate=0.0, seed=0)
    plain, moved = seen
    # 48 weights: the estimate of the deviation of 2 has a standard error of 2 / sqrt(96).
    assert abs(float((moved - plain).square().mean().sqrt()) - 2) < 4 * 2 / 96**0.5
    assert torch.equal(model[1].weight, plain)


def test_gradients_of_other_work_on_the_model_have_no_part():
    features, labels = records()
    model, oracle = (initialise(lambda: linear(6, 3), 0) for _ in range(2))
    nn.functional.cross_entropy(model(torch.tensor(features)), torch.tensor(labels)).backward()
    for one in (model, oracle):
        train(one, features, labels, seed=0)
    assert torch.equal(model[1].weight, oracle[1].weight)


def test_one_record_of_one_class():
    features, labels = records(n=1)
    assert np.isfinite(train(linear(6, 3), features, labels, seed=0))


def test_evaluate_does_not_depend_on_the_batch_size():
    features, labels = records()
    model = initialise(lambda: mlp([6, 8, 3]), 0)
    whole, parts = (evaluate(model, features, labels, batch_size=size) for size in (1000, 7))
    assert whole["accuracy"] == parts["accuracy"]
    assert whole["loss"] == pytest.approx(parts["loss"])


def test_frozen_and_unused_parameters_stay():
    model = nn.ModuleDict({"used": nn.Linear(6, 3), "unused": nn.Linear(2, 2)})
    model["used"].bias.requires_grad_(False)
    model.forward = lambda x: model["used"](x)
    before = get_arrays(model)
    train(model, *records(), seed=0)
    after = get_arrays(model)
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    assert changed == ["used.weight"]


def test_same_bits_in_another_process_with_other_threads():
    code = (
        "import sys, hashlib, numpy as np, torch\n"
        "from flwr_privacy.clients.torch import *\n"
        "torch.set_num_threads(int(sys.argv[1])); torch.manual_seed(int(sys.argv[1]))\n"
        "rng = np.random.default_rng(0)\n"
        "x = rng.normal(size=(96, 1, 28, 28)).astype(np.float32); y = np.arange(96) % 10\n"
        "model = initialise(lambda: cnn(10), 3)\n"
        "loss = train(model, x, y, seed=4)\n"
        "scores = evaluate(model, x, y)\n"
        "assert torch.get_num_threads() == int(sys.argv[1])\n"
        "print(loss.hex(), scores, [hashlib.md5(a).hexdigest() for a in "
        "get_arrays(model).values()])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, threads], capture_output=True, text=True, check=True
        ).stdout
        for threads in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop()


def test_threads_are_restored_after_an_error():
    threads = torch.get_num_threads()
    with pytest.raises(RuntimeError):
        train(linear(5, 3), *records(), seed=0)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("work", [lambda m, x, y: train(m, x, y, seed=0), evaluate])
def test_no_records(work):
    with pytest.raises(DataError, match="there are no records"):
        work(linear(6, 3), *records(n=0))


def test_records_without_labels():
    features, labels = records(n=5)
    with pytest.raises(DataError, match="5 records but 4 labels"):
        evaluate(linear(6, 3), features, labels[:4])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("steps", 0),
        ("batch_size", 0),
        ("learning_rate", -0.1),
        ("perturbation", -0.1),
    ],
)
def test_bad_settings(name, value):
    with pytest.raises(InvalidParameterError, match=f"{name} = {value}"):
        train(linear(6, 3), *records(), seed=0, **{name: value})


@pytest.mark.parametrize(
    ("available", "visible", "device"),
    [
        (True, "0", "cuda"),
        (True, None, "cuda"),
        (True, "", "cpu"),
        (False, "0", "cpu"),
        (False, None, "cpu"),
    ],
)
def test_allotted_device(monkeypatch, available, visible, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert allotted_device() == device
