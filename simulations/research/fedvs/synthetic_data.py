"""Data and settings of a FedVS simulation: the columns of several clients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.coding.field import MERSENNE_31, PrimeField
from flwr_privacy.coding.thresholds import recovery_threshold, usual_partitions
from flwr_privacy.errors import (
    DataError,
    InvalidParameterError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from flwr_privacy.fedvs.delays import BATCHES, LOG_BASES, HalfSlow
from flwr_privacy.fedvs.network import expanded_width
from flwr_privacy.fedvs.options import (
    VAFL,
    ColumnFeatures,
    IgnoreStragglers,
    LagrangeCoding,
    Quantisation,
    WaitNoised,
)
from flwr_privacy.fedvs.quantisation import Scales
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.wire.identity import stream

__all__ = ["AGGREGATIONS", "METHODS", "FedVSSettings", "FedVSSyntheticData"]

METHODS = ("fedvs", "wait", "masked", "ignore", "vafl", "wait-dp")
AGGREGATIONS = ("mean", "sum", "concatenate", "max")
SLOW = ("drawn", "first", "last")
_LINEAR = ("mean", "sum")

Block = NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class FedVSSyntheticData:
    """The data of a simulation: N clients with columns of the same rows.

    Parameters
    ----------
    blocks : sequence of (M, d_n) ndarray
        Training rows of each client, within [-1, 1].
    labels : (M,) ndarray
        Their labels, which the server has.
    test_blocks : sequence of (m, d_n) ndarray
        Rows on which the model is evaluated.
    test_labels : (m,) ndarray
        Their labels.

    Attributes
    ----------
    serial : int
        A number that no other data of this process have.

    Raises
    ------
    DataError
        If the shapes do not fit each other. The message has no value of the data.
    """

    blocks: Sequence[Block]
    labels: NDArray[Any]
    test_blocks: Sequence[Block]
    test_labels: NDArray[Any]
    serial: int = field(init=False, default_factory=count().__next__)

    def __post_init__(self) -> None:
        for name, blocks, labels in (
            ("blocks", self.blocks, self.labels),
            ("test_blocks", self.test_blocks, self.test_labels),
        ):
            object.__setattr__(self, name, tuple(blocks))
            if not len(blocks) or not len(labels):
                raise DataError(f"{name}: there is no client or no row")
            if any(block.ndim != 2 or len(block) != len(labels) for block in blocks):
                raise DataError(f"{name}: not all are matrices of {len(labels)} rows")
        if self.columns != [block.shape[1] for block in self.test_blocks]:
            raise DataError("test_blocks: their columns are not those of the training rows")

    @property
    def clients(self) -> int:
        """Number of clients, N."""
        return len(self.blocks)

    @property
    def rows(self) -> int:
        """Number of training rows, M."""
        return len(self.labels)

    @property
    def columns(self) -> list[int]:
        """Columns d_n of each client."""
        return [block.shape[1] for block in self.blocks]


@dataclass(frozen=True, kw_only=True)
class FedVSSettings:
    """One system and its parameters.

    Parameters
    ----------
    method : {"fedvs", "wait", "masked", "ignore", "vafl", "wait-dp"}, default "fedvs"
        ``wait``: the server waits for all embeddings. ``masked``: so it does, and sees only their
        exact sum, of integers. ``ignore``: it goes on without the stragglers, who never learn.
        ``vafl``: no rounds, it takes each embedding as it comes, with the last ones of all others
        (Chen et al., 2020). ``wait-dp``: clients add Laplace noise (Thapa et al., 2022).
    aggregation : {"mean", "sum", "concatenate", "max"}, default "mean"
        How embeddings are put together. The last two are for wait, ignore and vafl only; where
        embeddings are concatenated, those of ignored clients are zeros.
    embedding : int, default 64
        h.
    order : int, default 2
        Powers D of the polynomial networks.
    learning_rate : float, default 0.05
        Step size of the server and, without another, of the clients.
    clients_learning_rate : float, optional
        Step size of the clients.
    batch_size : int, default 32
        Real rows of a batch.
    K : int, optional
        FedVS's segments; by default the most with which half of the clients may be late.
    T : int, default 1
        FedVS's colluders.
    data_bits, weight_bits : int, default 8
        FedVS's scales.
    w_max : float, default 2.0
        Bound of FedVS's weights.
    prime : int, default 2**31 - 1
        FedVS's field.
    epsilon : float, default 5.0
        The epsilon' of wait-dp.
    clip : float, optional
        Bound to which wait-dp cuts the entries of an embedding; the noise then has scale
        ``2 clip / epsilon``. Without it the scale is that of the entries themselves, largest less
        smallest, over epsilon: it depends on the data, and is no differential privacy. With it it
        is that of a single entry of one round.
    test_noise : bool, default False
        Whether wait-dp has its noise in tests too.
    stragglers : int, optional
        How many clients are slow; half of them by default.
    slow : {"drawn", "first", "last"}, default "drawn"
        Which: drawn from the seed, or the first or last ones of the data. Where clients have rows
        of an image, those are one side of it, which the others cannot make good. The slowest is the
        last of them.
    log_base, batch : str, default "e" and "coded"
        See `HalfSlow`: they are open in the paper.
    delay_scale : float, default 1.0
        Factor of all delays.
    bandwidth_mbps : float, default 300.0
        Of every link.
    speed : float, default 1e9
        Multiplications per second of every client, for all methods alike.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.
    """

    method: str = "fedvs"
    aggregation: str = "mean"
    embedding: int = 64
    order: int = 2
    learning_rate: float = 0.05
    clients_learning_rate: float | None = None
    batch_size: int = 32
    K: int | None = None
    T: int = 1
    data_bits: int = 8
    weight_bits: int = 8
    w_max: float = 2.0
    prime: int = MERSENNE_31
    epsilon: float = 5.0
    clip: float | None = None
    test_noise: bool = False
    stragglers: int | None = None
    slow: str = "drawn"
    log_base: str = "e"
    batch: str = "coded"
    delay_scale: float = 1.0
    bandwidth_mbps: float = 300.0
    speed: float = 1e9

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        plain = self.method in ("wait", "ignore", "vafl")
        check_choice("aggregation", self.aggregation, AGGREGATIONS if plain else _LINEAR)
        for name in ("embedding", "order", "batch_size", "T"):
            check_integer(name, getattr(self, name), minimum=1)
        if self.K is not None:
            check_integer("K", self.K, minimum=1)
        for name in ("learning_rate", "delay_scale"):
            check_number(name, getattr(self, name), minimum=0)
        for name in ("epsilon", "bandwidth_mbps", "speed"):
            check_number(name, getattr(self, name), minimum=math.ulp(0.0))
        if self.clients_learning_rate is not None:
            check_number("clients_learning_rate", self.clients_learning_rate, minimum=0)
        if self.clip is not None:
            check_number("clip", self.clip, minimum=math.ulp(0.0))
        check_flag("test_noise", self.test_noise)
        check_choice("slow", self.slow, SLOW)
        check_choice("log_base", self.log_base, LOG_BASES)
        check_choice("batch", self.batch, BATCHES)
        _ = self.scales, self.field  # which check the rest

    @property
    def scales(self) -> Scales:
        """FedVS's grids of data and weights."""
        return Scales(
            data_bits=self.data_bits, weight_bits=self.weight_bits, x_max=1.0, w_max=self.w_max
        )

    @property
    def field(self) -> PrimeField:
        """FedVS's field."""
        return PrimeField(self.prime)

    def widths(self, data: FedVSSyntheticData) -> list[int]:
        """Return the columns e_n of each client's expanded data."""
        return [expanded_width(columns, self.order) for columns in data.columns]

    def segments(self, clients: int) -> int:
        """Return K: that of the setting, else the largest; without a code it is 1.

        Raises
        ------
        InvalidParameterError
            If decoding would take more clients than there are.
        """
        if self.method != "fedvs":
            return 1
        K = usual_partitions(clients, self.T) if self.K is None else self.K
        check_integer("clients", clients, minimum=recovery_threshold(K, self.T))
        return K

    def strategy(self, clients: int, seed: int) -> dict[str, Any]:
        """Return the keywords of the strategy, but for labels, server model and loop."""
        own: dict[str, Any] = {}
        if self.method == "fedvs":
            own["coding"] = LagrangeCoding(K=self.segments(clients), T=self.T)
            own["quantisation"] = Quantisation(
                prime=self.prime,
                data_bits=self.data_bits,
                weight_bits=self.weight_bits,
                w_max=self.w_max,
            )
        elif self.method == "masked":
            own["secure_sum"] = SecureSum(threshold=clients, value_range=64.0, bits=23)
        elif self.method != "wait":
            own["method"] = {
                "ignore": IgnoreStragglers(),
                "vafl": VAFL(),
                "wait-dp": WaitNoised(epsilon=self.epsilon, clip=self.clip),
            }[self.method]
        return {
            **own,
            "data": ColumnFeatures(order=self.order),
            "embedding": self.embedding,
            "batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
            "client_learning_rate": self.clients_learning_rate,
            "aggregation": "mean" if self.aggregation == "mean" else "sum",
            "delays": self._delays(clients, seed),
        }

    def delays(self, clients: int, seed: int) -> HalfSlow:
        """Return the delays of clients with the names "0" to "N - 1", without what is counted."""
        K = self.segments(clients)
        return HalfSlow(batch_size=self.batch_size, K=K, **self._delays(clients, seed))

    def _delays(self, clients: int, seed: int) -> dict[str, Any]:
        """Return the parameters of the delays; who is slow, by the seed."""
        everyone = np.arange(clients)
        places = {
            "drawn": stream(seed, "stragglers").permutation(clients),
            "first": np.roll(everyone, clients - self._slow_ones(clients)),
            "last": everyone,
        }[self.slow]
        return {
            "clients": tuple(str(n) for n in places),
            "stragglers": self.stragglers,
            "batch": self.batch,
            "log_base": self.log_base,
            "scale": self.delay_scale,
            "bandwidth_mbps": self.bandwidth_mbps,
            "speed": self.speed,
        }

    def _slow_ones(self, clients: int) -> int:
        return clients // 2 if self.stragglers is None else self.stragglers

    def check(self, data: FedVSSyntheticData) -> None:
        """Refuse what does not fit the data.

        Raises
        ------
        InvalidParameterError
            If there are too few clients to decode, more stragglers than clients, or FedVS's field
            is too small.
        """
        if self.stragglers is not None:
            check_integer("stragglers", self.stragglers, minimum=0, maximum=data.clients)
        if self.method == "fedvs":
            self.segments(data.clients)
            self.scales.check(self.widths(data), self.field)
        elif self.method == "ignore" and self.stragglers == data.clients:
            raise InvalidParameterError("stragglers", self.stragglers, "fewer than clients")
