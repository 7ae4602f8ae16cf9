"""One step with gradients clipped per record: what a scheme asks, and the proof that it was done.

A scheme wraps the user's training and sees only the arrays that come back, but its noise is right
only if they are one step from the arrays that it handed out. So the scheme opens a scope with
`asked`; the trainer that the user calls in it, e.g.
`flwr_privacy.clients.torch.train_per_record`, reads the plan and leaves a `PerRecordStep` there,
which knows the arrays before and after by their digests.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, ProtocolError, check_number
from flwr_privacy.randomness import SecureRandom

__all__ = [
    "ROUNDING",
    "PerRecordPlan",
    "PerRecordStep",
    "StepRequest",
    "asked",
    "certify",
    "current_plan",
    "digests",
    "in_step",
]

ROUNDING = 1e-3
"""Relative share of the sensitivity that is set aside for rounding.

It covers norms, clipping and sums in float64, for up to three million records: a sum of n vectors
of norm C is off by at most ``n * 2**-53`` of ``n C``, whatever the order, which has to stay under
``1e-3 * C``. Rounding to the type of the parameters does not shrink with the step, so a
`PerRecordStep` counts it by itself.
"""


@dataclass(frozen=True, kw_only=True)
class PerRecordPlan:
    """What a scheme asks: ``w - learning_rate / b * sum of clip(gradient of a record)``.

    Wei et al., "User-Level Privacy-Preserving Federated Learning", algorithm 1, lines 5 to 9.

    Parameters
    ----------
    clipping_norm : float
        L2 norm, above 0, that the gradient of a record over all parameters is clipped to.
    learning_rate : float
        Step size, above 0.
    sampling_rate : float, default 1.0
        Probability, above 0, with which a record is in the step, independently of the others; 1
        takes all records.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    clipping_norm: float
    learning_rate: float
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        for name in ("clipping_norm", "learning_rate"):
            if check_number(name, getattr(self, name)) <= 0:
                raise InvalidParameterError(name, getattr(self, name), "a number above 0")
        if not 0 < check_number("sampling_rate", self.sampling_rate) <= 1:
            raise InvalidParameterError(
                "sampling_rate", self.sampling_rate, "a number above 0 and of at most 1"
            )

    def batch(self, records: int) -> float:
        """Return b, the expected number of records in the step, by which the sum is divided.

        Examples
        --------
        >>> PerRecordPlan(clipping_norm=1.0, learning_rate=0.5, sampling_rate=0.25).batch(600)
        150.0
        """
        return self.sampling_rate * records


@dataclass(frozen=True, kw_only=True)
class PerRecordStep:
    """Certificate of a step with gradients clipped per record. It stays on the node.

    Parameters
    ----------
    plan : PerRecordPlan
        What was done.
    records : int
        Number of records n of the data set, whether they were in the step or not. It is public.
    before, after : tuple of bytes
        `digests` of the model's arrays before and after the step.
    rounding : float, default 0.0
        Largest L2 distance between the exact step and the stored one because of the type of the
        parameters. It may depend on the arrays before the step, not on the records.

    Guarantee
    ---------
    `sensitivity` bounds the L2 distance between the arrays after this step and after the same step
    on a data set in which one record was replaced by another; with sampling, for every choice of
    records. A record that was put into the data set several times counts as that many records.

    Not covered: that a step is refused because a gradient is not finite; anything that the user
    derives from the records besides the step, such as a loss.

    Examples
    --------
    >>> plan = PerRecordPlan(clipping_norm=1.0, learning_rate=1.0)
    >>> before, after = [np.zeros(2, np.float32)], [np.ones(2, np.float32)]
    >>> step = PerRecordStep(
    ...     plan=plan, records=800, before=digests(before), after=digests(after)
    ... )
    >>> round(step.sensitivity(), 7)
    0.0025025
    >>> step.check(before, after)
    >>> step.check(before, [array + 1 for array in after])
    Traceback (most recent call last):
    ...
    flwr_privacy.errors.ProtocolError: the training returned other arrays (1 of 1) than the \
per-record step made: return them as they are after the step, with nothing done in between
    """

    plan: PerRecordPlan
    records: int
    before: tuple[bytes, ...] = field(repr=False)
    after: tuple[bytes, ...] = field(repr=False)  # noiseless: whoever has it can test guesses
    rounding: float = 0.0

    def sensitivity(self) -> float:
        """Return ``2 learning_rate clipping_norm / b``, and what rounding adds.

        With sampling, a step changes by less where one record is added or removed, so an accountant
        for that relation may use it too.
        """
        plan = self.plan
        exact = 2 * plan.learning_rate * plan.clipping_norm / plan.batch(self.records)
        return (exact + 2 * self.rounding) * (1 + ROUNDING)

    def check(
        self, before: Iterable[NDArray[np.generic]], after: Iterable[NDArray[np.generic]]
    ) -> None:
        """Check that the step led from the one set of arrays to the other, bit for bit.

        Parameters
        ----------
        before : iterable of ndarray
            What the training was given. Only floating-point arrays count here and below.
        after : iterable of ndarray
            What it returned.

        Raises
        ------
        ProtocolError
            If the step started or ended at other arrays.
        """
        _compare(
            digests(before),
            self.before,
            "was given other arrays ({}) than the per-record step started at: load them into the "
            "model, all and unchanged, before the step",
        )
        _compare(
            digests(after),
            self.after,
            "returned other arrays ({}) than the per-record step made: return them as they are "
            "after the step, with nothing done in between",
        )


