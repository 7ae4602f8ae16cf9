"""The paper's bounds on convergence, what holds of them, and the errors of the two roundings.

The paper's proof has three gaps. Lemma B.2 bounds an inner product of either sign as if it were
positive, and is false. Assumption 1 bounds the rounding error of a weight by a multiple of the
weight, which no rounding to a grid meets near zero. And (16) takes the smoothness of the whole
loss for that of each block, Assumption 2: with N + 1 blocks it may be sqrt(N + 1) times as large.
So the rate of Theorem 5.4 is not proved. Where only the first inequality of (16) is used, with the
whole loss's constant, a floor remains that more rounds do not lower.

Source: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split
Models" (ICML 2023), section 5.2 and appendix B. Symbols: R rounds, eta the step size of all blocks,
L a Lipschitz constant of gradients, gap the difference of the first loss to the least, V_n a bound
of the squared error of a batch's gradient in block n.
"""

import math
from collections.abc import Sequence

from flwr_privacy.errors import check_integer, check_number

__all__ = [
    "batch_gradient_variance",
    "convergence_bound_corrected",
    "convergence_bound_paper",
    "embedding_error_bound",
    "embedding_error_rms",
    "lemma_b2_corrected",
    "lemma_b2_paper",
    "lemma_b2_paper_inner",
    "rounding_variance",
    "rounding_variance_bound",
    "step_size_paper",
    "whole_smoothness",
]

_MOST_BITS = 30
_SMALLEST = math.ulp(0.0)


# Roundings


def embedding_error_bound(
    E: int, *, x_max: float, w_max: float, data_bits: int, weight_bits: int, divisor: int
) -> float:
    """Return a bound of the error that both roundings make in an entry of the aggregate.

    Parameters
    ----------
    E : int
        Columns of all owners' expanded data together, at least 1.
    x_max, w_max : float
        Bounds of the absolute values of data and weights, at least 0.
    data_bits, weight_bits : int
        Scales, as in `Scales`.
    divisor : int
        Number of clients where the aggregate is a mean, else 1.

    Returns
    -------
    float
        ``(E / divisor) (x_max 2**-lw + w_max 2**(-lx - 1) + 2**(-lx - lw - 1))``, not in the paper.
    """
    _check_scales(E, data_bits, weight_bits, divisor)
    check_number("x_max", x_max, minimum=0)
    check_number("w_max", w_max, minimum=0)
    data_error, weight_error = 2.0 ** (-data_bits - 1), 2.0**-weight_bits
    product = x_max * weight_error + w_max * data_error + data_error * weight_error
    return E / divisor * product


def embedding_error_rms(
    E: int,
    *,
    x_square: float,
    w_square: float,
    data_bits: int,
    weight_bits: int,
    divisor: int,
) -> float:
    """Return the root mean square of that error, to first order.

    The fractional parts of scaled values are taken for uniform.

    Parameters
    ----------
    E : int
        Columns of all owners' expanded data together, at least 1.
    x_square, w_square : float
        Mean squares of data and weights, at least 0.
    data_bits, weight_bits : int
        Scales, as in `Scales`.
    divisor : int
        Number of clients where the aggregate is a mean, else 1.

    Returns
    -------
    float
        ``sqrt(E) / divisor * sqrt(x_square 4**-lw / 6 + w_square 4**-lx / 12)``, not in the paper.
    """
    _check_scales(E, data_bits, weight_bits, divisor)
    check_number("x_square", x_square, minimum=0)
    check_number("w_square", w_square, minimum=0)
    variance = x_square * 4.0**-weight_bits / 6 + w_square * 4.0**-data_bits / 12
    return math.sqrt(E * variance) / divisor


def rounding_variance_bound(weight_bits: int) -> float:
    """Return a bound of a weight's mean squared rounding error: ``4**-weight_bits / 4``.

    FedVS, Assumption 1, bounds it by a multiple of the weight's square instead, which no rounding
    to multiples of ``2**-weight_bits`` meets: near zero the error is far larger than the weight.

    Parameters
    ----------
    weight_bits : int
        Scale of the weights, 0 to 30.

    Examples
    --------
    >>> rounding_variance_bound(1)
    0.0625
    """
    check_integer("weight_bits", weight_bits, minimum=0, maximum=_MOST_BITS)
    return 4.0**-weight_bits / 4


