"""Plans and certificates of training with gradients clipped per record.

A scheme wraps the user's training and sees only the arrays that come back, but its noise is right
only if they are the requested steps from the arrays that it handed out. So it opens a scope with
`asked`; the trainer that the user calls in it, e.g.
`flwr_privacy.clients.torch.train_per_record`, reads the plan and leaves a `PerRecordStep` there,
which knows the arrays before and after by their digests.

Before the first charge a scheme rehearses it: `flwr_privacy.clients.node.rehearsal`.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_number
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import SMALLEST_NORM
from flwr_privacy.udp.sensitivity import RECORD_UNIT, check_steps, sensitivity

from .request import TrainingCertificate, TrainingRequest, chosen, not_declared, opened

__all__ = [
    "ROUNDING",
    "PerRecordPlan",
    "PerRecordStep",
    "StepRequest",
    "asked",
    "certify",
    "current_plan",
    "in_step",
]

ROUNDING = 1e-3
"""Relative share of the sensitivity that is set aside for rounding.

It covers norms, clipping and sums, for up to two million records. A sum of n vectors of norm C in
float64 is off by at most ``n * 2**-53`` of ``n C``, whatever the order. Where 64 vectors at a time
are summed in float32, one replaced record changes one such sum, by ``64**2 * 2**-24 * C`` at most
beyond what it should. Both together stay under ``1e-3 * C``. That is so in each step, and the
sensitivity of several steps is at least as large as what each of them can add, so the share does
not grow with their number. Rounding to the type of the parameters does not shrink with the step, so
a `PerRecordStep` counts it by itself.
"""


@dataclass(frozen=True, kw_only=True)
class PerRecordPlan:
    """A plan of steps ``w - learning_rate / b * sum of clip(gradient of a record)``.

    Wei et al., "User-Level Privacy-Preserving Federated Learning", algorithm 1, lines 5 to 9, is
    one step on all records.

    Parameters
    ----------
    clipping_norm : float
        L2 norm, above 0, that the gradient of a record over all parameters is clipped to.
    learning_rate : float
        Step size, above 0.
    sampling_rate : float, default 1.0
        Probability, above 0, with which a record is in the step, independently of the others; 1
        takes all records. Below 1 there is one step.
    epochs : int, default 1
        Passes over the records.
    batch_size : int, optional
        Records of a step, in the order in which they are given; by default all.
    bound : {"general", "convex", "unproven"}
        Which sensitivity several steps have; see `flwr_privacy.udp.sensitivity.BOUNDS`. For
        ``convex`` the trainer checks that the model is linear with one output, and whoever asks
        vouches for the loss and the learning rate.
    records : int, optional
        Number of records that the node has declared, at least 1. The steps, the divisor and the
        sensitivity are those of so many, whatever the data set has: records beyond it are left out,
        and missing ones count as zero. By default the data set says how many there are, and the
        sensitivity is only known with it.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    clipping_norm: float
    learning_rate: float
    sampling_rate: float = 1.0
    epochs: int = 1
    batch_size: int | None = None
    bound: str = "general"
    records: int | None = None

    def __post_init__(self) -> None:
        check_number("clipping_norm", self.clipping_norm, minimum=SMALLEST_NORM)
        for name in ("learning_rate", "sampling_rate"):
            if check_number(name, getattr(self, name)) <= 0:
                raise InvalidParameterError(name, getattr(self, name), "a number above 0")
        check_steps(
            RECORD_UNIT,
            sampling_rate=self.sampling_rate,
            epochs=self.epochs,
            batch_size=self.batch_size,
            bound=self.bound,
        )
        if self.records is not None:
            self.sensitivity()  # raises if there are none, or fewer than a batch has

    def count(self, records: int | None = None) -> int:
        """Return the number of records that the steps are for: the declared one, or else `records`.

        Raises
        ------
        InvalidParameterError
            If there is neither.

        Examples
        --------
        >>> PerRecordPlan(clipping_norm=1.0, learning_rate=0.5).count(600)
        600
        >>> PerRecordPlan(clipping_norm=1.0, learning_rate=0.5, records=500).count(600)
        500
        """
        count = records if self.records is None else self.records
        if count is None:
            raise InvalidParameterError("records", None, "a number, as the plan declares none")
        return count

    def batch(self, records: int | None = None) -> float:
        """Return b, the expected number of records in a step, by which its sum is divided.

        Examples
        --------
        >>> PerRecordPlan(clipping_norm=1.0, learning_rate=0.5, sampling_rate=0.25).batch(600)
        150.0
        """
        if self.batch_size is not None:
            return self.batch_size
        return self.sampling_rate * self.count(records)

    def steps(self, records: int | None = None) -> int:
        """Return the number of steps.

        Examples
        --------
        >>> plan = PerRecordPlan(clipping_norm=1.0, learning_rate=0.5, epochs=2, batch_size=128)
        >>> plan.steps(800)
        14
        """
        if self.batch_size is None:
            return self.epochs
        return self.epochs * -(-self.count(records) // self.batch_size)

    def sensitivity(self, records: int | None = None) -> float:
        """Return the sensitivity of the exact steps: `flwr_privacy.udp.sensitivity.sensitivity`.

        Where the plan declares the number of records, `records` is not used.

        Raises
        ------
        InvalidParameterError
            If there are no records, or fewer than a batch has, or nobody says how many.
        """
        return sensitivity(
            RECORD_UNIT,
            clipping_norm=self.clipping_norm,
            learning_rate=self.learning_rate,
            records=self.count(records),
            sampling_rate=self.sampling_rate,
            epochs=self.epochs,
            batch_size=self.batch_size,
            bound=self.bound,
        )


@dataclass(frozen=True, kw_only=True)
class PerRecordStep(TrainingCertificate[PerRecordPlan]):
    """Certificate of a local training with gradients clipped per record. It stays on the node.

    It is the whole training, from the arrays that came in to those that go out: one step by
    default, as many as the plan has otherwise.

    Parameters
    ----------
    plan : PerRecordPlan
        What was done.
    records : int
        Number of records n of the data set, whether they were in the steps or not; the declared one
        where the plan has it. It is public.
    before, after : tuple of bytes
        `digests` of the model's arrays before and after the training.
    rounding : float, default 0.0
        Largest L2 distance between the weights that the steps led to and the stored ones because of
        the type of the parameters, all steps together. It may depend on the arrays before the
        training, not on the records.

    Guarantee
    ---------
    `sensitivity` bounds the L2 distance between the arrays after this training and after the same
    training on a data set in which one record was replaced by another, in the same place; with
    sampling, for every choice of records. A record that was put into the data set several times
    counts as that many records. With a declared number the data set may also have one record fewer
    at its end. With the bound ``convex`` this rests on what whoever asks vouches for; with
    ``unproven`` and more than one step it does not hold.

    It holds for every record: one whose gradient is not finite, or for which the model or the loss
    raises, counts as zero, and the others as if it were an ordinary one.

    Not covered: how long the training takes; that it fails because memory or a device is lacking;
    anything that the user derives from the records besides it, such as a loss.

    Examples
    --------
    >>> from flwr_privacy.clients.certificates.request import digests
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
per-record training made: return them as they are after it, with nothing done in between
    """

    training: ClassVar[str] = "per-record training"

    rounding: float = 0.0

    def sensitivity(self) -> float:
        """Return the plan's sensitivity for this number of records, and what rounding adds.

        With sampling it is twice the distance of a step with a record from the same step without
        it, as an accountant needs it for a replaced record (`Charge.sampling`). Both steps are
        rounded, so what rounding adds counts twice.
        """
        moved = 2 * self.rounding if self.plan.sampling_rate == 1 else 4 * self.rounding
        return (self.plan.sensitivity(self.records) + moved) * (1 + ROUNDING)


class StepRequest(TrainingRequest[PerRecordStep]):
    """The events of a scope that `asked` opened."""

    plan: PerRecordPlan
    missing = (
        "the training did no per-record step: it has to call a per-record trainer, e.g. "
        "flwr_privacy.clients.torch.train_per_record, once and in the thread it runs in"
    )
    several = (
        "the training called a per-record trainer {} times: the noise of a round is for once; more "
        "steps are settings of the scheme"
    )

    def _differing(self, certificate: PerRecordStep) -> str:
        return super()._differing(certificate) or not_declared(
            self.plan.records, certificate.records
        )


_request: ContextVar[StepRequest | None] = ContextVar("flwr_privacy_per_record", default=None)


def asked(
    plan: PerRecordPlan, random: SecureRandom | None = None
) -> AbstractContextManager[StepRequest]:
    """Open a scope in which the user's training is to do exactly what `plan` says, once.

    Scopes may be nested; the innermost one counts. Take `StepRequest.certificate` once the training
    is over, and `PerRecordStep.check` it against the arrays.

    Parameters
    ----------
    plan : PerRecordPlan
        What the scheme asks.
    random : SecureRandom, optional
        Chooses the records of a sampled step; by default a new stream.

    Examples
    --------
    >>> plan = PerRecordPlan(clipping_norm=1.0, learning_rate=0.1)
    >>> with asked(plan) as request:
    ...     certify(PerRecordStep(plan=current_plan(), records=10, before=(), after=()))
    >>> request.certificate.records, current_plan()
    (10, None)
    """
    return opened(_request, StepRequest(plan, random))


def current_plan() -> PerRecordPlan | None:
    """Return the plan of the scheme around the training; None if there is no scheme."""
    request = _request.get()
    return None if request is None else request.plan


def in_step(plan: PerRecordPlan, records: int) -> NDArray[np.bool_]:
    """Choose the records of a step, each with the plan's sampling rate, exact to 2**-64.

    Where the plan declares the number of records, so many are chosen from, whatever `records` says.

    Returns
    -------
    (records,) bool ndarray
        It is secret: what the choice adds to the privacy, it adds against who does not know it.

    Examples
    --------
    >>> in_step(PerRecordPlan(clipping_norm=1.0, learning_rate=0.1), 3)
    array([ True,  True,  True])
    """
    request = _request.get()
    random = SecureRandom() if request is None else request.random
    return chosen(plan.count(records), plan.sampling_rate, random)


def certify(step: PerRecordStep) -> None:
    """Pass a certificate to the scheme around the training; without a scheme, do nothing.

    A trainer calls this before it shows in its model.

    Raises
    ------
    ProtocolError
        If it is the second time in the scope, or followed another plan than the scheme asks.
    """
    request = _request.get()
    if request is not None:
        request.add(step)
