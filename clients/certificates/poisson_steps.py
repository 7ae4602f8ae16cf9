"""Plans and certificates of training on Poisson batches.

A scheme may count on the secret choice of the records of a training for a part of its privacy, if
every step took every record independently with the same probability. It clips the update of the
whole training itself, so neither the gradients nor the step size matter, but it does not see which
records a training takes: a loader that shuffles takes each of them once, and promises nothing like
it. So the scheme opens a scope with `asked_steps`; the trainer that the user calls in it, e.g.
`flwr_privacy.clients.torch.train_poisson`, takes its batches from `poisson_batches` and leaves a
`PoissonSteps` there, which knows the arrays before and after by their digests.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.privacy.randomness import SecureRandom

from .request import TrainingCertificate, TrainingRequest, chosen, opened

__all__ = [
    "PoissonPlan",
    "PoissonRequest",
    "PoissonSteps",
    "asked_steps",
    "certify_steps",
    "current_steps",
    "poisson_batches",
]


@dataclass(frozen=True, kw_only=True)
class PoissonPlan:
    """A plan of steps on batches that take each record independently of the others.

    Parameters
    ----------
    sampling_rate : float
        Probability, above 0 and at most 1, with which a record is in a step.
    steps : int
        Number of steps, at least 1.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    sampling_rate: float
    steps: int

    def __post_init__(self) -> None:
        if not 0 < check_number("sampling_rate", self.sampling_rate) <= 1:
            raise InvalidParameterError(
                "sampling_rate", self.sampling_rate, "a number above 0 and at most 1"
            )
        check_integer("steps", self.steps, minimum=1)


@dataclass(frozen=True, kw_only=True)
class PoissonSteps(TrainingCertificate[PoissonPlan]):
    """Certificate of a local training on Poisson batches. It stays on the node.

    Parameters
    ----------
    plan : PoissonPlan
        What was done.
    records : int
        Number of records of the data set, whether they were in a batch or not.
    before, after : tuple of bytes
        `digests` of the model's arrays before and after the training.

    Guarantee
    ---------
    The arrays after the training depend on the records only through those that the steps took, and
    every step took every record independently with the plan's sampling rate: a record had no part
    in them with probability ``(1 - sampling_rate) ** steps``. There is no bound on what a record
    that had a part does to them: whoever releases them clips the update of the whole training.

    This covers each entry of the data set that the trainer was given. A record that was put into it
    several times counts as that many, and what the user chose before (a loader, dropped or added
    records) is not seen here. A step that fails is left out, which is a matter of the records that
    it took. Not covered: that a training fails because memory or a device is lacking, or in a
    loop of the user's own; how long it takes; what the user derives from the records besides it,
    such as a loss.

    Examples
    --------
    >>> from flwr_privacy.clients.certificates.request import digests
    >>> before, after = [np.zeros(2, np.float32)], [np.ones(2, np.float32)]
    >>> done = PoissonSteps(
    ...     plan=PoissonPlan(sampling_rate=0.05, steps=20),
    ...     records=1200,
    ...     before=digests(before),
    ...     after=digests(after),
    ... )
    >>> done.check(before, after)
    >>> done.check(before, [array + 1 for array in after])
    Traceback (most recent call last):
    ...
    flwr_privacy.errors.ProtocolError: the training returned other arrays (1 of 1) than the \
training on Poisson batches made: return them as they are after it, with nothing done in between
    """

    training: ClassVar[str] = "training on Poisson batches"


class PoissonRequest(TrainingRequest[PoissonSteps]):
    """The events of a scope that `asked_steps` opened."""

    plan: PoissonPlan
    missing = (
        "the training did no steps on Poisson batches: it has to call a trainer for them, e.g. "
        "flwr_privacy.clients.torch.train_poisson, once and in the thread it runs in"
    )
    several = (
        "the training called a trainer for Poisson batches {} times: the number of steps is a "
        "setting of the scheme"
    )

    def __init__(self, plan: PoissonPlan, random: SecureRandom | None = None) -> None:
        super().__init__(plan, random)
        self._drawn = 0

    def draw(self, records: int) -> NDArray[np.bool_]:
        """Choose the records of one step. More draws than planned spoil the request."""
        self._drawn += 1
        return chosen(records, self.plan.sampling_rate, self.random)

    def _differing(self, certificate: PoissonSteps) -> str:
        if text := super()._differing(certificate):
            return text
        if self._drawn != self.plan.steps:
            # To draw again until one likes the batches would not be what the plan says.
            return (
                f"the training drew {self._drawn} batches, the scheme asks for {self.plan.steps}: "
                "a training that failed cannot be begun again"
            )
        return ""


_request: ContextVar[PoissonRequest | None] = ContextVar("flwr_privacy_poisson", default=None)


def asked_steps(
    plan: PoissonPlan, random: SecureRandom | None = None
) -> AbstractContextManager[PoissonRequest]:
    """Open a scope in which the user's training is to do exactly the steps of `plan`, once.

    Scopes may be nested; the innermost one counts. Take `PoissonRequest.certificate` once the
    training is over, and `PoissonSteps.check` it against the arrays.

    Parameters
    ----------
    plan : PoissonPlan
        What the scheme asks.
    random : SecureRandom, optional
        Chooses the records of the steps; by default a new stream.

    Examples
    --------
    >>> plan = PoissonPlan(sampling_rate=0.5, steps=2)
    >>> with asked_steps(plan) as request:
    ...     batches = list(poisson_batches(current_steps(), records=10))
    ...     certify_steps(PoissonSteps(plan=plan, records=10, before=(), after=()))
    >>> len(batches), request.certificate.records, current_steps()
    (2, 10, None)
    """
    return opened(_request, PoissonRequest(plan, random))


def current_steps() -> PoissonPlan | None:
    """Return the plan of the scheme around the training; None if there is no such scheme."""
    request = _request.get()
    return None if request is None else request.plan


def poisson_batches(plan: PoissonPlan, records: int) -> Iterator[NDArray[np.intp]]:
    """Yield the places of the records of each step, in rising order.

    In a scheme's round its source of randomness chooses them, else a new one.

    Parameters
    ----------
    plan : PoissonPlan
        In a scheme's round, what the scheme asks.
    records : int
        Number of records of the data set.

    Yields
    ------
    (b,) intp ndarray
        It is secret, and may be empty.
    """
    request = _request.get() or PoissonRequest(plan)
    for _ in range(plan.steps):
        yield np.flatnonzero(request.draw(records))


def certify_steps(steps: PoissonSteps) -> None:
    """Pass a certificate to the scheme around the training; without a scheme, do nothing.

    Raises
    ------
    ProtocolError
        If it is the second time in the scope, or not what the scheme asks.
    """
    request = _request.get()
    if request is not None:
        request.add(steps)
