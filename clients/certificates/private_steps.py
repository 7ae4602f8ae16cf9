"""Certificates of a training loop of the user's own whose steps were all private (DP-SGD).

The loop is the user's: optimiser, loss, epochs. The scheme opens a scope with
`asked_private_steps`; `flwr_privacy.clients.torch.private_training`, which the user calls in it,
takes from the request what is in a step and its noise, and leaves a `PrivateSteps` there after the
last one. What is released is the model of that step: it is post-processing of noised sums only if
nothing chose it, so it is known by its digests.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import ProtocolError
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.udp.private_steps import PrivateStepsTerms

from .request import TrainingCertificate, TrainingRequest, chosen, not_declared, opened

__all__ = [
    "PrivateSteps",
    "PrivateStepsPlan",
    "PrivateStepsRequest",
    "asked_private_steps",
    "current_private_steps",
]


@dataclass(frozen=True, kw_only=True)
class PrivateStepsPlan:
    """What a training loop is asked to do.

    Parameters
    ----------
    terms : PrivateStepsTerms
        Its steps, sample, clipping and noise.
    client : str
        Whose training it is.
    records : int, optional
        Number of records that the node has declared. Samples and the divisor are for so many,
        whatever the data set has: records beyond it are left out, and missing ones count as zero.
        By default the data set says how many there are.
    """

    terms: PrivateStepsTerms
    client: str
    records: int | None = None


@dataclass(frozen=True, kw_only=True)
class PrivateSteps(TrainingCertificate[PrivateStepsPlan]):
    """Certificate of a local training whose steps were all private. It stays on the node.

    Parameters
    ----------
    plan : PrivateStepsPlan
        What was done.
    records : int
        Number of records of the data set, the declared one where the plan has it. It is public.
    before, after : tuple of bytes
        `digests` of the model's arrays before the training and after its last step.

    Guarantee
    ---------
    The arrays after the last step follow from those before the first, from the noised sums of the
    steps and from nothing else of the records, as far as the trainer can see: it compares the
    weights at every step with those after the step before, and it gets each batch that it drew
    before it draws another. `flwr_privacy.udp.PrivateStepsTerms` has what a noised sum protects.
    Not covered: a loop that changes the optimiser's settings by what it saw of raw batches, other
    than by torch's ReduceLROnPlateau, which is refused; and whether the gradients of real records
    are those of single records. That is rehearsed on generated ones, which cannot show a loss
    that is linear only there (flooding, a clamp or nan_to_num of the loss of a batch), records that
    are mixed with some probability or from some step on, nor what the app computed from its data
    before (statistics, class weights, a Dataset that looks up other records).
    """

    training: ClassVar[str] = "last private step"


class PrivateStepsRequest(TrainingRequest[PrivateSteps]):
    """The events of a scope that `asked_private_steps` opened."""

    plan: PrivateStepsPlan
    missing = (
        "the training did not take all the steps that were asked for: it has to take model, "
        "optimizer and loader from flwr_privacy.clients.torch.private_training, once, and go on "
        "until the loader ends for good. A loop that stops early tells something of the data: ask "
        "for fewer steps"
    )
    several = "the training took the private steps of a round {} times"

    def __init__(self, plan: PrivateStepsPlan, random: SecureRandom | None = None) -> None:
        super().__init__(plan, random)
        self._begun = False
        self.taken = 0

    def begin(self) -> None:
        """Note that the training has begun.

        Raises
        ------
        ProtocolError
            If it had before: to begin again until one likes the result is no private training.
        """
        if self._begun:
            raise ProtocolError(
                "private_training was called before in this round: a training cannot begin again"
            )
        self._begun = True

    def draw(self, records: int) -> NDArray[np.intp]:
        """Choose the records of a step, in rising order. The choice is secret, and may be none."""
        rate = self.plan.terms.sampling_rate
        return np.flatnonzero(chosen(self._count(records), rate, self.random))

    def noised(self, total: NDArray[np.float64], records: int) -> NDArray[np.float64]:
        """Return the noised sum of a step over the expected number of records in it.

        Raises
        ------
        ProtocolError
            If all steps were taken: no more are charged.
        """
        terms = self.plan.terms
        if self.taken >= terms.steps:
            raise ProtocolError(
                f"all {terms.steps} private steps were taken: only so many are charged"
            )
        self.taken += 1
        return terms.noised(total, self.random) / (terms.sampling_rate * self._count(records))

    def _count(self, records: int) -> int:
        return records if self.plan.records is None else self.plan.records

    def _differing(self, certificate: PrivateSteps) -> str:
        return super()._differing(certificate) or not_declared(
            self.plan.records, certificate.records
        )


_request: ContextVar[PrivateStepsRequest | None] = ContextVar(
    "flwr_privacy_private_steps", default=None
)


def asked_private_steps(
    plan: PrivateStepsPlan, random: SecureRandom | None = None
) -> AbstractContextManager[PrivateStepsRequest]:
    """Open a scope in which the user's training is to take the private steps of `plan`, once.

    Scopes may be nested; the innermost one counts. Take `PrivateStepsRequest.certificate` once the
    training is over, and `PrivateSteps.check` it against the arrays.

    Parameters
    ----------
    plan : PrivateStepsPlan
        What the scheme asks.
    random : SecureRandom, optional
        Chooses the records of the steps and draws their noise; by default a new stream.

    Examples
    --------
    >>> terms = PrivateStepsTerms(
    ...     steps=1, sampling_rate=0.5, clipping_norm=1.0, noise_multiplier=0.0, epsilon=8.0,
    ...     delta=1e-5, gap=0.0, grid=-27,
    ... )
    >>> with asked_private_steps(PrivateStepsPlan(terms=terms, client="0")) as request:
    ...     step = request.noised(np.array([3.0]), records=4)
    >>> step, current_private_steps()
    (array([1.5]), None)
    """
    return opened(_request, PrivateStepsRequest(plan, random))


def current_private_steps() -> PrivateStepsRequest | None:
    """Return the request of the scheme around the training; None if there is no such scheme."""
    return _request.get()
