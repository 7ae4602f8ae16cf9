"""Bytes of a payload: what is measured once for records of one form is right for each of them."""

import random
from typing import Any

import pytest
from flwr.app import ConfigRecord, MetricRecord

from flwr_privacy.wire import payload
from flwr_privacy.wire.payload import payload_bytes


def value(draw: random.Random, *, metric: bool) -> Any:
    near = 2 ** draw.randrange(63)
    return draw.choice(
        [
            draw.choice([0, 1, -1, near, -near, near - 1, 1 - near]),
            draw.choice([0.0, -1.5, 3e300]),
            [draw.randrange(2**40) for _ in range(draw.randrange(4))],
            draw.random() < 0.5,
            "aä€"[: draw.randrange(4)] * draw.randrange(90),
            bytes(draw.randrange(300)),
        ][: 3 if metric else 6]
    )


@pytest.mark.parametrize("kind", [ConfigRecord, MetricRecord])
def test_the_size_of_a_record_is_that_of_its_bytes(kind: Any) -> None:
    draw = random.Random(1)
    for _ in range(3000):
        names = draw.sample(["a", "ä", "client-id", "saturated"], draw.randrange(5))
        record = kind({name: value(draw, metric=kind is MetricRecord) for name in names})
        assert payload_bytes({"record": record}) == len(record.deflate()), dict(record)


def test_no_names_of_an_adversary_are_kept() -> None:
    before = len(payload._SIZES)
    long = [ConfigRecord({"x" * 10_000: 1}), ConfigRecord({f"{n:05}": n for n in range(2000)})]
    assert [payload_bytes({"r": record}) for record in long] == [len(r.deflate()) for r in long]
    assert len(payload._SIZES) == before
    for length in range(3000):
        payload_bytes({"r": ConfigRecord({"name": "x" * length})})
    assert len(payload._SIZES) <= payload._MOST_SIZES


def test_a_record_that_cannot_be_sent_has_no_size() -> None:
    assert payload_bytes({"record": ConfigRecord({"a": 2**62})}) > 0
    for _ in range(2):
        with pytest.raises(ValueError, match="out of range"):
            payload_bytes({"record": ConfigRecord({"a": 2**70})})
