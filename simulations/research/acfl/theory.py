"""The paper's bounds, the true effect of the noise, and the size of an upload.

Source: "Adaptive Coded Federated Learning: Privacy Preservation and Straggler Mitigation" (arXiv,
2024). Symbols: N devices, d features, o labels, p the probability that a device straggles, alpha
the weight of the coded gradient, beta2 and C2 bounds of the squared norms of a gradient and of the
model, s1 and s2 the variances of the noise on ``X^T X`` and on ``X^T Y``.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.accounting.gaussian import epsilon_of
from flwr_privacy.acfl.encoding import Moments, mirrored, moments
from flwr_privacy.acfl.weights import Weights, coded_energy, device_weights, stable_weights
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number

__all__ = [
    "alpha_bounds",
    "alpha_estimated",
    "alpha_horizon",
    "coded_fixed_point",
    "convergence_bound",
    "encode",
    "gradient_mse",
    "optimal_second_moment_bound",
    "record_epsilon",
    "record_mu",
    "second_moment_bound",
    "uplink_bits",
]

_SMALLEST = math.ulp(0.0)

Array = NDArray[np.float64]


def second_moment_bound(
    alpha: float,
    p: float,
    N: int,
    beta2: float,
    C2: float,
    s1: float,
    s2: float,
    d: int,
    o: int,
) -> float:
    """Return u, the bound of the aggregated gradient's squared norm, ACFL, (27) and (34).

    With D for ``d s1 C2 + o d s2`` it is
    ``[alpha^2 p + (1-p) (alpha + (1-alpha)/(1-p))^2 + N - 1] N beta2 + alpha^2 N D``.

    Parameters
    ----------
    alpha : float
        From 0 to 1.
    p : float
        At least 0 and below 1.
    N, beta2, C2, s1, s2, d, o
        As above.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(second_moment_bound(0.5, 0.2, 3, 2, 1.5, 0.5, 0.25, 2, 1), 9)
    19.875
    """
    check_number("alpha", alpha, minimum=0, maximum=1)
    _check(p, N, beta2)
    seen = (1 - p) * (alpha + (1 - alpha) / (1 - p)) ** 2
    noise = N * coded_energy(C2, s1, s2, d, o)
    return (alpha**2 * p + seen + N - 1) * N * beta2 + alpha**2 * noise


def optimal_second_moment_bound(
    p: float, N: int, beta2: float, C2: float, s1: float, s2: float, d: int, o: int
) -> float:
    """Return the least `second_moment_bound` over alpha, at `alpha_bounds`; ACFL, (38).

    It lies between ``N^2 beta2`` and what alpha = 0 has, ``N^2 beta2 + N beta2 p / (1 - p)``: in
    the bound the coded data gain little, however small the noise.

    Parameters
    ----------
    p, N, beta2, C2, s1, s2, d, o
        As in `second_moment_bound`.

    Examples
    --------
    >>> round(optimal_second_moment_bound(0.2, 3, 2, 1.5, 0.5, 0.25, 2, 1), 9)
    19.2
    """
    _check(p, N, beta2)
    missing = p * N * beta2 / (1 - p)
    total = missing + N * coded_energy(C2, s1, s2, d, o)
    gain = missing**2 / total if total > 0 else 0.0
    return N * beta2 / (1 - p) + N * beta2 * (N - 1) - gain


def convergence_bound(u: float, lam: float, T: int) -> float:
    """Return the paper's bound of ``E |W_T - W*|^2``, ``4 u / (lam^2 T)``; ACFL, (33) and (37).

    It does not hold for the algorithm that it is stated for. Its proof takes the noise of the
    encoding for fresh in every round, and it is drawn once: with a constant weight the model
    settles away from the optimum, see `coded_fixed_point`, while the bound goes to 0.

    Parameters
    ----------
    u : float
        Largest `second_moment_bound` over the rounds, at least 0.
    lam : float
        At most the least eigenvalue of the summed ``X^T X``, above 0; the steps are 1 / (lam t).
    T : int
        Rounds, at least 1.
    """
    check_number("u", u, minimum=0)
    check_number("lam", lam, minimum=_SMALLEST)
    check_integer("T", T, minimum=1)
    return 4 * u / (lam**2 * T)


def gradient_mse(
    alpha: float, p: float, G_list: Sequence[Array], W: Array, s1: float, s2: float
) -> float:
    """Return the expected squared error of the aggregated gradient at a fixed model.

    Not in the paper, and exact, for a weight that does not depend on who answers and for noise and
    stragglers drawn anew::

        (1-alpha)^2 p/(1-p) sum_i |G_i|^2 + alpha^2 N (d s1 |W|^2 + o d s2)

    The weight (43) minimises it, with the mean of ``|G_i|^2`` over all devices for beta2.

    Parameters
    ----------
    alpha, p
        As in `second_moment_bound`.
    G_list : sequence of ndarray
        The gradient of each device, shape (d, o).
    W : ndarray
        Model, shape (d, o).
    s1, s2 : float
        Variances of the noise.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.
    """
    check_number("alpha", alpha, minimum=0, maximum=1)
    squares = math.fsum(float(np.sum(G**2)) for G in G_list)
    _check(p, len(G_list), squares)
    d, o = W.shape
    noise = len(G_list) * coded_energy(float(np.sum(W**2)), s1, s2, d, o)
    return (1 - alpha) ** 2 * p / (1 - p) * squares + alpha**2 * noise


def uplink_bits(
    N: int, d: int, o: int, T: int, phi: int, p: float | None = None
) -> tuple[float, float]:
    """Return the bits of all uploads: of the encodings, ACFL, (12), and of the gradients, (13).

    Parameters
    ----------
    N, d, o, T : int
        Devices, features, labels, rounds.
    phi : int
        Bits of a real number, such as 64.
    p : float, optional
        Probability that a device straggles: the second number is then the expected one. Default:
        as in the paper, which counts every device in every round.

    Examples
    --------
    >>> uplink_bits(100, 10, 10, 1000, 32)
    (640000, 320000000)
    """
    for name, value in (("N", N), ("d", d), ("o", o), ("phi", phi)):
        check_integer(name, value, minimum=1)
    check_integer("T", T, minimum=0)
    gradients: float = phi * T * o * d * N
    if p is not None:
        gradients *= 1 - check_number("p", p, minimum=0, maximum=1)
    return phi * (d**2 + o * d) * N, gradients


def coded_fixed_point(A: Array, B: Array, N1: Array, N2: Array, alpha: float) -> Array:
    """Return where a training with a constant weight settles, in the mean (not in the paper).

    ``(A + alpha N1)^-1 (B + alpha N2)``, if all eigenvalues of ``A + alpha N1`` have a positive
    real part; else it diverges. For simulation: nobody but who drew the noise can compute it.

    Parameters
    ----------
    A, B : ndarray
        The moments of all devices' data, summed: shapes (d, d) and (d, o).
    N1, N2 : ndarray
        The noise of all encodings, summed.
    alpha : float
        Weight of the coded gradient, from 0 to 1.

    Raises
    ------
    InvalidParameterError
        If `alpha` is out of range.
    """
    check_number("alpha", alpha, minimum=0, maximum=1)
    return np.asarray(np.linalg.solve(A + alpha * N1, B + alpha * N2), dtype=np.float64)


def encode(
    X: Array,
    Y: Array,
    s1: float,
    s2: float,
    rng: np.random.Generator,
    *,
    symmetric: bool = False,
) -> Moments:
    """Return a local coded data set, ACFL, (2) and (3): the moments with Gaussian noise.

    The noise is of floating point and from an ordinary generator: for simulation and for checking
    formulas. What a client sends has discrete noise from a secure source.

    Parameters
    ----------
    X, Y : ndarray
        Features (m, d) and labels (m, o).
    s1, s2 : float
        Variances of the noise on the entries of ``X^T X`` and of ``X^T Y``, at least 0.
    rng : numpy.random.Generator
        Source of the noise.
    symmetric : bool, default False
        Draw the upper triangle of the first noise only and mirror it (not in the paper). The paper
        draws all entries, and the encoding of a symmetric matrix is then not symmetric.
    """
    first = math.sqrt(check_number("s1", s1, minimum=0))
    second = math.sqrt(check_number("s2", s2, minimum=0))
    exact = moments(X, Y)
    d = X.shape[1]
    if symmetric:
        noise = mirrored(rng.normal(0.0, first, d * (d + 1) // 2), d)
    else:
        noise = rng.normal(0.0, first, (d, d))
    return Moments(
        exact.features + noise, exact.labels + rng.normal(0.0, second, exact.labels.shape)
    )


def alpha_estimated(
    p: float, beta2: float, C2: float, s1: float, s2: float, d: int, o: int
) -> Weights:
    """Return the weights of the running algorithm, ACFL, (43).

    The number of devices cancels. Of the paper's formulas only this one changes over the rounds.

    Parameters
    ----------
    p, beta2
        As in `flwr_privacy.acfl.weights.stable_weights`.
    C2, s1, s2, d, o
        As in `flwr_privacy.acfl.weights.coded_energy`.

    Examples
    --------
    >>> a, w = alpha_estimated(0.2, 20, 0.04, 1, 1, 10, 10)
    >>> round(a, 8), round(w, 8)
    (0.04743833, 1.19070209)
    """
    return stable_weights(p, beta2, coded_energy(C2, s1, s2, d, o))


def alpha_bounds(
    p: float, N: int, beta2: float, C2: float, s1: float, s2: float, d: int, o: int
) -> float:
    """Return the weight of Theorem 3, ACFL, (36), from known bounds instead of estimates.

    The paper calls it adaptive; it is the same in all rounds.

    Parameters
    ----------
    p : float
        At least 0 and below 1.
    N : int
        Number of devices; it cancels.
    beta2, C2 : float
        Bounds of the squared norm of every device's gradient, and of the model.
    s1, s2, d, o
        As in `flwr_privacy.acfl.weights.coded_energy`.

    Examples
    --------
    >>> round(alpha_bounds(0.2, 3, 2, 1.5, 0.5, 0.25, 2, 1), 6)
    0.2
    """
    _check(p, N, beta2)
    missing = p * N * beta2 / (1 - p)
    noise = N * coded_energy(C2, s1, s2, d, o)
    return device_weights(missing, noise).coded


def alpha_horizon(
    p: float, beta2: float, C2: float, s1: float, s2: float, d: int, o: int, t: int
) -> Weights:
    """Return weights that look at the whole training: as `alpha_estimated`, with t D for D.

    Not in the paper, which takes the noise of the encoding for fresh in every round. It is drawn
    once. With steps that fall as 1/t the error of the stragglers averages out over the rounds and
    that of the encoding does not, and these weights minimise the sum of both. Not for stragglers
    that are the same in all rounds: their error does not average out either.

    Parameters
    ----------
    p, beta2, C2, s1, s2, d, o
        As in `alpha_estimated`.
    t : int
        The round, at least 1.
    """
    check_integer("t", t, minimum=1)
    return stable_weights(p, beta2, t * coded_energy(C2, s1, s2, d, o))


def record_mu(s1: float, s2: float, *, feature_norm: float, label_norm: float) -> float:
    """Return what an upload is for one record added or removed, in Gaussian DP (not in the paper).

    A record adds ``x x^T`` and ``x y^T``, of norms at most R_x^2 and R_x R_y, so it is mu-GDP with
    ``mu^2 = R_x^4 / s1 + (R_x R_y)^2 / s2``. With symmetric noise it is the same: a record that
    lies along an axis shows in one entry either way.

    Parameters
    ----------
    s1, s2 : float
        Variances of the noise, at least 0; without noise the result is infinite.
    feature_norm, label_norm : float
        Bounds R_x and R_y of the L2 norms of a record's features and labels, above 0. Entries of
        at most B have norm ``B sqrt(d)``.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.
    """
    for name, value in (("s1", s1), ("s2", s2)):
        check_number(name, value, minimum=0)
    for name, norm in (("feature_norm", feature_norm), ("label_norm", label_norm)):
        check_number(name, norm, minimum=_SMALLEST)
    if s1 == 0 or s2 == 0:
        return math.inf
    return math.sqrt(feature_norm**4 / s1 + (feature_norm * label_norm) ** 2 / s2)


def record_epsilon(
    s1: float, s2: float, *, feature_norm: float, label_norm: float, delta: float
) -> float:
    """Return the epsilon of an upload for one record added or removed: the usual currency.

    Parameters
    ----------
    s1, s2, feature_norm, label_norm
        As in `record_mu`.
    delta : float
        Strictly between 0 and 1.

    Examples
    --------
    >>> from flwr_privacy.acfl.privacy import sigma2_for_eps
    >>> s = sigma2_for_eps(1, 10, 10)
    >>> norm = math.sqrt(10)
    >>> round(record_epsilon(s, s, feature_norm=norm, label_norm=norm, delta=1e-5), 1)
    22.6
    """
    return epsilon_of(record_mu(s1, s2, feature_norm=feature_norm, label_norm=label_norm), delta)


def _check(p: float, N: int, beta2: float) -> None:
    if not 0 <= check_number("p", p) < 1:
        raise InvalidParameterError("p", p, "a number of at least 0 and below 1")
    check_integer("N", N, minimum=1)
    check_number("beta2", beta2, minimum=0)
