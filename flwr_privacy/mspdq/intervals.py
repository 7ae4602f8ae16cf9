"""Computes the widths of the intervals whose knobs MSPDQ's codes number.

The interval of message k + 1 lies around what was decoded of message k. Its width is the same for
all clients and coordinates and falls with the coupling (equation (20)), or it is the client's own:

``paper``
    ``pi[k] a_max[k]`` with the paper's pi (Lemma 9). pi needs the largest distance of visible and
    hidden sub-states over all clients, a Frobenius norm: it grows with the square root of the
    model's size, and below some number of bits its own rounding makes it run away.
``fixed``
    ``pi a_max[k]`` with a constant pi.
``linf``
    The same from the largest entry of any client instead of a norm. No value is ever outside of its
    interval if there are `min_levels_linf` knobs, all clients start from one vector, and the
    coupling does not grow (derived).
``bound``
    From a bound of the updates that is known beforehand, so nobody has to say anything. No value is
    outside of its interval if all clients start from the global model and keep to the bound
    (derived).
``self``
    Each client says how wide its interval must be. Never saturates, and narrower than all others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.coding.quantize import SMALLEST_WIDTH, float32_above
from flwr_privacy.errors import InvalidParameterError, check_choice, check_number

from .mixing import COUPLINGS, Mixing
from .theory import check_kappa, lambda_min_U

__all__ = [
    "RULES",
    "Intervals",
    "Widths",
    "min_levels_linf",
    "own_width",
    "pi_paper",
    "spread_gain",
    "width_linf",
    "widths_for_bound",
]

RULES = ("paper", "fixed", "linf", "bound", "self")

Vectors = NDArray[np.float64]

_SMALLEST = math.ulp(0.0)


def pi_paper(kappa: float, Wt: float) -> float:
    """Return the paper's pi, ``8 (kappa + k + k Wt) / kappa`` with ``k = max(1, kappa) = 1``.

    Parameters
    ----------
    kappa : float
        Consensus gain; the denominator is 1 minus the second eigenvalue of the consensus matrix.
    Wt : float
        Largest Frobenius norm so far of all draws' gaps between visible and hidden sub-states.

    Examples
    --------
    >>> pi_paper(0.5, 10.0)
    184.0
    """
    check_number("Wt", Wt, minimum=0)
    return 8 * (kappa + 1 + Wt) / (1 - lambda_min_U(kappa))


def spread_gain(kappa: float, coupling: str = "harmonic") -> float:
    """Return S: how far consensus lets clients drift apart, over the coupling (derived).

    ``sup over k >= 1 of sum_{l < k} (1 - kappa)^(k - 1 - l) a[l] / a[k]``.

    Parameters
    ----------
    kappa : float
        Consensus gain.
    coupling : {"const", "harmonic", "sqrt", "random"}, default "harmonic"
        How a[k] goes on. The random one is bounded by the constant one.

    Notes
    -----
    With r[k] = sum / a[k], r[k + 1] = a[k] / a[k + 1] ((1 - kappa) r[k] + 1), where a[k] / a[k + 1]
    falls. So once r falls it does so for ever, and the first maximum is the largest.

    Examples
    --------
    >>> [round(spread_gain(kappa), 3) for kappa in (0.1, 0.3, 0.5, 0.9)]
    [19.871, 5.821, 3.333, 2.0]
    """
    check_kappa(kappa)
    check_choice("coupling", coupling, COUPLINGS)
    if coupling in ("const", "random"):
        return 1 / kappa
    power = 1.0 if coupling == "harmonic" else 0.5
    k, largest, r = 1, 0.0, 2.0**power
    while r > largest:
        largest = r
        r = ((k + 2) / (k + 1)) ** power * ((1 - kappa) * r + 1)
        k += 1
    return largest


def _linf_factor(kappa: float, c: float, coupling: str) -> float:
    check_number("c", c, minimum=_SMALLEST)
    return (1 + 2 * kappa) * c + 1 + 2 * kappa * (1 + kappa * c) * spread_gain(kappa, coupling)


def width_linf(
    kappa: float,
    *,
    s: float,
    a: float,
    c: float = 1.0,
    coupling: str = "harmonic",
    apart: float = 0.0,
) -> float:
    """Return a width that no value leaves, from the largest entry of any gap (derived).

    ``2 s a ((1 + 2 kappa) c + 1 + 2 kappa (1 + kappa c) S)`` with S of `spread_gain`.

    Parameters
    ----------
    kappa : float
        Consensus gain.
    s : float
        Largest entry so far of any client's `flwr_privacy.mspdq.mixing.SubStates.gap`.
    a : float
        The coupling a_max[k]; the width is that of message k + 1.
    c : float, default 1.0
        Rounding errors may be ``c s a``: a larger c is for fewer bits.
    coupling : {"const", "harmonic", "sqrt", "random"}, default "harmonic"
        How the coupling goes on.
    apart : float, default 0.0
        What clients that do not start from one vector add, ``2 kappa (1 - kappa)^k`` times their
        largest distance from the first average; see `Widths`.

    Notes
    -----
    *Claim*: if all clients start from one vector and there are `min_levels_linf` knobs, then every
    value lies in its interval, and every rounding error is at most ``c s a[k]``.

    By induction: suppose it holds up to message k. Entry by entry, the visible sub-states' distance
    from their mean grows in a step by at most 2 s a[l] from the gaps and ``2 kappa c s a[l]`` from
    the rounding, and shrinks by 1 - kappa: it is at most ``2 (1 + kappa c) S s a[k]``. Step k moves
    a value by at most s a[k] from its gap and kappa times its decoded value's distance from the
    average, which is at most ``2 (1 + kappa c) S s a[k] + 2 c s a[k]``; and it began ``c s a[k]``
    from the centre. The sum is half the width. A rounding error is at most a step, the width over
    ``levels - 1``; this is at most ``c s a[k] / 2 <= c s a[k + 1]`` as a[k] <= 2 a[k + 1].

    Where clients start apart, `apart` bounds what is left of it, but not strictly: in tests nothing
    saturated from 4 bits on.

    Examples
    --------
    >>> round(width_linf(0.5, s=1.0, a=1.0), 12)
    16.0
    """
    check_number("s", s, minimum=0)
    check_number("a", a, minimum=0)
    return 2 * s * a * _linf_factor(kappa, c, coupling) + check_number("apart", apart, minimum=0)


def min_levels_linf(kappa: float, c: float = 1.0, *, coupling: str = "harmonic") -> int:
    """Return the knobs with which no value ever leaves an interval of `width_linf` (derived).

    Examples
    --------
    >>> min_levels_linf(0.5), min_levels_linf(0.5, 4.0)
    (33, 20)
    """
    exact = 1 + 4 / c * _linf_factor(kappa, c, coupling)
    return math.ceil(exact * (1 - 1e-12))  # S of floats may be a rounding error too large


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """The rule that decides the widths.

    Parameters
    ----------
    rule : {"paper", "fixed", "linf", "bound", "self"}, default "self"
        The rule. Under a secure sum it must be ``bound`` or ``fixed``, because no client's scalar
        may be seen.
    pi : float, default 1.0
        Width over coupling, above 0; for ``fixed`` only.
    c : float, default 1.0
        See `width_linf`; for ``linf`` only.
    bound : float, default 1.0
        Largest entry of a client's update, above 0; for ``bound`` only. What lies beyond is clipped
        to the last knob, which costs accuracy and nothing else.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    rule: str = "self"
    pi: float = 1.0
    c: float = 1.0
    bound: float = 1.0

    def __post_init__(self) -> None:
        check_choice("interval", self.rule, RULES)
        check_number("pi", self.pi, minimum=1e-20, maximum=1e20)
        check_number("c", self.c, minimum=1e-6, maximum=1e6)
        check_number("bound", self.bound, minimum=1e-20, maximum=1e20)

    @property
    def public(self) -> bool:
        """Whether the widths follow from the parameters alone, so that no client says anything."""
        return self.rule in ("fixed", "bound")

    def scalar(self, gap: Vectors) -> float:
        """Return a client's report of its gap: its norm, rounded up to float32.

        0 where the rule does not ask.

        Parameters
        ----------
        gap : ndarray of float64, shape (d,)
            `flwr_privacy.mspdq.mixing.SubStates.gap`.
        """
        if self.rule == "paper":
            return float32_above(float(np.linalg.norm(gap)))
        if self.rule == "linf":
            return float32_above(float(np.abs(gap).max(initial=0.0)))
        return 0.0


