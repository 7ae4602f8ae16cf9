"""Computes the adaptive weight of the coded gradient against the gradients that arrived.

Source: "Adaptive Coded Federated Learning: Privacy Preservation and Straggler Mitigation" (arXiv,
2024). The server mixes the gradient of the coded data, which is noisy and misses nobody, with the
sum of the gradients that came, which are clean and miss the stragglers (ACFL, (9)).

Symbols: p is the probability that a device straggles, beta2 the mean squared norm of a gradient,
C2 the squared norm of the model, D the expected squared norm of the noise that one device's
encoding puts into the coded gradient, N the number of devices.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number

__all__ = [
    "POLICIES",
    "AlphaPolicy",
    "Weights",
    "coded_energy",
    "device_weights",
    "stable_weights",
]

POLICIES = ("estimated", "bounds", "horizon")
"""The names of the policies that compute the weight."""

_SMALLEST = math.ulp(0.0)


class Weights(NamedTuple):
    """The factors of the two parts of the aggregated gradient, ACFL, (9)."""

    coded: float
    """Weight of the coded gradient: the paper's alpha, from 0 to 1."""

    received: float
    """Weight of the plain sum of the gradients that came: ``(1 - alpha) / (1 - p)``."""


def coded_energy(
    C2: float, s1: float, s2: float, d: int, o: int, *, symmetrised: bool = False
) -> float:
    """Return D, ``d s1 C2 + o d s2``: what the noise of one encoding is worth in the gradient.

    Parameters
    ----------
    C2 : float
        Squared Frobenius norm of the model, at least 0; infinite where the model diverged.
    s1, s2 : float
        Variances of the noise on the entries of ``X^T X`` and of ``X^T Y``, at least 0.
    d, o : int
        Features and labels.
    symmetrised : bool, default False
        Whether the server symmetrised a noise that is not symmetric (not in the paper): the first
        term is then ``(d + 1) / 2 * s1 C2``. Noise that is symmetric from the start counts as in
        the paper.

    Examples
    --------
    >>> coded_energy(0.5, 0.5, 0.2, 2, 1)
    0.9
    """
    _check_energy("C2", C2)
    check_number("s1", s1, minimum=0)
    check_number("s2", s2, minimum=0)
    check_integer("d", d, minimum=1)
    check_integer("o", o, minimum=1)
    rows = (d + 1) / 2 if symmetrised else d
    # Without noise the product is 0, even where the model has diverged.
    return (rows * s1 * C2 if s1 > 0 else 0.0) + o * d * s2


def stable_weights(p: float, beta2: float, D: float, *, gradient_noise: float = 0.0) -> Weights:
    """Return the weights that minimise the error of one round's gradient, ACFL, (43).

    With v for `gradient_noise` they minimise ``(1 - a)^2 (p beta2 + v) / (1 - p) + a^2 D``::

        den = p beta2 + v + (1 - p) D        a = (p beta2 + v) / den        w = D / den

    Nothing is divided by 1 - p, and ``a + (1 - p) w = 1`` whatever v is. The paper has v = 0.

    Parameters
    ----------
    p : float
        Probability that a device straggles, from 0 to 1.
    beta2 : float
        Mean squared norm of a gradient without its noise, at least 0.
    D : float
        As `coded_energy` gives it, at least 0.
    gradient_noise : float, default 0.0
        Expected squared norm of the noise in one gradient that came (not in the paper).

    Returns
    -------
    Weights
        Where neither part has an error (``den = 0``), or one is not finite: a = 0 and
        ``w = 1 / (1 - p)``, or w = 1 for p = 1. None of these cases is in the paper.

    Raises
    ------
    InvalidParameterError
        If `p` is no probability, or another value is negative.

    Examples
    --------
    >>> stable_weights(0.5, 5.0, 3.0)
    Weights(coded=0.625, received=0.75)
    """
    check_number("p", p, minimum=0, maximum=1)
    for name, value in (("beta2", beta2), ("D", D), ("gradient_noise", gradient_noise)):
        _check_energy(name, value)
    uncoded = Weights(0.0, 1 / (1 - p) if p < 1 else 1.0)
    energies = (beta2, gradient_noise, D)
    if not all(map(math.isfinite, energies)):
        return uncoded
    # Only ratios matter: a power of two keeps sums from overflow and products from underflow.
    shift = -math.frexp(max(energies))[1]
    square, noise, coded = (math.ldexp(x, shift) for x in energies)
    missing = p * square + noise
    den = missing + (1 - p) * coded
    if not (den > 0 and math.isfinite(coded / den)):
        return uncoded
    return Weights(missing / den, coded / den)


