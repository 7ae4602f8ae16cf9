"""A signed head: who said what of which experiment, and files of them."""

import json
from dataclasses import replace
from typing import Any

import pytest

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.privacy.ledger import Head
from flwr_privacy.privacy.ledger.chain import begun
from flwr_privacy.privacy.ledger.signed_head import (
    SignedHead,
    heads_from_json,
    heads_to_json,
)
from flwr_privacy.wire.pins import Identity

IDENTITY = Identity.generate()
HEAD = Head(count=3, value=b"v" * 32)
SIGNED = SignedHead.sign(IDENTITY, experiment="e", client="ward-7", head=HEAD)


def test_a_signed_head_is_read_again_from_its_file() -> None:
    unsigned = SignedHead.sign(None, experiment="two", client="ward-7", head=begun("two"))
    (first, second) = heads_from_json(heads_to_json([SIGNED, unsigned]))
    assert (first, second) == (SIGNED, unsigned)
    first.verify()
    assert first.key == IDENTITY.public
    with pytest.raises(ProtocolError, match="'ward-7' has no signature"):
        second.verify()


@pytest.mark.parametrize(
    "changes",
    [
        {"experiment": "f"},
        {"client": "ward-8"},
        {"head": Head(count=4, value=HEAD.value)},
        {"head": Head(count=3, value=b"w" * 32)},
        {"key": Identity.generate().public},
        {"signature": b"s" * 64},
    ],
)
def test_a_signature_is_for_everything_that_the_head_says(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="does not fit"):
        replace(SIGNED, **changes).verify()


@pytest.mark.parametrize(
    "changes",
    [
        {"experiment": ""},
        {"client": "a\n"},
        {"count": -1},
        {"count": True},
        {"value": "00"},
        {"value": "xy" * 32},
        {"value": 3},
        {"key": ""},
        {"key": None},
        {"signature": ""},
        {"signature": "AAAA"},
        {"signature": "no base64"},
        {"more": 1},
    ],
)
def test_a_malformed_head_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError):
        SignedHead.from_dict({**SIGNED.to_dict(), **changes})
    with pytest.raises(InvalidParameterError):
        heads_from_json(json.dumps({"heads": [{**SIGNED.to_dict(), **changes}]}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"heads": {}}', '{"heads": [1]}', "[" * 99_999])
def test_a_file_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameterError):
        heads_from_json(text)


@pytest.mark.parametrize("key", ["AAAA", "ü"])
def test_a_malformed_key_is_refused_when_it_is_used(key: str) -> None:
    with pytest.raises(InvalidParameterError, match="a public key"):
        replace(SIGNED, key=key).verify()