def widths_for_bound(mixing: Mixing, bound: float, levels: int) -> list[float]:
    """Return the widths of messages 1 to K that no value leaves, for updates within a bound.

    All clients start from one vector, and no entry of a client's model is further than `bound` from
    it (derived).

    Parameters
    ----------
    mixing : Mixing
        The mixing; not with random couplings.
    bound : float
        The bound, in the units of the weights.
    levels : int
        Number of knobs. With fewer than about 15 the rounding errors add up and the widths grow.

    Raises
    ------
    InvalidParameterError
        If the coupling is random.

    Notes
    -----
    Entry by entry, let x be the distance of a client's visible sub-state from their mean, y that of
    its gap g from the mean gap b, and f that of its rounding error e from their mean. Then

        x' = (1 - kappa) x + a y - kappa f,   y' = (1 - (1 + m) a) y + m kappa (x + f),
        b' = (1 - (1 + m) a) b,

    and a value comes to lie ``a b + a y - kappa x - e - kappa f`` from the centre of its interval.
    This is linear in g[0], b[0] and the errors of the messages so far. At first x is 0, g and b are
    at most ``(1 + m) bound``; an error is at most a step of its message, and f at most two. Half
    the width is the sum of the absolute coefficients times these bounds, so no value can leave it.

    Examples
    --------
    >>> widths_for_bound(Mixing(gamma=0.5, rounds=1), 0.25, 255)
    [0.5]
    >>> [round(width, 2) for width in widths_for_bound(Mixing(rounds=5), 1.0, 255)]
    [1.2, 0.74, 0.55, 0.38, 0.29]
    """
    check_number("bound", bound, minimum=0)
    if mixing.coupling == "random":
        raise InvalidParameterError("coupling", mixing.coupling, "one that is known beforehand")
    kappa, m, size = mixing.kappa, mixing.weight, mixing.rounds
    largest = (1 + m) * bound
    # Columns are what each cause has come to: y[0] = 1, then the error f = 1 of each message.
    x, y, b = np.zeros(size + 1), np.zeros(size + 1), 1.0
    y[0] = 1.0
    steps, widths = np.zeros(size + 1), []
    for k in range(size):
        a = mixing.largest_gain(k)
        place = a * y - kappa * x
        half = (abs(place[0]) + abs(a * b - place[0])) * largest
        half += 2 * float(np.abs(place[1:]) @ steps[1:]) + (1 + 2 * kappa) * steps[k] * (k > 0)
        widths.append(2 * half)
        x, y = (1 - kappa) * x + a * y, (1 - (1 + m) * a) * y + m * kappa * x
        if k > 0:
            x[k], y[k] = -kappa, m * kappa
        b *= 1 - (1 + m) * a
        steps[k + 1] = 2 * half / (levels - 1)
    return [float(width) for width in widths]


