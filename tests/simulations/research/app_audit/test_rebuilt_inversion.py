"""Gradient inversion, on transcripts that the test writes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from flwr_privacy.clients.torch import initialise
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.app_audit.rebuilt.case import Clock
from flwr_privacy.simulations.research.app_audit.rebuilt.gradient_inversion import (
    cosine_loss,
    descend,
    learning_rate_of,
    search,
)
from flwr_privacy.simulations.research.app_audit.rebuilt.inverted import LEVEL, inverted
from flwr_privacy.simulations.research.app_audit.rebuilt.likeness import paired, psnr, ssim
from flwr_privacy.simulations.research.app_audit.rebuilt.networks import filled
from flwr_privacy.simulations.research.attacks.torch_gradients import sigmoid_lenet

from .trainings import case, data, noise, plain_sgd, run


def lenet(classes: int = 5) -> nn.Sequential:
    return initialise(lambda: sigmoid_lenet((1, 8, 8), classes, (2, 1, 1)), 1)


MODEL = lenet()
MANY = [data(20, 1, 8, 8, seed=30 + i) for i in range(3)]


def test_a_single_record_is_rebuilt_and_drawn(tmp_path: Path) -> None:
    few = run(tmp_path / "few", MODEL, [data(1, 1, 8, 8, seed=5)])
    found = inverted(case(run(tmp_path / "as", MODEL, MANY), few, MODEL, tmp_path), Clock(8))
    assert found.verdict == "leak"
    assert found.numbers["recovered"] == 1
    (picture,) = found.pictures
    assert (tmp_path / picture).stat().st_size > 1000
    assert found.table is not None
    best = max(row[2] for row in found.table.rows)
    assert best > LEVEL + 10
    assert {row[1] for row in found.table.rows} == {"cosine", "squared"}


def test_noise_and_other_records_rebuild_nothing(tmp_path: Path) -> None:
    as_is = run(tmp_path / "as", MODEL, MANY)
    part = [data(1, 1, 8, 8, seed=5)]
    noised = run(tmp_path / "noised", MODEL, part, leave=noise(0.05))
    other = run(tmp_path / "other", MODEL, part, truths=[data(1, 1, 8, 8, seed=6)])
    for few in (noised, other):
        found = inverted(case(as_is, few, MODEL, tmp_path), Clock(1.5))
        assert found.verdict == "note"
        assert found.numbers["recovered"] == 0


def test_the_learning_rate_shows_in_the_update_of_a_record() -> None:
    draws = np.random.default_rng(0)
    for _ in range(20):
        weight, bias, inputs = draws.normal(size=(4, 6)), draws.normal(size=4), draws.normal(size=6)
        outputs = weight @ inputs + bias
        error = np.exp(outputs) / np.exp(outputs).sum() - (np.arange(4) == 2)
        rate = float(draws.uniform(0.01, 1))
        change = -rate * np.outer(error, inputs), -rate * error
        assert learning_rate_of(weight, bias, *change, 2) == pytest.approx(rate, rel=1e-9)
        assert learning_rate_of(weight, bias, -change[0], -change[1], 2) is None


def test_the_derivative_of_the_cosine_is_that_of_finite_differences() -> None:
    net = filled(MODEL, {})
    draws = np.random.default_rng(0)
    change = {name: draws.normal(size=tuple(p.shape)) for name, p in net.named_parameters()}
    loss = cosine_loss(net, change, np.array([1, 3]))
    x = draws.normal(size=(2, 1, 8, 8))
    value, slope = loss(x)
    assert 0 < value < 2
    for _ in range(3):
        step = 1e-6 * draws.normal(size=x.shape)
        numeric = (loss(x + step)[0] - loss(x - step)[0]) / 2
        assert (slope * step).sum() == pytest.approx(numeric, rel=1e-3)


def test_the_cosine_of_a_records_own_step_is_zero_whatever_its_length() -> None:
    net = filled(MODEL, {})
    inputs, labels = data(1, 1, 8, 8, seed=5)
    error = nn.functional.cross_entropy(net(torch.tensor(inputs).double()), torch.tensor(labels))
    slopes = torch.autograd.grad(error, list(net.parameters()))
    named = zip(dict(net.named_parameters()), slopes, strict=True)
    step = {name: -0.37 * slope.numpy() for name, slope in named}
    assert cosine_loss(net, step, labels)(inputs.astype(float))[0] < 1e-9
    up = {name: -array for name, array in step.items()}
    assert cosine_loss(net, up, labels)(inputs.astype(float))[0] == pytest.approx(2)


def test_a_search_stops_at_its_time_and_is_the_same_again() -> None:
    calls = 0

    def slow(x: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal calls
        calls += 1
        return float(((x - 3) ** 2).sum()), 2 * (x - 3)

    one, two = (descend(slow, (1, 4), np.random.default_rng(0), seconds=60) for _ in range(2))
    np.testing.assert_array_equal(one.records, two.records)
    np.testing.assert_allclose(one.records, 3, atol=1e-2)
    assert one.whole
    calls = 0
    hurried = descend(slow, (1, 4), np.random.default_rng(0), seconds=0)
    assert calls <= 8
    assert not hurried.whole
    assert not search(slow, (1, 4), np.random.default_rng(0), seconds=0, enough=1e-9).whole
    found = search(slow, (1, 4), np.random.default_rng(0), seconds=60, enough=1e-9)
    np.testing.assert_allclose(found.records, 3, atol=1e-4)


def test_ssim_is_the_formula_over_each_window() -> None:
    draws = np.random.default_rng(1)
    one, two = draws.uniform(size=(2, 20, 20))
    reach = np.arange(-5, 6)
    weights = np.exp(-(reach[:, None] ** 2 + reach[None] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    wide = [np.pad(image, 5, mode="symmetric") for image in (one, two)]
    values = []
    for row in range(20):
        for column in range(20):
            a, b = (image[row : row + 11, column : column + 11] for image in wide)
            m, n = (weights * a).sum(), (weights * b).sum()
            v, w = (weights * (a - m) ** 2).sum(), (weights * (b - n) ** 2).sum()
            c = (weights * (a - m) * (b - n)).sum()
            values.append(
                ((2 * m * n + 1e-4) * (2 * c + 9e-4)) / ((m * m + n * n + 1e-4) * (v + w + 9e-4))
            )
    assert ssim(one, two, span=1.0) == pytest.approx(np.mean(values), rel=1e-9)
    assert ssim(5 * one, 5 * two, span=5.0) == pytest.approx(np.mean(values), rel=1e-9)
    colours = ssim(np.stack([one, one]), np.stack([two, one]), span=1.0)
    assert colours == pytest.approx((np.mean(values) + 1) / 2)


def test_measures_refuse_what_does_not_fit() -> None:
    with pytest.raises(InvalidParameterError, match="found"):
        psnr([1.0], [1.0, 2.0], span=1.0)
    with pytest.raises(InvalidParameterError, match="span"):
        psnr([1.0], [1.0], span=0.0)
    with pytest.raises(InvalidParameterError, match="record"):
        ssim([1.0], [1.0], span=1.0)
    places, measures = paired(np.eye(3), np.eye(3)[[2, 0, 1]], lambda a, b: psnr(a, b, span=1.0))
    np.testing.assert_array_equal(places, [1, 2, 0])
    np.testing.assert_array_equal(measures, 100.0)


@pytest.mark.long
def test_the_audits_search_is_as_good_as_a_longer_one(tmp_path: Path) -> None:
    """On the LeNet of iDLG, beside 8 starts of 2,000 steps with the true learning rate."""
    model = lenet(10)
    part = data(1, 1, 8, 8, classes=10, seed=5)
    few = run(tmp_path / "few", model, [part], optimiser=plain_sgd)
    attacked = case(run(tmp_path / "as", model, MANY), few, model, tmp_path)
    found = inverted(attacked, Clock(40))
    assert found.table is not None
    short = max(row[2] for row in found.table.rows)
    from flwr_privacy.simulations.research.attacks.torch_gradients import matching_loss

    (one,) = attacked.trained(few)
    net = filled(model, one.upload.start)
    gradient = {name: -one.upload.change[name] / 0.1 for name, _ in net.named_parameters()}
    brute = search(
        matching_loss(net, gradient, part[1]),
        (1, 1, 8, 8),
        np.random.default_rng(0),
        seconds=300,
        enough=0.0,
        starts=8,
        iterations=2000,
    )
    long = psnr(part[0], brute.records, span=attacked.span)
    print(f"PSNR of the audit {short:.1f} dB, of the longer search {long:.1f} dB")
    assert short > min(long - 6, 60)
    assert long > LEVEL
