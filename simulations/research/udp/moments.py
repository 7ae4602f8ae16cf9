"""The moments of the paper's proof, and the epsilon against a server that sees who takes part."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp, xlog1py

from flwr_privacy.accounting.gaussian import check_delta, delta_of, epsilon_of
from flwr_privacy.accounting.roots import root
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number

__all__ = ["eps_moments", "eps_server", "ln_moment", "ln_moment_paper"]

_SMALLEST = math.ulp(0.0)
_NEGLIGIBLE = 1e-9  # of delta: participations rarer than that count as if they gave all away


def ln_moment(q: float, r: float, lambda_: int) -> float:
    """Return the moment ``ln D10`` of a release from a client drawn with probability q; exact.

    Equation (14) before its approximation: with nu0 = N(0, sigma^2) and
    nu1 = q N(Dl, sigma^2) + (1 - q) N(0, sigma^2), the logarithm of E over nu0 of
    (nu1 / nu0)^(lambda + 1),

        ln sum_l binom(lambda + 1, l) (1 - q)^(lambda + 1 - l) q^l exp(l (l - 1) r^2 / 2).

    It is lambda times the Rényi divergence of order lambda + 1. By Lemma 1 the opposite direction,
    D01, is never larger; the text drops the logarithm. The mixture describes what somebody sees who
    does not learn who takes part. The server does.

    Parameters
    ----------
    q : float
        Probability with which the client takes part, above 0 and at most 1.
    r : float
        Sensitivity over the noise, at least 0.
    lambda_ : int
        Order, at least 1.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(ln_moment(0.6, 0.3, 5), 7), round(ln_moment(0.9, 0.25, 100), 3)
    (0.5464654, 305.005)
    """
    _check_share(q)
    check_number("r", r, minimum=0)
    n = check_integer("lambda_", lambda_, minimum=1) + 1
    # What the terms sum to beyond 1, in logarithms: l = 0 and l = 1 add nothing.
    place = np.arange(2, n + 1)
    growth = place * (place - 1.0) * r**2 / 2
    with np.errstate(divide="ignore"):
        beyond = growth + np.log(-np.expm1(-growth))
    return float(np.logaddexp(0, logsumexp(_log_binomial(place, n, q) + beyond)))


def ln_moment_paper(q: float, r: float, lambda_: float) -> float:
    """Return the right side of equation (15), ``q lambda (lambda + 1) r^2 / 2``.

    The paper takes it for an upper bound of `ln_moment` (Fig. 2, "always above") and rests Theorem
    1 on it. It equals `ln_moment` for q = 1. For q < 1 it approximates an upper bound from below
    and fails for large orders: at q = 0.9, r = 0.25, lambda = 100 it is 284 and the moment 305.

    Parameters
    ----------
    q, r
        As in `ln_moment`.
    lambda_ : float
        Order, at least 0; Theorem 1 uses broken ones.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> ln_moment_paper(0.9, 0.25, 100)
    284.0625
    """
    _check_share(q)
    check_number("r", r, minimum=0)
    check_number("lambda_", lambda_, minimum=0)
    return q * lambda_ * (lambda_ + 1) * r**2 / 2


def eps_moments(
    *,
    noise_multiplier: float,
    rounds: int,
    q: float,
    delta: float,
    lambdas: Sequence[int] = range(1, 101),
) -> float:
    """Return the epsilon of the moments accountant, against who does not learn who takes part.

    Equation (8) with the exact moments: ``(T ln D10(lambda) + ln(1/delta)) / lambda`` for the
    lambda at which that is least.

    Parameters
    ----------
    noise_multiplier : float
        Noise over the sensitivity, z, the same in all rounds; above 0.
    rounds : int
        Rounds, T.
    q : float
        Probability with which a client takes part, above 0 and at most 1.
    delta : float
        Strictly between 0 and 1.
    lambdas : sequence of int, default 1 to 100
        Orders to try, one at least.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, or there are no orders.

    Examples
    --------
    >>> round(eps_moments(noise_multiplier=4.0, rounds=200, q=0.6, delta=1e-3), 2)
    10.44
    """
    check_number("noise_multiplier", noise_multiplier, minimum=_SMALLEST)
    check_integer("rounds", rounds, minimum=1)
    check_delta(delta)
    if not lambdas:
        raise InvalidParameterError("lambdas", lambdas, "orders to search, one at least")
    return min(
        (rounds * ln_moment(q, 1 / noise_multiplier, order) - math.log(delta)) / order
        for order in lambdas
    )


def eps_server(*, noise_multiplier: float, rounds: int, q: float, delta: float) -> float:
    """Return the epsilon of a client against the server, which sees who takes part.

    The number M of its participations is binomial, and M of them are sqrt(M) / z-GDP. Who sees M
    learns at most the average of their deltas: the result is the epsilon at which it is `delta`.
    For a client that did take part more often than most, more is known afterwards.

    Parameters
    ----------
    noise_multiplier : float
        Noise over the sensitivity, z, the same in all rounds.
    rounds : int
        Rounds, T.
    q : float
        Fraction of the clients that is asked in a round.
    delta : float
        Strictly between 0 and 1.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(eps_server(noise_multiplier=5.089605, rounds=200, q=0.6, delta=1e-3), 3)
    8.411
    """
    z = check_number("noise_multiplier", noise_multiplier, minimum=_SMALLEST)
    check_integer("rounds", rounds, minimum=1)
    _check_share(q)
    check_delta(delta)
    counts = np.arange(rounds + 1)
    shares = np.exp(_log_binomial(counts, rounds, q))
    likely = shares > _NEGLIGIBLE * delta / rounds
    rest = float(shares[~likely].sum())
    views = [
        (float(share), math.sqrt(count) / z)
        for count, share in zip(counts[likely], shares[likely], strict=True)
    ]

    def excess(epsilon: float) -> float:
        return rest + sum(share * delta_of(mu, epsilon) for share, mu in views) - delta

    if excess(0.0) <= 0:
        return 0.0
    highest = epsilon_of(max(mu for _, mu in views), delta / 2)
    if math.isinf(highest):
        return math.inf
    return root(excess, 0.0, highest, absolute=1e-12)


def _log_binomial(count: NDArray[np.int64], n: int, q: float) -> NDArray[np.float64]:
    """Return the logarithm of the probability of so many successes in n trials."""
    ways = gammaln(n + 1) - gammaln(count + 1) - gammaln(n - count + 1)
    logs: NDArray[np.float64] = ways + count * math.log(q) + xlog1py(n - count, -q)
    return logs


def _check_share(q: float) -> None:
    if not 0 < check_number("q", q) <= 1:
        raise InvalidParameterError("q", q, "a number above 0 and of at most 1")
