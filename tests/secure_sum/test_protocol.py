"""Sessions of a secure sum: they open, nobody's secrets are both revealed, and none is kept."""

import copy
import itertools
from contextlib import suppress

import numpy as np
from parties import EXPERIMENT, new_parties, new_session
from sum_session import CLIENTS, DEALT, JOINED, REVEALED, SENT, START, SURVIVORS, Sum, restart, walk

from flwr_privacy.coding.shamir import recover
from flwr_privacy.errors import ProtocolError
from flwr_privacy.secure_sum.messages import Dealt
from flwr_privacy.secure_sum.secrets import KEY, SEED, Derivation, halves
from flwr_privacy.wire.documents import dumps


def test_three_rounds_open_with_a_restart_of_every_client_between_any_two_steps():
    run = Sum(START)
    sums = []
    for server_round in (1, 2, 5):
        run.begin(name=f"round {server_round}", server_round=server_round)
        for phase in (DEALT, JOINED, SENT, REVEALED):
            before = copy.deepcopy({name: party.state for name, party in run.parties.items()})
            restart(run.parties)
            assert {name: party.state for name, party in run.parties.items()} == before
            run.advance(phase)
        run.assert_opens()
        sums.append(run.total)
    assert (sums[0] != sums[1]).any()


THREE = ["c00", "c01", "c02"]
WITHOUT = THREE[1:]


class Grabber:
    """A server that asks what it likes and keeps all that it is told."""

    def __init__(self) -> None:
        self.parties = new_parties(3)
        self.dealt: list[tuple[str, str, Dealt]] = []  # client, session, message
        self.holders: dict[tuple[int, str], set[int]] = {}  # of a half of a message's shares

    def ask(self, name: str, server_round: int, replay: bool, told: list[list[str]]) -> None:
        """Run a session with new messages, or with the oldest of that name in place of them."""
        session = new_session(self.parties, name=name, server_round=server_round, threshold=2)
        for client in THREE:
            with suppress(ProtocolError):
                message = self.parties[client].deal(session.invitation(client))
                self.dealt.append((client, name, message))
        for client, survivors in zip(THREE, told, strict=True):
            for peer in THREE:
                known = [m for by, under, m in self.dealt if (by, under) == (peer, name)]
                if known:
                    session.take_dealt(peer, known[0 if replay and peer != client else -1])
            with suppress(ProtocolError):
                self.parties[client].join(session.joined(client))
                self.parties[client].mask(name, np.zeros(1, np.uint64), 13)
            for asked in (survivors, THREE, WITHOUT):
                with suppress(ProtocolError):
                    keys, seeds = self.parties[client].reveal(name, asked)
                    self.keep(THREE.index(client), keys + seeds)

    def keep(self, holder: int, shares: list[bytes]) -> None:
        for number, (dealer, name, message) in enumerate(self.dealt):
            digests = message.digests[holder]
            for kind, digest in ((KEY, digests[:16]), (SEED, digests[16:])):
                for share in shares:
                    if (
                        Derivation(EXPERIMENT, name).share_digest(dealer, holder, kind, share)
                        == digest
                    ):
                        self.holders.setdefault((number, kind), set()).add(holder)

    def opened(self) -> list[set[str]]:
        """Return which secrets of each message can be opened."""
        return [
            {kind for kind in (KEY, SEED) if len(self.holders.get((number, kind), ())) >= 2}
            for number in range(len(self.dealt))
        ]


def test_no_server_gets_both_secrets_of_anybody_whatever_it_asks_in_three_sessions():
    # Same or another name, same or next round, new or old shares, and whom it tells that the first
    # client survived: all, nobody else, or one of two.
    told = {
        "all": [THREE] * 3,
        "nobody else": [THREE, WITHOUT, WITHOUT],
        "one of two": [THREE, THREE, WITHOUT],
    }
    nodes, secrets = 0, 0
    start = [(Grabber(), 1)]
    for choices in (
        itertools.product("s", [0], [False], told),
        itertools.product("st", [0, 1], [False, True], told),
        itertools.product("st", [0, 1], [False, True], ["all", "nobody else"]),
    ):
        ends = []
        for (server, server_round), choice in itertools.product(start, list(choices)):
            name, later, replay, survivors = choice
            server = copy.deepcopy(server)
            server.ask(name, server_round + later, replay, told[survivors])
            opened = server.opened()
            assert {KEY, SEED} not in opened
            nodes, secrets = nodes + 1, secrets + sum(map(len, opened))
            ends.append((server, server_round + later))
        start = ends
    assert nodes == 3 + 3 * 24 + 72 * 16
    assert secrets > 3 * nodes  # it does open something


# What a client remembers.
def test_after_it_has_revealed_a_client_remembers_no_secret_but_the_halves_it_revealed():
    run = Sum(JOINED)
    before = {name: copy.deepcopy(party.state) for name, party in run.parties.items()}
    run.advance(REVEALED)
    for client in SURVIVORS:
        party = run.parties[client]
        session = party.state["sessions"]["first"]
        assert session["private"] == session["seed"] == session["own"] == b""
        assert "mask_keys" not in session
        dealt = before[client]["sessions"]["first"]["shares"]
        kept = [
            halves(share)[peer in SURVIVORS] for peer, share in zip(CLIENTS, dealt, strict=True)
        ]
        assert session["shares"] == kept
        # Nothing else: its long-term key, which opens what was sealed for it, and public keys.
        known = [b"", *kept, party.state["private"], *party.state["peers"].values()]
        known.append(session["asked"])  # a hash of the question
        assert set(walk(party.state)) == set(known)
        forgotten = before[client]["sessions"]["first"]
        everything = dumps(party.state)
        for secret in (forgotten["private"], forgotten["seed"]):
            assert len(secret) == 32
            assert secret.hex().encode() not in everything
    # The files of all survivors together open one secret of each client.
    for place, peer in enumerate(CLIENTS):
        shares = {
            holder: run.parties[client].state["sessions"]["first"]["shares"][place]
            for holder, client in enumerate(SURVIVORS)
        }
        opened = recover(shares, threshold=3)
        secrets = before[peer]["sessions"]["first"]
        assert opened == secrets["seed" if peer in SURVIVORS else "private"]


def test_a_client_that_has_sent_remembers_nothing_with_which_its_vector_could_be_unmasked():
    run = Sum(JOINED)
    own = copy.deepcopy(run.parties["c01"].state["sessions"]["first"])
    run.advance(SENT)
    everything = dumps(run.parties["c01"].state)
    for secret in (own["private"], own["seed"]):
        assert len(secret) == 32
        assert secret.hex().encode() not in everything
