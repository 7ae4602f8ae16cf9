"""Takes a step without the user's code for all clients of a cohort; their answers travel as rows.

What is the same for all of them is read once: the message and its arrays. Everything that a node
checks, draws and keeps is each client's own, as where it answers alone (`dispatch.run_client`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from flwr_privacy.errors import ProtocolError
from flwr_privacy.secure_sum.messages import JOIN
from flwr_privacy.wire.arrays import Arrays, npy_size
from flwr_privacy.wire.cohort import EACH, ROWS, Cohort
from flwr_privacy.wire.message import COHORT, METRICS, RECORD, VERSION, Fields, Header
from flwr_privacy.wire.payload import payload_bytes, record_bytes

from .base import SchemeClient, Trained
from .dispatch import ARRAYS, App, Run, read_request, refusing_alike, reply_record
from .records import RecordArrays, first_array_record, to_record, with_content

__all__ = ["Row", "Step", "collected"]

_EMPTY = payload_bytes({METRICS: MetricRecord()}), payload_bytes({ARRAYS: ArrayRecord()})
"""Bytes of a record without metrics, and of one without arrays."""


@dataclass(frozen=True, eq=False)
class Row:
    """The answer of one client to a step, not written into records.

    Parameters
    ----------
    client_id : str
        The client.
    arrays : Mapping of str to ndarray
        Its arrays.
    fields : dict
        The scheme's own values.
    """

    client_id: str
    arrays: Arrays
    fields: Fields

    def size(self, header: Header) -> int:
        """Return the bytes of the payload that the client would send as the only one of its node.

        Raises
        ------
        ProtocolError
            If one of the fields has a name of the header.
        TypeError
            If one cannot be sent.
        """
        values = replace(header, client_id=self.client_id, version=VERSION).write(self.fields)
        metrics, no_arrays = _EMPTY
        arrays = sum(map(npy_size, self.arrays.values())) or no_arrays
        return (
            arrays
            + metrics
            + record_bytes(ConfigRecord.__name__, values, lambda: ConfigRecord(values).deflate())
        )

    def records(self, header: Header) -> dict[str, Any]:
        """Return the records of the answer, as those of a client that answers alone."""
        return {
            ARRAYS: to_record(self.arrays),
            METRICS: MetricRecord(),
            RECORD: reply_record(header, self.client_id, self.fields),
        }

    @property
    def form(self) -> tuple[Any, ...]:
        """What rows have in common that can be stacked: names and types."""
        arrays = tuple((name, a.dtype, a.shape) for name, a in self.arrays.items())
        return arrays, tuple((name, type(value)) for name, value in self.fields.items())

    @property
    def is_plain(self) -> bool:
        """Whether the arrays are of numbers, and each field is one value."""
        numbers = all(a.dtype.kind in "biuf" for a in self.arrays.values())
        return numbers and not any(isinstance(value, list) for value in self.fields.values())


class Step:
    """A request for a step of several clients, of which all get the same.

    Parameters
    ----------
    message : Message
        The request to the cohort, with its arrays decoded.
    header : Header
        Its header.
    """

    def __init__(self, message: Message, header: Header) -> None:
        own: dict[str, Any] = {n: r for n, r in message.content.items() if n != COHORT}
        self._message = with_content(message, RecordDict(own))
        self._header = header
        self._arrays = RecordArrays(first_array_record(self._message.content))

    @classmethod
    def of(cls, message: Message, header: Header, cohort: Cohort) -> "Step | None":
        """Return the step that a request may be; None where clients get records of their own."""
        alike = not any("@" in name for name in message.content) and JOIN not in message.content
        return cls(message, header) if alike and cohort.reply == EACH else None

    def fits(self, client: SchemeClient) -> bool:
        """Tell whether a client half says that this is a step without the user's code."""
        # Where something is charged, an answer shows the head of the client's ledger.
        return self._header.phase in client.steps and not client.guarantees_dp

    def take(
        self, app: App, client: SchemeClient, client_id: str, context: Context
    ) -> tuple["Row | RecordDict", int]:
        """Take the step for one client; return its answer and the bytes of its payload.

        The node checks what it checks in `dispatch.run_client`, in the same order, and it raises
        the same.
        """
        message, arrays = self._message, self._arrays
        header, fields = read_request(client, message)
        client.check_unaccounted(sigma=None)
        _, fields = Run(app, client, client_id, message, context, header, fields).admitted(arrays)
        with refusing_alike(client, context, []):
            out, own = client.handle(header.phase, arrays, fields, _no_training)
        return self._as_row(client_id, out, own)

    def _as_row(self, client_id: str, out: Arrays, own: Fields) -> tuple["Row | RecordDict", int]:
        """Return an answer as a row, or as records where it cannot be one; and its bytes."""
        metrics = own.pop(METRICS, {})
        arrays = {name: np.asarray(array) for name, array in out.items()}
        fields = {key: value for key, value in own.items() if value not in ("", [])}
        row = Row(client_id, arrays, fields)
        if not metrics and row.is_plain:
            return row, row.size(self._header)
        records = {**row.records(self._header), METRICS: MetricRecord(dict(metrics))}
        return RecordDict(records), payload_bytes(records)


def _no_training(start: Arrays) -> Trained:
    raise ProtocolError("a step that the client half names in `steps` calls for no training")


def collected(header: Header, answers: Mapping[str, "Row | RecordDict"]) -> RecordDict:
    """Return the records of the clients' answers: as rows, if all of them can be stacked.

    Parameters
    ----------
    header : Header
        Header of the request.
    answers : Mapping
        The answer of each client, in the order in which the node says that they have answered.
    """
    rows = [answer for answer in answers.values() if isinstance(answer, Row)]
    content = RecordDict()
    if len(rows) == len(answers) and len({row.form for row in rows}) == 1:
        arrays = {n: np.stack([row.arrays[n] for row in rows]) for n in rows[0].arrays}
        fields: Fields = {n: [row.fields[n] for row in rows] for n in rows[0].fields}
        content[ARRAYS + ROWS] = to_record(arrays)
        content[RECORD + ROWS] = ConfigRecord(fields)
    else:
        for client_id, answer in answers.items():
            records = answer.records(header) if isinstance(answer, Row) else answer
            for name, record in records.items():
                content[f"{name}@{client_id}"] = record
    content[RECORD] = reply_record(header, "", {})
    return content
