"""Certificates of a mean of losses that were clipped one by one.

A scheme that releases a loss opens a scope with `asked_loss`; the evaluator that the user calls in
it, e.g. `flwr_privacy.clients.torch.evaluate_per_record`, reads the cap and leaves a
`PerRecordLoss` there, which knows the arrays of the model by their digests.

Before the first charge a scheme rehearses it: `flwr_privacy.clients.node.rehearsal`.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number

from .per_record_steps import ROUNDING
from .request import CertificateRequest, check_same, not_declared, opened

__all__ = [
    "LossRequest",
    "PerRecordLoss",
    "asked_loss",
    "certify_loss",
    "check_cap",
    "current_cap",
    "declared_losses",
]


@dataclass(frozen=True, kw_only=True)
class PerRecordLoss:
    """Certificate of a mean of losses that were clipped one by one. It stays on the node.

    Parameters
    ----------
    cap : float
        What each record's loss was clipped to, from 0; above 0.
    records : int
        Number of records, at least 1; the declared one where the scheme has it. It is public.
    mean : float
        Mean of the clipped losses over that number.
    model : tuple of bytes
        `digests` of the arrays of the model that was evaluated.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Guarantee
    ---------
    `sensitivity` bounds the distance between this mean and that of the same model on a data set in
    which one record was replaced by another. (A mean that was clipped as a whole has no such bound:
    one record may move it by all of the cap.) The model counts as public: what it learned from the
    same records is not covered.

    Examples
    --------
    >>> from flwr_privacy.clients.certificates.request import digests
    >>> loss = PerRecordLoss(cap=4.0, records=100, mean=0.5, model=digests([np.zeros(2)]))
    >>> round(loss.sensitivity(), 5), loss.check([np.zeros(2)])
    (0.04004, None)
    """

    cap: float
    records: int
    mean: float = field(repr=False)  # noiseless
    model: tuple[bytes, ...] = field(repr=False)

    def __post_init__(self) -> None:
        check_cap("cap", self.cap)
        check_integer("records", self.records, minimum=1)
        check_number("mean", self.mean, minimum=0, maximum=self.cap)

    def sensitivity(self) -> float:
        """Return ``cap / records``, and what rounding adds."""
        return self.cap / self.records * (1 + ROUNDING)

    def check(self, arrays: Iterable[NDArray[np.generic]]) -> None:
        """Check that the model that was evaluated has these arrays, bit for bit.

        Raises
        ------
        ProtocolError
            If it has others.
        """
        check_same(
            arrays,
            self.model,
            "the evaluation was given other arrays ({}) than it evaluated: load them into the "
            "model, all and unchanged",
        )


class LossRequest(CertificateRequest[PerRecordLoss]):
    """The events of a scope that `asked_loss` opened.

    Parameters
    ----------
    cap : float
        What the scheme asks each record's loss to be clipped to.
    records : int, optional
        Number of records that the node has declared.
    """

    missing = (
        "the evaluation measured no per-record loss: it has to call, e.g., "
        "flwr_privacy.clients.torch.evaluate_per_record, once and in the thread it runs in"
    )
    several = "the evaluation measured {} per-record losses: the noise of a round is for one"

    def __init__(self, cap: float, records: int | None = None) -> None:
        super().__init__()
        self.cap = check_cap("cap", cap)
        self.records = None if records is None else check_integer("records", records, minimum=1)

    def _differing(self, certificate: PerRecordLoss) -> str:
        if certificate.cap != self.cap:
            return (
                f"the scheme asks for losses clipped to {self.cap}, measured were some clipped to "
                f"{certificate.cap}"
            )
        return not_declared(self.records, certificate.records)


_loss_request: ContextVar[LossRequest | None] = ContextVar("flwr_privacy_loss", default=None)


def asked_loss(cap: float, *, records: int | None = None) -> AbstractContextManager[LossRequest]:
    """Open a scope in which the user's evaluation is to measure exactly one per-record loss.

    Take `LossRequest.certificate` once the evaluation is over, and `PerRecordLoss.check` it against
    the arrays.

    Parameters
    ----------
    cap : float
        What each record's loss is to be clipped to, above 0.
    records : int, optional
        Number of records that the node has declared, at least 1. The mean is over so many, whatever
        the data set has: records beyond it are left out, and a missing one counts as a loss of 0.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> with asked_loss(4.0) as request:
    ...     certify_loss(PerRecordLoss(cap=current_cap(), records=10, mean=0.5, model=()))
    >>> request.certificate.records, current_cap()
    (10, None)
    """
    return opened(_loss_request, LossRequest(cap, records))


def current_cap() -> float | None:
    """Return the loss cap of the scheme around the evaluation; None without a scheme."""
    request = _loss_request.get()
    return None if request is None else request.cap


def declared_losses() -> int | None:
    """Return the number of records that the scheme around the evaluation declares, or None."""
    request = _loss_request.get()
    return None if request is None else request.records


def certify_loss(loss: PerRecordLoss) -> None:
    """Pass a loss to the scheme around the evaluation; without a scheme, do nothing.

    Raises
    ------
    ProtocolError
        If it is the second one in the scope, or was clipped to another cap than the scheme asks.
    """
    request = _loss_request.get()
    if request is not None:
        request.add(loss)


def check_cap(parameter: str, cap: float) -> float:
    """Return the cap of a loss if it is a finite number above 0.

    Raises
    ------
    InvalidParameterError
        If it is none.
    """
    if check_number(parameter, cap) <= 0:
        raise InvalidParameterError(parameter, cap, "a number above 0")
    return cap
