"""Records of vertical schemes: a client's columns, pending gradients, aggregated embeddings."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import RecordDict
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError, ProtocolError, check_integer
from flwr_privacy.fedvs.data import TRAIN_PART
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.strategies.requests.request_log import ClientReply
from flwr_privacy.strategies.state.experiment import to_record
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.identity import check_client_id

__all__ = [
    "Aggregate",
    "Enrolled",
    "Pending",
    "arrays_message",
    "check_aligned",
    "label_vector",
    "natural",
]


@dataclass(frozen=True, kw_only=True)
class _Told:
    """The fields that every client sends in the setup."""

    columns: int
    parts: list[str]
    rows: list[int]
    ids: list[bytes]


@dataclass(frozen=True, kw_only=True)
class Enrolled:
    """A client's description of itself and its data.

    Parameters
    ----------
    columns : int
        Raw features.
    rows : dict of str to int
        Rows of each part.
    ids : dict of str to bytes
        Hash of the rows' identities of each part; b"" where none are given.
    key, signature : bytes
        Its public key, if the scheme has any.
    """

    columns: int
    rows: dict[str, int]
    ids: dict[str, bytes]
    key: bytes = b""
    signature: bytes = b""

    @classmethod
    def of(cls, reply: ClientReply) -> "Enrolled":
        """Read the description from a client's reply.

        Raises
        ------
        ReplyRefusedError
            If an entry is missing or of another kind.
        """
        try:
            return cls.read(reply.fields)
        except (ProtocolError, InvalidParameterError) as error:
            text = f"client {reply.client_id}: {error}"
            raise ReplyRefusedError("malformed", text) from error

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "Enrolled":
        """Read the description from a reply, which may come from an adversary.

        Raises
        ------
        ProtocolError
            If an entry is missing or of another kind.
        """
        told = records.read(_Told, fields)
        parts, rows, ids = told.parts, told.rows, told.ids
        if not len(parts) == len(rows) == len(ids) or TRAIN_PART not in parts:
            raise ProtocolError("it does not say which rows it has")
        for name in parts:
            check_client_id(name, parameter="parts")
        for count in rows:
            check_integer("rows", count, minimum=1)
        key, signature = fields.get("key", b""), fields.get("signature", b"")
        if type(key) is not bytes or type(signature) is not bytes:
            raise ProtocolError("its key is no bytes")
        return cls(
            columns=check_integer("columns", told.columns, minimum=1),
            rows=dict(zip(parts, rows, strict=True)),
            ids=dict(zip(parts, ids, strict=True)),
            key=key,
            signature=signature,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Pending:
    """A gradient that has not reached the clients yet.

    Parameters
    ----------
    rows : list of int
        Coded rows of its batch.
    clients : list of str
        Whose embeddings were in the aggregate.
    gradient : (K b, h) float32
        Gradient with respect to the aggregate; zero at pads.
    """

    rows: list[int] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)
    gradient: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))


@dataclass(frozen=True, kw_only=True, eq=False)
class Aggregate:
    """The aggregated embeddings of some rows.

    Parameters
    ----------
    values : (m, h) float32
        One row for each place of the rows, in the order of `Segments.real_rows`; pads are noise.
    clients : list of str
        Over whom.
    """

    values: NDArray[np.float32]
    clients: list[str]


def natural(names: Iterable[str]) -> list[str]:
    """Sort names so that numbers in them are in numeric order.

    Examples
    --------
    >>> natural(["10", "9", "1"])
    ['1', '9', '10']
    """
    return sorted(names, key=lambda name: (len(name), name))


def arrays_message(arrays: Mapping[str, NDArray[Any]]) -> RecordDict:
    """Return arrays as the content of a request."""
    return RecordDict({"arrays": to_record(dict(arrays))})


def check_aligned(told: Mapping[str, Enrolled]) -> None:
    """Refuse clients that do not have the same rows.

    Raises
    ------
    ProtocolError
        If numbers of rows or identities differ; it names the clients.
    """
    names = natural(told)
    first = told[names[0]]
    for name in names[1:]:
        if told[name].rows != first.rows:
            raise ProtocolError(
                f"client {name} has rows {told[name].rows}, client {names[0]} has {first.rows}: "
                "all clients must have the same rows"
            )
    for part in first.rows:
        given = [name for name in names if told[name].ids[part]]
        others = [name for name in given if told[name].ids[part] != told[given[0]].ids[part]]
        if others:
            raise ProtocolError(
                f"the rows '{part}' of clients {others} have other identities than those of client "
                f"{given[0]}, or another order: align them before the training"
            )


def label_vector(name: str, given: ArrayLike) -> NDArray[Any]:
    """Return labels as a vector of numbers.

    Raises
    ------
    InvalidParameterError
        If they are none; it names the parameter.
    """
    labels = np.asarray(given)
    if labels.ndim != 1 or not len(labels) or labels.dtype.kind not in "iufb":
        raise InvalidParameterError(
            name, f"{type(given).__name__} of shape {labels.shape}", "a vector of numbers"
        )
    if not np.isfinite(labels.astype(np.float64)).all():
        raise InvalidParameterError(name, "NaN or infinity", "a label for every row")
    return labels.astype(np.int64) if labels.dtype.kind == "b" else labels
