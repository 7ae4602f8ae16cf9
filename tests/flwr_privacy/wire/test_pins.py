import base64
import copy
import dataclasses
import os
import pickle
import re
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.wire.channel import canonical
from flwr_privacy.wire.pins import Identity, Pins

# RFC 8032, section 7.1: secret key, public key
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
    ),
]
WARD, CLINIC = (
    Identity(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private))) for private, _ in VECTORS
)


def pem(key, encryption=None) -> bytes:
    encryption = encryption or NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


@pytest.fixture
def key_file(tmp_path):
    def with_content(content: bytes, mode: int = 0o600):
        path = tmp_path / "identity.pem"
        path.write_bytes(content)
        path.chmod(mode)
        return path

    return with_content


@pytest.fixture
def read(tmp_path):
    def from_text(text: str) -> Pins:
        path = tmp_path / "pins.toml"
        path.write_text(text, encoding="utf-8")
        return Pins.read(path)

    return from_text


@pytest.mark.parametrize(("private", "public"), VECTORS)
def test_the_public_key_is_that_of_rfc_8032(private, public):
    identity = Identity(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private)))
    assert identity.public == base64.b64encode(bytes.fromhex(public)).decode()


def test_new_identities_differ():
    assert len({Identity.generate().public for _ in range(20)}) == 20


def test_what_was_written_is_read_back(tmp_path):
    path = tmp_path / "identity.pem"
    WARD.write(path)
    back = Identity.read(str(path))
    assert back.public == WARD.public
    assert back.sign("run", 1) == WARD.sign("run", 1)


def test_the_file_is_the_key_in_pkcs8_without_password(tmp_path):
    path = tmp_path / "identity.pem"
    WARD.write(path)
    assert path.read_text().startswith("-----BEGIN PRIVATE KEY-----\n")
    key = load_pem_private_key(path.read_bytes(), password=None)
    assert key.private_bytes_raw().hex() == VECTORS[0][0]


def test_only_the_owner_may_read_the_file_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        WARD.write(tmp_path / "identity.pem")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "identity.pem").stat().st_mode) == 0o600


def test_an_identity_is_never_overwritten(tmp_path):
    path, link = tmp_path / "identity.pem", tmp_path / "link.pem"
    WARD.write(path)
    link.symlink_to(tmp_path / "elsewhere.pem")
    for taken in (path, link):
        with pytest.raises(InvalidParameterError, match="never overwritten") as raised:
            CLINIC.write(taken)
        assert raised.value.value == str(taken)
    assert Identity.read(path).public == WARD.public
    assert not (tmp_path / "elsewhere.pem").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    path = tmp_path / "missing" / "identity.pem"
    with pytest.raises(InvalidParameterError, match=re.escape(f"identity = '{path}'")):
        WARD.write(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o440])
def test_a_file_with_rights_for_others_is_refused(key_file, mode):
    path = key_file(pem(Ed25519PrivateKey.generate()), mode)
    with pytest.raises(InvalidParameterError) as raised:
        Identity.read(path)
    assert f"not with mode {mode:04o} (chmod 600 {path})" in str(raised.value)
    assert raised.value.value == str(path)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_for_its_owner_alone_is_read(key_file, mode):
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(VECTORS[0][0]))
    assert Identity.read(key_file(pem(key), mode)).public == WARD.public


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no key",
        bytes.fromhex(VECTORS[0][0]),
        pem(Ed25519PrivateKey.generate())[:-40],
        pem(X25519PrivateKey.generate()),
        pem(Ed25519PrivateKey.generate(), BestAvailableEncryption(b"password")),
        Ed25519PrivateKey.generate()
        .public_key()
        .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    ],
    ids=["empty", "text", "raw", "cut", "x25519", "password", "public"],
)
def test_a_file_that_is_no_ed25519_key_is_refused(key_file, content):
    path = key_file(content)
    with pytest.raises(InvalidParameterError, match="an Ed25519 private key in PEM") as raised:
        Identity.read(path)
    assert raised.value.value == str(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "missing.pem", tmp_path):
        with pytest.raises(InvalidParameterError, match="a file that can be read") as raised:
            Identity.read(path)
        assert raised.value.value == str(path)


def test_a_signature_is_ed25519_of_the_canonical_parts():
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(VECTORS[0][1]))
    signed = canonical("flwr-privacy signature", "run", 7, [b"key"])
    key.verify(WARD.sign("run", 7, [b"key"]), signed)


def test_a_repr_shows_no_key():
    assert repr(WARD) == "<Identity of 11qYAYKx...>"
    assert repr(WARD)[13:21] == WARD.public[:8]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_identity_cannot_be_pickled_or_copied(duplicate):
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        duplicate(WARD)


def test_pins_are_read_from_a_file(read):
    pins = read(f'[clients]\n"ward-7" = "{WARD.public}"\n"st.anne" = "{CLINIC.public}"\n')
    assert dict(pins.clients) == {"ward-7": WARD.public, "st.anne": CLINIC.public}
    assert "ward-7" in pins
    assert "st.anne" in pins
    assert "ward" not in pins
    pins.verify("ward-7", WARD.sign("run", 7), "run", 7)
    pins.verify("st.anne", CLINIC.sign("run", 7), "run", 7)


