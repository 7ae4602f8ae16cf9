"""The codec of MSPDQ: each message's interval lies around the value decoded before.

Equations (18), with plain stochastic rounding in place of its signs, and (20). Both ends of the
wire keep the last decoded value in float64 and go on from it by the same arithmetic, so they have
the same bits for ever.
"""

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.coding.quantize import LARGEST_WIDTH, SMALLEST_WIDTH, Codes, Knobs, span
from flwr_privacy.errors import DataError, InvalidParameterError, check_integer
from flwr_privacy.privacy.randomness import SecureRandom

__all__ = ["Codec", "DecodedSum", "centred", "decode_start", "encode_start", "uncentred"]

Vectors = NDArray[np.float64]


class Codec:
    """One end of the codec for one client, with the last decoded value, which both ends have.

    Parameters
    ----------
    start : ndarray, shape (d,)
        What both ends have at message 0: the common start, or what `decode_start` returns. Nobody
        changes it any more.
    levels : int
        Number of knobs.

    Attributes
    ----------
    value : ndarray of float64, shape (d,)
        The last decoded value q[k].

    Examples
    --------
    >>> client, server = Codec(np.zeros(2), 16), Codec(np.zeros(2), 16)
    >>> codes, saturated = client.encode(np.array([0.3, -0.2]), 1.0, SecureRandom())
    >>> server.decode(codes, 1.0)
    >>> bool((client.value == server.value).all()), saturated
    (True, 0)
    """

    def __init__(self, start: NDArray[np.floating], levels: int) -> None:
        self.value: Vectors = np.asarray(start, np.float64)
        self.levels = levels

    def encode(self, visible: Vectors, width: float, random: SecureRandom) -> tuple[Codes, int]:
        """Return the codes of the next message, and advance to their value.

        Parameters
        ----------
        visible : ndarray of float64, shape (d,)
            The visible sub-state.
        width : float
            Width of the intervals around `value`.
        random : SecureRandom
            Where the random bits come from.

        Returns
        -------
        codes, saturated
            See `flwr_privacy.coding.quantize.Knobs.encode`.

        Raises
        ------
        InvalidParameterError
            If a value or the width is not allowed.
        """
        codes, saturated = self._knobs(width).encode(visible, self.value, random)
        self.decode(codes, width)
        return codes, saturated

    def decode(self, codes: Codes, width: float) -> None:
        """Advance to the value of the next message. The codes may come from an adversary.

        Raises
        ------
        InvalidParameterError
            If there are more or fewer codes than values, one has no knob, or the width is not
            allowed. The value is unchanged then.
        """
        if codes.shape != self.value.shape:
            raise InvalidParameterError("codes", codes.shape, f"the shape {self.value.shape}")
        self.value = self._knobs(width).decode(codes, self.value)

    def _knobs(self, width: float) -> Knobs:
        return Knobs(width=width, levels=self.levels)


class DecodedSum:
    """The sum of all clients' decoded values, from sums of codes alone; the server needs no more.

    With widths that are common to all, or the sum of one client's codes at a time,

        sum_i q_i[k + 1] = sum_i q_i[k] + step * sum_i codes_i - draws * width / 2,

    where a client that was drawn c times counts c times. So a secure sum may open the sum of the
    codes and keep each client's for itself.

    Parameters
    ----------
    start : ndarray, shape (d,)
        The sum of the values at message 0; for a common start it, times `draws`.
    draws : int
        Draws in this learning round, M.

    Raises
    ------
    InvalidParameterError
        If there are no draws.

    Examples
    --------
    >>> decoded = DecodedSum(2 * np.array([1.0, 1.0]), 2)
    >>> decoded.add(np.array([3, 9], np.uint8), Knobs(width=1.5, levels=16), draws=2)
    >>> decoded.average
    array([0.4, 0.7])
    """

    def __init__(self, start: NDArray[np.floating], draws: int) -> None:
        self._total: Vectors = np.array(start, np.float64)
        self._draws = check_integer("draws", draws, minimum=1)

    @property
    def average(self) -> Vectors:
        """The average W[k], shape (d,)."""
        return self._total / self._draws

    def add(self, code_sum: Codes, knobs: Knobs, *, draws: int) -> None:
        """Advance by the codes of a message, of all clients or of one.

        Parameters
        ----------
        code_sum : ndarray of unsigned integers, shape (d,)
            Sum of the codes, each times how often its client was drawn
            (`flwr_privacy.coding.quantize.CodeSum`, or what a secure sum opened).
        knobs : Knobs
            Width and number of knobs that they share.
        draws : int
            How many draws are in the sum.

        Raises
        ------
        InvalidParameterError
            If the shape is another, or a sum is larger than so many draws can have.
        """
        check_integer("draws", draws, minimum=1, maximum=self._draws)
        if code_sum.shape != self._total.shape:
            raise InvalidParameterError("codes", code_sum.shape, f"the shape {self._total.shape}")
        if int(code_sum.max(initial=0)) > draws * (knobs.levels - 1):
            raise InvalidParameterError("codes", "a sum beyond", f"sums over {draws} draws")
        moved = code_sum.astype(np.float64)
        moved *= knobs.step
        moved -= draws * (knobs.width / 2)
        self._total += moved


