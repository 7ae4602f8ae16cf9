import re

import numpy as np
import pytest
from apps import record
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from flwr_privacy.errors import ProtocolError
from flwr_privacy.wire.digests import request_digest
from flwr_privacy.wire.message import Header
from flwr_privacy.wire.payload import payload_bytes

HEADER = Header(scheme="fedavg", experiment_id="e1", phase="train", server_round=2)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("scheme", "udp", "scheme 'udp': this end speaks 'fedavg'"),
        ("version", 9, "protocol version 9: this end speaks version 1"),
        (
            "phase",
            "trian",
            "phase 'trian' is not known: for this type of message the scheme 'fedavg' has 'train'",
        ),
    ],
)
def test_a_disagreement_names_both(key, value, text):
    header, _ = Header.read({**HEADER.write(), key: value})
    with pytest.raises(ProtocolError, match=re.escape(text)):
        header.check(scheme="fedavg", phases={"train"})


@pytest.mark.parametrize("key", HEADER.write())
def test_an_entry_that_is_missing_or_ill_typed_is_named(key):
    entries = HEADER.write()
    with pytest.raises(ProtocolError, match=f"'{key}' is None"):
        Header.read({k: v for k, v in entries.items() if k != key})
    with pytest.raises(ProtocolError, match=f"'{key}' is 1.5"):
        Header.read({**entries, key: 1.5})


def test_the_schemes_own_fields_survive():
    own = {"bits": 4, "codes": b"\x00\x01", "widths": [1, 2]}
    assert Header.read({**HEADER.write(), **own}) == (HEADER, own)


def test_payload_counts_what_is_sent():
    model = {"w": np.zeros(1000, np.float32)}
    empty = payload_bytes(RecordDict({"arrays": record({"w": np.zeros(0, np.float32)})}))
    assert payload_bytes(RecordDict({"arrays": record(model)})) == empty + 4000
    config = RecordDict({"c": ConfigRecord({"codes": bytes(500)}), "m": MetricRecord({"x": 1})})
    assert 500 < payload_bytes(config) < 700


def question(**changes):
    content = {
        "arrays": record({"w": np.arange(4, dtype=np.float32), "b": np.zeros(1)}),
        "config": ConfigRecord({"lr": 0.5, "names": ["a", "b"], "epochs": 1}),
        "join": ConfigRecord({"session": "s", "sealed": [b"1"]}),
        **changes,
    }
    return request_digest(RecordDict(content), without={"join": ("sealed",)})


@pytest.mark.parametrize(
    "changes",
    [
        {"arrays": record({"w": np.arange(4, dtype=np.float64), "b": np.zeros(1)})},
        {"arrays": record({"w": np.arange(1, 5, dtype=np.float32), "b": np.zeros(1)})},
        {"arrays": record({"w": np.arange(4, dtype=np.float32)[:, None], "b": np.zeros(1)})},
        {"arrays": record({"v": np.arange(4, dtype=np.float32), "b": np.zeros(1)})},
        {"arrays": record({"w": np.arange(4, dtype=np.float32)})},
        {"config": ConfigRecord({"lr": 0.25, "names": ["a", "b"], "epochs": 1})},
        {"config": ConfigRecord({"lr": 0.5, "names": ["ab"], "epochs": 1})},
        {"config": ConfigRecord({"lr": 0.5, "names": ["a", "b"], "epochs": 1.0})},
        {"config": ConfigRecord({"lr": 0.5, "names": ["a", "b"], "epochs": True})},
        {"config": ConfigRecord({"lr": 0.5, "names": ["a", "b"]})},
        {"join": ConfigRecord({"session": "t", "sealed": [b"1"]})},
        {"more": ConfigRecord()},
        {"config": MetricRecord({"lr": 0.5, "epochs": 1})},
        {"arrays": record({"b": np.zeros(1), "w": np.arange(4, dtype=np.float32)})},
    ],
)
def test_whatever_is_asked_otherwise_has_another_digest(changes):
    assert question(**changes) != question()


def test_a_digest_leaves_out_what_is_for_one_client_alone():
    assert question(join=ConfigRecord({"session": "s", "sealed": [b"2", b"3"]})) == question()
    assert question(**{"join@3": ConfigRecord({"sealed": [b"3"]})}) == question()
    numbers = ConfigRecord({"lr": np.float64(0.5), "names": ["a", "b"], "epochs": 1})
    assert question(config=numbers) == question()  # as they are after a journey
    moved = {"config": ConfigRecord(), "lr": ConfigRecord(), "0.5": ConfigRecord()}
    assert question(**moved) != question(config=ConfigRecord({"lr": "0.5"}))