def test_a_signature_of_someone_else_or_something_else_is_refused():
    pins = Pins({"ward": WARD.public, "clinic": CLINIC.public})
    signature = WARD.sign("run", 7)
    pins.verify("ward", signature, "run", 7)
    for client_id, parts in [
        ("clinic", ("run", 7)),
        ("ward", ("run", 8)),
        ("ward", ("run", "7")),
        ("ward", ("run",)),
        ("ward", ("run", 7, "")),
        ("ward", (("run", 7),)),
    ]:
        with pytest.raises(ProtocolError, match=f"signature of client '{client_id}' does not fit"):
            pins.verify(client_id, signature, *parts)


def test_every_changed_byte_of_a_signature_is_refused():
    pins, signature = Pins({"ward": WARD.public}), WARD.sign("run", 7)
    for place in range(len(signature)):
        damaged = bytearray(signature)
        damaged[place] ^= 1
        with pytest.raises(ProtocolError, match="'ward' does not fit"):
            pins.verify("ward", bytes(damaged), "run", 7)


@pytest.mark.parametrize("signature", [b"", bytes(63), bytes(64), bytes(65), "a" * 64, None])
def test_what_is_no_signature_is_refused(signature):
    with pytest.raises(ProtocolError, match="signature of client 'ward' does not fit"):
        Pins({"ward": WARD.public}).verify("ward", signature, "run", 7)


def test_a_client_without_a_pin_is_refused():
    pins = Pins({"ward": WARD.public})
    with pytest.raises(ProtocolError, match="client 'clinic' is not pinned"):
        pins.verify("clinic", CLINIC.sign("run"), "run")
    with pytest.raises(ProtocolError, match=r"client 'x{64}' is not pinned"):
        pins.verify("x" * 10_000, CLINIC.sign("run"), "run")


def test_nothing_changes_pins_later():
    clients = {"ward": WARD.public}
    pins = Pins(clients)
    clients["clinic"] = CLINIC.public
    assert "clinic" not in pins
    with pytest.raises(TypeError):
        pins.clients["clinic"] = CLINIC.public
    with pytest.raises(dataclasses.FrozenInstanceError):
        pins.clients = clients


def test_one_key_for_two_clients_is_refused():
    with pytest.raises(InvalidParameterError, match=r"clients\.clinic .* of client 'ward'"):
        Pins({"ward": WARD.public, "clinic": WARD.public})


def test_one_key_has_one_text():
    last = WARD.public[-2]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    same = WARD.public[:-2] + alphabet[alphabet.index(last) + 1] + "="
    assert base64.b64decode(same) == base64.b64decode(WARD.public)
    with pytest.raises(InvalidParameterError, match=r"clients\.clinic"):
        Pins({"ward": WARD.public, "clinic": same})


@pytest.mark.parametrize(
    "public",
    [
        "",
        "no base64!",
        "schlüssel",
        WARD.public[:-1],
        WARD.public + "\n",
        base64.b64encode(bytes(31)).decode(),
        base64.b64encode(bytes(33)).decode(),
        base64.urlsafe_b64encode(b"\xff" * 32).decode(),
        bytes(32).hex(),
        7,
        {"ward": WARD.public},
    ],
)
def test_what_is_no_public_key_is_refused(public):
    with pytest.raises(InvalidParameterError, match=r"clients\.ward .*: 32 bytes in base64"):
        Pins({"ward": public})


@pytest.mark.parametrize("client_id", ["", "a b", "..", "a/b", "x" * 65, "ward\n"])
def test_a_malformed_id_is_refused(client_id):
    with pytest.raises(InvalidParameterError, match=r"clients = .*: expected 1 to 64 letters"):
        Pins({client_id: WARD.public})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clients", "a TOML file"),
        ('[clients]\nward = "a"\nward = "b"', "a TOML file"),
        ("", "clients = None: expected a table of public keys"),
        ('clients = "ward"', "clients = 'ward': expected a table of public keys"),
        ("[client]", "key = 'client': expected one of 'clients' (nearest: 'clients')"),
        ("[clients]\n[more]", "key = 'more': expected one of 'clients'"),
        ('[clients]\nward = "a"', "clients.ward = 'a': expected a public key"),
        ('[clients]\nst.anne = "a"', "(an id with a dot needs quotes)"),
        ('[clients]\n"a b" = "a"', "clients = 'a b': expected 1 to 64 letters"),
    ],
)
def test_an_error_in_a_file_names_the_file_and_the_place(read, tmp_path, text, message):
    with pytest.raises(InvalidParameterError) as raised:
        read(text)
    assert str(tmp_path / "pins.toml") in str(raised.value)
    assert message in str(raised.value)


def test_pins_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(InvalidParameterError, match="a file that can be read"):
        Pins.read(tmp_path / "missing.toml")
    (tmp_path / "pins.toml").write_bytes(b"\xff")
    with pytest.raises(InvalidParameterError, match=r"pins\.toml.*a TOML file"):
        Pins.read(tmp_path / "pins.toml")
