import copy
import hmac
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.wire.channel import Channel, KeyPair, canonical, check_usable, derive

# RFC 7748, section 6.1
ALICE = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
ALICE_PUBLIC = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
BOB = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
BOB_PUBLIC = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
SHARED = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")

P = 2**255 - 19
LOW_ORDER = [  # u of all points of order 1, 2, 4 and 8, and the same not reduced
    *(u.to_bytes(32, "little") for u in (0, 1, P - 1, P, P + 1)),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
]

CONTEXT = ("udp", 1, "run-7", b"hash")
ASSOCIATED = ("run-7", 3, "shares", "ward", "clinic", (2, 5))

leaves = st.text() | st.integers() | st.binary()
parts = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4), max_leaves=12)


def decoded(encoding: bytes) -> list:
    """Read an encoding back: whatever can be read back was not lost."""
    values = []
    while encoding:
        kind, size = encoding[:1], int.from_bytes(encoding[1:9], "big")
        content, encoding = encoding[9 : 9 + size], encoding[9 + size :]
        assert len(content) == size
        if kind == b"s":
            values.append(content.decode())
        elif kind == b"i":
            values.append(int.from_bytes(content, "big", signed=True))
        elif kind == b"b":
            values.append(content)
        else:
            assert kind == b"l"
            values.append(decoded(content))
    return values


def hkdf(secret: bytes, info: bytes) -> bytes:
    """Return one block of RFC 5869 with SHA-256 and no salt."""
    extracted = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def ends(**changes):
    ward, clinic = KeyPair.of(ALICE), KeyPair.of(BOB)
    here = {"own": ward, "peer_public": clinic.public, "me": "ward", "peer": "clinic"}
    there = {"own": clinic, "peer_public": ward.public, "me": "clinic", "peer": "ward"}
    there |= changes
    return Channel(context=CONTEXT, **here), Channel(**{"context": CONTEXT, **there})


@given(st.lists(parts, max_size=4))
@settings(deadline=None, derandomize=True)
def test_an_encoding_can_be_read_back(values):
    assert decoded(canonical(*values)) == values


@given(st.lists(parts, max_size=3), st.lists(parts, max_size=3))
@settings(deadline=None, derandomize=True)
def test_encodings_are_equal_only_where_the_parts_are(one, other):
    assert (canonical(*one) == canonical(*other)) == (one == other)


def test_parts_that_look_alike_have_different_encodings():
    alike = [
        *[(), ("",), (b"",), ((),), (((),),), ("", ""), (0,), (0, 0)],
        *[("1",), (1,), (b"1",), (-1,), (255,), (256,), (-256,), (128,), (-128,), (2**64,)],
        *[("ab", "c"), ("a", "bc"), ("abc",), (("ab", "c"),), (("ab",), "c"), ("ab", ("c",))],
        *[("\ud83d\ude00",), ("\U0001f600",), ("\ud83d",), ("?",), ("??",)],
    ]
    assert len({canonical(*parts) for parts in alike}) == len(alike)


@pytest.mark.parametrize(
    ("number", "content"),
    [
        (0, "00"),
        (127, "7f"),
        (128, "0080"),
        (-1, "ff"),
        (-128, "80"),
        (-129, "ff7f"),
    ],
)
def test_an_integer_is_no_longer_than_it_must_be(number, content):
    content = bytes.fromhex(content)
    assert canonical(number) == b"i" + len(content).to_bytes(8, "big") + content


def test_a_list_and_a_tuple_are_one_sequence():
    assert canonical([1, ["a"]]) == canonical((1, ("a",)))


@pytest.mark.parametrize("part", [True, 1.0, None, {"a": 1}, {1}, np.int64(1), bytearray(b"a")])
def test_other_types_have_no_encoding(part):
    for nested in (part, [part], ("a", [part])):
        with pytest.raises(TypeError, match=type(part).__name__):
            canonical(nested)