def device_weights(S: float, energy: float) -> Weights:
    """Return the weights for devices that straggle each with its own probability.

    Not in the paper. The part that came is then ``sum_i I_i G_i / (1 - p_i)``, and
    ``a = S / (S + energy)``, ``w = 1 - a``.

    Parameters
    ----------
    S : float
        Error of that part, ``sum_i p_i / (1 - p_i) |G_i|^2``, which
        ``sum_i I_i p_i / (1 - p_i)^2 |G_i|^2`` estimates without bias.
    energy : float
        Error of the coded gradient: D of all devices together. Only the ratio of the two matters.

    Examples
    --------
    >>> round(device_weights(9.25, 2.0).coded, 7)
    0.8222222
    """
    return stable_weights(0.0, 0.0, energy, gradient_noise=S)


class AlphaPolicy:
    """Chooses the weights of each round of a training, from the rounds so far.

    Parameters
    ----------
    policy : {"estimated", "bounds", "horizon"} or float
        ``estimated``: (43), the paper's algorithm. ``bounds``: the weight of Theorem 3, from
        `gradient_bound` and the energy that the caller computes from `model_bound`. ``horizon``:
        (43) with t D for D, because the noise of the encoding does not average out over the rounds
        (not in the paper). A number from 0 to 1: that weight in all rounds.
    straggler_rate : float, mapping of str to float, or None
        Probability that a device straggles, at least 0 and below 1: of all, or of each by its name
        (not in the paper). None estimates it (not in the paper): one minus the mean share that
        answered, at most 1 - 1/N.
    predictable : bool, default False
        Weigh a round by what the rounds before have shown, if there is one (not in the paper). The
        weights then do not depend on who answers in the round, and its gradient has no bias from
        that.
    gradient_bound : float, optional
        beta, above 0: bound of the norm of every gradient. For ``bounds``.
    model_bound : float, optional
        C, above 0: bound of the norm of the model. For ``bounds``.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or ``bounds`` has none.

    Examples
    --------
    >>> policy = AlphaPolicy("estimated", straggler_rate=0.25)
    >>> a, w = policy.weigh(t=1, answered=1, devices=2, squares=1.125, energy=0.9)
    >>> round(a, 7), round(w, 7)
    (0.2941176, 0.9411765)
    """

    def __init__(
        self,
        policy: str | float,
        *,
        straggler_rate: float | Mapping[str, float] | None,
        predictable: bool = False,
        gradient_bound: float | None = None,
        model_bound: float | None = None,
    ) -> None:
        self.policy = (
            check_choice("alpha", policy, POLICIES)
            if isinstance(policy, str)
            else check_number("alpha", policy, minimum=0, maximum=1)
        )
        self._known = straggler_rate is not None
        self._odds: float | None = None  # mean of p / (1 - p), and of 1 / (1 - p), if they differ
        self._shown = 1.0
        self._rate: float | None = None
        if isinstance(straggler_rate, Mapping):
            if not straggler_rate:
                raise InvalidParameterError("straggler_rate", {}, "a rate for each device")
            rates = [_check_rate("straggler_rate", rate) for rate in straggler_rate.values()]
            self._odds = math.fsum(p / (1 - p) for p in rates) / len(rates)
            self._shown = math.fsum(1 / (1 - p) for p in rates) / len(rates)
        elif straggler_rate is not None:
            self._rate = _check_rate("straggler_rate", straggler_rate)
        for name, bound in (("gradient_bound", gradient_bound), ("model_bound", model_bound)):
            if bound is not None:
                check_number(name, bound, minimum=_SMALLEST)
            elif policy == "bounds":
                raise InvalidParameterError(name, None, "a bound, which alpha = 'bounds' needs")
        self.predictable = predictable
        self._bound_square = None if gradient_bound is None else gradient_bound**2
        self._rounds = 0
        self._shares = 0.0  # sum over the rounds of the share that answered
        self._beta2: float | None = None

    @property
    def rate(self) -> float | None:
        """The probability of straggling that the last round was weighed with.

        None where each device has its own, and before the first round if it is to be estimated.
        """
        return self._rate

    @property
    def beta2(self) -> float | None:
        """The last estimate of a gradient's mean squared norm; None before there is one.

        Where each device has its own rate: of ``p_i / (1 - p_i) |G_i|^2``, the mean over all.
        """
        return self._beta2

    def weigh(
        self,
        *,
        t: int,
        answered: int,
        devices: int,
        squares: float,
        energy: float,
        gradient_noise: float = 0.0,
    ) -> Weights | None:
        """Weigh one round, and remember it; to be called once for each round, in their order.

        Parameters
        ----------
        t : int
            The round, at least 1.
        answered, devices : int
            How many gradients came, of how many devices.
        squares : float
            Sum of the squared norms of the gradients that came, without their noise: where the
            gradients have noise, what it is expected to add is to be subtracted, and a result
            below 0 counts as 0. Where each device has its own rate p_i, the norms are weighed:
            ``sum_i I_i p_i / (1 - p_i)^2 |G_i|^2``.
        energy : float
            D of one device, see `coded_energy`; for ``bounds`` with the square of `model_bound`
            for C2.
        gradient_noise : float, default 0.0
            Expected squared norm of the noise in one gradient that came, at least 0.

        Returns
        -------
        Weights or None
            None: nobody has ever answered, and so there is nothing to weigh by; the model stays.
            Where each device has its own rate, the second weight is for
            ``sum_i I_i G_i / (1 - p_i)``.

        Raises
        ------
        InvalidParameterError
            If a value is out of range.
        """
        check_integer("t", t, minimum=1)
        check_integer("devices", devices, minimum=1)
        check_integer("answered", answered, minimum=0, maximum=devices)
        before = (self._beta2, self._rounds, self._shares)
        self._rounds += 1
        self._shares += answered / devices
        if answered > 0:
            self._beta2 = max(squares, 0.0) / (answered if self._odds is None else devices)
        now = (self._beta2, self._rounds, self._shares)
        beta2 = before[0] if self.predictable and before[0] is not None else now[0]
        if not self._known:
            _, rounds, shares = before if self.predictable and before[1] else now
            self._rate = min(max(1 - shares / rounds, 0.0), 1 - 1 / devices)
        if not isinstance(self.policy, str):
            return Weights(self.policy, (1 - self.policy) / (1 - (self._rate or 0.0)))
        if self.policy == "horizon":
            energy *= t
        if self.policy == "bounds":
            beta2 = self._bound_square
        if beta2 is None:
            return None
        if self._odds is None:
            return stable_weights(self._rate or 0.0, beta2, energy, gradient_noise=gradient_noise)
        missing = beta2 * self._odds if self.policy == "bounds" else beta2
        return device_weights(missing + self._shown * gradient_noise, energy)

    def state(self) -> dict[str, Any]:
        """Return what is remembered, as plain values that JSON keeps."""
        return {
            "rounds": self._rounds,
            "shares": self._shares,
            "beta2": self._beta2,
            "rate": self._rate,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Remember what `state` has returned, in place of what is remembered now."""
        self._rounds = check_integer("rounds", state["rounds"], minimum=0)
        self._shares = check_number("shares", state["shares"], minimum=0)
        self._beta2 = None if state["beta2"] is None else float(state["beta2"])
        if not self._known:
            self._rate = None if state["rate"] is None else float(state["rate"])


def _check_rate(parameter: str, rate: float) -> float:
    if not 0 <= check_number(parameter, rate) < 1:
        raise InvalidParameterError(parameter, rate, "a number of at least 0 and below 1")
    return float(rate)


def _check_energy(name: str, value: float) -> None:
    """Refuse what is negative; a model that diverges may have an energy that is not finite."""
    if value < 0:
        raise InvalidParameterError(name, value, "a number of at least 0")
