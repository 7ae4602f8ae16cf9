"""Bounds what an encoding reveals, by the paper's measure: its own bound, and tighter ones.

Source: "Adaptive Coded Federated Learning: Privacy Preservation and Straggler Mitigation" (arXiv,
2024). Its measure is the mutual information between one entry of X and the upload, for somebody
who knows all other entries and the labels (MI-DP). That is weak: the unit is one number of one
record, a record can be told apart at a small level
(`flwr_privacy.simulations.research.acfl.theory.record_epsilon`), and nothing is said of the
gradients, which are affine in the model and give ``X^T X`` and ``X^T Y`` away exactly.

Symbols: d features, o labels, entries of X in [-B_X, B_X] and of Y in [-B_Y, B_Y]; s1 and s2 are
the variances of the noise on ``X^T X`` and on ``X^T Y``. Levels are in nats;
the paper does not say which unit it has.
"""

import math
from collections.abc import Callable

from flwr_privacy.accounting.roots import root
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number

__all__ = [
    "BOUNDS",
    "eps_feature",
    "eps_feature_tight",
    "eps_label",
    "eps_label_tight",
    "mi_epsilon",
    "noise_split",
    "sigma2_for_eps",
]

BOUNDS = ("paper", "tight")
"""The names of the bounds of the mutual information."""

_SMALLEST = math.ulp(0.0)
_NO_VARIANCE = "a level that the noise of some variance gives"
_LEAST_BOUND, _LARGEST_BOUND = 1e-70, 1e70  # the fourth power of a bound must be a float


def eps_feature(
    d: int,
    o: int,
    s1: float,
    s2: float,
    *,
    B_X: float = 1.0,
    B_Y: float = 1.0,
    symmetric: bool = False,
) -> float:
    """Return the paper's bound for an entry of the features, ACFL, (17).

    ``(d - 1/2) ln(1 + B_X^4 / s1) + (o/2) ln(1 + (B_X B_Y)^2 / s2)``; the paper has bounds of 1.
    It adds up what each entry of the upload could tell by itself, and is valid, not tight.

    Parameters
    ----------
    d, o : int
        Features and labels, at least 1.
    s1, s2 : float
        Variances of the noise, at least 0; without noise the level is infinite.
    B_X, B_Y : float, default 1.0
        Bounds of the entries, above 0.
    symmetric : bool, default False
        Whether the noise on ``X^T X`` is symmetric (not in the paper). An entry then shows in d
        entries with noise of their own instead of ``2 d - 1``: d/2 in place of d - 1/2.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> round(eps_feature(10, 10, 1, 1), 6)
    10.050634
    """
    first, second = _shares(d, o, s1, s2, B_X, B_Y)
    entries = d / 2 if symmetric else d - 0.5
    return entries * math.log1p(first) + o / 2 * math.log1p(second)


def eps_label(d: int, o: int, s1: float, s2: float, *, B_X: float = 1.0, B_Y: float = 1.0) -> float:
    """Return the same kind of bound for an entry of the labels (not in the paper).

    ``(d/2) ln(1 + (B_X B_Y)^2 / s2)``. The paper's measure takes the labels as known.

    Parameters
    ----------
    d, o, s1, s2, B_X, B_Y
        As in `eps_feature`; `o` and `s1` do not matter.

    Examples
    --------
    >>> round(eps_label(10, 10, 1, 1), 6)
    3.465736
    """
    _, second = _shares(d, o, s1, s2, B_X, B_Y)
    return d / 2 * math.log1p(second)


def eps_feature_tight(
    d: int,
    o: int,
    s1: float,
    s2: float,
    *,
    B_X: float = 1.0,
    B_Y: float = 1.0,
    symmetric: bool = False,
) -> float:
    """Return a bound for an entry of the features that is never above the paper's (not in it).

    All entries that it shows in show the same number, so together they are two channels: the
    number itself, and its square in the corner::

        ln(1 + 2 (d - 1) B_X^4 / s1 + o (B_X B_Y)^2 / s2) / 2 + ln(1 + B_X^4 / (4 s1)) / 2

    Parameters
    ----------
    d, o, s1, s2, B_X, B_Y
        As in `eps_feature`.
    symmetric : bool, default False
        Whether the noise on ``X^T X`` is symmetric: then d - 1 in place of 2 (d - 1).

    Examples
    --------
    >>> round(eps_feature_tight(10, 10, 1, 1), 6)
    1.79522
    """
    first, second = _shares(d, o, s1, s2, B_X, B_Y)
    seen = (1 if symmetric else 2) * (d - 1)
    shown = (seen * first if seen else 0.0) + o * second  # 0 times infinity is 0: no such entries
    return (math.log1p(shown) + math.log1p(first / 4)) / 2


def eps_label_tight(
    d: int, o: int, s1: float, s2: float, *, B_X: float = 1.0, B_Y: float = 1.0
) -> float:
    """Return the tighter bound for an entry of the labels, ``ln(1 + d (B_X B_Y)^2 / s2) / 2``.

    Not in the paper.

    Parameters
    ----------
    d, o, s1, s2, B_X, B_Y
        As in `eps_feature`; `o` and `s1` do not matter.

    Examples
    --------
    >>> round(eps_label_tight(10, 10, 1, 1), 6)
    1.198948
    """
    _, second = _shares(d, o, s1, s2, B_X, B_Y)
    return math.log1p(d * second) / 2


