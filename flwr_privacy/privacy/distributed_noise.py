"""Noise that clients add in shares: only the sum has enough noise, and only the sum is opened.

Every client adds a small discrete Gaussian of its own to its codes before a secure sum. A sum of
discrete Gaussians is no discrete Gaussian; how far it is from one, and from the continuous Gaussian
that an accountant knows, is bounded here.

Sources: Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism for Federated
Learning with Secure Aggregation", ICML 2021; the bound is our own.
"""

import math

from flwr_privacy.errors import check_integer, check_number

from .noise import LARGEST_SCALE, SMALLEST_SCALE, discretisation_gap

__all__ = [
    "MOST_PARTIES",
    "SMALLEST_SHARE",
    "honest_members",
    "log_ratio_bound",
    "share_sigma",
    "summed_gap",
]

SMALLEST_SHARE = 3.0
"""Least parameter of a share, in grid steps, that `summed_gap` knows.

The sum of up to 2^40 such shares then costs less than 1e-12 more than a discrete Gaussian, for
vectors of up to 2^40 entries.
"""

MOST_PARTIES = 2**40


def share_sigma(total: float, parties: int) -> float:
    """Return the parameter of each client's share: ``total / sqrt(parties)``.

    Parameters
    ----------
    total : float
        Parameter that the noise of the sum must have, in any unit.
    parties : int
        Smallest number of honest shares in any sum that is opened, from 1 to 2^40: the smallest
        quorum minus the clients that may collude with whoever opens it.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.

    Notes
    -----
    **Guarantee.** *Protected*: integer vectors of clients, each sent once, as a code plus a share
    of discrete Gaussian noise (`flwr_privacy.privacy.noise.discrete_gaussian`), into one sum.
    *Against*: the server, and colluding clients, who know their own vectors and shares and take
    them off; they see nothing of the others but the sum. *Covered*: with at least `parties` honest
    shares in the sum, the client's own among them, it is as private as with continuous Gaussian
    noise of parameter `total`, up to `summed_gap`; a share more is independent noise on top, which
    takes nothing away. *Not covered*: a sum with fewer honest shares than `parties`, for which
    nothing is guaranteed: the caller must refuse to open it; two sums that are opened and share a
    message, or one message sent twice with different shares; codes that are clipped or refused
    after their share was added, because a share alone hides nothing (leave room for 12 standard
    deviations of the share; sums that wrap modulo something are covered); streams that are not
    `secure`.

    Examples
    --------
    >>> share_sigma(100.0, 25)
    20.0
    """
    check_number("total", total, minimum=math.ulp(0.0))
    return total / math.sqrt(check_integer("parties", parties, minimum=1, maximum=MOST_PARTIES))