@pytest.mark.parametrize(("private", "public"), [(ALICE, ALICE_PUBLIC), (BOB, BOB_PUBLIC)])
def test_the_public_key_is_that_of_rfc_7748(private, public):
    assert KeyPair.of(private).public == public
    assert KeyPair.of(private).private == private


def test_the_agreed_key_is_hkdf_of_the_shared_secret_of_rfc_7748():
    info = canonical("flwr-privacy agreed key", CONTEXT, [ALICE_PUBLIC, BOB_PUBLIC])
    assert ALICE_PUBLIC < BOB_PUBLIC
    assert KeyPair.of(ALICE).agree(BOB_PUBLIC, *CONTEXT) == hkdf(SHARED, info)
    assert KeyPair.of(BOB).agree(ALICE_PUBLIC, *CONTEXT) == hkdf(SHARED, info)


def test_every_pair_and_every_context_has_another_key():
    pairs = [KeyPair() for _ in range(4)]
    keys = [
        one.agree(other.public, *context)
        for place, one in enumerate(pairs)
        for other in pairs[:place]
        for context in [(), ("run", 1), ("run", 2), ("run", "1"), (("run", 1),)]
    ]
    assert len(set(keys)) == len(keys) == 30
    assert all(len(key) == 32 for key in keys)


def test_new_pairs_differ():
    assert len({KeyPair().private for _ in range(20)}) == 20


@pytest.mark.parametrize("point", LOW_ORDER, ids=bytes.hex)
@pytest.mark.parametrize("top_bit", [0, 0x80])
def test_a_point_of_low_order_is_refused(point, top_bit):
    public = point[:31] + bytes([point[31] | top_bit])  # X25519 ignores the top bit
    with pytest.raises(ProtocolError, match="public key cannot be used: a point of low order"):
        KeyPair().agree(public)
    with pytest.raises(ProtocolError, match="public key cannot be used"):
        Channel(KeyPair(), public, me="a", peer="b", context=())


@pytest.mark.parametrize("public", [b"", bytes(31), ALICE_PUBLIC + b"\0", "a" * 32, None])
def test_a_public_key_of_another_size_or_type_is_refused(public):
    with pytest.raises(ProtocolError, match="public key cannot be used: it is not 32 bytes"):
        KeyPair().agree(public)


@pytest.mark.parametrize("private", [b"", ALICE[:31], ALICE + b"w", ALICE.hex()[:32]])
def test_a_private_key_of_another_size_or_type_is_refused_and_not_shown(private):
    with pytest.raises(InvalidParameterError, match=r"private = '.*': expected 32 bytes") as raised:
        KeyPair.of(private)
    assert raised.value.value in {"bytes", "str"}


def test_a_derived_key_is_hkdf_of_its_secret():
    info = canonical("flwr-privacy derived key", ("mask", 3))
    assert derive(b"secret", "mask", 3) == hkdf(b"secret", info)


def test_a_derived_key_depends_on_secret_and_context():
    keys = {
        derive(secret, *context)
        for secret in (bytes(32), b"\1" * 32, bytes(16))
        for context in [(), ("mask",), ("mask", 1), ("mask", 2), ("mask1",)]
    }
    assert len(keys) == 15


def test_a_message_arrives_in_both_directions():
    here, there = ends()
    for plain in (b"", b"a share", bytes(range(256)) * 100):
        sealed = here.seal(plain, *ASSOCIATED)
        assert len(sealed) == len(plain) + 28
        assert there.open(sealed, *ASSOCIATED) == plain
        assert here.open(there.seal(plain, *ASSOCIATED), *ASSOCIATED) == plain


def test_every_changed_byte_is_refused():
    here, there = ends()
    sealed = here.seal(b"a share", *ASSOCIATED)
    for place in range(len(sealed)):
        for change in (1, 0x80, 0xFF):
            damaged = bytearray(sealed)
            damaged[place] ^= change
            with pytest.raises(ProtocolError, match="damaged, or sealed for another purpose"):
                there.open(bytes(damaged), *ASSOCIATED)
    assert there.open(sealed, *ASSOCIATED) == b"a share"


