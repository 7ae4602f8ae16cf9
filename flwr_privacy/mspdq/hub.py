"""The server's side of a learning round of MSPDQ: the clients' values and their average."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.coding.packing import packed_bytes, unpack_into
from flwr_privacy.coding.quantize import Codes, Knobs
from flwr_privacy.errors import InvalidParameterError, check_number
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.privacy.grid import CodeGrid, GridMean

from .codec import Codec, DecodedSum, decode_start, uncentred
from .intervals import Intervals, Widths
from .terms import CODES, MSPTerms

__all__ = ["Hub", "SumHub", "code_sum", "outweighs", "unpacked"]

Vectors = NDArray[np.float64]

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_LARGEST_SCALAR = 2.0**60  # 2^100 is the largest width


class Hub:
    """The server's side if it sees every client's codes.

    Parameters
    ----------
    terms : MSPTerms
        The parameters.
    intervals : Intervals
        The rule of the widths, with its constants.
    draws : dict
        How often each client was drawn.
    start : ndarray, shape (d,)
        What all have at message 0 if the start is common; otherwise only its length counts.
    weights : dict, optional
        What each client weighs in the averages; by default as often as it was drawn.
    largest : float, default the largest float32
        Largest value that the model can hold; beyond, a message is refused.

    Attributes
    ----------
    width : float or None
        Width of the next message; None: each client's own.
    widest : float
        Largest width of any message so far.

    Notes
    -----
    The average is taken in the order of the names, so it is the same whoever answers first.
    """

    def __init__(
        self,
        terms: MSPTerms,
        intervals: Intervals,
        draws: Mapping[str, int],
        start: NDArray[np.floating],
        *,
        weights: Mapping[str, float] | None = None,
        largest: float = _LARGEST_FLOAT32,
    ) -> None:
        self._terms = terms
        self._intervals = intervals
        self._draws = draws
        self._weights = draws if weights is None else weights
        if intervals.rule == "linf":  # where clients start apart, the widths follow
            largest = min(largest, _LARGEST_SCALAR)
        self._largest = largest / max(1, sum(self._weights.values()))  # so that no sum is beyond
        self._start = start
        self._codecs: dict[str, Codec] = {}
        self._scalars: dict[str, float] = {}
        self._widths: Widths | None = None
        self.width: float | None = None
        self.widest = 0.0

    def begin(self, client: str, packed: NDArray[Any], low: float, high: float) -> None:
        """Take message 0 of a client, its own split.

        Raises
        ------
        ReplyRefusedError, InvalidParameterError, ValueError
            If it is malformed; it may come from an adversary.
        """
        self._codecs[client] = Codec(self.decoded(packed, low, high), self._terms.levels)

    def decoded(self, packed: NDArray[Any], low: float, high: float) -> Vectors:
        """Return the value of a message 0, with the conditions of `begin`."""
        return self._checked(decode_start(self._unpacked(packed), (low, high), self._terms.levels))

    def tell(self, client: str, scalar: float) -> None:
        """Record a client's report of its gap.

        Raises
        ------
        InvalidParameterError
            If it is negative, or so large that no interval of this width is allowed.
        """
        self._scalars[client] = check_number("scalar", scalar, minimum=0, maximum=_LARGEST_SCALAR)

    def plan(self, clients: Collection[str]) -> None:
        """Decide on the `width` of the next message, from all clients' reports."""
        if self._intervals.rule == "self":
            return
        names = sorted(clients)
        if self._widths is None:
            apart = 0.0
            if self._codecs:
                average = self.average(names)
                apart = max(float(np.abs(self._value(c) - average).max()) for c in names)
            self._widths = Widths(
                self._intervals, self._terms.mixing, self._terms.levels, apart=apart
            )
        scalars = [] if self._intervals.public else [self._scalars[name] for name in names]
        self.width = self._widths.next(scalars, [self._draws[name] for name in names])

    def hear(self, client: str, packed: NDArray[Any], half: float | None) -> None:
        """Take the next message of a client.

        Parameters
        ----------
        client : str
            Who sent it.
        packed : ndarray of uint8
            Its codes.
        half : float or None
            Half the width, where the client says it.

        Raises
        ------
        ReplyRefusedError, InvalidParameterError, ValueError
            If it is malformed; it may come from an adversary. Nothing is changed then.
        """
        width = self.width if half is None else 2 * half
        if width is None:
            raise InvalidParameterError("half-width", half, "a number")
        codec = Codec(self._value(client), self._terms.levels)
        codec.decode(self._unpacked(packed), width)
        self._checked(codec.value)
        self._codecs[client] = codec
        self.widest = max(self.widest, width)

    def average(self, clients: Collection[str]) -> Vectors:
        """Return the average of some clients' values by their weights."""
        total, weight = np.zeros(self._start.size), 0.0
        for client in sorted(clients):
            total += self._weights[client] * self._value(client)
            weight += self._weights[client]
        total /= weight
        return total

    def _value(self, client: str) -> Vectors:
        codec = self._codecs.get(client)
        return self._start.astype(np.float64) if codec is None else codec.value

    def _unpacked(self, packed: NDArray[Any]) -> Codes:
        return unpacked(packed, self._terms.bits, self._start.size)

    def _checked(self, value: Vectors) -> Vectors:
        if not np.abs(value).max(initial=0.0) <= self._largest:
            raise ReplyRefusedError("range", "values that the model's dtype cannot hold")
        return value