class Widths:
    """The widths of one learning round, as the server decides them; not for the rule ``self``.

    Parameters
    ----------
    intervals : Intervals
        The rule.
    mixing : Mixing
        The mixing.
    levels : int
        Number of knobs; ``bound`` uses it.
    apart : float, default 0.0
        Largest entry of any client's first decoded value minus the first average, where clients
        do not start from one vector; ``linf`` uses it.

    Raises
    ------
    InvalidParameterError
        If the rule is ``self``.

    Examples
    --------
    >>> widths = Widths(Intervals(rule="linf"), Mixing(gamma=0.1, coupling="harmonic"), 64)
    >>> round(widths.next([0.5, 2.0], [1, 1]), 9), round(widths.next([1.0, 1.5], [1, 1]), 9)
    (3.2, 1.6)
    """

    def __init__(
        self, intervals: Intervals, mixing: Mixing, levels: int, apart: float = 0.0
    ) -> None:
        if intervals.rule == "self":
            raise InvalidParameterError("interval", "self", "a rule by which the server decides")
        self._planned = (
            widths_for_bound(mixing, intervals.bound, levels) if intervals.rule == "bound" else []
        )
        self._intervals = intervals
        self._mixing = mixing
        self._apart = check_number("apart", apart, minimum=0)
        self._k = 0
        self._largest = 0.0

    def next(self, scalars: Sequence[float], draws: Sequence[int]) -> float:
        """Return the width of message k + 1, for k = 0, 1, ... in turn.

        Parameters
        ----------
        scalars : sequence of float
            `Intervals.scalar` of each client's gap at message k; none for ``fixed`` and ``bound``.
        draws : sequence of int
            How often each client was drawn.

        Raises
        ------
        InvalidParameterError
            If a scalar is negative or not finite.
        """
        for scalar in scalars:
            check_number("scalar", scalar, minimum=0)
        k, kappa = self._k, self._mixing.kappa
        a = self._mixing.largest_gain(k)
        self._k += 1
        if self._intervals.rule == "fixed":
            return self._intervals.pi * a
        if self._intervals.rule == "bound":
            return self._planned[k]
        if self._intervals.rule == "paper":
            norm = math.hypot(*(math.sqrt(n) * s for n, s in zip(draws, scalars, strict=True)))
            self._largest = max(self._largest, norm)
            return pi_paper(kappa, self._largest) * a
        self._largest = max(self._largest, *scalars)
        return width_linf(
            kappa,
            s=self._largest,
            a=a,
            c=self._intervals.c,
            coupling=self._mixing.coupling,
            apart=2 * kappa * (1 - kappa) ** k * self._apart,
        )


def own_width(visible: Vectors, centre: Vectors) -> float:
    """Return the width that a client's values need, rounded up such that its half is a float32.

    0 where there is no value to round; otherwise at least
    `flwr_privacy.coding.quantize.SMALLEST_WIDTH`.

    Parameters
    ----------
    visible : ndarray of float64, shape (d,)
        The values that are about to be rounded.
    centre : ndarray of float64, shape (d,)
        What was decoded of the message before.

    Examples
    --------
    >>> own_width(np.array([1.0, 2.5]), np.array([1.0, 2.0]))
    1.0
    """
    apart = visible - centre
    needed = 2 * float32_above(float(np.abs(apart, out=apart).max(initial=0.0)))
    return max(needed, SMALLEST_WIDTH) if needed else 0.0
