import copy
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
from parties import (
    EXPERIMENT,
    deal,
    join,
    masked,
    new_parties,
    new_session,
    plain_sum,
    reveal,
    summed,
)

from flwr_privacy.coding.shamir import recover
from flwr_privacy.errors import ProtocolError
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.secure_sum import Bounds, NotOpenedError, Participant
from flwr_privacy.secure_sum import participant as participant_module
from flwr_privacy.secure_sum.participant import KEY, SEED, Dealt, commitment, halves, share_digest
from flwr_privacy.wire.channel import Channel, KeyPair
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


@contextmanager
def refused(party: Participant, text: str) -> Iterator[None]:
    """Expect a refusal with this text that leaves what the client remembers as it was."""
    party.public_key()
    before = copy.deepcopy(party.state)
    with pytest.raises(ProtocolError, match=re.escape(text)):
        yield
    assert party.state == before


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


# What a client refuses.

FOUR = CLIENTS[:4]
BAD_INVITATIONS = [
    # change, text
    ({"roster": [*CLIENTS[:4], "c03"]}, "does not name its members once"),
    ({"roster": CLIENTS[::-1]}, "does not name its members once"),
    ({"roster": ["c00", "c02", "c03", "c04", "c05"]}, "does not name its members once"),
    ({"roster": FOUR}, "not one key and one signature for each of the roster"),
    ({"signatures": [b""] * 4}, "not one key and one signature for each of the roster"),
    ({"keys": [b"k" * 32] * 6}, "not one key and one signature for each of the roster"),
    ({"threshold": 2}, "threshold 2 for 5 clients: it must be more than half of them"),
    ({"threshold": 0}, "threshold 0 for 5 clients"),
    ({"threshold": -3}, "threshold -3 for 5 clients"),
    ({"threshold": 6}, "threshold 6 for 5 clients"),
    ({"server_round": -1}, "round -1 does not follow round -1"),
]


@pytest.mark.parametrize(("change", "text"), BAD_INVITATIONS)
def test_a_malformed_invitation_is_refused(change, text):
    run = Sum(START)
    party = run.parties["c01"]
    with refused(party, text):
        party.deal(replace(run.session.invitation("c01"), **change))
    run.assert_opens()


