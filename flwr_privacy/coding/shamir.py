"""Shamir's secret sharing: any `threshold` holders can open a secret, fewer learn nothing of it.

Every byte of a secret is the constant term of a polynomial of its own over GF(2^8), of degree below
the threshold and with random coefficients. The share of holder i (from 0) is its value at point
i + 1; the holders' values determine the polynomial, and so the secret, by Lagrange's formula.

Products come from tables of logarithms: 3 generates the non-zero elements.

Source: Shamir, "How to Share a Secret", Communications of the ACM 22 (11), 1979.
"""

import os
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import check_integer

__all__ = ["MOST_HOLDERS", "deal", "recover"]

MOST_HOLDERS = 255
"""The non-zero elements of the field, each the point of one holder."""

_POLYNOMIAL = 0x11B  # x^8 + x^4 + x^3 + x + 1, as in AES
_ORDER = 255  # of the generator
_LOG_ZERO = 2 * _ORDER  # added to any logarithm, it leads to the zeros after all other products


def deal(secret: bytes, *, holders: int, threshold: int) -> list[bytes]:
    """Split a secret into one share per holder.

    Parameters
    ----------
    secret : bytes
        Any length.
    holders : int
        Number of shares, 1 to 255.
    threshold : int
        How many shares open the secret, 1 to `holders`.

    Returns
    -------
    list of bytes
        The share of each holder, as long as the secret.

    Raises
    ------
    InvalidParameterError
        If `holders` or `threshold` is out of range.

    Notes
    -----
    **Guarantee.** *Protected*: the secret, but not its length. *Against*: any adversary, of any
    computing power, who sees up to ``threshold - 1`` of the shares. *Covered*: perfect secrecy,
    since for every secret these shares are independent and uniform (Shamir, section 2), as long as
    the operating system's random bytes are. *Not covered*: integrity, as a changed share opens
    another secret without an error; the time that table look-ups take, which may depend on the
    secret.

    Examples
    --------
    >>> shares = deal(b"open sesame", holders=5, threshold=3)
    >>> recover({0: shares[0], 3: shares[3], 4: shares[4]}, threshold=3)
    b'open sesame'
    """
    check_integer("holders", holders, minimum=1, maximum=MOST_HOLDERS)
    check_integer("threshold", threshold, minimum=1, maximum=holders)
    coefficients = np.frombuffer(secret + os.urandom((threshold - 1) * len(secret)), np.uint8)
    shares = _evaluate(coefficients.reshape(threshold, len(secret)), holders)
    return [share.tobytes() for share in shares]


def recover(shares: Mapping[int, bytes], *, threshold: int) -> bytes:
    """Recover a secret from shares. The shares may come from an adversary.

    Secrets that were dealt to the same holders can be opened in one go, concatenated.

    Parameters
    ----------
    shares : Mapping of int to bytes
        Shares by holder, from 0. The `threshold` first holders count.
    threshold : int
        The threshold of the deal, 1 to 255.

    Raises
    ------
    InvalidParameterError
        If `threshold` is out of range.
    ValueError
        If there are too few shares, shares of different lengths, or a holder that cannot be.

    Notes
    -----
    **Guarantee.** That of `deal`. *Not covered*: a wrong share or a wrong threshold, which gives
    another secret and no error.
    """
    check_integer("threshold", threshold, minimum=1, maximum=MOST_HOLDERS)
    for holder in shares:
        if not 0 <= holder < MOST_HOLDERS:
            raise ValueError(f"a share of holder {holder}: expected 0 to {MOST_HOLDERS - 1}")
    if len(shares) < threshold:
        raise ValueError(f"shares missing: {threshold - len(shares)} of {threshold}")
    lengths = [len(share) for share in shares.values()]
    if min(lengths) != max(lengths):
        raise ValueError(f"shares of {min(lengths)} to {max(lengths)} bytes: expected one length")
    used = sorted(shares)[:threshold]
    matrix = np.frombuffer(b"".join(shares[holder] for holder in used), np.uint8)
    logarithms = _lagrange(tuple(holder + 1 for holder in used))
    return _product(logarithms[None, :], matrix.reshape(threshold, lengths[0])).tobytes()


def _tables() -> tuple[NDArray[np.intp], NDArray[np.uint8]]:
    """Return the logarithm of every element, and the element of every sum of two logarithms."""
    logarithm = np.full(256, _LOG_ZERO, np.intp)
    element = np.zeros(_LOG_ZERO + _ORDER, np.uint8)
    power = 1
    for exponent in range(_ORDER):
        logarithm[power] = exponent
        element[[exponent, exponent + _ORDER]] = power
        power ^= power << 1  # times 3, which is x + 1
        if power > 255:
            power ^= _POLYNOMIAL
    return logarithm, element


_LOGARITHM, _ELEMENT = _tables()


def _product(left: NDArray[np.intp], right: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the matrix product of non-zero elements, given by logarithms, with any elements."""
    logarithms = _LOGARITHM[right]
    total = np.zeros((len(left), right.shape[1]), np.uint8)
    for column, row in zip(left.T, logarithms, strict=True):
        total ^= _ELEMENT.take(np.add.outer(column, row))
    return total


def _evaluate(coefficients: NDArray[np.uint8], holders: int) -> NDArray[np.uint8]:
    """Return the polynomials' values, a row per holder; `coefficients` has a row per degree."""
    points = _LOGARITHM[1 : holders + 1]
    powers = np.outer(points, np.arange(len(coefficients))) % _ORDER
    return _product(powers, coefficients)


@lru_cache(maxsize=256)
def _lagrange(points: tuple[int, ...]) -> NDArray[np.intp]:
    """Return the logarithms of the weights that give a polynomial's value at 0.

    The weight of point x is the product of y / (y - x) over the other points y; in this field y - x
    is y ^ x.
    """
    x = np.array(points)
    differences = x[:, None] ^ x[None, :]
    np.fill_diagonal(differences, 1)  # of logarithm 0
    others = _LOGARITHM[x].sum() - _LOGARITHM[x]
    weights: NDArray[np.intp] = (others - _LOGARITHM[differences].sum(axis=1)) % _ORDER
    weights.flags.writeable = False  # it is shared by all calls
    return weights
