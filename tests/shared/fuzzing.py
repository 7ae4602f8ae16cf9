"""Changes messages of real trainings at random, in either direction."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.wire.arrays import decode_npy
from flwr_privacy.wire.message import RECORD

APP_FAILED = 2
"""Flower's code for an exception in a client that is none of this library's."""

_KINDS = {ConfigRecord: (bool, int, float, str, bytes), MetricRecord: (int, float)}


def extreme(draws: random.Random, kinds: Sequence[type]) -> Any:
    """Return a value that nobody expects."""
    values: dict[type, list[Any]] = {
        bool: [True, False],
        int: [0, -1, 1, 2, 255, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)],
        float: [0.0, -0.0, 1e-320, -1.0, 0.5, 1e300, float("inf"), float("-inf"), float("nan")],
        str: ["", "0", "weights", "..", "/etc/passwd", "é" * 40, "a\nb", "x" * 5000],
        bytes: [b"", b"\x00", b"\xff" * 32, draws.randbytes(32), draws.randbytes(300)],
    }
    value = draws.choice(values[draws.choice(kinds)])
    if type(value) is not bool and draws.random() < 0.2:
        return [value] * draws.choice([0, 1, 2, 5])
    return value


def altered(draws: random.Random, value: Any) -> Any:
    """Return a value close to one."""
    if isinstance(value, list):
        return altered_list(draws, value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(
            -(2**63), min(2**63 - 1, value + draws.choice([-1, 1, 2**20, -value, -2 * value]))
        )
    if isinstance(value, float):
        return value * draws.choice([-1, 0, 2, 1e10, float("nan")])
    if isinstance(value, bytes):
        return altered_bytes(draws, value)
    return draws.choice([value + "x", value[:-1], value.upper(), value[::-1]])


def altered_list(draws: random.Random, values: list[Any]) -> list[Any]:
    if not values:
        return values
    place = draws.randrange(len(values))
    own = values[place]
    return draws.choice(
        [
            values[:place],
            values[:place] + values[place + 1 :],
            [*values, own],
            values[::-1],
            [*values[:place], altered(draws, own), *values[place + 1 :]],
        ]
    )


def altered_bytes(draws: random.Random, data: bytes) -> bytes:
    if not data:
        return b"\x00"
    place = draws.randrange(len(data))
    flipped = data[:place] + bytes([data[place] ^ (1 << draws.randrange(8))]) + data[place + 1 :]
    return draws.choice([flipped, flipped, data[:place], data + data[: place + 1], b""])


def altered_array(draws: random.Random, array: Array) -> Array:
    data = array.data
    try:
        values = np.array(decode_npy(data))
    except ValueError:  # it was changed before
        values = None
    if values is None or draws.random() < 0.4:
        return Array(array.dtype, array.shape, array.stype, altered_bytes(draws, data))
    flat = values.reshape(-1)
    choice = draws.randrange(7)
    if choice == 0:
        values = values.astype(draws.choice(["float64", "float16", "int8", "uint32", "int64"]))
    elif choice == 1:
        values = flat
    elif choice == 2:
        values = np.concatenate([flat, flat])
    elif choice == 3:
        values = flat[:0]
    elif choice == 4 and len(flat):
        values = values.astype(np.result_type(values, np.float32))
        values.reshape(-1)[draws.randrange(len(flat))] = draws.choice([np.nan, np.inf, 1e38, -1e38])
    elif choice == 5:
        values = values.astype(">" + values.dtype.str[1:])
    else:
        header = draws.choice(["|O", "<f4", "<U9", "<M8[s]"])
        shape = draws.choice(["(2,)", "(-1,)", "(99999999999,)", "()", "(0, 9)"])
        text = f"{{'descr': '{header}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        raw = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data[-8:]
        return Array(array.dtype, array.shape, array.stype, raw)
    return Array(values)


def mutated(draws: random.Random, content: RecordDict) -> RecordDict:
    """Return a content with a few changes; the given one stays as it is."""
    made = RecordDict(dict(content))
    for _ in range(draws.choice([1, 1, 1, 2, 3])):
        name = draws.choice(list(made)) if made else RECORD
        change: Callable[..., None] = _change_record if draws.random() < 0.85 else _change_names
        change(draws, made, name)
    return made


def _change_names(draws: random.Random, content: RecordDict, name: str) -> None:
    record = content.get(name, ConfigRecord())
    choice = draws.randrange(4)
    if choice == 0:
        content.pop(name, None)
    elif choice == 1:
        content[draws.choice(["arrays", "metrics", "x", f"{name}@0", f"{name}@@0"])] = record
    elif choice == 2:
        content[name] = draws.choice([ArrayRecord(), ConfigRecord(), MetricRecord()])
    else:
        content["more"] = ConfigRecord({"x": draws.randbytes(50)})


def _change_record(draws: random.Random, content: RecordDict, name: str) -> None:
    record = content.get(name)
    if record is None:
        return
    entries: dict[str, Any] = dict(record)
    key = draws.choice(list(entries)) if entries else "x"
    choice = draws.random()
    if isinstance(record, ArrayRecord):
        if choice < 0.15 or not entries:
            entries.pop(key, None)
        elif choice < 0.3:
            entries[draws.choice(["", "x", f"{key}.1", "a/b"])] = entries[key]
        else:
            entries[key] = altered_array(draws, entries[key])
    elif choice < 0.2:
        entries.pop(key, None)
    elif choice < 0.6 and key in entries:
        value = altered(draws, entries[key])
        entries[key] = value if isinstance(record, ConfigRecord) or value != [] else 0
    else:
        entries[key if choice < 0.9 else "more"] = extreme(draws, _KINDS[type(record)])
    content[name] = type(record)(entries)


class FuzzedGrid(InlineGrid):
    """An inline engine that changes some messages.

    Parameters
    ----------
    client_app, nodes, options
        As those of `InlineGrid`.
    draws : random.Random
        Decides.
    replies, requests : float
        Share of the replies and of the requests that are changed.

    Attributes
    ----------
    changed : int
        How many messages were changed.
    crashed : list of str
        What exceptions of a client came out that are none of the library's.
    """

    def __init__(
        self,
        client_app: Any,
        nodes: Sequence[Mapping[str, Any]],
        *,
        draws: random.Random,
        replies: float = 0.0,
        requests: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(client_app, nodes, **options)
        self._draws, self._share = draws, {"replies": replies, "requests": requests}
        self.changed = 0
        self.crashed: list[str] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = []
        for message in messages:
            if self._hit("requests"):
                content = mutated(self._draws, message.content)
                own = Message(content, message.metadata.dst_node_id, message.metadata.message_type)
                (message_id,) = super().push_messages([own])
                message.metadata.__dict__["_message_id"] = message_id
                sent.append(message_id)
            else:
                sent.extend(super().push_messages([message]))
        return sent

    def _answer(self, message_id: str) -> list[Message]:
        # What is not of this library goes to the app, if the scheme protects nothing.
        ours = RECORD in self._requests[message_id].content
        replies = super()._answer(message_id)
        for reply in replies:
            if reply.has_error():
                if ours and reply.error.code == APP_FAILED:
                    self.crashed.append(reply.error.reason)
            elif self._hit("replies"):
                reply.content = mutated(self._draws, reply.content)
        return replies

    def _hit(self, direction: str) -> bool:
        hit = self._draws.random() < self._share[direction]
        self.changed += hit
        return hit