class SumHub:
    """The server's side if it sees only sums of codes.

    Parameters
    ----------
    terms : MSPTerms
        The parameters; the start is common.
    intervals : Intervals
        The rule of the widths, one by which no client says anything.
    start : ndarray, shape (d,)
        The common start.

    Attributes
    ----------
    width : float or None
        Width of the next message; None before the first plan.
    widest : float
        Largest width so far.
    """

    def __init__(self, terms: MSPTerms, intervals: Intervals, start: NDArray[np.floating]) -> None:
        self._terms = terms
        self._start = start
        self._widths = Widths(intervals, terms.mixing, terms.levels)
        self._sum: DecodedSum | None = None
        self.width: float | None = None
        self.widest = 0.0

    def plan(self, clients: Collection[str]) -> None:
        """Decide on the `width` of the next message, independently of the clients."""
        self.width = self._widths.next([], [])
        self.widest = max(self.widest, self.width)

    def hear(self, opened: NDArray[np.int64], draws: int) -> None:
        """Take the sum of the next messages' codes.

        Parameters
        ----------
        opened : ndarray of int64, shape (d,)
            Sum of the codes (`flwr_privacy.mspdq.codec.centred`), each as often as its client was
            drawn. From the second message on it must be over the same clients.
        draws : int
            Draws in the sum.

        Raises
        ------
        InvalidParameterError
            If it is no sum of so many codes.
        """
        if self._sum is None:
            self._sum = DecodedSum(draws * self._start.astype(np.float64), draws)
        if self.width is None:
            raise ValueError("there is no width: plan before")
        levels = self._terms.levels
        knobs = Knobs(width=self.width, levels=levels)
        self._sum.add(uncentred(opened, levels, draws=draws), knobs, draws=draws)

    def average(self, clients: Collection[str]) -> Vectors:
        """Return the average over those whose codes are in the sums."""
        return self._start.astype(np.float64) if self._sum is None else self._sum.average


def unpacked(packed: NDArray[Any], bits: int, size: int) -> Codes:
    """Return the codes that a client packed. The bytes may come from an adversary.

    Raises
    ------
    ReplyRefusedError
        If they are no bytes, or more or fewer than so many codes take.
    """
    length = packed_bytes(size, bits)
    if packed.dtype != np.uint8:
        raise ReplyRefusedError("dtype", f"codes as {packed.dtype}, not as uint8")
    if packed.shape != (length,):
        detail = f"codes of shape {packed.shape}: {size} of {bits} bits are {length} bytes"
        raise ReplyRefusedError("shape", detail)
    codes: Codes = np.empty(size, np.uint8 if bits <= 8 else np.uint16)
    unpack_into(packed, bits, codes)
    return codes


def outweighs(draws: Mapping[str, int], *, least: int) -> bool:
    """Tell whether one client may weigh more than all others in a sum over `least` clients or more.

    Everybody else weighs at least 1, so nobody does who was drawn less often than `least` times.
    The sum of other draws would say more of that client than of the others.
    """
    return max(draws.values(), default=1) >= least


def code_sum(size: int) -> GridMean:
    """Return an empty sum of so many codes, each times its client's draws."""
    return GridMean({CODES: np.broadcast_to(np.zeros((), np.float64), size)}, CodeGrid(0), [CODES])