class StepRequest:
    """What happened in a scope that `asked` opened.

    Parameters
    ----------
    plan : PerRecordPlan
        What the scheme asks.
    random : SecureRandom
        Chooses the records of the step.
    """

    def __init__(self, plan: PerRecordPlan, random: SecureRandom) -> None:
        self.plan = plan
        self.random = random
        self._steps: list[PerRecordStep] = []

    def add(self, step: PerRecordStep) -> None:
        """Enter a step. A second one spoils the request, whatever the caller does about the error.

        Raises
        ------
        ProtocolError
            If it is the second one, or followed another plan.
        """
        self._steps.append(step)
        self._check()

    @property
    def step(self) -> PerRecordStep:
        """The step that was done.

        Raises
        ------
        ProtocolError
            If there was none, more than one, or one that followed another plan.
        """
        self._check()
        if not self._steps:
            raise ProtocolError(
                "the training did no per-record step: it has to call a per-record trainer, e.g. "
                "flwr_privacy.clients.torch.train_per_record, once and in the thread it runs in"
            )
        return self._steps[0]

    def _check(self) -> None:
        if len(self._steps) > 1:
            raise ProtocolError(
                f"the training did {len(self._steps)} per-record steps: the noise of a round is "
                "for one"
            )
        if any(step.plan != self.plan for step in self._steps):
            raise ProtocolError(
                f"the scheme asks for a step with {self.plan}, done was one with "
                f"{self._steps[0].plan}"
            )


_request: ContextVar[StepRequest | None] = ContextVar("flwr_privacy_per_record", default=None)


@contextmanager
def asked(plan: PerRecordPlan, random: SecureRandom | None = None) -> Iterator[StepRequest]:
    """Open a scope in which the user's training is to do exactly one step by `plan`.

    Scopes may be nested; the innermost one counts. Take `StepRequest.step` once the training is
    over, and `PerRecordStep.check` it against the arrays.

    Parameters
    ----------
    plan : PerRecordPlan
        What the scheme asks.
    random : SecureRandom, optional
        Chooses the records of the step; by default a new stream.

    Examples
    --------
    >>> plan = PerRecordPlan(clipping_norm=1.0, learning_rate=0.1)
    >>> with asked(plan) as request:
    ...     certify(PerRecordStep(plan=current_plan(), records=10, before=(), after=()))
    >>> request.step.records, current_plan()
    (10, None)
    """
    request = StepRequest(plan, random or SecureRandom())
    token = _request.set(request)
    try:
        yield request
    finally:
        _request.reset(token)


def current_plan() -> PerRecordPlan | None:
    """Return what the scheme around the training asks; None if there is no scheme."""
    request = _request.get()
    return None if request is None else request.plan


def in_step(plan: PerRecordPlan, records: int) -> NDArray[np.bool_]:
    """Choose the records of a step, each with the plan's sampling rate, exact to 2**-64.

    Returns
    -------
    (records,) bool ndarray
        It is secret: what the choice adds to the privacy, it adds against who does not know it.

    Examples
    --------
    >>> in_step(PerRecordPlan(clipping_norm=1.0, learning_rate=0.1), 3)
    array([ True,  True,  True])
    """
    if plan.sampling_rate == 1:
        return np.ones(records, np.bool_)
    request = _request.get()
    random = SecureRandom() if request is None else request.random
    return random.uint64(records) < np.uint64(int(math.ldexp(plan.sampling_rate, 64)))


def certify(step: PerRecordStep) -> None:
    """Hand a step to the scheme around the training; without a scheme, do nothing.

    A trainer calls this before the step shows in its model.

    Raises
    ------
    ProtocolError
        If it is the second step in the scope, or followed another plan than the scheme asks.
    """
    request = _request.get()
    if request is not None:
        request.add(step)


def digests(arrays: Iterable[NDArray[np.generic]]) -> tuple[bytes, ...]:
    """Return the SHA-256 of type, shape and values of each floating-point array, in their order.

    Examples
    --------
    >>> a = np.arange(6.0).reshape(2, 3)
    >>> digests([a, np.arange(3)]) == digests([np.asfortranarray(a)])
    True
    >>> digests([a]) == digests([a.astype(np.float32)])
    False
    """
    return tuple(
        _digest(array)
        for array in map(np.asarray, arrays)
        if np.issubdtype(array.dtype, np.floating)
    )


def _digest(array: NDArray[Any]) -> bytes:
    # A type and a shape have no line break, so no two arrays have the same bytes.
    header = f"{array.dtype.str} {array.shape}\n".encode()
    return hashlib.sha256(header + array.tobytes()).digest()


def _compare(found: tuple[bytes, ...], certified: tuple[bytes, ...], text: str) -> None:
    if len(found) != len(certified):
        raise ProtocolError(
            "the training "
            + text.format(f"{len(found)} of floating point, the model has {len(certified)}")
        )
    different = sum(a != b for a, b in zip(found, certified, strict=True))
    if different:
        raise ProtocolError("the training " + text.format(f"{different} of {len(found)}"))