def mi_epsilon(
    d: int,
    o: int,
    s1: float,
    s2: float,
    *,
    bound: str = "paper",
    B_X: float = 1.0,
    B_Y: float = 1.0,
    symmetric: bool = False,
) -> float:
    """Return the level of an upload: the larger of those of a feature's and of a label's entry.

    Parameters
    ----------
    d, o, s1, s2, B_X, B_Y
        As in `eps_feature`.
    bound : {"paper", "tight"}, default "paper"
        Which bound. ``paper``: (17), and its like for the labels.
    symmetric : bool, default False
        Whether the noise on ``X^T X`` is symmetric.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> round(mi_epsilon(2, 1, 4, 1), 6)  # here the label's
    0.693147
    """
    check_choice("bound", bound, BOUNDS)
    of_feature, of_label = eps_feature, eps_label
    if bound == "tight":
        of_feature, of_label = eps_feature_tight, eps_label_tight
    feature = of_feature(d, o, s1, s2, B_X=B_X, B_Y=B_Y, symmetric=symmetric)
    return max(feature, of_label(d, o, s1, s2, B_X=B_X, B_Y=B_Y))


def sigma2_for_eps(
    eps: float,
    d: int,
    o: int,
    *,
    bound: str = "paper",
    B_X: float = 1.0,
    B_Y: float = 1.0,
    symmetric: bool = False,
) -> float:
    """Return the variance of both noises at which `mi_epsilon` is `eps`.

    For the paper's bound and equal bounds B of all entries it is
    ``B^4 / (exp(eps / (d - 1/2 + o/2)) - 1)``.

    Parameters
    ----------
    eps : float
        The level in nats, above 0.
    d, o, bound, B_X, B_Y, symmetric
        As in `mi_epsilon`.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or no variance that a float can hold gives the level.

    Examples
    --------
    >>> round(sigma2_for_eps(1, 10, 10), 6), round(sigma2_for_eps(1, 10, 10, bound="tight"), 6)
    (14.005747, 4.656893)
    """
    check_number("eps", eps, minimum=_SMALLEST)

    def level(log_s: float) -> float:
        s = math.exp(log_s)
        return mi_epsilon(d, o, s, s, bound=bound, B_X=B_X, B_Y=B_Y, symmetric=symmetric)

    if bound == "paper" and B_X == B_Y:
        _shares(d, o, 1.0, 1.0, B_X, B_Y)  # checks them
        exponent = eps / ((d if symmetric else 2 * d - 1) + o) * 2
        s = B_X**4 * math.exp(-exponent) / -math.expm1(-exponent)
        if not 0 < s < math.inf:
            raise InvalidParameterError("eps", eps, _NO_VARIANCE)
        return s
    return math.exp(_at_level(eps, level, -700.0, 700.0))


def noise_split(
    eps: float, d: int, o: int, C2: float, *, B_X: float = 1.0, B_Y: float = 1.0
) -> tuple[float, float]:
    """Return the variances that disturb the gradient least, for one level (not in the paper).

    They minimise ``d s1 C2 + o d s2`` subject to ``eps_feature(d, o, s1, s2) = eps``. Look at
    `eps_label` after: less noise on ``X^T Y`` may raise it above `eps`.

    Parameters
    ----------
    eps : float
        Level of an entry of the features in nats, above 0.
    d, o : int
        Features and labels.
    C2 : float
        Squared norm of the model for which the noise is least, above 0.
    B_X, B_Y : float, default 1.0
        Bounds of the entries.

    Returns
    -------
    tuple of float
        s1 and s2.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or no variances that a float can hold give the level.

    Examples
    --------
    >>> [round(s, 4) for s in noise_split(1, 10, 10, 1.0)]
    [30.7805, 6.6927]
    """
    check_number("eps", eps, minimum=_SMALLEST)
    check_number("C2", C2, minimum=_SMALLEST)
    first, second = _shares(d, o, 1.0, 1.0, B_X, B_Y)

    def variances(log_price: float) -> tuple[float, float]:
        # Where the derivatives agree: s1 (s1 + B_X^4) d C2 / ((d - 1/2) B_X^4) is the price, and
        # so is s2 (s2 + (B_X B_Y)^2) 2 d / (B_X B_Y)^2.
        price = math.exp(log_price)
        return (
            _side(first, price * (d - 0.5) * first / (d * C2)),
            _side(second, price * second / (2 * d)),
        )

    def level(log_price: float) -> float:
        return eps_feature(d, o, *variances(log_price), B_X=B_X, B_Y=B_Y)

    return variances(_at_level(eps, level, -300.0, 300.0))


def _at_level(eps: float, level: Callable[[float], float], low: float, high: float) -> float:
    """Return where a level that falls from `low` to `high` is `eps`."""

    def excess(x: float) -> float:
        return math.log(max(level(x), _SMALLEST)) - math.log(eps)

    if not excess(low) > 0 > excess(high):
        raise InvalidParameterError("eps", eps, _NO_VARIANCE)
    return root(excess, low, high, absolute=1e-14, relative=1e-14)


def _shares(d: int, o: int, s1: float, s2: float, B_X: float, B_Y: float) -> tuple[float, float]:
    """Return ``B_X^4 / s1`` and ``(B_X B_Y)^2 / s2``, the signal over the noise of an entry."""
    check_integer("d", d, minimum=1)
    check_integer("o", o, minimum=1)
    for name, value in (("s1", s1), ("s2", s2)):
        check_number(name, value, minimum=0)
    _check_bound("B_X", B_X)
    _check_bound("B_Y", B_Y)
    return (
        B_X**4 / s1 if s1 > 0 else math.inf,
        (B_X * B_Y) ** 2 / s2 if s2 > 0 else math.inf,
    )


def _check_bound(name: str, value: float) -> None:
    check_number(name, value, minimum=_LEAST_BOUND, maximum=_LARGEST_BOUND)


def _side(signal: float, product: float) -> float:
    """Return the s above 0 with ``s (s + signal) = product``."""
    return 2 * product / (signal + math.hypot(signal, 2 * math.sqrt(product)))
