"""The paper's theorems on UDP and their corrections: moments, the server's view, convergence.

Symbols: Dl is the L2 sensitivity of a release and r = Dl / sigma; K of U clients are asked in each
of T rounds, q = K / U; F is the loss, d the number of its parameters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import wrightomega

from flwr_privacy.accounting.gaussian import check_delta, epsilon_of, mu_of
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number

__all__ = [
    "SEARCH_GRID",
    "PLProblem",
    "SearchCost",
    "b_corrected",
    "b_paper",
    "bound_corrected",
    "bound_paper",
    "c_corrected",
    "c_paper",
    "optimal_rounds",
    "search_cost",
    "stationary_rounds",
]

SEARCH_GRID = (10, 25, 50, 75, 100, 125, 150, 175, 200, 250, 300)
"""Numbers of rounds that a search for the best one tries; the paper does not give its own."""

_SMALLEST = math.ulp(0.0)
_ROUNDING = 1e-12  # by which eta may exceed 1 / Lc


# -- Convergence ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PLProblem:
    """The constants of a training that Theorem 2 assumes.

    One full-gradient step per round, without clipping, weights 1 / K, and on the loss F of every
    client: Lc-smooth, and ``F(w) - min F <= |grad F(w)|^2 / (2 mu)`` (PL). The paper's experiments
    with neural networks meet none of it.

    Parameters
    ----------
    Theta : float
        Loss at the start above the least loss, at least 0.
    mu, Lc : float
        PL constant and smoothness, ``0 < mu <= Lc``.
    eta : float
        Learning rate, above 0 and at most 1 / Lc.
    U, K : int
        Number of clients, and of those asked in a round.
    epsilon, delta : float, or list or tuple of float
        Budget of the clients over the whole training, the same for all or one value each.
    Dl : float, or list or tuple of float
        Sensitivity of a release, likewise.
    epsd : float, default 0.0
        Mean square by which the gradients of the clients differ from that of F. (The paper's
        assumption has the norm, its equation (53) the square.)
    d : int, default 1
        Number of parameters.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> problem = PLProblem(
    ...     Theta=2.3, mu=0.1, Lc=1.0, eta=1.0, U=50, K=50, epsilon=4.0, delta=1e-3, Dl=0.0025
    ... )
    >>> round(problem.A, 6)
    0.9
    """

    Theta: float
    mu: float
    Lc: float
    eta: float
    U: int
    K: int
    epsilon: float | Sequence[float]
    delta: float | Sequence[float]
    Dl: float | Sequence[float]
    epsd: float = 0.0
    d: int = 1

    def __post_init__(self) -> None:
        check_number("Theta", self.Theta, minimum=0)
        check_number("Lc", self.Lc, minimum=_SMALLEST)
        check_number("mu", self.mu, minimum=_SMALLEST, maximum=self.Lc)
        check_number("eta", self.eta, minimum=_SMALLEST, maximum=(1 + _ROUNDING) / self.Lc)
        check_integer("U", self.U, minimum=1)
        check_integer("K", self.K, minimum=1, maximum=self.U)
        check_number("epsd", self.epsd, minimum=0)
        check_integer("d", self.d, minimum=1)
        for value in self._of_clients("epsilon"):
            check_number("epsilon", value, minimum=_SMALLEST)
        for value in self._of_clients("delta"):
            check_delta(value)
        for value in self._of_clients("Dl"):
            check_number("Dl", value, minimum=_SMALLEST)

    @property
    def A(self) -> float:
        """What a round without noise leaves of the loss: ``1 - 2 mu eta + mu eta^2 Lc``."""
        return max(0.0, 1 - self.mu * self.eta * (2 - self.eta * self.Lc))

    @property
    def noise(self) -> float:
        """Sum over the clients of ``Dl^2 ln(1/delta) / epsilon^2``."""
        epsilon, delta, Dl = (
            np.asarray(self._of_clients(name), np.float64) for name in ("epsilon", "delta", "Dl")
        )
        return float(np.sum(np.square(Dl / epsilon) * -np.log(delta)))

    @property
    def spread(self) -> float:
        """How much of `epsd` a draw of K of U clients leaves: ``(U - K) / (K (U - 1))``."""
        return (self.U - self.K) / (self.K * (self.U - 1)) if self.K < self.U else 0.0

    def _of_clients(self, name: str) -> Sequence[float]:
        value: Any = getattr(self, name)
        own: Sequence[float] = value if isinstance(value, list | tuple) else [value] * self.U
        if len(own) != self.U:
            raise InvalidParameterError(name, value, f"a number, or one for each of U = {self.U}")
        return own


def b_paper(problem: PLProblem) -> float:
    """Return what a planned round adds to the loss by the paper: b of equation (22).

    ``Lc^2 / mu * K / U^2 * sum_i Dl_i^2 ln(1/delta_i) / epsilon_i^2``. It is too small; compare
    `b_corrected`. Equation (57) divides by mu where the derivation has ``mu eta (2 - eta Lc) / Lc``
    (equal at eta = 1 / Lc only), forgets that noise has d coordinates, and takes the noise of one
    client for that of the mean of K, whence its "more participants, more noise".
    """
    return problem.Lc**2 / problem.mu * problem.K / problem.U**2 * problem.noise


def c_paper(problem: PLProblem, *, extra_U: bool = False) -> float:
    """Return what drawing clients adds to the loss by the paper: c of equation (22).

    ``eta^2 Lc^2 epsd / (2 mu) * (U - K) / (K (U - 1))``, which is too small for eta below 1 / Lc;
    compare `c_corrected`.

    Parameters
    ----------
    problem : PLProblem
        The training.
    extra_U : bool, default False
        Whether to multiply by U as (22) and (59) print; (57) and (58) do not, and nothing in the
        derivation does.
    """
    c = problem.eta**2 * problem.Lc**2 * problem.epsd / (2 * problem.mu) * problem.spread
    return problem.U * c if extra_U else c


def b_corrected(problem: PLProblem) -> float:
    """Return what a planned round adds to the loss.

    ``Lc d / (U^2 mu eta (2 - eta Lc)) * sum_i Dl_i^2 ln(1/delta_i) / epsilon_i^2``, with the noise
    of equation (10). K cancels: the noise of a client grows with q = K / U, and averaging divides
    by K.
    """
    return problem.Lc * problem.d / problem.U**2 * problem.noise / _descent(problem)


def c_corrected(problem: PLProblem) -> float:
    """Return what drawing clients adds to the loss.

    ``eta Lc epsd / (2 mu (2 - eta Lc)) * (U - K) / (K (U - 1))``.
    """
    energy = problem.Lc * problem.eta**2 / 2 * problem.epsd * problem.spread
    return energy / _descent(problem)


def bound_paper(problem: PLProblem, rounds: float, *, extra_U: bool = False) -> float:
    """Return the bound of Theorem 2 as printed; for most trainings it is none.

    ``A^T Theta + (1 - A^T)(b T + c)``, equations (22) and (59), with `b_paper` and `c_paper`. It is
    below what a quadratic loss truly has for eta < 1 / Lc (K = 1) and wherever d > K.

    Parameters
    ----------
    problem : PLProblem
        The training.
    rounds : float
        Rounds planned, T, at least 0.
    extra_U : bool, default False
        As in `c_paper`.

    Raises
    ------
    InvalidParameterError
        If `rounds` is out of range.

    Examples
    --------
    >>> problem = PLProblem(
    ...     Theta=2.3, mu=0.1, Lc=1.0, eta=1.0, U=50, K=50, epsilon=4.0, delta=1e-3, Dl=0.0025
    ... )
    >>> round(bound_paper(problem, 86), 6)
    0.002587
    """
    b, c = b_paper(problem), c_paper(problem, extra_U=extra_U)
    return _loss(rounds, problem.Theta, problem.A, b, c)


def bound_corrected(problem: PLProblem, rounds: float) -> float:
    """Return an upper bound of the expected loss above the least one after T rounds.

    The recursion of Theorem 2 done again, with the noise of equation (10):
    ``A^T Theta + (1 - A^T)(b T + c)`` with `b_corrected` and `c_corrected`. For quadratic losses
    with mu = Lc it is met exactly.

    Parameters
    ----------
    problem : PLProblem
        The training.
    rounds : float
        Rounds planned, T, at least 0.

    Raises
    ------
    InvalidParameterError
        If `rounds` is out of range.
    """
    b, c = b_corrected(problem), c_corrected(problem)
    return _loss(rounds, problem.Theta, problem.A, b, c)


def stationary_rounds(Theta: float, A: float, b: float, c: float) -> float:
    """Return where ``A^T Theta + (1 - A^T)(b T + c)`` is least over real T >= 0.

    With a = -ln A and M = 1 + a (Theta - c) / b the derivative is zero where
    ``e^(a T) + a T = M``, so ``T = (M - W(e^M)) / a`` with Lambert's W. Theorem 3 claims a minimum
    for a "sufficiently large U" and offers a search. There is exactly one minimum for every U and
    K, and the number of clients does not help: what (23) and (24) say of it rests on a last term
    that is misprinted (they have T and 1 / U where ``-2 b / ln A`` belongs).

    Parameters
    ----------
    Theta : float
        Loss at the start above the least loss, at least 0.
    A : float
        Factor of a round, at least 0 and below 1.
    b : float
        What a planned round adds, above 0.
    c : float
        What remains without noise, at least 0.

    Returns
    -------
    float
        The minimum; 0 if Theta <= c.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(stationary_rounds(2.3, 0.9, 2.698342e-5, 0.0), 3)
    86.388
    """
    check_number("Theta", Theta, minimum=0)
    if not 0 <= check_number("A", A) < 1:
        raise InvalidParameterError("A", A, "a number of at least 0 and below 1")
    check_number("b", b, minimum=_SMALLEST)
    check_number("c", c, minimum=0)
    if Theta <= c or A == 0:
        return 0.0
    a = -math.log(A)
    M = 1 + a * (Theta - c) / b
    if math.isinf(M):
        raise InvalidParameterError("b", b, "a number that is not vanishing beside Theta - c")
    # W(e^M) without e^M: omega = W(e^M) solves omega + ln omega = M, and M - omega = ln omega.
    return max(0.0, math.log(float(wrightomega(M)))) / a


def optimal_rounds(Theta: float, A: float, b: float, c: float) -> int:
    """Return the number of rounds T that makes ``A^T Theta + (1 - A^T)(b T + c)`` least.

    The better of the two integers beside `stationary_rounds`: the bound falls before and rises
    after.

    Parameters
    ----------
    Theta, A, b, c : float
        As in `stationary_rounds`.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> optimal_rounds(2.3, 0.9, 2.698342e-5, 0.0), optimal_rounds(1.0, 0.9, 1e-5, 1.0)
    (86, 0)
    """
    before = math.floor(stationary_rounds(Theta, A, b, c))
    return min((before, before + 1), key=lambda rounds: _loss(rounds, Theta, A, b, c))


# -- What a search costs -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SearchCost:
    """What a search for the best number of rounds costs.

    Parameters
    ----------
    runs : int
        Trainings.
    rounds : int
        Rounds of all of them.
    mu : float
        Gaussian differential privacy of all of them together, for a client that is in all.
    epsilon : float
        The same as epsilon, at the delta of one training.
    """

    runs: int
    rounds: int
    mu: float
    epsilon: float


def search_cost(
    grid: Sequence[int] = SEARCH_GRID, *, epsilon: float, delta: float, repeats: int = 1
) -> SearchCost:
    """Return what it costs to train with each number of rounds of a grid and take the best.

    The baseline "optimal UDP" does so. The paper counts neither its rounds (of which CRD takes at
    most T0, once) nor its privacy. m trainings of mu-GDP each are ``mu sqrt(m)``-GDP together, also
    if later ones are chosen by what earlier ones gave.

    Parameters
    ----------
    grid : sequence of int, default `SEARCH_GRID`
        Numbers of rounds that are tried.
    epsilon, delta : float
        What one training truly gives, as Gaussian differential privacy: the cap of a ledger, or for
        the paper's noise what is computed from it, not the epsilon that equation (10) claims.
    repeats : int, default 1
        Trainings per number of rounds.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> cost = search_cost(epsilon=4.0, delta=1e-3)
    >>> cost.runs, cost.rounds, round(cost.mu, 3), round(cost.epsilon, 2)
    (11, 1460, 4.03, 19.83)
    """
    if not grid:
        raise InvalidParameterError("grid", grid, "at least one number of rounds")
    for rounds in grid:
        check_integer("grid", rounds, minimum=1)
    runs = len(grid) * check_integer("repeats", repeats, minimum=1)
    mu = mu_of(epsilon, delta) * math.sqrt(runs)
    return SearchCost(runs=runs, rounds=repeats * sum(grid), mu=mu, epsilon=epsilon_of(mu, delta))


def _descent(problem: PLProblem) -> float:
    return problem.mu * problem.eta * (2 - problem.eta * problem.Lc)


def _loss(rounds: float, Theta: float, A: float, b: float, c: float) -> float:
    check_number("rounds", rounds, minimum=0)
    left: float = A**rounds
    return left * Theta + (1 - left) * (b * rounds + c)
