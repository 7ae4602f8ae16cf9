"""A hello is good for one nonce, node, scheme, experiment, client and set of fields."""

from dataclasses import replace
from typing import Any

import pytest

from flwr_privacy.errors import ProtocolError
from flwr_privacy.wire.hello import IDENTITY, NONCE_BYTES, SIGNATURE, proven_key, signed
from flwr_privacy.wire.message import Header
from flwr_privacy.wire.pins import Identity

WARD, CLINIC = Identity.generate(), Identity.generate()
NONCE, NODE = bytes(range(NONCE_BYTES)), 7
HEADER = Header(scheme="udp", experiment_id="e", phase="hello", server_round=0, client_id="ward-7")
TOLD = {"plays": "one", "role": "device", "key": b"k" * 32, "sizes": [3, 4], "rate": 0.5}
HELLO = signed(WARD, HEADER, TOLD, nonce=NONCE, node=NODE)
BAD = r"the hello is not signed with the key that it names"


def test_a_signed_hello_names_its_key() -> None:
    assert proven_key(HEADER, HELLO, nonce=NONCE, node=NODE) == WARD.public
    assert {name: HELLO[name] for name in TOLD} == TOLD


def test_a_hello_without_key_and_signature_has_no_key() -> None:
    assert proven_key(HEADER, TOLD, nonce=NONCE, node=NODE) == ""


def test_what_does_not_travel_is_not_signed() -> None:
    hello = signed(WARD, HEADER, {**TOLD, "storage": "", "peers": []}, nonce=NONCE, node=NODE)
    _, travelled = Header.read(HEADER.write(hello))
    assert "storage" not in travelled
    assert proven_key(HEADER, travelled, nonce=NONCE, node=NODE) == WARD.public


@pytest.mark.parametrize(
    "question",
    [{"nonce": bytes(NONCE_BYTES), "node": NODE}, {"nonce": NONCE, "node": NODE + 1}],
    ids=["another nonce", "another node"],
)
def test_a_hello_is_of_no_use_elsewhere(question: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=BAD):
        proven_key(HEADER, HELLO, **question)


@pytest.mark.parametrize(
    "change",
    [{"client_id": "ward-8"}, {"experiment_id": "f"}, {"scheme": "fedavg"}],
    ids=lambda change: next(iter(change)),
)
def test_a_hello_is_of_one_client_experiment_and_scheme(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=BAD):
        proven_key(replace(HEADER, **change), HELLO, nonce=NONCE, node=NODE)


CHANGES: dict[str, dict[str, Any]] = {
    "a changed text": {"plays": "any"},
    "changed bytes": {"key": b"j" * 32},
    "two swapped values": {"plays": "device", "role": "one"},
    "a number in place of a text": {"plays": 1},
    "an integer in place of a float": {"rate": 1},
    "a changed list": {"sizes": [34]},
    "one more": {"peers": ["ward-8"]},
    "another's key": {IDENTITY: CLINIC.public},
    "another's signature": {SIGNATURE: CLINIC.sign("hello")},
    "no bytes as signature": {SIGNATURE: "a signature"},
    "a list as key": {IDENTITY: [WARD.public]},
    "no base64 as key": {IDENTITY: "key"},
    "a key with a strange letter": {IDENTITY: WARD.public[:-1] + "!="},
    "a number as key": {IDENTITY: 5},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_no_field_can_be_changed(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=BAD):
        proven_key(HEADER, HELLO | change, nonce=NONCE, node=NODE)


@pytest.mark.parametrize("missing", [*TOLD, IDENTITY, SIGNATURE])
def test_no_field_can_be_left_out(missing: str) -> None:
    fields = {name: value for name, value in HELLO.items() if name != missing}
    with pytest.raises(ProtocolError, match=BAD):
        proven_key(HEADER, fields, nonce=NONCE, node=NODE)


def test_the_fields_of_one_hello_do_not_fit_the_signature_of_another() -> None:
    other = signed(WARD, HEADER, {"plays": "any"}, nonce=NONCE, node=NODE)
    with pytest.raises(ProtocolError, match=BAD):
        proven_key(HEADER, HELLO | {SIGNATURE: other[SIGNATURE]}, nonce=NONCE, node=NODE)


@pytest.mark.parametrize("nonce", [None, b"", b"short", bytes(NONCE_BYTES + 1), "n" * 32, 7])
def test_a_client_signs_only_a_nonce_of_the_right_size(nonce: Any) -> None:
    with pytest.raises(ProtocolError, match="hello: the entry 'nonce' is not 32 bytes"):
        signed(WARD, HEADER, TOLD, nonce=nonce, node=NODE)


def test_a_signature_of_a_key_is_no_hello() -> None:
    """Zones and secure sums sign with the same identity, parts that begin otherwise."""
    parts = ("udp key", "e", "ward-7", b"k" * 32)
    with pytest.raises(ProtocolError, match=BAD):
        proven_key(HEADER, HELLO | {SIGNATURE: WARD.sign(*parts)}, nonce=NONCE, node=NODE)
