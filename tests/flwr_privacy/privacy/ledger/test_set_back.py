"""A ledger of 1,000 charges that is set back, cut, forked or lacks a charge is found.

By its witness, and by a server that remembers the last head that it saw of its experiment. Each is
tried at every entry; where checksums and marks have to be mended first, at some.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import LedgerError
from flwr_privacy.privacy.ledger import Entry, Head, Ledger, Question
from flwr_privacy.privacy.ledger.chain import begun, extended
from flwr_privacy.privacy.ledger.journal import Journal

CHARGES = 1000
CHARGE = Charge(neighbours="replace_one", noise_multiplier=2.0)
TIME = "2025-12-31T23:59:59Z"
SOME = (0, 1, 31, 32, 63, 64, 499, CHARGES - 1)  # around marks, and the ends


def entry(server_round: int, request: int = 0) -> Entry:
    question = Question(
        experiment_id="e", phase="train", server_round=server_round, request=request
    )
    return Entry(question=question, scheme="udp", unit="user", charge=CHARGE, time=TIME)


def journal_of(entries: Iterable[Entry]) -> Journal:
    journal = Journal(Path("a.ledger"), "a")
    for one in entries:
        journal.extend(journal.charged(one))
        journal.extend(journal.answered(journal.count - 1))
    return journal


class Server:
    """What an honest server does: its own chain, and the head of each number of charges."""

    def __init__(self) -> None:
        self.heads = [begun("e")]
        for n in range(CHARGES):
            last = self.heads[-1]
            self.heads.append(extended(last, CHARGE, phase="train", server_round=n, request=0))

    def accepts(self, head: Head) -> bool:
        """Tell whether a node shows all the charges that it has shown before."""
        return head == self.heads[-1]


@pytest.fixture(scope="module")
def content() -> bytes:
    return bytes(journal_of(map(entry, range(CHARGES))).content)


@pytest.fixture(scope="module")
def ends(content: bytes) -> list[int]:
    """Return where each charge's lines begin; what is before is the ledger without it."""
    found, place = [], 0
    for n in range(CHARGES):
        place = content.rfind(b"\n", 0, content.find(b'{"charge":[%d,' % n, place)) + 1
        found.append(place)
    return found


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


@pytest.fixture
def ledger(tmp_path: Path, content: bytes) -> Ledger:
    """Return the ledger, with a witness that has seen all of it."""
    (tmp_path / "witness").mkdir()
    own = {"data_set": "a", "durable": False, "witness": tmp_path / "witness"}
    (tmp_path / "a.ledger").write_bytes(content)
    found = Ledger(tmp_path / "a.ledger", **own)
    found.begin_witness()
    assert found.view().count == CHARGES
    return found


def unwitnessed(ledger: Ledger) -> Ledger:
    return Ledger(ledger.path, data_set="a", durable=False)


def test_an_honest_ledger_is_accepted(ledger: Ledger, server: Server) -> None:
    assert server.accepts(ledger.head("e"))
    with ledger.locked() as locked:
        locked.charge(entry(CHARGES))
    assert ledger.view().count == CHARGES + 1


def shown(ledger: Ledger, content: bytes) -> tuple[str, Head]:
    """Return what the witness misses of a file, and the head that its node shows a server."""
    journal = Journal(ledger.path, "a", bytearray(content))
    assert ledger.witness is not None
    return ledger.witness.missing(ledger.witness.seen(), journal), journal.head("e")


def test_an_older_copy_is_found_at_every_entry(
    ledger: Ledger, content: bytes, ends: list[int], server: Server
) -> None:
    for n, end in enumerate(ends):
        missing, head = shown(ledger, content[:end])  # what the file was before charge n
        assert missing.startswith("was set back to an older state" if n else "is gone or empty")
        assert head == server.heads[n]
        assert not server.accepts(head)
    ledger.path.write_bytes(content[: ends[500]])
    with pytest.raises(LedgerError, match="older state: its witness saw 1000 charges, it has 500"):
        ledger.view()


def test_a_cut_within_a_line_is_found_at_every_entry(
    ledger: Ledger, content: bytes, ends: list[int], server: Server
) -> None:
    for n, end in enumerate(ends):
        missing, head = shown(ledger, content[: end + 40])
        assert missing.startswith("was set back to an older state" if n else "is gone or empty")
        assert not server.accepts(head)


def test_a_fork_is_found_at_every_entry(
    ledger: Ledger, content: bytes, ends: list[int], server: Server
) -> None:
    for n, end in enumerate(ends):
        fork = Journal(ledger.path, "a", bytearray(content[:end]))
        fork.extend(fork.charged(entry(n, request=1)))
        assert ledger.witness is not None
        assert ledger.witness.missing(ledger.witness.seen(), fork)
        assert fork.head("e").count == n + 1
        assert fork.head("e") not in server.heads


@pytest.mark.parametrize("n", SOME)
def test_a_fork_that_is_as_long_is_another_branch(ledger: Ledger, server: Server, n: int) -> None:
    others = [entry(k, request=int(k >= n)) for k in range(CHARGES + 2)]
    ledger.path.write_bytes(bytes(journal_of(others).content))
    with pytest.raises(LedgerError, match="is another branch: its witness saw 1000 charges"):
        ledger.view()
    assert unwitnessed(ledger).head("e") not in server.heads


def test_a_charge_that_is_deleted_is_found_at_every_entry(
    ledger: Ledger, content: bytes, ends: list[int]
) -> None:
    for end in ends:
        line = content.find(b"\n", end) + 1
        with pytest.raises(LedgerError, match="is damaged"):  # a checksum, or a mark's hash
            shown(ledger, content[:end] + content[line:])


@pytest.mark.parametrize("n", SOME)
def test_a_charge_that_is_deleted_with_everything_mended_is_found(
    ledger: Ledger, server: Server, n: int
) -> None:
    others = [entry(k) for k in range(CHARGES) if k != n]
    ledger.path.write_bytes(bytes(journal_of(others).content))
    with pytest.raises(LedgerError, match=r"set back to an older|is another branch"):
        ledger.view()
    assert not server.accepts(unwitnessed(ledger).head("e"))


@pytest.mark.parametrize("n", SOME)
def test_a_changed_charge_with_everything_mended_is_found(
    ledger: Ledger, server: Server, n: int
) -> None:
    others = [entry(k, request=int(k == n)) for k in range(CHARGES)]
    ledger.path.write_bytes(bytes(journal_of(others).content))
    with pytest.raises(LedgerError, match="is another branch"):
        ledger.view()
    assert not server.accepts(unwitnessed(ledger).head("e"))


@pytest.mark.parametrize(
    "remove", [Path.unlink, lambda path: path.write_bytes(b"")], ids=["deleted", "emptied"]
)
def test_a_ledger_that_is_gone_is_found(
    ledger: Ledger, server: Server, remove: Callable[[Path], object]
) -> None:
    remove(ledger.path)
    for attempt in (ledger.view, lambda: ledger.locked().__enter__()):
        with pytest.raises(LedgerError, match="is gone or empty, and its witness saw 1000 charges"):
            attempt()
    assert not server.accepts(unwitnessed(ledger).head("e"))