def rounding_variance(w: float, weight_bits: int) -> float:
    """Return a weight's mean squared rounding error: ``f (1 - f) 4**-weight_bits``.

    Parameters
    ----------
    w : float
        The weight; f is the fractional part of ``2**weight_bits * w``.
    weight_bits : int
        Scale of the weights, 0 to 30.

    Examples
    --------
    >>> rounding_variance(0.25, 1), rounding_variance(0.5, 1)
    (0.0625, 0.0)
    """
    check_integer("weight_bits", weight_bits, minimum=0, maximum=_MOST_BITS)
    scaled = math.ldexp(check_number("w", w), weight_bits)
    fraction = scaled - math.floor(scaled)
    return fraction * (1 - fraction) * 4.0**-weight_bits


# Convergence


def batch_gradient_variance(L: float, parameters: int, delta: float, batch: int) -> float:
    """Return V_n, the bound of a batch's squared gradient error in a block: FedVS, Lemma B.1.

    ``32 L^2 (log(2 parameters / delta) + 1/4) / batch``. The paper cites it.

    Parameters
    ----------
    L : float
        Lipschitz constant, at least 0.
    parameters : int
        Number of weights of the block, at least 1.
    delta : float
        Probability that the bound fails, above 0 and at most 1.
    batch : int
        Rows of the batch: ``K b`` of b coded rows (the paper has b), at least 1.
    """
    check_number("L", L, minimum=0)
    check_integer("parameters", parameters, minimum=1)
    check_number("delta", delta, minimum=_SMALLEST, maximum=1)
    check_integer("batch", batch, minimum=1)
    return 32 * L**2 * (math.log(2 * parameters / delta) + 0.25) / batch


def lemma_b2_paper(
    loss: float, *, eta: float, L: float, gradient: Sequence[float], error: Sequence[float]
) -> float:
    """Return FedVS, Lemma B.2, (15): what the paper takes for a bound of the next loss.

    It is none. For ``w^2 / 2`` at w = 1, with an error of -1 in the gradient and a step size of
    1/2, the weight stays at 1 and the loss at 0.5; the lemma says 0.25.

    Parameters
    ----------
    loss : float
        The loss.
    eta : float
        Step size of all blocks, above 0.
    L : float
        Lipschitz constant, above 0.
    gradient : sequence of float
        Squared norm of the loss's gradient in each block, at least 0.
    error : sequence of float
        Squared norm of the difference between the gradient that is used and that one, in each
        block, at least 0.

    Examples
    --------
    >>> lemma_b2_paper(0.5, eta=0.5, L=1, gradient=[1], error=[1])
    0.25
    """
    a, b = _blocks(eta, L, gradient, error)
    return check_number("loss", loss) + (L * eta**2 - 1.5 * eta) * a + L * eta**2 * b


def lemma_b2_paper_inner(
    loss: float, *, eta: float, L: float, gradient: Sequence[float], error: Sequence[float]
) -> float:
    """Return the first line of FedVS, (18), from which Lemma B.2 follows: false as well.

    Parameters are those of `lemma_b2_paper`.

    Examples
    --------
    >>> lemma_b2_paper_inner(0.5, eta=0.5, L=1, gradient=[1], error=[1])
    0.0
    """
    a, b = _blocks(eta, L, gradient, error)
    return check_number("loss", loss) + (L * eta**2 - 1.5 * eta) * a + (L * eta**2 - 0.5 * eta) * b


def lemma_b2_corrected(
    loss: float, *, eta: float, L: float, gradient: Sequence[float], error: Sequence[float]
) -> float:
    """Return a bound of the next loss: ``loss - eta/2 sum gradient + eta/2 sum error``.

    It follows from the first inequality of FedVS, (16), if `L` is a Lipschitz constant of the whole
    gradient and ``eta <= 1 / L``.

    Parameters are those of `lemma_b2_paper`, with a step size of at most ``1 / L``.

    Examples
    --------
    >>> lemma_b2_corrected(0.5, eta=0.5, L=1, gradient=[1], error=[1])
    0.5
    """
    a, b = _blocks(eta, L, gradient, error)
    check_number("eta", eta, maximum=1 / L)
    return check_number("loss", loss) + eta / 2 * (b - a)


def step_size_paper(L: float, rounds: int) -> float:
    """Return the step size of FedVS, Theorem 5.4: ``3 / (4 L sqrt(R))``.

    Examples
    --------
    >>> step_size_paper(1, 100)
    0.075
    """
    check_number("L", L, minimum=_SMALLEST)
    return 3 / (4 * L * math.sqrt(check_integer("rounds", rounds, minimum=1)))


