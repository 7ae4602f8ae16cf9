"""Theory of MSP and MSPDQ beside the bounds on convergence: stability, bits, sampling.

Symbols and equations as in `flwr_privacy.mspdq.theory`. What is not in the paper is marked as
derived.
"""

import math

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.mspdq.theory import largest_stable

__all__ = [
    "min_bits",
    "quantizer_delta",
    "sample_draws",
    "stable",
    "sum_bits",
    "uplink_bits",
]

_SMALLEST = math.ulp(0.0)
_UPLOADS = ("fedavg", "msp", "mspdq", "jopeq")


def stable(kappa: float, a: float, m: int) -> bool:
    """Tell whether mixing converges: ``(1 + m) a < 2 - kappa + kappa a / 2`` (derived).

    Examples
    --------
    >>> stable(0.5, 0.5, 1), stable(0.5, 0.1, 17)
    (True, False)
    """
    return 0 < check_number("a", a) < largest_stable(kappa, m)


def min_bits(M: int, d: int, pi: float, *, lag: bool = True) -> int:
    """Return the bits that Assumption 3 asks for: ``ceil(log2(1 + sqrt(M d) pi))``.

    The paper has the inequality the wrong way round, and is short of the factor 2 that `lag` puts
    in front of the root: the interval of step k has the coupling of step k - 1. No experiment of
    the paper has so many bits.

    Examples
    --------
    >>> min_bits(20, 2000, 184.0), min_bits(20, 2000, 184.0, lag=False)
    (17, 16)
    """
    check_integer("M", M, minimum=1)
    check_integer("d", d, minimum=1)
    check_number("pi", pi, minimum=0)
    return math.ceil(math.log2(1 + (2 if lag else 1) * math.sqrt(M * d) * pi))


def quantizer_delta(C4: float, step: float) -> float:
    """Return the delta of one rounded value: inputs `C4` apart are (0, delta)-private.

    ``min(1, C4 / step)``, the total variation of stochastic rounding, and no less: Proposition 4
    corrected. It is for one value and one message; the shrinking of the interval takes it to 1.

    Examples
    --------
    >>> round(quantizer_delta(0.01, 184 * 0.1 / 255), 6)
    0.138587
    """
    check_number("C4", C4, minimum=0)
    check_number("step", step, minimum=_SMALLEST)
    return min(1.0, C4 / step)


def uplink_bits(scheme: str, d: int, K: int, B: int) -> int:
    """Return the bits of a client's uploads in a learning round, as the paper counts them.

    Without the scalars, and with a first upload from every client of MSPDQ also where the start is
    common to all and nobody uploads it.

    Parameters
    ----------
    scheme : {"fedavg", "msp", "mspdq", "jopeq"}
        The latter two have codes, the others float32.
    d, K, B : int
        Values of the model, mixing steps, bits of a code.

    Examples
    --------
    >>> uplink_bits("mspdq", 1, 10, 8), uplink_bits("msp", 1, 4, 8)
    (88, 160)
    """
    check_choice("scheme", scheme, _UPLOADS)
    check_integer("d", d, minimum=1)
    check_integer("K", K, minimum=0)
    check_integer("B", B, minimum=1)
    uploads = K + 1 if scheme in ("msp", "mspdq") else 1
    return (B if scheme in ("mspdq", "jopeq") else 32) * d * uploads


def sum_bits(levels: int, M: int) -> int:
    """Return the bits of a sum of the codes of M draws: what a secure sum's modulus must hold.

    At most ``B + ceil(log2 M)``.

    Examples
    --------
    >>> sum_bits(256, 20)
    13
    """
    check_integer("levels", levels, minimum=2)
    check_integer("M", M, minimum=1)
    return (M * (levels - 1)).bit_length()


def sample_draws(
    shares: NDArray[np.floating], draws: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Draw clients with replacement; return how often each was drawn.

    The mean over the draws is an unbiased estimate of the mean by shares (Lemma 1).

    Parameters
    ----------
    shares : ndarray, shape (N,)
        Probability of each client; they add up to 1.
    draws : int
        Number of draws M.
    generator : numpy.random.Generator
        Sampling is no secret.

    Raises
    ------
    InvalidParameterError
        If the shares are no probabilities or `draws` is below 1.

    Examples
    --------
    >>> int(sample_draws(np.full(100, 0.01), 20, np.random.default_rng(0)).sum())
    20
    """
    check_integer("draws", draws, minimum=1)
    if not (shares >= 0).all() or abs(float(shares.sum()) - 1) > 1e-6:
        raise InvalidParameterError("shares", float(shares.sum()), "probabilities with the sum 1")
    counts: NDArray[np.int64] = generator.multinomial(draws, shares / shares.sum())
    return counts
