"""The delays of FedVS's experiments: virtual seconds, expected waits, and their readings.

Source: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split
Models" (ICML 2023), section 6.2. The upload of a fast client takes an exponential time of mean
0.1 s; half of the clients are stragglers, and the i-th of them has mean ``2 + 4 i / N`` seconds.
Sharing the weights takes every client another exponential time, of ``(log^2 N) / |B|`` times its
own mean. The paper does not say which logarithm that is, nor whether the batch B has coded rows or
real ones, nor whether anybody waits for the last share. The answers decide whether FedVS is faster
than waiting for everybody: see `conventions`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.stragglers import Stragglers
from flwr_privacy.wire.identity import check_client_id, stream

__all__ = [
    "BATCHES",
    "LOG_BASES",
    "HalfSlow",
    "batch_rows",
    "expected_order_statistic",
    "expected_wait",
    "mean_delays",
    "sharing_factor",
]

LOG_BASES = ("e", "2")
BATCHES = ("coded", "real")
SHARE, UPLOAD = "weights", "train"  # phases of a round that take time

_FAST = 0.1  # seconds
_SLOWEST_FROM, _SLOPE = 2.0, 4.0
_NODES = 24  # of a panel of the integral
_PANELS = 96

Array = NDArray[np.float64]


def mean_delays(N: int, *, stragglers: int | None = None) -> Array:
    """Return the means of the clients' upload delays in seconds, the fast clients first.

    Parameters
    ----------
    N : int
        Number of clients, at least 1.
    stragglers : int, optional
        How many of them are slow; ``N // 2`` by default.

    Examples
    --------
    >>> mean_delays(5).tolist()
    [0.1, 0.1, 0.1, 2.8, 3.6]
    """
    check_integer("N", N, minimum=1)
    slow = N // 2 if stragglers is None else stragglers
    check_integer("stragglers", slow, minimum=0, maximum=N)
    return np.array(
        [_FAST] * (N - slow) + [_SLOWEST_FROM + _SLOPE * i / N for i in range(1, slow + 1)]
    )


def expected_order_statistic(means: ArrayLike, r: int) -> float:
    """Return the expected time at which `r` of several independent exponential times have ended.

    Parameters
    ----------
    means : array_like of float, shape (N,)
        Their means, > 0; they need not be equal.
    r : int
        From 1, the first to end, to N, the last.

    Notes
    -----
    It is the integral over t of the probability that fewer than `r` have ended by t, a sum of
    Bernoulli variables. Its panels grow geometrically from a thousandth of the least expected time
    to fifty times the largest mean, so that the relative error is below 1e-9.

    Examples
    --------
    >>> round(expected_order_statistic([1.0, 1.0], 2), 9)
    1.5
    """
    own = np.asarray(means, dtype=np.float64)
    if own.ndim != 1 or not len(own) or not (np.isfinite(own) & (own > 0)).all():
        raise InvalidParameterError("means", means, "positive numbers, one at least")
    check_integer("r", r, minimum=1, maximum=len(own))
    edges = np.geomspace(1e-3 * own.min() / len(own), 50 * own.max(), _PANELS)
    edges = np.concatenate([[0.0], edges])
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    half = np.diff(edges)[:, None] / 2
    times = (edges[:-1, None] + half * (nodes + 1)).ravel()
    fewer = np.zeros((r, len(times)))  # probability that so many have ended, for 0 to r - 1
    fewer[0] = 1
    for mean in own:
        ended = -np.expm1(-times / mean)
        moved = fewer[:-1] * ended
        fewer *= 1 - ended
        fewer[1:] += moved
    return float(np.sum(fewer.sum(axis=0) * (half * weights).ravel()))


def expected_wait(N: int, r: int, *, stragglers: int | None = None) -> float:
    """Return the expected seconds until `r` of `N` uploads are there.

    Parameters
    ----------
    N, stragglers
        As in `mean_delays`.
    r : int
        ``N`` for a server that waits for all, the recovery threshold for FedVS.

    Examples
    --------
    >>> [round(expected_wait(28, r), 3) for r in (28, 13)]
    [10.307, 0.186]
    """
    return expected_order_statistic(mean_delays(N, stragglers=stragglers), r)


def sharing_factor(N: int, rows: float, *, log_base: str = "e") -> float:
    """Return ``(log^2 N) / |B|``: how much longer sharing weights takes than an upload, on average.

    Parameters
    ----------
    N : int
        Number of clients, at least 1.
    rows : float
        ``|B|``, > 0: coded rows or real ones, see `conventions`.
    log_base : {"e", "2"}, default "e"
        The logarithm.

    Examples
    --------
    >>> round(sharing_factor(28, 256 / 6, log_base="2"), 3)
    0.542
    """
    check_integer("N", N, minimum=1)
    check_choice("log_base", log_base, LOG_BASES)
    if check_number("rows", rows) <= 0:
        raise InvalidParameterError("rows", rows, "a number above 0")
    logarithm = math.log(N) if log_base == "e" else math.log2(N)
    return logarithm**2 / rows


@dataclass(frozen=True, kw_only=True)
class HalfSlow(Stragglers):
    """The delays of section 6.2, drawn anew in every round; the stragglers stay the same.

    It has the methods of `flwr_privacy.stragglers.StragglerModel` and takes its place. In the phase
    ``weights`` a client shares its weights, in ``train`` it uploads; all others take no time.

    Parameters
    ----------
    clients : tuple of str
        All clients, each once; the last ones are the stragglers, the slowest at the end.
    stragglers : int, optional
        How many are slow; half of them, rounded down, by default.
    batch_size : int, default 32
        Real rows in a batch.
    K : int, default 1
        Segments: a batch has ``batch_size / K`` coded rows.
    batch : {"coded", "real"}, default "coded"
        Which rows ``|B|`` counts.
    log_base : {"e", "2"}, default "e"
        Of ``log^2 N``.
    share_seconds, upload_seconds : float or mapping of str to float, optional
        Seconds that every client, or each by its name, takes beside its delay, for computing and
        messages. By default a strategy with these delays counts them
        (`flwr_privacy.fedvs.clock`); without a strategy they are 0.
    bandwidth_mbps : float, default 300.0
        Of every client's link, for what is counted.
    speed : float, default 1e9
        Multiplications of every client per second, for what is counted.
    scale : float, default 1.0
        Factor of all delays, at least 0; without delays it is 0.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.

    Examples
    --------
    >>> delays = HalfSlow(clients=("a", "b"), batch_size=4)
    >>> delays.mean_of("b"), round(delays.mean_of("b", phase="weights"), 3)
    (4.0, 0.48)
    """

    clients: tuple[str, ...]
    stragglers: int | None = None
    batch_size: int = 32
    K: int = 1
    batch: str = "coded"
    log_base: str = "e"
    share_seconds: float | Mapping[str, float] | None = None
    upload_seconds: float | Mapping[str, float] | None = None
    bandwidth_mbps: float = 300.0
    speed: float = 1e9
    scale: float = 1.0
    _means: dict[str, float] = field(init=False, repr=False, compare=False)
    _factor: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", tuple(self.clients))
        for client in self.clients:
            check_client_id(client, parameter="delays.clients")
        if not self.clients or len(set(self.clients)) < len(self.clients):
            allowed = "names that differ, one at least"
            raise InvalidParameterError("delays.clients", self.clients, allowed)
        N = len(self.clients)
        check_integer("delays.batch_size", self.batch_size, minimum=1)
        check_integer("delays.K", self.K, minimum=1)
        check_choice("delays.batch", self.batch, BATCHES)
        check_choice("delays.log_base", self.log_base, LOG_BASES)
        check_number("delays.scale", self.scale, minimum=0)
        for name in ("bandwidth_mbps", "speed"):
            check_number(f"delays.{name}", getattr(self, name), minimum=1e-9)
        for name in ("share_seconds", "upload_seconds"):
            given = getattr(self, name)
            own = given if isinstance(given, Mapping) else dict.fromkeys(self.clients, given or 0.0)
            if set(own) != set(self.clients):
                allowed = "a number for every client"
                raise InvalidParameterError(f"delays.{name}", given, allowed)
            for seconds in own.values():
                check_number(f"delays.{name}", seconds, minimum=0)
        means = mean_delays(N, stragglers=self.stragglers).tolist()
        rows = batch_rows(self.batch_size, self.K, self.batch)
        object.__setattr__(self, "_means", dict(zip(self.clients, means, strict=True)))
        object.__setattr__(self, "_factor", sharing_factor(N, rows, log_base=self.log_base))

    @property
    def fast(self) -> tuple[str, ...]:
        """The clients that are no stragglers."""
        slow = len(self.clients) // 2 if self.stragglers is None else self.stragglers
        return self.clients[: len(self.clients) - slow]

    @property
    def counted(self) -> bool:
        """Whether a strategy counts what computing and messages take."""
        return self.share_seconds is None and self.upload_seconds is None

    def mean_of(self, client_id: str, *, phase: str = UPLOAD) -> float:
        """Return the mean delay of a client in a phase, in seconds.

        Raises
        ------
        InvalidParameterError
            If the client is none of `clients`.
        """
        if client_id not in self._means:
            raise InvalidParameterError("client", client_id, "one that has a delay")
        factor = {SHARE: self._factor, UPLOAD: 1.0}.get(phase, 0.0)
        return self.scale * factor * self._means[client_id]

    def finish_time(
        self, *, seed: int | str, server_round: int, client_id: str, phase: str, request: int = 0
    ) -> float:
        """Return the virtual seconds from the request to the answer of one client.

        Parameters
        ----------
        seed : int or str
            Root seed of the experiment.
        server_round : int
            Round, from 1.
        client_id : str
            One of `clients`.
        phase : str
            Phase within the round.
        request : int, default 0
            Number of the request within the round.

        Raises
        ------
        InvalidParameterError
            If the client is none of `clients`.
        """
        mean = self.mean_of(client_id, phase=phase)
        given = {SHARE: self.share_seconds, UPLOAD: self.upload_seconds}.get(phase)
        fixed = given[client_id] if isinstance(given, Mapping) else given or 0.0
        if mean == 0:
            return fixed
        draws = stream(seed, "half-slow", client_id, server_round, phase, request)
        return fixed + mean * float(draws.standard_exponential())


def batch_rows(batch_size: int, K: int, batch: str) -> float:
    """Return ``|B|``."""
    return batch_size / K if batch == "coded" else float(batch_size)
