"""Averages codes within a trusted zone, and adds noise to the average that leaves it.

A zone is all that lies under one boundary node. Its models are ``public start + step * codes``: all
of its devices had the start at the last noised release, and everything since then is in the codes,
which only members see. The same functions serve the server that simulates the aggregators of a
simulation, and an aggregator that is a node of its own.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.accounting import ADD_REMOVE, REPLACE_ONE, Charge
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.grid import CodeGrid, saturated
from flwr_privacy.privacy.noise import discrete_gaussian, discretisation_gap
from flwr_privacy.privacy.randomness import SecureRandom

from .sensitivity import Drift, Reach

__all__ = [
    "GAP",
    "NEIGHBOURS",
    "NOISE_REACH",
    "Codes",
    "Upload",
    "averaged",
    "check_gap",
    "noised",
    "release_charge",
    "trained",
]

GAP = 1e-9
"""Epsilon set aside per release for noise that lives on a grid."""

NEIGHBOURS = {"user": REPLACE_ONE, "record": ADD_REMOVE}
"""Which data sets are neighbours, by the unit that is protected."""

NOISE_REACH = 12
"""Standard deviations of noise for which codes have room; what is beyond saturates."""

Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Upload:
    """The upload of a zone's member to its parent: codes, and how far one device can move them.

    Parameters
    ----------
    codes : (d,) int64
        Distance from the public start of the zone, in steps of the grid.
    reach : Reach
        Bound on what the data of one device can change in them, in units of the weights.
    floor : float, default 0.0
        Least standard deviation of the noise that its members allow, in units of the weights.
    wide : bool, default False
        Whether codes may leave 32 bits: after a clean event, whatever they are. How long a sealed
        message is, its carrier sees, so it must not depend on them.
    """

    codes: Codes
    reach: Reach
    floor: float = 0.0
    wide: bool = False


def averaged(
    uploads: list[Upload] | tuple[NDArray[Any], int, Reach],
    drift: Drift,
    *,
    tier: int,
    grid: CodeGrid,
) -> Upload:
    """Return the mean of the children's codes, rounded to the grid (to the nearest, half up).

    Parameters
    ----------
    uploads : list of Upload, or tuple
        Those of the children that took part; or their sum, their number and the reach that each of
        them has.
    drift : Drift
        How the bound goes on.
    tier : int
        Of the node that averages.
    grid : CodeGrid
        What a code means.

    Notes
    -----
    Rounding may move two neighbouring means apart by up to a step in every entry, which the bound
    has: ``step * sqrt(d)``.

    Examples
    --------
    >>> drift, own = Drift(), Reach(anchor=2, own=2.0)
    >>> mean = averaged((np.array([7, -4]), 4, own), drift, tier=1, grid=CodeGrid(-10))
    >>> mean.codes.tolist(), round(mean.reach.total, 3)
    ([2, -1], 0.501)
    """
    if isinstance(uploads, tuple):
        codes, count, reach = uploads
        total = codes.astype(np.int64)
        children = [(reach, 1 / count)] * count
        floor, wide = 0.0, True
    else:
        count = len(uploads)
        total = np.zeros_like(uploads[0].codes)
        for upload in uploads:
            total += upload.codes
        children = [(upload.reach, 1 / count) for upload in uploads]
        floor = max(upload.floor for upload in uploads)
        wide = any(upload.wide for upload in uploads)
    mean = total
    mean *= 2
    mean += count
    mean //= 2 * count
    slack = grid.step * math.sqrt(total.size)
    return Upload(mean, drift.averaged(children, tier=tier, slack=slack), floor, wide)


def trained(
    drift: Drift, reach: Reach, bound: float, steps: int, grid: CodeGrid, size: int
) -> Reach:
    """Return how far the data of one device can move a device's codes after its training.

    Parameters
    ----------
    drift : Drift
        How models drift apart.
    reach : Reach
        Of the model that the device started from.
    bound : float
        Largest L2 norm of its update; 0 where nothing is clipped, and nothing protected.
    steps : int
        Local steps.
    grid : CodeGrid
        To which the update is truncated.
    size : int
        Number of codes.
    """
    slack = grid.step * math.sqrt(size)
    return drift.trained(reach, bound=bound, steps=steps, slack=slack)


def noised(
    codes: Codes, *, sigma: float, grid: CodeGrid, random: SecureRandom
) -> NDArray[np.int32]:
    """Return codes with exact discrete Gaussian noise, as they travel.

    Parameters
    ----------
    codes : (d,) int64
        Codes; they are changed.
    sigma : float
        Standard deviation in units of the weights.
    grid : CodeGrid
        What a code means.
    random : SecureRandom
        Source of the noise.

    Raises
    ------
    InvalidParameterError
        If the grid is too coarse for the noise to be worth what is charged for it.
    """
    check_gap(codes.size, sigma=sigma, grid=grid)
    codes += discrete_gaussian(codes.size, sigma / grid.step, random)
    return saturated(codes)


def release_charge(noise_multiplier: float, sampling: float, *, unit: str) -> Charge | None:
    """Return a device's charge for a noised release of its zone; None without noise.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise over the sensitivity; 0 for none.
    sampling : float
        Probability that a record is in any batch of the period; 1 counts no sampling.
    unit : {"user", "record"}
        What is protected: all data of a device, replaced by any others, or a record that is there
        or not.
    """
    if noise_multiplier == 0:
        return None
    return Charge(
        noise_multiplier=noise_multiplier,
        neighbours=NEIGHBOURS[unit],
        sampling=sampling,
        gap=GAP,
    )


def check_gap(dimension: int, *, sigma: float, grid: CodeGrid) -> None:
    """Refuse a grid that is too coarse for the noise to be worth what is charged for it.

    Raises
    ------
    InvalidParameterError
        If it is.
    """
    steps = sigma / grid.step
    if discretisation_gap(dimension, steps) > GAP:
        raise InvalidParameterError(
            "grid", grid.exponent, f"a finer grid: the noise is only {steps:.3g} steps of it"
        )
