"""A secure sum of five clients, one of which drops out."""

from collections.abc import Iterator

from parties import deal, join, masked, new_parties, new_session, plain_sum, reveal, summed

from flwr_privacy.secure_sum import Participant
from flwr_privacy.wire.documents import dumps, loads

CLIENTS = [f"c{i:02}" for i in range(5)]
SURVIVORS = CLIENTS[:4]  # the last one deals and sends nothing
START, DEALT, JOINED, SENT, REVEALED = range(5)


class Sum:
    """A secure sum of five clients that stops at a phase, and goes on honestly from there."""

    def __init__(self, phase: int, **session) -> None:
        self.parties = new_parties(5)
        self.begin(**session)
        self.advance(phase)

    def begin(self, **session) -> None:
        self.session = new_session(self.parties, **session)
        self.phase = START

    def advance(self, phase: int) -> None:
        while self.phase < phase:
            self.phase += 1
            if self.phase == DEALT:
                deal(self.session, self.parties, CLIENTS)
            elif self.phase == JOINED:
                join(self.session, self.parties, CLIENTS)
            elif self.phase == SENT:
                self.total = summed(masked(self.session, self.parties, SURVIVORS)).total
            elif self.phase == REVEALED:
                reveal(self.session, self.parties, SURVIVORS, SURVIVORS)

    def next_round(self, phase: int) -> None:
        self.begin(name="second", server_round=2)
        self.advance(phase)

    def assert_opens(self) -> None:
        self.advance(REVEALED)
        assert self.session.open(self.total, SURVIVORS).tolist() == plain_sum(SURVIVORS)


def restart(parties: dict[str, Participant]) -> None:
    for party in parties.values():
        party.state = loads(dumps(party.state))


def walk(value) -> Iterator[bytes]:
    """Yield all bytes in nested values."""
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from walk(item)


def flipped(share: bytes) -> bytes:
    return bytes([share[0] ^ 1]) + share[1:]
