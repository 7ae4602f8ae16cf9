"""Decodes the arrays of replies, and takes answers apart that have a row for each client."""

from collections.abc import Iterator
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_privacy.clients.node.records import RecordArrays, to_record
from flwr_privacy.errors import ProtocolError
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.cohort import ROWS
from flwr_privacy.wire.message import METRICS, RECORD, Fields, Header

__all__ = ["arrays_of", "replies_of_rows"]

_ARRAYS = "arrays"


def arrays_of(record: ArrayRecord) -> dict[str, Any]:
    """Decode a record of arrays, without copies.

    Raises
    ------
    ReplyRefusedError
        If an array cannot be decoded.
    """
    try:
        return dict(RecordArrays(record))
    except ValueError as error:
        raise ReplyRefusedError("malformed", f"an array cannot be decoded ({error})") from error


def replies_of_rows(
    clients: list[str], content: RecordDict, header: Header
) -> Iterator[tuple[str, RecordDict, Fields]]:
    """Return each client's reply from the rows of a node's answer: its records and its fields.

    Parameters
    ----------
    clients : list of str
        Those who have answered, in the order of the rows.
    content : RecordDict
        The answer, whose own header was checked.
    header : Header
        Header of the request.

    Raises
    ------
    ReplyRefusedError
        If the answer has not one row for each of them.
    """
    arrays, columns = (content.get(name + ROWS) for name in (_ARRAYS, RECORD))
    if not isinstance(arrays, ArrayRecord) or not isinstance(columns, ConfigRecord):
        raise ReplyRefusedError("malformed", "rows without a record of arrays and one of values")
    stacked, values, count = arrays_of(arrays), dict(columns), len(clients)
    if any(array.shape[:1] != (count,) for array in stacked.values()) or any(
        not isinstance(column, list) or len(column) != count for column in values.values()
    ):
        raise ReplyRefusedError("malformed", f"other rows than one for each of {count} clients")
    try:
        header.write(values)
    except ProtocolError as error:
        raise ReplyRefusedError("malformed", str(error)) from error
    shared = ConfigRecord(header.write())
    return (
        _reply(client, row, stacked, values, shared.copy()) for row, client in enumerate(clients)
    )


def _reply(
    client: str, row: int, stacked: Arrays, values: Fields, record: ConfigRecord
) -> tuple[str, RecordDict, Fields]:
    fields = {name: column[row] for name, column in values.items()}
    record["client-id"] = client
    for name, value in fields.items():
        record[name] = value
    arrays = to_record({name: array[row] for name, array in stacked.items()}, local=True)
    content: dict[str, Any] = {_ARRAYS: arrays, METRICS: MetricRecord(), RECORD: record}
    return client, RecordDict(content), fields
