"""What crosses the server: as many bytes as the formulas say, and no share that it could read."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vertical
from vertical import (
    EMBEDDING,
    ROWS,
    TEST_ROWS,
    Circle,
    Wire,
    arrays_in,
    bytes_of,
    coding_fields,
    digits,
)

from flwr_privacy.clients.vertical import coded_data, coded_round, sealed_shares
from flwr_privacy.clients.vertical.columns import Owned, common_order
from flwr_privacy.coding.lagrange import lagrange_basis
from flwr_privacy.coding.packing import packed_bytes
from flwr_privacy.errors import ProtocolError
from flwr_privacy.fedvs.costs import cost_model
from flwr_privacy.fedvs.rows import Segments
from flwr_privacy.fedvs.terms import Chunk, CodeTerms
from flwr_privacy.pipeline.step_store import StepStore
from flwr_privacy.strategies.vertical.fedvs import CODE, DEAL
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.channel import Channel, KeyPair
from flwr_privacy.wire.documents import loads
from flwr_privacy.wire.message import RECORD, TRAIN

Array = np.ndarray
PIECE = 24  # bytes: six elements of which no others are likely to consist


# -- How much ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "K", "prime"), [(4, 1, 2**31 - 1), (6, 2, 2**31 - 1), (6, 2, 4194301)]
)
def test_F21_every_phase_has_the_bytes_that_its_elements_take(
    clients: int, K: int, prime: int
) -> None:
    """4 bytes an element, or those of a narrower field, and 28 for every sealed share."""
    bits = 32 if prime > 2**24 else prime.bit_length()
    wire, h, size = Wire(), EMBEDDING, 8
    small = {"prime": prime, "data_bits": 5, "weight_bits": 6}
    vertical.train(clients, K=K, num_rounds=2, before=wire, spare=clients - 2 * K - 1, **small)
    widths = [2 * columns.shape[1] for columns in digits(clients)[0]]
    b = -(-size // K)
    lengths = {
        part: Segments(rows=rows, K=K).length
        for part, rows in (("train", ROWS), ("test", TEST_ROWS))
    }

    def sealed(elements: int) -> int:
        return packed_bytes(elements, bits) + 28

    for name, reply in wire.of(wire.said, CODE):
        if arrays := arrays_in(reply):
            place = int(name)
            length = arrays["sealed"].shape[1]
            assert arrays["sealed"].shape[0] == clients - 1
            assert length in {sealed(count * widths[place]) for count in lengths.values()}
    dealt = [arrays_in(m)["sealed"] for _, m in wire.of(wire.said, CODE) if arrays_in(m)]
    data = sum(array.nbytes for array in dealt)
    costs = {
        part: cost_model(
            N=clients, K=K, T=1, rows=rows, widths=widths, h=h, b=min(b, lengths[part]), bits=bits
        )
        for part, rows in (("train", ROWS), ("test", TEST_ROWS))
    }
    assert data == sum(cost.data_relay_bytes for cost in costs.values())
    for server_round in (1, 2):
        maskers = 0
        for name, reply in wire.of(wire.said, DEAL, server_round):
            got = arrays_in(reply)["sealed"]
            plain = costs["train"].weights_bytes[int(name)]
            # A mask lies in the same sealed message, and is packed with the weights.
            masked = sealed(widths[int(name)] * h + b * h)
            assert got.shape in {(clients - 1, plain), (clients - 1, masked)}
            maskers += got.shape[1] == masked
        assert maskers == 3  # T + 1, and one who may be missing
        for _, reply in wire.of(wire.said, TRAIN, server_round):
            assert arrays_in(reply)["answer"].nbytes == costs["train"].answer_bytes
        for name, question in wire.of(wire.asked, TRAIN, server_round):
            got = arrays_in(question)["sealed"].nbytes
            others = [e for i, e in enumerate(costs["train"].weights_bytes) if i != int(name)]
            fields = question.content[RECORD]
            assert fields["dealers"] == [str(i) for i in range(clients)]
            dealing = dict(wire.of(wire.asked, DEAL, server_round))[name].content[RECORD]
            masks = sum(who != name for who in dealing["maskers"]) * b * h
            if bits == 32:
                assert got == sum(others) + 4 * masks
    for _, question in wire.of(wire.asked, DEAL, 2):
        gradient = arrays_in(question)["gradient"]
        assert gradient.nbytes == costs["train"].gradient_bytes == 4 * K * b * h
    for _, reply in wire.of(wire.said, "enrol"):
        assert len(reply.content[RECORD]["key"]) == costs["train"].key_bytes


def test_F21_the_costs_of_a_round_are_those_of_its_messages() -> None:
    """Masks of all who deal some are counted."""
    wire = Wire()
    vertical.train(6, K=2, num_rounds=1, before=wire)
    widths = [2 * columns.shape[1] for columns in digits(6)[0]]
    costs = cost_model(N=6, K=2, T=1, rows=ROWS, widths=widths, h=EMBEDDING, b=4)
    dealt = sum(arrays_in(m)["sealed"].nbytes for _, m in wire.of(wire.said, DEAL))
    assert dealt == costs.weights_relay_bytes


# -- What the server can read ------------------------------------------------------------------


class Spy:
    """Everything that clients have in the clear and that must not leave them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.secrets: dict[str, list[Array]] = {}
        self._wrap(monkeypatch, coded_data, "data_shares")
        for name in ("weight_shares", "zero_masks"):
            self._wrap(monkeypatch, coded_round, name)
        original = Channel.seal

        def seal(channel: Channel, plain: bytes, *associated: Any) -> bytes:
            self.secrets.setdefault("sealed", []).append(np.frombuffer(plain, np.uint8))
            return original(channel, plain, *associated)

        monkeypatch.setattr(Channel, "seal", seal)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, client: Any, name: str) -> None:
        original = getattr(client, name)

        def wrapped(code: Any, *given: Any) -> Array:
            shares = original(code, *given)
            self.secrets.setdefault(name, []).extend(shares)
            if name != "zero_masks":
                self.secrets.setdefault(f"{name}: what is shared", []).append(given[0])
            return shares

        monkeypatch.setattr(client, name, wrapped)

    def pieces(self) -> dict[str, set[bytes]]:
        """Return the beginnings of all of them, in every form in which elements lie somewhere."""
        found: dict[str, set[bytes]] = {}
        for name, arrays in self.secrets.items():
            pieces = found.setdefault(name, set())
            for array in arrays:
                if array.dtype == np.uint8:
                    pieces.add(array.tobytes()[:PIECE])
                    continue
                flat = array.reshape(-1)
                pieces.add(flat[: PIECE // 4].astype("<u4").tobytes())
                pieces.add(flat[: PIECE // 8].astype("<i8").tobytes())
                pieces.add(str(flat[:4].tolist())[1:-1].encode())
        return found


def haystack(wire: Wire, folder: Path, log: str) -> bytes:
    crossed = [bytes_of(m) for m in (*wire.asked, *wire.said) if m.has_content()]
    files = [path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()]
    assert {path.name for path in folder.iterdir()} >= {"checkpoint.bin", "metrics.jsonl"}
    return b"|".join([*crossed, *files, log.encode()])


@pytest.mark.parametrize("clients", [4, 6])
def test_F22_no_share_is_in_the_clear_anywhere_at_the_server(
    clients: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor are features, weights or masks: in messages, checkpoint, history and log."""
    caplog.set_level(logging.DEBUG)
    spy, wire = Spy(monkeypatch), Wire()
    nodes, server = tmp_path / "nodes", tmp_path / "server"
    nodes.mkdir()
    server.mkdir()
    vertical.train(
        clients, K=clients // 2 - 1, num_rounds=3, before=wire, run_dir=server, state=nodes
    )
    seen = haystack(wire, server, caplog.text)
    pieces = spy.pieces()
    assert set(pieces) == {
        *("sealed", "data_shares", "weight_shares", "zero_masks"),
        *("data_shares: what is shared", "weight_shares: what is shared"),
    }
    for name, secret in pieces.items():
        assert len(secret) > 5
        assert not [piece for piece in secret if piece in seen], name
    for own in vertical.weights(nodes).values():
        assert own.tobytes()[:PIECE] not in seen
    for columns in digits(clients)[0]:
        assert all(row.tobytes()[-PIECE:] not in seen for row in columns)
    # What may be read is found, so that the search would find the rest.
    answer = arrays_in(wire.of(wire.said, TRAIN)[0][1])["answer"]
    assert answer.tobytes()[:PIECE] in seen


def test_F22_without_sealing_the_same_search_finds_shares(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Channel, "seal", lambda self, plain, *_: plain + bytes(28))
    monkeypatch.setattr(Channel, "open", lambda self, sealed, *_: sealed[:-28])
    spy, wire = Spy(monkeypatch), Wire()
    vertical.train(num_rounds=2, before=wire, run_dir=tmp_path)
    seen = haystack(wire, tmp_path, caplog.text)
    pieces = spy.pieces()
    for name in ("sealed", "data_shares", "weight_shares"):
        assert [piece for piece in pieces[name] if piece in seen], name


def test_F22_secrets_are_in_no_representation(tmp_path: Path) -> None:
    """Neither of what a message is made into nor of what a client computes with."""
    circle = Circle(tmp_path)
    circle.code()
    dealt = circle.deal(circle.dealing())
    assert dealt
    node = circle.nodes["0"]
    assert "0." not in repr(node._data)
    owned = Owned(node._data, str(tmp_path), "e")
    expanded = owned.expanded(order=2, bias=False, x_max=1.0, data_bits=8)
    for thing in (owned, expanded):
        assert "array" not in repr(thing)
        assert len(repr(thing)) < 200


def test_F22_two_trainings_on_the_same_data_have_nothing_in_common() -> None:
    """Without a seed; with one the shares are the same, and the messages still are not."""
    crossed = []
    for _ in range(2):
        wire = Wire()
        vertical.train(num_rounds=1, experiment_id="e", before=wire, insecure_seed=None)
        crossed.append(
            {
                (phase, name): arrays_in(message)
                for phase in (CODE, DEAL, TRAIN)
                for name, message in wire.of(wire.said, phase)
                if arrays_in(message)
            }
        )
    one, other = crossed
    common = set(one) & set(other)
    assert len(common) >= 8
    for key in common:
        for name, array in one[key].items():
            equal = float(np.mean(array == other[key][name]))
            # Bytes agree by chance in 1 of 256 places; five standard errors and a bit.
            assert equal < 1 / 256 + 5 * np.sqrt(1 / 256 / array.size) + 0.01, key


def test_F22_coded_rows_of_two_trainings_differ(tmp_path: Path) -> None:
    found = []
    for number in ("1", "2"):
        (tmp_path / number).mkdir()
        vertical.train(num_rounds=1, experiment_id="e", insecure_seed=None, state=tmp_path / number)
        paths = sorted(
            (tmp_path / number).glob("0.fedvs/*/*.coded"), key=lambda p: p.stat().st_size
        )
        found.append([np.fromfile(path, "<u4") for path in paths])
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        assert np.mean(one == other) < 0.001


# -- Sealed for one receiver, one purpose --------------------------------------------------------


@pytest.fixture
def circle(tmp_path: Path) -> Circle:
    circle = Circle(tmp_path)
    circle.code()
    return circle


def damaged(circle: Circle, dealt: Any, sender: str, receiver: str, place: int = 40) -> Any:
    changed = {name: sealed.copy() for name, sealed in dealt.items()}
    row = circle.names.index(receiver)
    row -= row > circle.names.index(sender)
    changed[sender][row, place] ^= 1
    return changed


@pytest.mark.parametrize("place", [0, 12, 40, -1], ids=["nonce", "first", "middle", "tag"])
def test_F22_a_flipped_bit_names_sender_round_and_phase(circle: Circle, place: int) -> None:
    dealt = circle.deal(circle.dealing(), server_round=4)
    text = f"round 4, phase '{DEAL}': the share of client 2 cannot be used: damaged"
    with pytest.raises(ProtocolError, match=text):
        circle.evaluate("1", damaged(circle, dealt, "2", "1", place), server_round=4)
    assert len(circle.evaluate("1", dealt, server_round=4)) == 4 * 3 * EMBEDDING


def test_F22_a_flipped_bit_of_coded_data_names_sender_and_phase(tmp_path: Path) -> None:
    circle = Circle(tmp_path)
    first = coding_fields(circle.terms, Chunk(part="train", first=0, count=ROWS))
    dealt = {name: node.ask(CODE, None, first)[0]["sealed"] for name, node in circle.nodes.items()}
    changed = circle.passed_on(damaged(circle, dealt, "0", "2"), "2")
    then = coding_fields(circle.terms, Chunk(part="test", first=0, count=TEST_ROWS))
    text = f"round 0, phase '{CODE}': the share of client 0 cannot be used"
    with pytest.raises(ProtocolError, match=text):
        circle.nodes["2"].ask(CODE, changed, then, request=1)


def test_F22_a_share_for_another_receiver_is_not_opened(circle: Circle) -> None:
    dealt = circle.deal(circle.dealing())
    swapped = {name: sealed[::-1].copy() for name, sealed in dealt.items()}
    for name in circle.names:
        with pytest.raises(ProtocolError, match="cannot be used: damaged, or sealed for another"):
            circle.evaluate(name, swapped)


def test_F22_a_share_of_another_set_is_not_opened(circle: Circle) -> None:
    """Associated data name the set; a set is of one round."""
    old = circle.deal(circle.dealing("s1"))
    circle.deal(circle.dealing("s2"), server_round=2)
    with pytest.raises(ProtocolError, match=r"round 2, phase .* client 1 cannot be used: damaged"):
        circle.evaluate("0", old, "s2", server_round=2)
    with pytest.raises(ProtocolError, match="no shares of this set"):
        circle.evaluate("0", old, "s1", server_round=2)


def test_F22_a_share_of_another_round_is_not_opened(circle: Circle) -> None:
    """Associated data name the round too."""
    dealt = circle.deal(circle.dealing("s1"), server_round=1)
    with pytest.raises(ProtocolError, match=r"round 2, phase .* client 1 cannot be used: damaged"):
        circle.evaluate("0", dealt, "s1", server_round=2)
    assert len(circle.evaluate("0", dealt, "s1", server_round=1))


def test_F22_a_share_is_not_opened_by_another_key(
    circle: Circle, monkeypatch: pytest.MonkeyPatch
) -> None:
    dealt = circle.deal(circle.dealing())
    monkeypatch.setattr(StepStore, "pair", lambda *_: KeyPair())
    monkeypatch.setattr(sealed_shares, "_peers", sealed_shares.DataCache())
    with pytest.raises(ProtocolError, match="the share of client 1 cannot be used"):
        circle.evaluate("0", dealt)


def test_shares_of_another_number_of_bytes_are_refused(circle: Circle) -> None:
    dealt = circle.deal(circle.dealing())
    short = {name: sealed[:, :-1] for name, sealed in dealt.items()}
    with pytest.raises(ProtocolError, match=r"sealed shares of shape .*: expected"):
        circle.evaluate("0", short)


# -- What nodes keep -----------------------------------------------------------------------------


def test_F14_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    vertical.train(num_rounds=2, state=tmp_path)
    found = [path for path in tmp_path.rglob("*") if ".fedvs" in str(path)]
    assert {path.suffix for path in found if path.is_file()} >= {".coded", ""}
    for path in found:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    for path in tmp_path.rglob("*.key"):
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_F14_what_K_plus_T_nodes_keep_opens_the_data_and_T_do_not(tmp_path: Path) -> None:
    """The coded rows of nodes 0 and 3, with K = T = 1; those of one node are uniform."""
    vertical.train(num_rounds=1, experiment_id="e", state=tmp_path)
    state = vertical.states(tmp_path)["0"]
    terms = records.read(CodeTerms, loads(state["terms"]))
    stored = {
        name: np.fromfile(path, "<u4").reshape(ROWS, terms.offsets[-1]).astype(np.int64)
        for name in terms.members
        for path in tmp_path.glob(f"{name}.fedvs/*/*.coded")
        if path.stat().st_size == 4 * ROWS * terms.offsets[-1]
    }
    p, (one, other) = terms.prime, (0, 3)
    points = terms.code.points
    nodes = terms.code.nodes
    # A line through two points, at the first node.
    slope = pow(points[other] - points[one], -1, p)
    left = (points[other] - nodes[0]) * slope % p
    right = (nodes[0] - points[one]) * slope % p
    found = (stored["0"].astype(object) * left + stored["3"].astype(object) * right) % p
    place = common_order(ROWS, "e", "train")
    powers = [np.concatenate([X, X**2], axis=1)[place] for X in digits(4)[0]]
    expected = np.floor(np.concatenate(powers, axis=1) * 256 + 0.5).astype(np.int64)
    np.testing.assert_array_equal(found.astype(np.int64), expected)
    # One node's own: no element of the data, and means as of the uniform distribution.
    mean = stored["0"].mean() / p
    assert abs(mean - 0.5) < 4 / np.sqrt(12 * stored["0"].size)
    assert np.mean(stored["0"] == expected) < 0.001


def test_a_pad_is_uniform_and_no_row_of_zeros(tmp_path: Path) -> None:
    """What three nodes hold of 41 rows in two segments, with K = 2 and T = 1, opens it."""
    circle = Circle(tmp_path, 5, partitions=2, least=5)
    circle.code()
    terms, (length, width) = circle.terms, (21, circle.terms.offsets[-1])
    holders = (1, 2, 4)
    stored = [
        np.fromfile(path, "<u4").reshape(length, width).astype(object)
        for holder in holders
        for path in tmp_path.glob(f"{holder}.fedvs/*/*.coded")
        if path.stat().st_size == 4 * length * width
    ]
    # Shares lie on a polynomial of degree K + T - 1 = 2: its value at the last segment's node.
    points = [terms.code.points[holder] for holder in holders]
    basis = lagrange_basis(points, [terms.code.nodes[1]], terms.prime)[0].tolist()
    last = sum(row * factor for row, factor in zip(stored, basis, strict=True)) % terms.prime
    pad = last[-1].astype(np.int64)
    place = common_order(ROWS, "e", "train")
    powers = [np.concatenate([X, X**2], axis=1)[place] for X in digits(5)[0]]
    row = np.floor(np.concatenate(powers, axis=1)[-1] * 256 + 0.5)
    np.testing.assert_array_equal(last[-2].astype(np.int64), row)  # the last one that is a row
    assert len(set(pad.tolist())) == width
    assert np.mean(pad > 2**20) > 0.95


def test_F14_what_T_plus_1_nodes_get_in_a_round_opens_the_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of client 0, from what nodes 1 and 2 compute with; that of one node is uniform."""
    dealt: list[Array] = []
    held: list[Array] = []
    deal, compute = coded_round.weight_shares, coded_round.evaluate

    def weight_shares(code: Any, elements: Array, random: Any) -> Array:
        dealt.append(elements)
        return deal(code, elements, random)

    def evaluate(field: Any, coded_rows: Array, coded_weights: Array, masks: Any) -> Array:
        held.append(coded_weights[: len(dealt[0])].astype(object))
        return compute(field, coded_rows, coded_weights, masks)

    monkeypatch.setattr(coded_round, "weight_shares", weight_shares)
    monkeypatch.setattr(coded_round, "evaluate", evaluate)
    circle = Circle(tmp_path)
    circle.code()
    shares = circle.deal(circle.dealing())
    circle.evaluate("1", shares)
    circle.evaluate("2", shares)
    code, p = circle.terms.code, circle.terms.prime
    (x, y), at = (code.points[1], code.points[2]), code.nodes[0]
    slope = pow(y - x, -1, p)
    found = (held[0] * ((y - at) * slope) + held[1] * ((at - x) * slope)) % p
    np.testing.assert_array_equal(found.astype(np.int64), dealt[0])
    assert (held[0].astype(np.int64) != dealt[0]).all()
