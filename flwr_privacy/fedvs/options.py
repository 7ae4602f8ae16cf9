"""Constructor options of the vertical schemes: features, coding and quantisation; methods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from flwr_privacy.coding.field import MERSENNE_31
from flwr_privacy.errors import InvalidParameterError, check_flag, check_integer, check_number
from flwr_privacy.keywords import checked_keywords

__all__ = [
    "VAFL",
    "ColumnFeatures",
    "IgnoreStragglers",
    "LagrangeCoding",
    "Quantisation",
    "WaitForAll",
    "WaitNoised",
]


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class ColumnFeatures:
    """The features that clients make of their columns.

    Parameters
    ----------
    order : int or dict, default 2
        D, the highest power of the features, of all clients or of each by its name.
    bias : bool, default False
        Whether the clients append a column of ones.
    x_max : float, default 1.0
        Bound of the absolute value of a feature.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    order: int | Mapping[str, int] = 2
    bias: bool = False
    x_max: float = 1.0

    def __post_init__(self) -> None:
        for degree in self.order.values() if isinstance(self.order, Mapping) else [self.order]:
            check_integer("order", degree, minimum=1, maximum=64)
        check_flag("bias", self.bias)
        check_number("x_max", self.x_max, minimum=1e-12)


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class LagrangeCoding:
    """How rows and weights are divided into shares, and when they are shared anew.

    Parameters
    ----------
    K : int, optional
        Segments of the rows: the more, the less a client computes, and the more answers it takes.
        By default the most with which half of the clients may straggle, or 1.
    T : int, default 1
        How many colluding clients learn nothing from shares.
    zero_mask : bool, default True
        Whether some clients add shares of zero to the answers, so that these say their sum only.
    spare : int, default 0
        Answers beyond the R that are needed for which a round waits, to find wrong ones.
    least_dealers : int, optional
        Least number of clients over which embeddings are summed, R or more; by default all. With
        fewer, who deals no weights in time is left out of the round and misses its gradient. That
        shows the server the embeddings of single clients: sums of two rounds with and without one
        differ by little else.
    refresh_every : int, optional
        Rounds after which the data are coded anew, and the old shares are deleted.
    relay_limit : int, default 2**26
        Bytes of shares that the server passes on at a time during the setup.
    paper : bool, default False
        Whether everything is as printed: no zero masks, pads of zeros, weights without bounds. The
        clients must allow it.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or two do not go together.
    """

    K: int | None = None
    T: int = 1
    zero_mask: bool | None = None
    spare: int = 0
    least_dealers: int | None = None
    refresh_every: int | None = None
    relay_limit: int = 2**26
    paper: bool = False

    def __post_init__(self) -> None:
        check_flag("paper", self.paper)
        if self.zero_mask is not None:
            check_flag("zero_mask", self.zero_mask)
        if self.paper and self.masked:
            raise InvalidParameterError("zero_mask", True, "false with paper=True")
        check_integer("T", self.T, minimum=1)
        check_integer("spare", self.spare, minimum=0)
        check_integer("relay_limit", self.relay_limit, minimum=1)
        for name, least in (("K", 1), ("least_dealers", 2), ("refresh_every", 1)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=least)

    @property
    def masked(self) -> bool:
        """Whether some clients add shares of zero; by default unless all is as printed."""
        return not self.paper if self.zero_mask is None else self.zero_mask


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """The field, and the grids on which features and weights are rounded.

    Parameters
    ----------
    prime : int, default 2**31 - 1
        Size p of the field, below 2**31. One below 2**22 makes shares smaller and products faster,
        if the scales fit.
    data_bits, weight_bits : int, default 8
        Bits of the grids on which features and weights are rounded, l_x and l_w.
    w_max : float, default 2.0
        Bound of the absolute value of a weight, to which the clients cut them.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    prime: int = MERSENNE_31
    data_bits: int = 8
    weight_bits: int = 8
    w_max: float = 2.0

    def __post_init__(self) -> None:
        check_integer("prime", self.prime, minimum=3, maximum=2**31 - 1)
        check_number("w_max", self.w_max, minimum=1e-12)


@dataclass(frozen=True, kw_only=True)
class WaitForAll:
    """The server waits for the embeddings of all clients."""

    name: ClassVar[str] = "wait"


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class IgnoreStragglers:
    """The stragglers are never asked, in tests neither.

    Parameters
    ----------
    fast : sequence of str, optional
        Who is no straggler; by default who is not slow in `delays`, or whoever answers within the
        `deadline`.
    """

    name: ClassVar[str] = "ignore"

    fast: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True)
class VAFL:
    """No wait: a client's gradient is computed with the last embeddings of the others.

    A round is one answer (Chen et al. 2020).
    """

    name: ClassVar[str] = "vafl"


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class WaitNoised:
    """The server waits for all clients, and they add Laplace noise to their embeddings.

    The noise (Thapa et al. 2022) has no guarantee: see `flwr_privacy.fedvs.split_vfl.noisy`.

    Parameters
    ----------
    epsilon : float, default 5.0
        The noise's scale is the spread of the embeddings through this number.
    clip : float, optional
        Bound to which embeddings are cut; their spread is twice that. By default it is taken from
        each batch.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    name: ClassVar[str] = "wait-dp"

    epsilon: float = 5.0
    clip: float | None = None

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon, minimum=1e-9)
        if self.clip is not None:
            check_number("clip", self.clip, minimum=1e-9)
