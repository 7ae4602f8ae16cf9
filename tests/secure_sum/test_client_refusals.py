"""What a client of a secure sum refuses: invitations, questions and names of survivors."""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
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
from sum_session import CLIENTS, DEALT, JOINED, REVEALED, SENT, START, SURVIVORS, Sum, restart

from flwr_privacy.errors import ProtocolError
from flwr_privacy.secure_sum import Participant
from flwr_privacy.secure_sum.secrets import halves
from flwr_privacy.wire.channel import Channel, KeyPair


@contextmanager
def refused(party: Participant, text: str) -> Iterator[None]:
    """Expect a refusal with this text that leaves what the client remembers as it was."""
    party.public_key()
    before = copy.deepcopy(party.state)
    with pytest.raises(ProtocolError, match=re.escape(text)):
        yield
    assert party.state == before


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
    yield (
        "short",
        lambda r: sealed_by_c02(r, bytes(63)),
        "the share of client c02 cannot be used: it has 63",
    )
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
