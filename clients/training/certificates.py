"""The common part of certificates of local work: the request for one, and its checks.

A scheme that needs more than the update of the user's training opens a scope with a
`CertificateRequest`; the trainer or evaluator that the user calls in it leaves its certificate
there. A certificate knows the arrays before and after by their digests, so that nothing can be put
in their place.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import ProtocolError
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.arrays import array_digest

__all__ = ["CertificateRequest", "check_same", "chosen", "digests", "opened"]

Certificate = TypeVar("Certificate")


class CertificateRequest(Generic[Certificate]):
    """The events of a scope that must produce exactly one certificate.

    A kind of request says in `_missing`, `_several` and `_differing` what is wrong with none, with
    more than one, and with one of something else than was asked.
    """

    def __init__(self) -> None:
        self._certificates: list[Certificate] = []

    def add(self, certificate: Certificate) -> None:
        """Add a certificate. A second one spoils the request, even if the error is caught.

        Raises
        ------
        ProtocolError
            If it is the second one, or one of something else than was asked.
        """
        self._certificates.append(certificate)
        self._check()

    @property
    def certificate(self) -> Certificate:
        """The certificate of the scope.

        Raises
        ------
        ProtocolError
            If there was nothing, more than one thing, or something else than was asked.
        """
        self._check()
        if not self._certificates:
            raise ProtocolError(self._missing())
        return self._certificates[0]

    def _check(self) -> None:
        if len(self._certificates) > 1:
            raise ProtocolError(self._several(len(self._certificates)))
        for certificate in self._certificates:
            if text := self._differing(certificate):
                raise ProtocolError(text)

    def _missing(self) -> str:
        raise NotImplementedError

    def _several(self, count: int) -> str:
        raise NotImplementedError

    def _differing(self, certificate: Certificate) -> str:
        """Return what is wrong with a certificate; nothing if it is what was asked."""
        raise NotImplementedError


Asked = TypeVar("Asked")


@contextmanager
def opened(scope: ContextVar[Asked | None], request: Asked) -> Iterator[Asked]:
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
