"""Weighted sums of the gradients of single records, and how exact they are."""

import numpy as np
import pytest
import torch

from flwr_privacy.clients.certificates.per_record_steps import ROUNDING
from flwr_privacy.clients.torch.record_gradients import Gradients

B, OUTPUTS, INPUTS = 200, 3, 5


def gradients(scale=1.0, dtype=torch.float32):
    rng = np.random.default_rng(0)
    deltas = torch.tensor(rng.normal(size=(B, OUTPUTS)), dtype=dtype)
    inputs = torch.tensor(rng.normal(size=(B, INPUTS)) * scale, dtype=dtype)
    return Gradients(whole={"b": deltas}, outer={"w": (deltas, inputs)})


def summed(found, weights, **options):
    total = {
        "b": torch.zeros(OUTPUTS, dtype=torch.float64),
        "w": torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64),
    }
    found.add_to(total, weights, **options)
    return total["w"].numpy()


def exact(found, weights):
    deltas, inputs = (t.double().numpy() for t in found.outer["w"])
    return (weights.numpy()[:, None] * deltas).T @ inputs


def clipping(found, norm=1.0):
    """Weights that make each outer product as long as is allowed."""
    deltas, inputs = found.outer["w"]
    return norm / (deltas.double().norm(dim=1) * inputs.double().norm(dim=1))


def error(found, **options):
    weights = clipping(found)
    return np.linalg.norm(summed(found, weights, **options) - exact(found, weights))


def test_sums_are_in_float64_unless_less_is_asked_for():
    assert error(gradients()) < 1e-13
    assert 1e-9 < error(gradients(), short=True) < 1e-4


def test_a_replaced_record_meets_the_rounding_of_its_own_block_only():
    first, weights = gradients(), clipping(gradients())
    second = gradients()
    second.outer["w"][1][70] *= -3.0
    again = clipping(second)
    apart = summed(second, again, short=True) - summed(first, weights, short=True)
    due = exact(second, again) - exact(first, weights)
    # The bound of `ROUNDING` for one block. The other blocks may not contribute at all.
    assert np.linalg.norm(apart - due) <= ROUNDING / 2
    for places in (slice(0, 64), slice(128, B)):
        mask = torch.zeros(B, dtype=torch.float64)
        mask[places] = 1
        sums = [summed(f, w * mask, short=True) for f, w in ((first, weights), (second, again))]
        np.testing.assert_array_equal(sums[0], sums[1])


def test_large_inputs_are_summed_in_float64():
    assert error(gradients(scale=2.0**30), short=True) < 1e-13


def test_other_types_are_summed_in_float64():
    assert error(gradients(dtype=torch.float16), short=True) < 1e-13
    assert error(gradients(dtype=torch.float64), short=True) < 1e-13


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_shorter_products_than_float32_are_not_used(precision):
    torch.set_float32_matmul_precision(precision)
    try:
        assert error(gradients(), short=True) < 1e-13
    finally:
        torch.set_float32_matmul_precision("highest")


def test_fast_mathematics_of_the_environment_is_not_used(monkeypatch):
    monkeypatch.setenv("DNNL_DEFAULT_FPMATH_MODE", "BF16")
    assert error(gradients(), short=True) < 1e-13


@pytest.mark.parametrize("norm", [1e-9, 1e9])
def test_short_sums_hold_at_the_ends_of_their_range(norm):
    for scale in (1e-30, 1e-3, 2.0**17):  # the largest input is then below the limit of 2**20
        found = gradients(scale=scale)
        weights = clipping(found, norm).clamp(max=1)
        apart = summed(found, weights, short=True) - exact(found, weights)
        assert np.linalg.norm(apart) <= B * 64 * 2.0**-24 * norm