@pytest.mark.parametrize("threshold", [2, 3, 4])
def test_a_threshold_is_more_than_half_of_an_even_roster(threshold):
    parties = new_parties(4)
    session = new_session(parties, threshold=threshold)
    if threshold == 2:
        with refused(parties["c00"], "threshold 2 for 4 clients: it must be more than half"):
            parties["c00"].deal(session.invitation("c00"))
    else:
        session.take_dealt("c00", parties["c00"].deal(session.invitation("c00")))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("key", "text"),
    [
        (b"k" * 31, "the public key cannot be used: it is not 32 bytes"),
        (bytes(32), "the public key cannot be used: a point of low order"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused_and_not_remembered(place, key, text):
    run = Sum(START)
    party = run.parties["c01"]
    invitation = run.session.invitation("c01")
    keys = [*invitation.keys]
    keys[place] = key
    text = "the key of client c01 is another than before" if place == 1 else text
    with refused(party, text):
        party.deal(replace(invitation, keys=keys))
    run.assert_opens()


def test_another_key_for_the_client_itself_is_refused():
    run = Sum(START)
    invitation = run.session.invitation("c01")
    keys = [KeyPair().public if name == "c01" else run.session.keys[name][0] for name in CLIENTS]
    with refused(run.parties["c01"], "the key of client c01 is another than before"):
        run.parties["c01"].deal(replace(invitation, keys=keys))
    run.assert_opens()


@pytest.mark.parametrize("phase", [DEALT, SENT, REVEALED])
def test_a_key_of_a_peer_that_changes_is_refused(phase):
    run = Sum(phase)
    again = new_session(run.parties, name="second", server_round=2)
    restart(run.parties)
    for peer in ("c00", "c04"):
        keys = [KeyPair().public if name == peer else again.keys[name][0] for name in CLIENTS]
        with refused(run.parties["c01"], f"the key of client {peer} is another than before"):
            run.parties["c01"].deal(replace(again.invitation("c01"), keys=keys))
    swapped = [again.keys[name][0] for name in ("c00", "c01", "c03", "c02", "c04")]
    with refused(run.parties["c01"], "the key of client c02 is another than before"):
        run.parties["c01"].deal(replace(again.invitation("c01"), keys=swapped))
    run.assert_opens()
    run.next_round(REVEALED)
    run.assert_opens()


def test_the_key_of_a_peer_is_remembered_through_rounds_without_it():
    run = Sum(REVEALED)
    some = {client: run.parties[client] for client in SURVIVORS}
    between = new_session(some, name="second", server_round=2)
    deal(between, some, SURVIVORS)
    restart(run.parties)
    again = new_session(run.parties, name="third", server_round=3).invitation("c01")
    with refused(run.parties["c01"], "the key of client c04 is another than before"):
        run.parties["c01"].deal(replace(again, keys=[*again.keys[:4], KeyPair().public]))
    run.parties["c01"].deal(again)


@pytest.mark.parametrize("phase", [DEALT, JOINED, SENT, REVEALED])
def test_a_session_name_that_is_replayed_is_refused(phase):
    run = Sum(phase)
    for server_round in (1, 2):
        invitation = replace(run.session.invitation("c01"), server_round=server_round)
        with refused(run.parties["c01"], "session 'first' is repeated"):
            run.parties["c01"].deal(invitation)
    run.assert_opens()


def test_a_round_that_was_opened_is_never_opened_again():
    run = Sum(REVEALED)
    run.assert_opens()
    for server_round in (1, 0):
        again = new_session(run.parties, name="again", server_round=server_round)
        text = f"round {server_round} does not follow round 1, whose sum this client has opened"
        with refused(run.parties["c01"], text):
            run.parties["c01"].deal(again.invitation("c01"))
    run.next_round(REVEALED)
    run.assert_opens()
    with refused(run.parties["c01"], "session 'first' is not known here, or is over"):
        run.parties["c01"].reveal("first", SURVIVORS)


def test_a_second_attempt_at_a_round_ends_the_first():
    run = Sum(SENT)
    first = run.session
    run.begin(name="attempt 2", server_round=1)
    run.advance(DEALT)
    for call in (
        lambda: run.parties["c01"].reveal("first", SURVIVORS),
        lambda: run.parties["c01"].join(first.joined("c01")),
        lambda: run.parties["c01"].mask("first", np.zeros(5, np.uint64), 13),
    ):
        with refused(run.parties["c01"], "session 'first' is not known here, or is over"):
            call()
    run.assert_opens()


def test_rounds_may_overlap_but_opening_the_later_one_ends_the_earlier():
    run = Sum(SENT)
    first = run.session
    reveal(first, run.parties, SURVIVORS, SURVIVORS[:3])
    run.next_round(DEALT)  # dealt in the exchange that opens the first
    reveal(first, run.parties, SURVIVORS, SURVIVORS[3:])
    assert first.open(run.total, SURVIVORS).tolist() == plain_sum(SURVIVORS)
    run.assert_opens()
    for client in SURVIVORS:
        assert list(run.parties[client].state["sessions"]) == ["second"]


def bad_joins():
    def shares(run):
        return run.session.joined("c01")

    def with_share(run, share):
        sealed = [*shares(run).sealed]
        sealed[2] = share
        return replace(shares(run), sealed=sealed)

    def flipped(at):
        def change(run):
            share = bytearray(shares(run).sealed[2])
            share[at] ^= 1
            return with_share(run, bytes(share))

        return change

    def sealed_by_c02(run, content, name="first", **other):
        # What a dealer with other ideas seals: everything but one thing is right.
        session = {**run.parties["c02"].state["sessions"]["first"], **other}
        associated = run.parties["c02"]._associated(name, session)
        mask_key = shares(run).mask_keys[2]
        channel = run.parties["c02"]._channel("c01", run.session.keys["c01"][0])
        return with_share(run, channel.seal(content, *associated, "c02", "c01", mask_key))

    def swapped_keys(run):
        keys = [*shares(run).mask_keys]
        keys[2], keys[3] = keys[3], keys[2]
        return replace(shares(run), mask_keys=keys)

    def other_own_key(run):
        keys = [*shares(run).mask_keys]
        keys[1] = KeyPair().public
        return replace(shares(run), mask_keys=keys)

    def stranger(run):
        joined = shares(run)
        return replace(
            joined,
            dealers=[*joined.dealers, "c05"],
            mask_keys=[*joined.mask_keys, KeyPair().public],
            sealed=[*joined.sealed, joined.sealed[0]],
        )

    def only(*places):
        def change(run):
            joined = shares(run)
            return replace(
                joined,
                dealers=[joined.dealers[i] for i in places],
                mask_keys=[joined.mask_keys[i] for i in places],
                sealed=[joined.sealed[i] for i in places],
            )

        return change

    members = "the dealers are not members of the roster, this client among them"
    lengths = "there is not one key and one share for each dealer"
    damaged = "the share of client c02 cannot be used: damaged, or sealed for another purpose"
    yield "a dealer who is not in the roster", stranger, members
    yield "dealers without the client", only(0, 2, 3, 4), members
    yield "a dealer twice", only(0, 1, 2, 2, 3), members
    yield "unsorted dealers", only(1, 0, 2, 3, 4), members
    yield "a key less", lambda r: replace(shares(r), mask_keys=shares(r).mask_keys[1:]), lengths
    yield "a share more", lambda r: replace(shares(r), sealed=[*shares(r).sealed, b""]), lengths
    yield "too few dealers", only(0, 1), "2 clients dealt, 1 fewer than the threshold"
    yield "the client alone", only(1), "1 clients dealt, 2 fewer than the threshold"
    yield "another own key", other_own_key, "the server has another mask key for this client"
    yield "swapped keys", swapped_keys, damaged
    for at in (0, 11, 12, 50, 75, 76, 91):  # nonce, shares, tag
        yield f"flipped bit of byte {at}", flipped(at), damaged
    yield "no share", lambda r: with_share(r, b""), damaged
    yield "a cut share", lambda r: with_share(r, shares(r).sealed[2][:-1]), damaged
    yield "other dealer's", lambda r: with_share(r, r.session.joined("c01").sealed[3]), damaged
    yield "other receiver's", lambda r: with_share(r, r.session.joined("c03").sealed[2]), damaged
    yield "sent back", lambda r: with_share(r, r.session.joined("c02").sealed[1]), damaged
    yield "of another session", lambda r: sealed_by_c02(r, bytes(64), name="zeroth"), damaged
    yield "of another round", lambda r: sealed_by_c02(r, bytes(64), round=0), damaged
    yield "of another step", lambda r: sealed_by_c02(r, bytes(64), step=1), damaged
    yield "of a roster of four", lambda r: sealed_by_c02(r, bytes(64), first_roster=4), damaged
    yield "other threshold", lambda r: sealed_by_c02(r, bytes(64), threshold=4), damaged
    yield "short", lambda r: sealed_by_c02(r, bytes(63)), "the share of client c02 has 63 bytes"
    yield "unknown", lambda r: replace(shares(r), session="x" * 99), f"session '{'x' * 64}' is not"


BAD_JOINS = list(bad_joins())


@pytest.mark.parametrize(
    ("change", "text"), [case[1:] for case in BAD_JOINS], ids=[case[0] for case in BAD_JOINS]
)
def test_a_malformed_question_to_join_is_refused(change, text):
    run = Sum(DEALT)
    with refused(run.parties["c01"], text):
        run.parties["c01"].join(change(run))
    run.assert_opens()


def test_the_refusals_of_shares_are_of_the_share_and_not_of_how_it_was_sealed_here():
    # The dealer of the cases above is believed where it does keep to what was agreed on.
    run = Sum(DEALT)
    dealer, name = run.parties["c02"], "first"
    associated = dealer._associated(name, dealer.state["sessions"][name])
    joined = run.session.joined("c01")
    channel = dealer._channel("c01", run.session.keys["c01"][0])
    sealed = [*joined.sealed]
    sealed[2] = channel.seal(bytes(64), *associated, "c02", "c01", joined.mask_keys[2])
    run.parties["c01"].join(replace(joined, sealed=sealed))
    assert run.parties["c01"].state["sessions"][name]["shares"][2] == bytes(64)


def test_someone_in_the_middle_without_the_keys_cannot_seal_a_share():
    run = Sum(DEALT)
    joined = run.session.joined("c01")
    other = KeyPair()
    associated = run.parties["c02"]._associated(
        "first", run.parties["c02"].state["sessions"]["first"]
    )
    channel = Channel(
        other, run.session.keys["c01"][0], me="c02", peer="c01", context=("secure-sum", EXPERIMENT)
    )
    sealed = [*joined.sealed]
    sealed[2] = channel.seal(bytes(64), *associated, "c02", "c01", joined.mask_keys[2])
    with refused(run.parties["c01"], "the share of client c02 cannot be used"):
        run.parties["c01"].join(replace(joined, sealed=sealed))
    run.assert_opens()


def test_a_client_gives_one_vector_per_session():
    run = Sum(SENT)
    party = run.parties["c01"]
    restart(run.parties)
    with refused(party, "session 'first' has no place for this client's vector"):
        party.mask("first", np.ones(5, np.uint64), 13)
    with refused(party, "session 'first' has this client's vector already"):
        party.join(run.session.joined("c01"))
    run.assert_opens()
    with refused(party, "session 'first' has no place for this client's vector"):
        party.mask("first", np.ones(5, np.uint64), 13)


def test_a_client_joins_once_even_before_it_sends():
    run = Sum(JOINED)
    with refused(run.parties["c01"], "session 'first' has this client's vector already"):
        run.parties["c01"].join(run.session.joined("c01"))
    run.assert_opens()


@pytest.mark.parametrize("phase", [START, DEALT])
def test_a_client_that_has_not_joined_gives_no_vector(phase):
    run = Sum(phase)
    text = "is not known here" if phase == START else "has no place for this client's vector"
    with refused(run.parties["c01"], f"session 'first' {text}"):
        run.parties["c01"].mask("first", np.zeros(5, np.uint64), 13)
    run.assert_opens()


@pytest.mark.parametrize("phase", [START, DEALT, JOINED])
def test_a_client_that_has_not_sent_reveals_nothing(phase):
    run = Sum(phase)
    text = "is not known here" if phase == START else "has no vector of this client"
    with refused(run.parties["c01"], f"session 'first' {text}"):
        run.parties["c01"].reveal("first", SURVIVORS)
    run.assert_opens()


BAD_SURVIVORS = [
    (["c00", "c01", "c05"], "the survivors are not dealers of the session"),
    (["c00", "c02", "c03"], "the survivors are not dealers of the session, this client among them"),
    (["c01", "c00", "c02"], "the survivors are not dealers of the session"),
    (["c00", "c01", "c01"], "the survivors are not dealers of the session"),
    (["c00", "c01"], "2 clients survived, 1 fewer than the threshold: such a sum is not opened"),
    (["c01"], "1 clients survived, 2 fewer than the threshold: such a sum is not opened"),
]


@pytest.mark.parametrize(("survivors", "text"), BAD_SURVIVORS)
def test_survivors_that_cannot_be_are_refused(survivors, text):
    run = Sum(SENT)
    with refused(run.parties["c01"], text):
        run.parties["c01"].reveal("first", survivors)
    run.assert_opens()


def test_survivors_who_never_dealt_are_refused():
    run = Sum(START)
    deal(run.session, run.parties, SURVIVORS)
    join(run.session, run.parties, SURVIVORS)
    total = summed(masked(run.session, run.parties, SURVIVORS)).total
    with refused(run.parties["c01"], "the survivors are not dealers of the session"):
        run.parties["c01"].reveal("first", CLIENTS)
    reveal(run.session, run.parties, SURVIVORS, SURVIVORS)
    assert run.session.open(total, SURVIVORS).tolist() == plain_sum(SURVIVORS)


@pytest.mark.parametrize(
    "others",
    [
        CLIENTS,  # more than before: both secrets of the last one
        ["c00", "c01", "c02"],  # fewer than before: both secrets of the fourth
        ["c00", "c01", "c03"],
        ["c00", "c01", "c02", "c04"],
    ],
)
def test_a_session_is_opened_for_one_set_of_survivors(others):
    run = Sum(SENT)
    party = run.parties["c01"]
    answer = party.reveal("first", SURVIVORS)
    restart(run.parties)
    with refused(party, "session 'first' was opened for other survivors: that would open both"):
        party.reveal("first", others)
    assert party.reveal("first", SURVIVORS) == answer  # a lost answer can be asked for again
    run.assert_opens()


def test_a_clients_answer_is_of_the_seeds_of_the_survivors_and_the_keys_of_the_missing():
    run = Sum(JOINED)
    mine = dict(zip(CLIENTS, run.parties["c01"].state["sessions"]["first"]["shares"], strict=True))
    assert {len(share) for share in mine.values()} == {64}
    run.advance(SENT)
    keys, seeds = run.parties["c01"].reveal("first", SURVIVORS)
    assert keys == [halves(mine["c04"])[0]]
    assert seeds == [halves(mine[client])[1] for client in SURVIVORS]


def test_old_shares_under_a_replayed_name_are_refused():
    # After a session is over its name may come again. If the shares that were dealt under it then
    # were taken for new ones, the holders would open the other secret of a client that survived.
    run = Sum(REVEALED)
    old = run.session
    run.next_round(REVEALED)
    victim = "c00"
    for client in SURVIVORS[1:]:
        party = run.parties[client]
        replayed = new_session(run.parties, name="first", server_round=3)
        fresh = party.deal(replayed.invitation(client))
        joined = old.joined(client)
        keys = [*joined.mask_keys]
        keys[joined.dealers.index(client)] = fresh.mask_key
        with refused(party, f"the share of client {victim} cannot be used"):
            party.join(replace(joined, mask_keys=keys))
        with refused(party, "session 'first' has no vector of this client"):
            party.reveal("first", SURVIVORS[1:])


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
                    if share_digest(EXPERIMENT, name, dealer, holder, kind, share) == digest:
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


# What the server sees, and what it checks.


def test_colluders_below_the_threshold_do_not_open_a_secret_and_as_many_as_it_do():
    run = Sum(SENT)
    victim, experiment = "c00", run.session
    dealt = experiment._dealt[victim]
    place = CLIENTS.index(victim)
    for colluders in (["c01", "c02"], ["c02", "c04"], ["c01", "c02", "c04"]):
        # All that the server has, and what the colluders opened with their keys.
        shares = {
            CLIENTS.index(name): run.parties[name].state["sessions"]["first"]["shares"][place]
            for name in colluders
        }
        seeds = {holder: halves(share)[1] for holder, share in shares.items()}
        keys = {holder: halves(share)[0] for holder, share in shares.items()}
        seed = recover(seeds, threshold=len(seeds))
        key = recover(keys, threshold=len(keys))
        found = commitment(EXPERIMENT, "first", victim, seed) == dealt.commitment
        assert found == (len(colluders) == 3)
        assert (KeyPair.of(key).public == dealt.mask_key) == (len(colluders) == 3)


def test_what_goes_through_the_server_does_not_have_a_share_in_the_clear():
    run = Sum(JOINED)
    for client in CLIENTS:
        dealt = run.session._dealt[client]
        mine = run.parties[client].state["sessions"]["first"]
        sent = b"|".join(walk([dealt.mask_key, dealt.commitment, dealt.digests, dealt.sealed]))
        for secret in (mine["private"], mine["seed"], *halves(mine["own"])):
            assert secret not in sent
        for holder in CLIENTS:
            place = CLIENTS.index(client)
            share = run.parties[holder].state["sessions"]["first"]["shares"][place]
            assert all(half not in sent for half in halves(share))


BAD_DEALS = {
    "a short mask key": lambda d: {"mask_key": d.mask_key[1:]},
    "a long commitment": lambda d: {"commitment": d.commitment + b"x"},
    "a digest less": lambda d: {"digests": d.digests[1:]},
    "a short digest": lambda d: {"digests": [*d.digests[:4], b"short"]},
    "a share less": lambda d: {"sealed": d.sealed[:4]},
    "a share more": lambda d: {"sealed": [*d.sealed, d.sealed[0]]},
    "a long share": lambda d: {"sealed": [d.sealed[0] + b"x", *d.sealed[1:]]},
    "a share for itself": lambda d: {"sealed": [d.sealed[0]] * 5},
    "none for another": lambda d: {"sealed": [b"", b"", *d.sealed[2:]]},
}


@pytest.mark.parametrize("change", BAD_DEALS.values(), ids=BAD_DEALS.keys())
def test_the_server_refuses_malformed_deals(change):
    run = Sum(START)
    dealt = run.parties["c01"].deal(run.session.invitation("c01"))
    with pytest.raises(ReplyRefusedError, match="malformed: shares of another number or length"):
        run.session.take_dealt("c01", replace(dealt, **change(dealt)))
    assert run.session.dealers == []
    run.session.take_dealt("c01", dealt)
    assert run.session.dealers == ["c01"]


def flipped(share: bytes) -> bytes:
    return bytes([share[0] ^ 1]) + share[1:]


BAD_SHARES = {
    # what is made of the shares of the key of c04 and of the seeds of the survivors
    "a damaged seed": (lambda k, s: (k, [s[0], flipped(s[1]), *s[2:]]), "damaged share of .* c01"),
    "a damaged key": (lambda k, s: ([flipped(k[0])], s), "damaged share of client c04"),
    "swapped": (lambda k, s: (k, [s[1], s[0], *s[2:]]), "damaged share of client c00"),
    "seed for key": (lambda k, s: ([s[0]], [k[0], *s[1:]]), "damaged share of client c04"),
    "a cut share": (lambda k, s: (k, [s[0][:-1], *s[1:]]), "damaged share of client c00"),
    "an empty one": (lambda k, s: (k, [*s[:3], b""]), "damaged share of client c03"),
    "a seed less": (lambda k, s: (k, s[1:]), "another number of shares than was asked for"),
    "no key": (lambda k, s: ([], s), "another number of shares than was asked for"),
    "one more": (lambda k, s: ([*k, s[0]], s), "another number of shares than was asked for"),
    "nothing": (lambda k, s: ([], []), "another number of shares than was asked for"),
}


@pytest.mark.parametrize(("change", "text"), BAD_SHARES.values(), ids=BAD_SHARES.keys())
def test_the_server_refuses_damaged_shares_and_keeps_none_of_the_answer(change, text):
    run = Sum(SENT)
    answers = {client: run.parties[client].reveal("first", SURVIVORS) for client in SURVIVORS}
    run.session.take_revealed("c00", SURVIVORS, *answers["c00"])
    run.session.take_revealed("c03", SURVIVORS, *answers["c03"])
    with pytest.raises(ReplyRefusedError, match=f"malformed: .*{text}"):
        run.session.take_revealed("c01", SURVIVORS, *change(*answers["c01"]))
    with pytest.raises(
        NotOpenedError, match="2 of at least 3 clients revealed their shares, 1 are"
    ):
        run.session.open(run.total, SURVIVORS)
    assert all(set(shares) == {0, 3} for shares in run.session._shares.values())
    run.session.take_revealed("c02", SURVIVORS, *answers["c02"])
    assert run.session.open(run.total, SURVIVORS).tolist() == plain_sum(SURVIVORS)


def test_the_server_refuses_the_shares_of_another_client():
    run = Sum(SENT)
    answer = run.parties["c01"].reveal("first", SURVIVORS)
    with pytest.raises(ReplyRefusedError, match="malformed: a damaged share of client c04"):
        run.session.take_revealed("c02", SURVIVORS, *answer)


@pytest.mark.parametrize("byte", [5, 37])  # of the key, of the seed
@pytest.mark.parametrize("dealer", ["c00", "c04"])  # a survivor, one who is missing
def test_a_dealer_of_other_secrets_than_announced_is_named(monkeypatch, byte, dealer):
    honest = participant_module.deal

    def dishonest(secret: bytes, **parameters: int) -> list[bytes]:
        return honest(secret[:byte] + bytes([secret[byte] ^ 1]) + secret[byte + 1 :], **parameters)

    run = Sum(START)
    for client in CLIENTS:
        monkeypatch.setattr(participant_module, "deal", dishonest if client == dealer else honest)
        deal(run.session, run.parties, [client])
    run.phase = DEALT
    what = {("c00", 37): "seed", ("c04", 5): "key"}.get((dealer, byte))
    if what is None:
        run.assert_opens()  # the other secret is of no use here
        return
    run.advance(REVEALED)
    with pytest.raises(NotOpenedError, match=f"client {dealer} dealt another {what} than it ann"):
        run.session.open(run.total, SURVIVORS)


def test_too_few_shares_of_somebody_are_named_on_a_sparse_graph():
    parties = new_parties(7)
    names = sorted(parties)
    rosters = {
        name: sorted(names[(place + step) % 7] for step in range(-2, 3))
        for place, name in enumerate(names)
    }
    bounds = Bounds(cohort=7, code_limit=100, largest_weight=8, modulus_bits=14)
    session = new_session(parties, threshold=4, rosters=rosters, bounds=bounds)
    deal(session, parties, names)
    join(session, parties, names)
    total = summed(masked(session, parties, names), bounds)
    reveal(session, parties, names, names[3:])  # of the first one's neighbours only the last two
    with pytest.raises(
        NotOpenedError, match="2 of at least 3 clients have a share of client c00, 1 are missing"
    ):
        session.open(total.total, names)
    reveal(session, parties, names, ["c00"])  # a client holds a share of its own secrets
    assert session.open(total.total, names).tolist() == plain_sum(names, bounds)


def test_a_session_is_of_its_round_and_old_ones_are_forgotten():
    parties = new_parties(5)
    party = parties["c01"]
    for server_round in (1, 2, 3, 4):
        session = new_session(parties, name=f"s{server_round}", server_round=server_round)
        party.deal(session.invitation("c01"))
        assert party.seat(f"s{server_round}", server_round, 0) == (3, 5)
        with pytest.raises(ProtocolError, match=f"is of round {server_round}, not of round 9"):
            party.seat(f"s{server_round}", 9, 0)
        # Of the round before it may yet be asked for shares; what was never sent is not kept.
        assert len(party.state["sessions"]) == min(server_round, 2)
