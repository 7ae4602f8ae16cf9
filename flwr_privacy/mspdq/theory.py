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
    "lambda_min_U",
    "laplace_scale",
    "largest_stable",
    "max_coupling",
    "residual",
    "rounds_needed",
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


def laplace_scale(Df: float, eps_dp: float) -> float:
    """Return the scale of the Laplace split, ``Df / eps_dp`` (Proposition 1).

    It makes the *first* message eps_dp-private if `Df` bounds the L1 distance of trained models.
    The later messages take the noise away again.
    """
    return check_number("Df", Df, minimum=0) / check_number("eps_dp", eps_dp, minimum=_SMALLEST)