def convergence_bound_paper(
    *,
    L: float,
    rounds: int,
    gap: float,
    gamma: float,
    sigma: float,
    variances: Sequence[float],
) -> float:
    """Return FedVS, Theorem 5.4: the paper's bound of the gradient's mean squared norm.

    ``16 L gap / (9 sqrt(R)) + sum_n (2 L^2 gamma^2 sigma^2 + 2 V_n) / sqrt(R)``. Its proof rests on
    a false lemma and on an assumption that cannot be met, so it is not known to hold.

    Parameters
    ----------
    L : float
        Lipschitz constant, above 0.
    rounds : int
        R, at least 1; the step size is `step_size_paper`.
    gap : float
        Difference of the first loss to the least, at least 0.
    gamma : float
        The rounding error's constant, Assumption 1, at least 0.
    sigma : float
        Bound of the norm of all weights, Assumption 4, at least 0.
    variances : sequence of float
        V_n of each block, the server's among them, at least 0.

    Examples
    --------
    >>> bound = convergence_bound_paper(L=1, rounds=100, gap=1, gamma=0, sigma=0, variances=[])
    >>> round(bound, 5)
    0.17778
    """
    check_number("L", L, minimum=_SMALLEST)
    root = math.sqrt(check_integer("rounds", rounds, minimum=1))
    check_number("gap", gap, minimum=0)
    check_number("gamma", gamma, minimum=0)
    check_number("sigma", sigma, minimum=0)
    return 16 * L * gap / (9 * root) + _noise(L, (gamma * sigma) ** 2, variances) / root


def convergence_bound_corrected(
    *,
    L: float,
    rounds: int,
    eta: float,
    gap: float,
    rounding: float,
    variances: Sequence[float],
) -> float:
    """Return a bound of the gradient's mean squared norm that follows from `lemma_b2_corrected`.

    ``2 gap / (eta R) + sum_n (2 L^2 rounding + 2 V_n)``: the second term stays, however many rounds
    there are.

    Parameters
    ----------
    L : float
        Lipschitz constant of the whole gradient, above 0; see `whole_smoothness`.
    rounds : int
        R, at least 1.
    eta : float
        Step size, above 0 and at most ``1 / L``.
    gap : float
        Difference of the first loss to the least, at least 0.
    rounding : float
        Bound of the mean squared error of all rounded weights together, at least 0: their number
        times `rounding_variance_bound`. (The paper has ``gamma^2 sigma^2``.)
    variances : sequence of float
        V_n of each block, the server's among them, at least 0.

    Examples
    --------
    >>> convergence_bound_corrected(L=1, rounds=100, eta=0.5, gap=1, rounding=0.0, variances=[])
    0.04
    """
    check_number("L", L, minimum=_SMALLEST)
    check_integer("rounds", rounds, minimum=1)
    check_number("eta", eta, minimum=_SMALLEST, maximum=1 / L)
    check_number("gap", gap, minimum=0)
    check_number("rounding", rounding, minimum=0)
    return 2 * gap / (eta * rounds) + _noise(L, rounding, variances)


def whole_smoothness(L: float, clients: int) -> float:
    """Return the Lipschitz constant of the whole gradient that FedVS, Assumption 2, gives.

    The assumption bounds the change of each block's gradient by L times the change of all weights.
    With N clients and the server there are N + 1 blocks, so the whole gradient's constant is
    ``L sqrt(N + 1)``; ``(w_0 + ... + w_N)^2`` attains it. FedVS, (16), has L.

    Parameters
    ----------
    L : float
        Lipschitz constant of every block's gradient, at least 0.
    clients : int
        N, at least 1.

    Examples
    --------
    >>> whole_smoothness(1.0, 3)
    2.0
    """
    check_number("L", L, minimum=0)
    return L * math.sqrt(check_integer("clients", clients, minimum=1) + 1)


def _noise(L: float, rounding: float, variances: Sequence[float]) -> float:
    """Return the sum over the blocks of ``2 L^2 rounding + 2 V_n``."""
    return sum(2 * L**2 * rounding + 2 * check_number("variances", v, minimum=0) for v in variances)


def _blocks(
    eta: float, L: float, gradient: Sequence[float], error: Sequence[float]
) -> tuple[float, float]:
    """Return the sums of the squared norms over the blocks."""
    check_number("eta", eta, minimum=_SMALLEST)
    check_number("L", L, minimum=_SMALLEST)
    a = sum(check_number("gradient", value, minimum=0) for value in gradient)
    b = sum(check_number("error", value, minimum=0) for value in error)
    return a, b


def _check_scales(E: int, data_bits: int, weight_bits: int, divisor: int) -> None:
    check_integer("E", E, minimum=1)
    check_integer("data_bits", data_bits, minimum=0, maximum=_MOST_BITS)
    check_integer("weight_bits", weight_bits, minimum=0, maximum=_MOST_BITS)
    check_integer("divisor", divisor, minimum=1)