def honest_members(members: int, *, trusted: int | None = None) -> int:
    """Return how many members of a noise committee count as honest.

    Parameters
    ----------
    members : int
        Members whose noise is in a sum.
    trusted : int, optional
        Nodes from which they were chosen, by whoever may collude with some of them: a fifth of
        these counts as colluding, and one at least. By default the members.

    Examples
    --------
    >>> honest_members(5), honest_members(10), honest_members(5, trusted=10)
    (4, 8, 3)
    """
    return members - max(1, (members if trusted is None else trusted) // 5)


def log_ratio_bound(sigma: float, parties: int) -> float:
    r"""Bound the distance of a sum of discrete Gaussians from one discrete Gaussian.

    They may have centres between the integers, each another one
    (`flwr_privacy.privacy.noise.discrete_gaussian_around`).

    Parameters
    ----------
    sigma : float
        Parameter of each of them in grid steps, from 2^-20 to 2^40.
    parties : int
        Number n of independent discrete Gaussians, from 1 to 2^40.

    Returns
    -------
    float
        A bound of ``|ln P_S(k) / P_Y(k)|`` for every integer k, where S is the sum and Y a discrete
        Gaussian of parameter ``sigma * sqrt(n)`` around the sum of all centres: about
        ``4 n exp(-pi**2 sigma**2)``. Infinite where the proof says nothing (sigma below 1 or so).

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.

    Notes
    -----
    Subtract its centre from each: y_j is in the integers plus a shift, and k, their sum, in the
    integers plus all shifts. The sum of the squares of y is k^2 / n plus |y - (k/n) 1|^2, where
    1 = (1, ..., 1). So

        P_S(k) = exp(-k^2 / 2 n sigma^2) W(k) / Z,   W(k) = sum exp(-|y - (k/n) 1|^2 / 2 sigma^2),

    with Z the product of the partition functions and the sum over all y that add up to k; the first
    factor is that of P_Y. Two such y differ by an integer vector whose sum is 0. So the vectors
    y - (k/n) 1 are a translate of the lattice L = {y in Z^n: sum y = 0}, in the hyperplane
    orthogonal to 1: which one, depends on k and the shifts. By Poisson's summation formula, W(k) is
    a constant times 1 + theta(k), with |theta(k)| <= T = sum exp(-2 pi^2 sigma^2 |w|^2) over the
    non-zero w of the dual lattice L*, whatever the translate. As P_S and P_Y both add up to 1,
    their ratio is between (1 - T) / (1 + T) and its inverse.

    L* is the orthogonal projection of Z^n to the hyperplane. The z in Z^n with the same projection
    w differ by multiples of 1, so just one of them has a sum s with -n/2 < s <= n/2; and then

        |w|^2 = |z|^2 - s^2 / n >= |z|^2 - |s| / 2 >= |z|^2 / 2,

    because |s| <= sum |z_i| <= |z|^2. Hence T <= (sum_j exp(-pi^2 sigma^2 j^2))^n - 1 over all
    integers j, and with x = exp(-pi^2 sigma^2) the inner sum is at most 1 + 2 x / (1 - x).

    Kairouz, Liu and Steinke have 10 sum_{k=1}^{n-1} exp(-2 pi^2 sigma^2 k / (k+1)) (theorem on the
    convolution of discrete Gaussians), which for n = 2 is 5/4 of this, and for large n less. Exact
    sums (in the tests) agree with both. For n = 2 they are a quarter of this bound; for more
    parties both bounds are far too large, which costs nothing at the parameters in use.

    Examples
    --------
    >>> f"{log_ratio_bound(4.0, 2):.2g}"
    '2.1e-68'
    """
    check_number("sigma", sigma, minimum=SMALLEST_SCALE, maximum=LARGEST_SCALE)
    check_integer("parties", parties, minimum=1, maximum=MOST_PARTIES)
    x = math.exp(-((math.pi * sigma) ** 2))
    log = parties * math.log1p(2 * x / (1 - x))  # of 1 + T
    return math.inf if log >= math.log(2) else 2 * math.atanh(math.expm1(log))


def summed_gap(dimension: int, sigma: float, parties: int) -> float:
    """Return the epsilon that noise in shares may cost beyond that of the continuous Gaussian.

    What `flwr_privacy.privacy.noise.discretisation_gap` says of a vector of discrete Gaussian noise
    holds with this gap for a sum of such vectors, compared to continuous noise of parameter ``sigma
    * sqrt(parties)``. If they are discrete Gaussian around fractions, their sum stands for a sample
    around the sum of these.

    Parameters
    ----------
    dimension : int
        Length d of the vector, >= 1.
    sigma : float
        Parameter of each share in grid steps: at least `SMALLEST_SHARE`; for one party at least 4.
    parties : int
        Number n of independent shares in the sum, from 1 to 2^40; more in the sum do no harm.

    Returns
    -------
    float
        The gap of one summed vector.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.

    Notes
    -----
    Let mu be the sum of the centres, X the continuous noise of parameter sigma sqrt(n) around mu,
    rounded to the nearest integers, Y discrete Gaussian around mu with the same parameter, and S
    the sum. `discretisation_gap` shows P_Y(B) <= exp(e_1) P_X(B) + 2 exp(-x) and P_X(B) <= exp(e_2)
    P_Y(B) + exp(-x). Coordinates are independent, so S and Y differ by at most d t in
    log-probability, with t = `log_ratio_bound`. Hence the same holds for S with e_1 + d t and e_2 +
    d t, and with exp(d t) times the first tail. At most d t = 1.1e-7 (d = 2^63, n = 2^40, sigma =
    3), within the margin of the tail of 1e-30. So 2 d t is what the gap grows by.

    Examples
    --------
    >>> summed_gap(10**6, 2.0**10, 16) == discretisation_gap(10**6, 2.0**12)
    True
    """
    check_integer("parties", parties, minimum=1, maximum=MOST_PARTIES)
    root = math.sqrt(parties)
    check_number("sigma", sigma, minimum=SMALLEST_SHARE, maximum=LARGEST_SCALE / root)
    return discretisation_gap(dimension, sigma * root) + 2 * dimension * log_ratio_bound(
        sigma, parties
    )
