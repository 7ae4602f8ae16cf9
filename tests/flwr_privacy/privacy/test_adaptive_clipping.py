"""Adaptive clipping, against closed forms and integration."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.accounting.gaussian import delta_of, epsilon_of
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.adaptive_clipping import (
    COUNT_GRID,
    count_code,
    fraction_below,
    next_clipping_norm,
    split,
)


@given(z=st.floats(0.1, 1e3), share=st.floats(1e-6, 0.99))
def test_update_and_count_are_one_release_of_the_combined_noise_multiplier(
    z: float, share: float
) -> None:
    update, count = split(z, share)
    assert count is not None
    # The mu of two Gaussian releases is the root of the sum of their squares.
    assert math.hypot(1 / update, 1 / count) == pytest.approx(1 / z, rel=1e-12)
    assert (z / count) ** 2 == pytest.approx(share, rel=1e-12)
    both = [
        Charge(neighbours="replace_one", noise_multiplier=update),
        Charge(neighbours="replace_one", noise_multiplier=count),
    ]
    assert spent(both, delta=1e-5) == pytest.approx(epsilon_of(1 / z, 1e-5), rel=1e-9)


def test_the_joint_release_is_no_less_private_than_one_gaussian_where_it_is_integrated() -> None:
    z_u, z_c = split(1.3, 0.25)
    assert z_c is not None
    # One client moves the update and the count by their sensitivities, 1 each here.
    u, c = np.meshgrid(np.linspace(-18, 19, 2001), np.linspace(-32, 33, 2001), indexing="ij")
    cell = (37 / 2000) * (65 / 2000) / (2 * math.pi * z_u * z_c)
    p = np.exp(-((u / z_u) ** 2 + (c / z_c) ** 2) / 2) * cell
    q = np.exp(-(((u - 1) / z_u) ** 2 + ((c - 1) / z_c) ** 2) / 2) * cell
    for epsilon in (0.0, 0.5, 1.0, 2.0):
        delta = np.maximum(p - math.exp(epsilon) * q, 0).sum()
        assert delta == pytest.approx(delta_of(1 / 1.3, epsilon), rel=1e-4)


@pytest.mark.parametrize(("below", "above"), [(0, 7), (3, 4), (7, 0)])
def test_the_fraction_below_is_read_from_the_count(below: int, above: int) -> None:
    codes = below * count_code(within=True) + above * count_code(within=False)
    assert fraction_below(COUNT_GRID.step * codes, 7) == pytest.approx(below / 7)


def test_the_fraction_below_is_unbiased_for_poisson_samples() -> None:
    population, q, share = 400, 0.1, 0.3
    random = np.random.default_rng(0)
    inside = np.arange(population) < share * population
    values = []
    for _ in range(4000):
        drawn = random.random(population) < q
        halves = np.where(inside, 1.0, -1.0)[drawn].sum()
        values.append(fraction_below(halves, q * population))
    # The variance of the sum of halves is N q (1 - q): five standard errors of the mean.
    error = math.sqrt(population * q * (1 - q)) / (2 * q * population)
    wanted = 0.5 + (2 * share - 1) / 2
    assert abs(np.mean(values) - wanted) < 5 * error / math.sqrt(4000)


def test_one_step_of_the_clipping_norm_is_the_papers() -> None:
    assert next_clipping_norm(2.0, 0.75, quantile=0.5, learning_rate=0.4) == pytest.approx(
        2 * math.exp(-0.1)
    )
    assert next_clipping_norm(2.0, 0.5) == 2.0


def test_noise_beyond_all_and_none_moves_no_further_than_they_do() -> None:
    assert next_clipping_norm(1.0, 7.0) == next_clipping_norm(1.0, 1.0) == math.exp(-0.1)
    assert next_clipping_norm(1.0, -7.0) == next_clipping_norm(1.0, 0.0) == math.exp(0.1)


def test_the_clipping_norm_stays_a_norm() -> None:
    assert next_clipping_norm(1e-100, 1.0) == 1e-100
    assert next_clipping_norm(1e100, 0.0) == 1e100
    assert next_clipping_norm(1.0, 0.0, quantile=1.0, learning_rate=100.0) == math.exp(100)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: split(-1.0, 0.1), r"noise_multiplier = -1\.0"),
        (lambda: fraction_below(math.nan, 3), "sum_of_halves = nan"),
        (lambda: fraction_below(1.0, 0), "count = 0"),
        (lambda: next_clipping_norm(0.0, 0.5), r"norm = 0\.0"),
        (lambda: next_clipping_norm(1.0, math.nan), "below = nan"),
        (lambda: next_clipping_norm(1.0, 0.5, quantile=1.5), r"quantile = 1\.5"),
        (lambda: next_clipping_norm(1.0, 0.5, learning_rate=0.0), r"learning_rate = 0\.0"),
    ],
)
def test_values_that_are_not_allowed_are_named(call: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        call()
