"""What all certificates of local work share: the request for one, and its checks.

A scheme that needs more than the update of the user's training opens a scope with a
`CertificateRequest`; the trainer or evaluator that the user calls in it leaves its certificate
there. A certificate knows the arrays before and after by their digests, so that nothing can be put
in their place.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.arrays import array_digest

__all__ = [
    "CertificateRequest",
    "TrainingCertificate",
    "TrainingRequest",
    "agreed",
    "check_same",
    "chosen",
    "digests",
    "not_declared",
    "opened",
]

StepPlan = TypeVar("StepPlan")
Certificate = TypeVar("Certificate")
Scope = TypeVar("Scope")


@dataclass(frozen=True, kw_only=True)
class TrainingCertificate(Generic[StepPlan]):
    """Certificate of a local training. It stays on the node.

    Parameters
    ----------
    plan
        What was done.
    records : int
        Number of records of the data set, whether they were in a step or not.
    before, after : tuple of bytes
        `digests` of the model's arrays before and after the training.
    """

    training: ClassVar[str]
    """What the training is called in an error."""

    plan: StepPlan
    records: int
    before: tuple[bytes, ...] = field(repr=False)
    after: tuple[bytes, ...] = field(repr=False)  # noiseless: whoever has it can test guesses

    def check(
        self, before: Iterable[NDArray[np.generic]], after: Iterable[NDArray[np.generic]]
    ) -> None:
        """Check that the training led from the one set of arrays to the other, bit for bit.

        Parameters
        ----------
        before : iterable of ndarray
            What the training was given. Only floating-point arrays count here and below.
        after : iterable of ndarray
            What it returned.

        Raises
        ------
        ProtocolError
            If it started or ended at other arrays.
        """
        check_same(
            before,
            self.before,
            f"the training was given other arrays ({{}}) than the {self.training} started at: "
            "load them into the model, all and unchanged, before it",
        )
        check_same(
            after,
            self.after,
            f"the training returned other arrays ({{}}) than the {self.training} made: return "
            "them as they are after it, with nothing done in between",
        )


class CertificateRequest(Generic[Certificate]):
    """The events of a scope that must produce exactly one certificate.

    A kind of request says in `missing` and `several` what is wrong with none and with more than one
    (``{}`` stands for how many), and in `_differing` what with one of something else than was
    requested.
    """

    missing: ClassVar[str]
    several: ClassVar[str]

    def __init__(self) -> None:
        self._certificates: list[Certificate] = []

    def add(self, certificate: Certificate) -> None:
        """Add a certificate. A second one spoils the request, even if the error is caught.

        Raises
        ------
        ProtocolError
            If it is the second one, or one of something else than was requested.
        """
        self._certificates.append(certificate)
        self._check()

    @property
    def certificate(self) -> Certificate:
        """The certificate of the scope.

        Raises
        ------
        ProtocolError
            If there was nothing, more than one thing, or something else than was requested.
        """
        self._check()
        if not self._certificates:
            raise ProtocolError(self.missing)
        return self._certificates[0]

    def _check(self) -> None:
        if len(self._certificates) > 1:
            raise ProtocolError(self.several.format(len(self._certificates)))
        for certificate in self._certificates:
            if text := self._differing(certificate):
                raise ProtocolError(text)

    def _differing(self, certificate: Certificate) -> str:
        """Return what is wrong with a certificate; nothing if it is what was requested."""
        raise NotImplementedError


Trained = TypeVar("Trained", bound=TrainingCertificate[Any])


class TrainingRequest(CertificateRequest[Trained]):
    """The events of a scope in which the user's training is to follow a plan, once.

    Parameters
    ----------
    plan
        What the scheme asks for.
    random : SecureRandom, optional
        Chooses the records of sampled steps; by default a new stream.
    """

    def __init__(self, plan: Any, random: SecureRandom | None = None) -> None:
        super().__init__()
        self.plan = plan
        self.random = random or SecureRandom()

    def _differing(self, certificate: Trained) -> str:
        if certificate.plan != self.plan:
            return f"the scheme asks for {self.plan}, done was {certificate.plan}"
        return ""


def agreed(plan: StepPlan | None, kind: type[StepPlan], **given: Any) -> StepPlan:
    """Return the scheme's plan, or outside of a scheme's round a plan of the user's settings.

    Parameters
    ----------
    plan
        The scheme's plan, if there is a scheme around the training.
    kind : type
        The dataclass of the plan.
    **given
        The user's settings; None where the user gave none.

    Raises
    ------
    InvalidParameterError
        If a setting is missing, or is not what the scheme asks for.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    if plan is None:
        for entry in fields(kind):  # type: ignore[arg-type]
            if entry.default is MISSING and entry.name not in settings:
                allowed = "a number, as there is no scheme around the training to ask"
                raise InvalidParameterError(entry.name, None, allowed)
        return kind(**settings)
    for name, value in settings.items():
        if value != (asked := getattr(plan, name)):
            raise InvalidParameterError(name, value, f"{asked}, as the scheme asks, or nothing")
    return plan


@contextmanager
def opened(scope: ContextVar[Scope | None], request: Scope) -> Iterator[Scope]:
    """Make a request the innermost one of its kind within the scope."""
    token = scope.set(request)
    try:
        yield request
    finally:
        scope.reset(token)


def chosen(records: int, rate: float, random: SecureRandom) -> NDArray[np.bool_]:
    """Choose each of some records with probability `rate`, independently, exact to 2**-64.

    Parameters
    ----------
    records : int
        Number of records.
    rate : float
        Above 0, at most 1; with 1 nothing is drawn.
    random : SecureRandom
        Decides.

    Returns
    -------
    (records,) bool ndarray
        It is secret: what the choice adds to the privacy, it adds against who does not know it.

    Examples
    --------
    >>> chosen(3, 1.0, SecureRandom())
    array([ True,  True,  True])
    """
    if rate == 1:
        return np.ones(records, np.bool_)
    return random.uint64(records) < np.uint64(int(math.ldexp(rate, 64)))


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
        array_digest(array)
        for array in map(np.asarray, arrays)
        if np.issubdtype(array.dtype, np.floating)
    )


def check_same(
    arrays: Iterable[NDArray[np.generic]], certified: tuple[bytes, ...], text: str
) -> None:
    """Check arrays against the digests of a certificate.

    Parameters
    ----------
    arrays : iterable of ndarray
        Only those of floating point count.
    certified : tuple of bytes
        What their `digests` have to be.
    text : str
        What the error says; ``{}`` stands for how many differ.

    Raises
    ------
    ProtocolError
        If they are others.
    """
    found = digests(arrays)
    if len(found) != len(certified):
        raise ProtocolError(
            text.format(f"{len(found)} of floating point, the model has {len(certified)}")
        )
    different = sum(a != b for a, b in zip(found, certified, strict=True))
    if different:
        raise ProtocolError(text.format(f"{different} of {len(found)}"))


def not_declared(declared: int | None, done: int) -> str:
    """Return what is wrong with a certificate for another number of records than is declared."""
    if declared in (None, done):
        return ""
    return f"{declared} records are declared, and the certificate is for {done}"
