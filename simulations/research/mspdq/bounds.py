"""The paper's bounds on convergence and communication: Theorems 2 and 3, Proposition 3.

Losses are mu-strongly convex and L-smooth. The step size is ``2 / (mu (theta + t))`` after t SGD
steps, with theta = max(8 L / mu, E) - 1. All bounds are for m = 1. ``sum_p2_sigma`` is the sum of
``p_i**2 sigma_i`` (the paper's sigma_i are variances), ``Gamma`` the heterogeneity
``F* - sum p_i F_i*``, ``G`` the bound on the second moment of a gradient, ``x0`` the expected
squared distance of the first model from the optimum.
"""

import math

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.mspdq.theory import k_rounds, shift_theta

__all__ = [
    "D1",
    "D2",
    "D3",
    "bound_msp",
    "bound_mspdq",
    "comm_complexity_bound",
    "comm_count",
    "nu2",
    "round_complexity",
]

_SMALLEST = math.ulp(0.0)


def D1(eps_s: float, *, C: float, w_max_squared: float) -> float:
    """Return the share of the split, ``(2 e^2 - 4 e + 8) / 3 C^2 ||w_max||^2`` (Lemma 8).

    It falls in `eps_s`: a narrower split disturbs less. The derivation squares a sum as if the
    cross terms vanished.

    Examples
    --------
    >>> round(D1(0.3, C=1.0, w_max_squared=4.0), 6)
    9.306667
    """
    check_number("eps_s", eps_s, minimum=0, maximum=1)
    check_number("C", C, minimum=0)
    check_number("w_max_squared", w_max_squared, minimum=0)
    return (2 * eps_s**2 - 4 * eps_s + 8) / 3 * C**2 * w_max_squared


def D2(
    D1: float, *, sum_p2_sigma: float, L: float, Gamma: float, E: int, G: float, M: int
) -> float:
    """Return the constant of Theorem 2: D1, and what local SGD and sampling add.

    ``D1 + sum_p2_sigma + 6 L Gamma + 8 (E - 1)^2 G + 4 E^2 G / M``.
    """
    check_integer("E", E, minimum=1)
    check_integer("M", M, minimum=1)
    return D1 + sum_p2_sigma + 6 * L * Gamma + 8 * (E - 1) ** 2 * G + 4 / M * E**2 * G


def D3(*, d: int, gamma_max: float, pi: float, B: int, M: int) -> float:
    """Return what B bits add in Theorem 3, ``d gamma_max^2 pi^2 / (4 M (2^B - 1)^2)``."""
    check_integer("d", d, minimum=1)
    check_integer("B", B, minimum=1)
    check_integer("M", M, minimum=1)
    return d * (gamma_max * pi / (2.0**B - 1)) ** 2 / (4 * M)


def bound_msp(
    *, mu: float, L: float, E: int, t: int, x0: float, D2: float, tight: bool = False
) -> float:
    """Return Theorem 2's bound on the expected gap of the loss after t SGD steps.

    ``8 L / (mu (theta + t)) * (2 D2 / mu + (8 L + mu E) / 2 * x0)``. With `tight` the constant that
    the paper's proof gives, L in place of the first 8 L.
    """
    check_integer("t", t, minimum=1)
    theta = shift_theta(mu=mu, L=L, E=E)
    whole = (2 * D2 / mu + (8 * L + mu * E) / 2 * x0) * L / (mu * (theta + t))
    return whole if tight else 8 * whole


def bound_mspdq(
    *, mu: float, L: float, E: int, t: int, x0: float, D2: float, D3: float, tight: bool = False
) -> float:
    """Return Theorem 3's bound: Theorem 2's with ``D2 + D3``.

    It needs as many mixing steps as `flwr_privacy.mspdq.theory.k_rounds` says
    and more, because the falling coupling mixes slower than the proof supposes, and the bits of
    `flwr_privacy.simulations.research.mspdq.theory.min_bits`.
    """
    return bound_msp(mu=mu, L=L, E=E, t=t, x0=x0, D2=D2 + D3, tight=tight)


def nu2(*, mu: float, L: float, E: int, x0: float, D: float) -> float:
    """Return the nu of ``E||w_t - w*||^2 <= nu / (theta + t)``, for D = D2 + D3.

    ``max(rho^2 D / (rho mu - 1), (theta + 1) x0)`` with ``rho = 2 / mu``.
    """
    return max(4 / mu**2 * D, (shift_theta(mu=mu, L=L, E=E) + 1) * x0)


def round_complexity(rho_acc: float, *, mu: float, L: float, E: int, x0: float, D: float) -> float:
    """Return after how many rounds the squared distance has fallen to a share of the first one.

    ``nu2 / (rho_acc x0) - theta``, the I of Proposition 3.

    Raises
    ------
    InvalidParameterError
        If `rho_acc` is not above 0 and at most 1, or `x0` is not positive.
    """
    if not 0 < check_number("rho_acc", rho_acc) <= 1:
        raise InvalidParameterError("rho_acc", rho_acc, "a number above 0 and of at most 1")
    check_number("x0", x0, minimum=_SMALLEST)
    return nu2(mu=mu, L=L, E=E, x0=x0, D=D) / (rho_acc * x0) - shift_theta(mu=mu, L=L, E=E)


def comm_complexity_bound(rounds: float, *, M: int, mu: float, L: float, E: int) -> float:
    """Return Proposition 3's bound on the uploads of all clients in so many learning rounds.

    ``M I (1 + mu theta + mu (1 + I) / 2)`` with I rounded up. It takes ln x for less than x - 1, as
    if the rate were 1/e: for a slower contraction `comm_count` can be more.
    """
    check_integer("M", M, minimum=1)
    whole = math.ceil(rounds)
    return M * whole * (1 + mu * shift_theta(mu=mu, L=L, E=E) + mu / 2 * (1 + whole))


def comm_count(
    rounds: float, *, M: int, mu: float, L: float, E: int, lam: float, quantized: bool = True
) -> int:
    """Return the uploads of all clients in so many learning rounds, counted: ``K_t + 1`` each."""
    check_integer("M", M, minimum=1)
    return M * sum(
        1 + k_rounds(mu=mu, L=L, E=E, t=t, lam=lam, quantized=quantized)
        for t in range(1, math.ceil(rounds) + 1)
    )
