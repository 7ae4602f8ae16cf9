"""Charges for different neighbours: which may be added up, and how one becomes another.

Costs for different neighbours are never added up as they are. Without a sample a Gaussian release
costs the same for each relation, as its noise multiplier is the noise over the distance of *those*
neighbours; the same noise has another multiplier for another relation.

Theorem: a replaced element in a Poisson sample
-----------------------------------------------
A release adds Gaussian noise of covariance ``sigma^2 I`` to f(S), S being a Poisson sample of rate
q, and one element more or less in S moves f by at most C. Then for two data sets in which one
element is replaced by another, and in any dimension, the release is dominated by the pair

    P = (1 - q) N(0, sigma^2) + q N(C, sigma^2),   Q = (1 - q) N(0, sigma^2) + q N(-C, sigma^2):

for every alpha >= 0 its hockey-stick divergence ``H_alpha``, the largest P(E) - alpha Q(E) over all
events E, is at most that of P and Q. This pair is ``NeighboringRelation.REPLACE_ONE`` of
dp-accounting. Pairs that dominate compose, also where a release is chosen by what the earlier ones
gave (Zhu, Dong, Wang, *Optimal accounting of differential privacy via characteristic function*,
AISTATS 2022, theorem 10), and they bound every Rényi divergence.

*Proof.* (1) The other elements are sampled alike for both data sets, and H is jointly convex. So
fix them, and with them f without the element, which may be 0. The two releases are
``(1 - q) N(0) + q N(u)`` and ``(1 - q) N(0) + q N(v)`` with norms of u and v up to C.

(2) Let alpha >= 1, ``a = 1 + (alpha - 1) / q`` and ``b = alpha / a``. As measures
``(1 - q) N(0) + q N(u) - alpha [(1 - q) N(0) + q N(v)]`` is
``q [N(u) - a ((1 - b) N(0) + b N(v))]``, so H_alpha of the two is q times H_a of N(u) and
``(1 - b) N(0) + b N(v)`` (Balle, Barthe, Gaboardi, *Privacy amplification by subsampling*, NeurIPS
2018, theorem 2). That is the mean of ``F(R) = max(0, 1 - a R)``, where R is the ratio of the second
density to the first at ``x = u + sigma y``, for y of the standard normal law:

    R = (1 - b) exp(-X - Var X / 2) + b exp(-Y - Var Y / 2),
    X = u.y / sigma,   Y = (u - v).y / sigma.

(3) F is convex and X, Y are jointly normal. If no covariance of (X, Y), variances among them, is
above that of (X', Y'), then E F(R) <= E F(R') (Kahane, *Sur le chaos multiplicatif*, Ann. Sci.
Math. Québec 9, 1985; on the way from the one to the other the derivative of the mean is a sum of
the differences of covariances times means of F'' and positive factors). Here
``Var X <= (C / sigma)^2``, ``Var Y <= (2C / sigma)^2`` and the covariance is at most
``2 (C / sigma)^2``. All three are attained at once, by u = C and v = -C in one dimension.

(4) For alpha < 1, ``H_alpha(A, B) = 1 - alpha + alpha H_{1/alpha}(B, A)``: the releases change
places, and P and Q are the mirror images of each other. QED.

The theorem holds for the charge of a sampled release with ``neighbours="replace_one"``, noise
multiplier ``sigma / 2C``.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from flwr_privacy.errors import InvalidParameterError

from .charges import GAUSSIAN, REPLACE_ONE, Charge, check_alike

__all__ = ["as_replaced", "relation_of"]


def as_replaced(charge: Charge) -> Charge:
    """Return what the release of a charge costs where one element is replaced by another.

    Half the noise multiplier, with the same sample. Nothing is lost by it: there are releases that
    cost as much.

    Parameters
    ----------
    charge : Charge
        A charge for any neighbours; one for ``replace_one`` is returned as it is.

    Raises
    ------
    InvalidParameterError
        For Laplace noise with a sample: no bound is known to us.

    Notes
    -----
    Let an element that is added, removed or zeroed out move a value by at most C. Without a sample,
    an element is replaced by removing (zeroing out) it and adding (filling in) the other: the
    values are at most 2C apart, by the triangle inequality of the norm, and the noise over 2C is
    half the noise over C. With a sample the theorem of this module is about the same release: the
    noise over its 2C is half the noise over C. The gap stays: it compares the release of *one* data
    set on the grid with that on the real line.

    Examples
    --------
    >>> charge = Charge(noise_multiplier=2.0, neighbours="add_remove", sampling=0.1)
    >>> as_replaced(charge).noise_multiplier
    1.0
    """
    if charge.neighbours == REPLACE_ONE:
        return charge
    if charge.mechanism != GAUSSIAN and charge.sampling < 1:
        raise InvalidParameterError("charge", charge, "Gaussian noise where there is a sample")
    half = max(charge.noise_multiplier / 2, math.ulp(0.0))  # next to none costs infinitely much
    return replace(charge, noise_multiplier=half, neighbours=REPLACE_ONE)


def relation_of(charges: Iterable[Charge]) -> str | None:
    """Return the neighbours that all charges are for; None without charges.

    Raises
    ------
    InvalidParameterError
        If they are for different ones.
    """
    first: Charge | None = None
    for charge in charges:
        first = first or charge
        check_alike(first, charge)
    return None if first is None else first.neighbours