def test_a_message_that_is_cut_or_longer_or_no_bytes_is_refused():
    here, there = ends()
    sealed = here.seal(b"a share", *ASSOCIATED)
    parts = [sealed[:size] for size in range(len(sealed))]
    for other in [*parts, sealed[1:], sealed + b"\0", sealed + sealed, sealed.hex(), None]:
        with pytest.raises(ProtocolError, match="message from 'ward' to 'clinic'"):
            there.open(other, *ASSOCIATED)


@pytest.mark.parametrize(
    "associated",
    [
        ("run-8", 3, "shares", "ward", "clinic", (2, 5)),
        ("run-7", 4, "shares", "ward", "clinic", (2, 5)),
        ("run-7", "3", "shares", "ward", "clinic", (2, 5)),
        ("run-7", 3, "masks", "ward", "clinic", (2, 5)),
        ("run-7", 3, "shares", "wards", "clinic", (2, 5)),
        ("run-7", 3, "shares", "ward", "surgery", (2, 5)),
        ("run-7", 3, "shares", "clinic", "ward", (2, 5)),
        ("run-7", 3, "shares", "ward", "clinic", (5, 2)),
        ("run-7", 3, "shares", "ward", "clinic", 2, 5),
        ("run-7", 3, "shares", "ward", "clinic"),
        (),
    ],
)
def test_other_associated_data_are_refused(associated):
    here, there = ends()
    with pytest.raises(ProtocolError, match="sealed for another purpose"):
        there.open(here.seal(b"a share", *ASSOCIATED), *associated)


def test_a_message_cannot_go_back_to_its_sender():
    here, there = ends()
    for end in (here, there):
        with pytest.raises(ProtocolError):
            end.open(end.seal(b"a share", *ASSOCIATED), *ASSOCIATED)
        with pytest.raises(ProtocolError):
            end.open(end.seal(b""))


@pytest.mark.parametrize(
    "changes",
    [
        {"me": "surgery"},
        {"peer": "surgery"},
        {"me": "ward", "peer": "clinic"},
        {"context": ("udp", 1, "run-8", b"hash")},
        {"context": ("udp", 2, "run-7", b"hash")},
        {"context": ("udp", 1, "run-7", b"other")},
        {"context": (*CONTEXT, "more")},
        {"own": KeyPair()},
        {"peer_public": KeyPair().public},
        {"own": KeyPair.of(ALICE), "peer_public": BOB_PUBLIC},  # swapped: the secret is the same
    ],
    ids=lambda changes: "-".join(changes),
)
def test_ends_that_differ_do_not_understand_each_other(changes):
    here, there = ends(**changes)
    with pytest.raises(ProtocolError):
        there.open(here.seal(b"a share"))
    with pytest.raises(ProtocolError):
        here.open(there.seal(b"a share"))


def test_two_seals_of_one_text_share_nothing():
    here, _ = ends()
    sealed = [here.seal(b"sixteen bytes...", *ASSOCIATED) for _ in range(50)]
    for part in (slice(None, 12), slice(12, -16), slice(-16, None)):
        assert len({message[part] for message in sealed}) == 50


def test_an_end_has_another_name_than_its_peer():
    with pytest.raises(InvalidParameterError, match="peer = 'ward': expected another name"):
        Channel(KeyPair(), KeyPair().public, me="ward", peer="ward", context=())


def test_a_repr_shows_no_key():
    pair, (here, _) = KeyPair.of(ALICE), ends()
    assert repr(pair) == "<KeyPair of 8520f009...>"
    assert repr(here) == "<Channel from 'ward' to 'clinic'>"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_key_pair_and_a_channel_cannot_be_pickled_or_copied(duplicate):
    for secret in (KeyPair(), *ends()):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            duplicate(secret)


def test_a_key_with_which_nobody_agrees_on_another_is_found_before():
    check_usable(KeyPair().public)
    for public in (bytes(32), b"k" * 31):
        with pytest.raises(ProtocolError, match="cannot be used"):
            check_usable(public)
