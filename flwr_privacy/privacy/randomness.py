"""Cryptographic randomness: the keystream of AES-256 in counter mode.

NumPy's and Python's own generators are built for speed and repeatability: who sees some of their
output can work out the rest. A keystream cannot be told from uniform bits without its key, and it
is as fast.
"""

import hashlib
import os
from typing import Any, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

__all__ = ["SecureRandom"]

_KEY_BYTES = 32
_BLOCK_BYTES = 16
_ZEROS = memoryview(bytes(1 << 16))  # what is encrypted; small enough to stay in the cache


class SecureRandom:
    """A stream of uniform random bits under a key of its own, drawn from the operating system.

    A stream belongs to one process and one thread: it cannot be pickled or copied, and it refuses
    to go on in a forked process, because a second copy would repeat the noise of the first, and
    equal noise on two values gives away their difference.

    Attributes
    ----------
    secure : bool
        Whether the key came from the operating system. Nothing is protected if it did not.

    Notes
    -----
    The cipher is that of NIST SP 800-38A, section 6.5, over a 128-bit counter from zero. A key is
    used by one stream only and never leaves it.

    Examples
    --------
    >>> SecureRandom().uint64(3).shape
    (3,)
    >>> SecureRandom.insecure(0, "noise", 1).bits(8) == SecureRandom.insecure(0, "noise", 1).bits(8)
    True
    """

    def __init__(self) -> None:
        self._key: bytes | None = None
        self._keystream: Any = None  # made by the first who takes from it: many streams are unused
        self._process = os.getpid()
        self.secure = True

    @classmethod
    def insecure(cls, seed: int, *purpose: str | int) -> "SecureRandom":
        """Return a stream that anyone can repeat, for tests.

        Parameters
        ----------
        seed : int
            Any integer.
        *purpose : str or int
            What the stream is for, most general first. Different purposes have different streams:
            the parts are length-prefixed before they are hashed (SHA-256) to the key.
        """
        digest = hashlib.sha256(b"flwr-privacy insecure stream")
        for part in (seed, *purpose):
            encoded = f"{type(part).__name__}:{part}".encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
        stream = cls()
        stream._key, stream.secure = digest.digest(), False
        return stream

    def fill(self, out: NDArray[Any]) -> None:
        """Fill an array with uniform random bits.

        Parameters
        ----------
        out : ndarray
            C-contiguous array of integers.

        Raises
        ------
        RuntimeError
            In a process forked from the one that made the stream.
        """
        if os.getpid() != self._process:
            raise RuntimeError("a SecureRandom cannot be used in a forked process: make a new one")
        if self._keystream is None:
            self._keystream = _keystream(os.urandom(_KEY_BYTES) if self._key is None else self._key)
        octets = out.data.cast("B")
        for start in range(0, len(octets), len(_ZEROS)):
            part = octets[start : start + len(_ZEROS)]
            self._keystream.update_into(_ZEROS[: len(part)], part)

    def uint64(self, size: int) -> NDArray[np.uint64]:
        """Return `size` integers, uniform on ``[0, 2**64)``."""
        words = np.empty(size, np.uint64)
        self.fill(words)
        return words

    def bits(self, count: int) -> int:
        """Return one integer, uniform on ``[0, 2**count)``."""
        octets = np.empty(-(-count // 8), np.uint8)
        self.fill(octets)
        return int.from_bytes(octets.tobytes(), "big") >> (-count % 8)

    def spawn(self, count: int) -> list["SecureRandom"]:
        """Return streams that are independent of each other and of what follows in this one.

        Their keys are SHA-256 of 256 bits of this stream and their numbers.
        """
        seed, streams = self.bits(8 * _KEY_BYTES).to_bytes(_KEY_BYTES), []
        for number in range(count):
            stream = type(self)()
            stream._key = hashlib.sha256(seed + number.to_bytes(8)).digest()
            stream.secure = self.secure
            streams.append(stream)
        return streams

    def __repr__(self) -> str:
        return f"<SecureRandom secure={self.secure}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SecureRandom cannot be pickled or copied: the copy would repeat noise")


def _keystream(key: bytes) -> Any:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(_BLOCK_BYTES))).encryptor()
