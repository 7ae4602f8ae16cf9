"""Theory of the mixing that parameters are checked with: spectra, stability, convergence.

Equations are numbered as in the paper, see `flwr_privacy.mspdq`. What follows from the dynamics and
is not in the paper is marked as derived.

Symbols: kappa is the consensus gain, a the coupling of the visible with each hidden sub-state, m
the number of hidden sub-states, M of draws in a round, K of mixing steps.
"""

import math
from collections.abc import Callable, Iterable

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number

__all__ = [
    "MOST_ROUNDS",
    "k_rounds",
    "lambda2_P",
    "lambda_min_U",
    "laplace_scale",
    "largest_stable",
    "max_coupling",
    "residual",
    "rounds_needed",
    "shift_theta",
]

MOST_ROUNDS = 10**6
"""Mixing steps beyond which `rounds_needed` gives up."""

_SMALLEST = math.ulp(0.0)


def check_kappa(kappa: float) -> None:
    """Refuse a consensus gain outside of (0, 1): beyond, the paper's range of couplings is empty.

    Raises
    ------
    InvalidParameterError
        If it is outside.
    """
    if not 0 < check_number("kappa", kappa) < 1:
        raise InvalidParameterError("kappa", kappa, "a number between 0 and 1, neither of them")


def lambda_min_U(kappa: float) -> float:
    """Return the least eigenvalue of the consensus matrix (47), ``1 - kappa``, M - 1 times.

    The largest is 1, once; so this is also the second largest.

    Raises
    ------
    InvalidParameterError
        If `kappa` is not between 0 and 1.
    """
    check_kappa(kappa)
    return 1 - kappa


def max_coupling(kappa: float) -> float:
    """Return the bound of the coupling in Theorem 2, ``(1 - kappa) / (2 - kappa)``.

    Below it the joint matrix of visible and hidden sub-states is positive semidefinite (m = 1).

    Examples
    --------
    >>> round(max_coupling(0.5), 6), round(max_coupling(0.1), 6)
    (0.333333, 0.473684)
    """
    least = lambda_min_U(kappa)
    return least / (1 + least)


def largest_stable(kappa: float, m: int) -> float:
    """Return the coupling from which on mixing diverges, equal for all hidden sub-states (derived).

    ``(2 - kappa) / (1 + m - kappa / 2)``, where an eigenvalue of P reaches -1.
    """
    check_kappa(kappa)
    check_integer("m", m, minimum=1)
    return (2 - kappa) / (1 + m - kappa / 2)


def lambda2_P(kappa: float, a: float) -> float:
    """Return the second largest eigenvalue of the joint matrix P for m = 1 (derived).

    ``1 - (kappa + 2 a - sqrt(kappa^2 + 4 a^2)) / 2``, M - 1 times. With a constant coupling
    Lemma 7 holds with this rate and C = 1, because P is symmetric.

    Examples
    --------
    >>> round(lambda2_P(0.5, 0.1), 9)
    0.91925824
    """
    check_kappa(kappa)
    check_number("a", a, minimum=0)
    return 1 - (kappa + 2 * a - math.hypot(kappa, 2 * a)) / 2


def residual(a_seq: Iterable[float], m: int) -> float:
    r"""Return how much of the first mean's error is left: :math:`\prod_k (1 - (1 + m) a[k])`.

    With equal couplings and equal m, the mean of the visible sub-states is, for every kappa, every
    number of clients and whatever was rounded on the way (derived)::

        mean(v[K]) - mean(w) = residual * (mean(v[0]) - mean(w))

    Parameters
    ----------
    a_seq : iterable of float
        The couplings a[0], ..., a[K - 1].
    m : int
        Number of hidden sub-states.

    Examples
    --------
    >>> round(residual([0.1] * 4, 1), 4)
    0.4096
    """
    check_integer("m", m, minimum=1)
    return math.prod(1 - (1 + m) * check_number("a_seq", a) for a in a_seq)


def rounds_needed(tol: float, a_fn: Callable[[int], float], m: int) -> int:
    """Return the least K at which the absolute `residual` is at most `tol`.

    Parameters
    ----------
    tol : float
        Above 0.
    a_fn : callable
        The coupling a[k] of mixing step k = 0, 1, ...
    m : int
        Number of hidden sub-states.

    Raises
    ------
    InvalidParameterError
        If `MOST_ROUNDS` steps are too few.

    Examples
    --------
    >>> rounds_needed(0.1, lambda k: 0.1, 1), rounds_needed(0.1, lambda k: 0.3 / (k + 1), 1)
    (11, 13)
    """
    check_number("tolerance", tol, minimum=_SMALLEST)
    check_integer("m", m, minimum=1)
    left = 1.0
    for k in range(MOST_ROUNDS):
        if abs(left) <= tol:
            return k
        left *= 1 - (1 + m) * a_fn(k)
    raise InvalidParameterError(
        "tolerance",
        tol,
        f"more: {MOST_ROUNDS} mixing steps leave {abs(left):.3g}; a larger or a constant coupling "
        "mixes faster",
    )


def k_rounds(*, mu: float, L: float, E: int, t: int, lam: float, quantized: bool) -> int:
    """Return the paper's number of mixing steps after learning round t (Theorems 2 and 3).

    ``ceil(log_lam eta_t)`` with ``eta_t = 2 / (mu (theta + t))``; with quantization at least
    ``ceil(1 / eta_t)``; at least 1. Lemma 7, on which it stands, wants a constant coupling: with
    a falling one it is too few (see `rounds_needed`).

    Parameters
    ----------
    mu, L : float
        Strong convexity and smoothness of the clients' losses.
    E : int
        Local steps.
    t : int
        Learning round, from 1 on.
    lam : float
        Rate of contraction, between 0 and 1.
    quantized : bool
        Whether it is for MSPDQ.
    """
    inverse = mu * (shift_theta(mu=mu, L=L, E=E) + check_integer("t", t, minimum=1)) / 2
    if not 0 < check_number("lam", lam) < 1:
        raise InvalidParameterError("lam", lam, "a number between 0 and 1, neither of them")
    steps = _ceil(-math.log(inverse) / math.log(lam))
    return max(1, steps, _ceil(inverse) if quantized else 1)


def _ceil(value: float) -> int:
    """Return the ceiling of a value that rounding may have lifted above a whole number."""
    return math.ceil(value - 1e-12 * abs(value))


def shift_theta(*, mu: float, L: float, E: int) -> float:
    """Return the theta of the paper's learning rates, ``max(8 L / mu, E) - 1``.

    Raises
    ------
    InvalidParameterError
        If a value is not positive.
    """
    check_number("mu", mu, minimum=_SMALLEST)
    check_number("L", L, minimum=_SMALLEST)
    check_integer("E", E, minimum=1)
    return max(8 * L / mu, E) - 1


def laplace_scale(Df: float, eps_dp: float) -> float:
    """Return the scale of the Laplace split, ``Df / eps_dp`` (Proposition 1).

    It makes the *first* message eps_dp-private if `Df` bounds the L1 distance of trained models.
    The later messages take the noise away again.
    """
    return check_number("Df", Df, minimum=0) / check_number("eps_dp", eps_dp, minimum=_SMALLEST)
