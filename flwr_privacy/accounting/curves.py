"""Computes one release's cost: Rényi divergence by order, or privacy loss distribution.

Both come from dp-accounting, but for the divergence of a replaced element in a sample. They take a
tenth of a second to some seconds, and are kept here for the next release of the same kind.

An element that is added, removed or zeroed out costs the same: the release with it and the one
without it are the same two. With a sample a replaced element costs something else
(`flwr_privacy.accounting.neighbours`).
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .charges import GAUSSIAN, LAPLACE, REPLACE_ONE, Charge

__all__ = ["MOST_PARTS", "ORDERS", "composed_pld", "gaussian_mu", "rdp_curve"]

ORDERS = np.array(
    [1 + tenth / 10 for tenth in range(1, 100)]
    + list(range(11, 64))
    + [64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, 1024]
)
"""Rényi orders: the default ones of dp-accounting, and more above 64, for a small epsilon."""

MOST_PARTS = 256
"""All Gaussian releases without sampling are composed as at most so many."""

_LEAST_NOISE = 1e-6  # with less of it, a cost is infinite here: float64 would overflow
_LEAST_ON_GRID = 0.02  # the same for a curve on a grid, which would take a node a minute
_FINEST = 1e-4  # of the grids for the privacy loss; the coarsest is 1
_POINTS_OF_ALL, _POINTS_OF_ONE, _POINTS_OF_PART = 2**22, 2**16, 2**16
_SIGMAS = 10  # the normal law ends there for all practical purposes


@lru_cache(maxsize=2**12)
def rdp_curve(
    mechanism: str, noise_multiplier: float, sampling: float, neighbours: str
) -> NDArray[np.float64]:
    """Return the Rényi divergence of one release at each of `ORDERS`, or an upper bound.

    Parameters
    ----------
    mechanism, noise_multiplier, sampling, neighbours
        As in `Charge`; Laplace noise without sampling only.
    """
    if noise_multiplier < _LEAST_NOISE:
        return np.full(ORDERS.shape, np.inf)
    if sampling < 1 and neighbours == REPLACE_ONE:
        from .replaced import replaced_divergence  # late: few nodes sample

        return _bounding(replaced_divergence(ORDERS, noise_multiplier, sampling))
    # It takes a second to import, and who needs Gaussian DP only does without.
    from dp_accounting import (
        GaussianDpEvent,
        LaplaceDpEvent,
        PoissonSampledDpEvent,
    )
    from dp_accounting.rdp import RdpAccountant

    event = (LaplaceDpEvent if mechanism == LAPLACE else GaussianDpEvent)(noise_multiplier)
    accountant = RdpAccountant(ORDERS)
    with _without_warnings():
        accountant.compose(PoissonSampledDpEvent(sampling, event) if sampling < 1 else event)
    return _bounding(np.where(np.isnan(accountant.rdp), np.inf, accountant.rdp))


def _bounding(curve: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a curve that is nowhere below the divergence, for what float64 made of it."""
    # A divergence does not fall as its order grows: where the series for a broken order was given
    # up (infinite) or is rough, the next whole order is a better bound.
    curve = np.minimum.accumulate(curve[::-1])[::-1]
    return curve * (1 + 1e-12) + 1e-15  # more than float64 may have lost in it


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hush dp-accounting, which warns of each order that it leaves out."""
    logger, nothing = logging.getLogger("absl"), logging.NullHandler()
    level = logger.level
    logger.setLevel(logging.ERROR)
    # Absl gives a root logger without handlers one for good, which prints what is printed already.
    logging.root.addHandler(nothing)
    try:
        yield
    finally:
        logging.root.removeHandler(nothing)
        logger.setLevel(level)


def gaussian_mu(releases: tuple[tuple[Charge, int], ...]) -> float:
    """Return the mu of Gaussian releases without sampling: ``sqrt(sum count / z**2)``."""
    return math.hypot(*(math.sqrt(n) / charge.noise_multiplier for charge, n in releases))


@lru_cache(maxsize=4)
def composed_pld(releases: tuple[tuple[Charge, int], ...]) -> Any:
    """Return the privacy loss distribution of all releases; None stands for an infinite loss.

    Parameters
    ----------
    releases : tuple of (Charge, int)
        Charges, and how often each was made; at least one.
    """
    interval = _interval(releases)
    if interval > 1 or any(charge.noise_multiplier < _LEAST_ON_GRID for charge, _ in releases):
        return None
    plain = tuple(entry for entry in releases if _is_plain(entry[0]))
    parts = [
        _self_composed(replace(charge, gap=0.0), n, interval)
        for charge, n in releases
        if not _is_plain(charge)
    ]
    if plain:
        # Together they are exactly as many equal ones as one likes: so few that none is small on
        # the grid, and so many that none is large, for a large one takes long.
        mu = gaussian_mu(plain)
        points = 2 * _SIGMAS * mu / interval
        count = min(MOST_PARTS, math.ceil((points / _POINTS_OF_PART) ** 2))
        equal = replace(plain[0][0], noise_multiplier=math.sqrt(count) / mu, gap=0.0)
        parts.append(_self_composed(equal, count, interval))
    return reduce(lambda one, other: one.compose(other), parts)


def _is_plain(charge: Charge) -> bool:
    return charge.mechanism == GAUSSIAN and charge.sampling == 1


def _interval(releases: tuple[tuple[Charge, int], ...]) -> float:
    """Return the step of the grid of losses: the finest that keeps the arrays small."""
    # The losses of all spread at most like those of Gaussians without sampling.
    needed = 2 * _SIGMAS * gaussian_mu(releases) / _POINTS_OF_ALL
    for charge, _ in releases:
        if charge.sampling < 1:
            precision = 1 / charge.noise_multiplier
            # No loss is larger: of Laplace noise at all, of Gaussian noise practically.
            laplace = charge.mechanism == LAPLACE
            largest = precision if laplace else precision * (_SIGMAS + precision / 2)
            needed = max(needed, largest / _POINTS_OF_ONE)
    # Powers of two of the finest, so that another release seldom needs another grid.
    doublings = max(0.0, math.log2(needed) - math.log2(_FINEST)) if needed > 0 else 0.0
    return math.inf if math.isinf(doublings) else _FINEST * 2.0 ** math.ceil(doublings)


@lru_cache(maxsize=16)
def _self_composed(charge: Charge, count: int, interval: float) -> Any:
    single = _single(charge, interval)
    return single.self_compose(count) if count > 1 else single


@lru_cache(maxsize=16)
def _single(charge: Charge, interval: float) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    noise = charge.noise_multiplier
    options = {"value_discretization_interval": interval, "sampling_prob": charge.sampling}
    if charge.mechanism == LAPLACE:
        return pld.from_laplace_mechanism(noise, **options)
    if charge.sampling < 1 and charge.neighbours == REPLACE_ONE:
        # Its noise is over what one element can add, which is half of what two are apart.
        relation = NeighboringRelation.REPLACE_ONE
        return pld.from_gaussian_mechanism(2 * noise, neighboring_relation=relation, **options)
    return pld.from_gaussian_mechanism(noise, **options)