def centred(codes: Codes, levels: int) -> NDArray[np.int64]:
    """Return codes as a secure sum takes them: about zero, at most ``levels // 2`` away from it.

    Examples
    --------
    >>> centred(np.array([0, 8, 15], np.uint8), 16)
    array([-8,  0,  7])
    """
    return codes.astype(np.int64) - levels // 2


def uncentred(opened: NDArray[np.int64], levels: int, *, draws: int) -> Codes:
    """Return the sum of the codes of which a secure sum opened the sum of the `centred` ones.

    Raises
    ------
    InvalidParameterError
        If it is no sum of so many codes.

    Examples
    --------
    >>> uncentred(np.array([-16, 14]), 16, draws=2)
    array([ 0, 30], dtype=uint64)
    """
    sums = opened + draws * (levels // 2)
    if int(sums.min(initial=0)) < 0:
        raise InvalidParameterError("codes", "a sum below", f"sums over {draws} draws")
    return sums.astype(np.uint64)


def encode_start(
    visible: Vectors, levels: int, random: SecureRandom
) -> tuple[Codes, tuple[float, float]]:
    """Return the codes of a vector as a whole, and the ends of the interval that holds it.

    Message 0 of the start modes ``independent`` and ``reference``; also the plain quantization of
    an update that is sent once.

    Parameters
    ----------
    visible : ndarray of float64, shape (d,)
        The vector, with at least one entry.
    levels : int
        Number of knobs.
    random : SecureRandom
        Where the random bits come from.

    Returns
    -------
    codes : ndarray of unsigned integers, shape (d,)
        The numbers of the knobs.
    ends : tuple of float
        Both ends of the interval; float32 numbers, unless it is widened to `SMALLEST_WIDTH`.

    Raises
    ------
    InvalidParameterError
        If a value is not finite.
    DataError
        If they lie further apart than `flwr_privacy.coding.quantize.LARGEST_WIDTH`.

    Examples
    --------
    >>> codes, ends = encode_start(np.array([0.0, 0.5, 1.0]), 3, SecureRandom())
    >>> codes, ends, decode_start(codes, ends, 3)
    (array([0, 1, 2], dtype=uint8), (0.0, 1.0), array([0. , 0.5, 1. ]))
    """
    ends = span(visible)
    width = ends[1] - ends[0]
    if width > LARGEST_WIDTH:
        raise DataError("the values lie too far apart to be rounded to knobs")
    if 0 < width < SMALLEST_WIDTH:
        ends = ends[0] - SMALLEST_WIDTH, ends[1] + SMALLEST_WIDTH
    knobs, centre = Knobs.between(*ends, levels)
    codes, _ = knobs.encode(visible, centre, random)
    return codes, ends


def decode_start(codes: Codes, ends: tuple[float, float], levels: int) -> Vectors:
    """Return the vector that `encode_start` encoded. Both may come from an adversary.

    Raises
    ------
    InvalidParameterError
        If the ends are no interval, or a code has no knob.
    """
    knobs, centre = Knobs.between(*ends, levels)
    return knobs.decode(codes, centre)
