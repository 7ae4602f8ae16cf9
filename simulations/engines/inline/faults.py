"""Faults that the inline engine injects into replies, to test how a strategy handles them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from flwr_privacy.errors import check_choice
from flwr_privacy.wire.arrays import decode_npy
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.message import RECORD

__all__ = ["KINDS", "Fault", "fault_of"]

KINDS = {
    "drop": "the reply is lost",
    "crash": "the client dies before it replies: reply and state are lost",
    "delay": "the reply is ready only `seconds` later",
    "reorder": "the reply comes after all others",
    "duplicate": "the reply comes twice",
    "stranger": "the reply comes from a node that does not exist",
    "stale": "the client's previous reply comes again",
    "corrupt": "the bytes of an array are cut short",
    "nan": "an array has a NaN",
    "infinity": "an array has an infinity",
    "reshape": "an array has another shape",
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault, and which replies it hits (by default all).

    Parameters
    ----------
    kind : str
        A key of `KINDS`.
    client : str, optional
        Identity of the client.
    server_round : int, optional
        Round.
    phase : str, default "train"
        Phase.
    seconds : float, default 0.5
        Real seconds of a delay.
    """

    kind: str
    client: str | None = None
    server_round: int | None = None
    phase: str = "train"
    seconds: float = 0.5

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)

    def hits(self, request: Message, node_config: Mapping[str, object]) -> bool:
        """Tell whether the reply to a request is hit."""
        entry = request.content.get(RECORD)
        record: Mapping[str, object] = entry if isinstance(entry, ConfigRecord) else {}
        return (
            self.phase == record.get("phase")
            and self.server_round in (None, record.get("round"))
            and self.client in (None, client_id_from(node_config))
        )

    def damage(self, reply: Message) -> None:
        """Damage the first array of a reply, in place, if this is that kind of fault."""
        if reply.has_error():
            return
        named = (entry for entry in reply.content.array_records.items() if entry[1])
        name, record = next(named, ("", ArrayRecord()))
        if not record:
            return
        key, array = next(iter(record.items()))
        if self.kind == "corrupt":
            broken = Array(
                array.dtype, array.shape, array.stype, array.data[: len(array.data) // 2]
            )
        elif self.kind in ("nan", "infinity", "reshape"):
            values = np.array(decode_npy(array.data))
            if self.kind == "reshape":
                values = np.concatenate([values.reshape(-1), values.reshape(-1)])
            else:
                values = values.astype(np.result_type(values, np.float32))  # integers have no NaN
                values.reshape(-1)[0] = np.nan if self.kind == "nan" else np.inf
            broken = Array(values)
        else:
            return
        content = RecordDict(dict(reply.content))
        content[name] = ArrayRecord({**record, key: broken})
        reply.content = content


def fault_of(
    faults: Iterable[Fault], request: Message, node_config: Mapping[str, object]
) -> Fault | None:
    """Return the first fault that hits the reply to a request."""
    return next((fault for fault in faults if fault.hits(request, node_config)), None)
