"""What the server of a secure sum sees, and what it checks."""

from dataclasses import replace

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
from sum_session import CLIENTS, DEALT, JOINED, REVEALED, SENT, START, SURVIVORS, Sum, flipped, walk

from flwr_privacy.coding.shamir import recover
from flwr_privacy.errors import ProtocolError
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.secure_sum import Bounds, NotOpenedError
from flwr_privacy.secure_sum import participant as participant_module
from flwr_privacy.secure_sum.secrets import Derivation, halves
from flwr_privacy.wire.channel import KeyPair


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
        found = Derivation(EXPERIMENT, "first").commitment(victim, seed) == dealt.commitment
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


DAMAGED = {
    # what is made of the shares of the key of c04 and of the seeds of the survivors
    "a damaged seed": (lambda k, s: (k, [s[0], flipped(s[1]), *s[2:]]), ["c01"]),
    "a damaged key": (lambda k, s: ([flipped(k[0])], s), ["c04"]),
    "swapped": (lambda k, s: (k, [s[1], s[0], *s[2:]]), ["c00", "c01"]),
    "seed for key": (lambda k, s: ([s[0]], [k[0], *s[1:]]), ["c00", "c04"]),
    "a cut share": (lambda k, s: (k, [s[0][:-1], *s[1:]]), ["c00"]),
    "an empty one": (lambda k, s: (k, [*s[:3], b""]), ["c03"]),
    "all of them": (lambda k, s: ([b""], [b""] * 4), ["c00", "c01", "c02", "c03", "c04"]),
}


@pytest.mark.parametrize(("change", "dealers"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_share_is_left_out_and_the_others_of_the_answer_count(change, dealers):
    run = Sum(SENT)
    answers = {client: run.parties[client].reveal("first", SURVIVORS) for client in SURVIVORS}
    assert run.session.take_revealed("c00", SURVIVORS, *answers["c00"]) == []
    assert run.session.take_revealed("c03", SURVIVORS, *answers["c03"]) == []
    assert run.session.take_revealed("c01", SURVIVORS, *change(*answers["c01"])) == dealers
    kept = {
        dealer
        for (dealer, _), shares in run.session._shares.items()
        if run.session.rosters[dealer].index("c01") in shares
    }
    assert kept == {"c00", "c01", "c02", "c03", "c04"}.difference(dealers)
    # Two shares of each secret are there beside; of what was damaged, the third is missing.
    missing = "clients have a share of client" if kept else "clients revealed their shares"
    with pytest.raises(NotOpenedError, match=f"2 of at least 3 {missing}"):
        run.session.open(run.total, SURVIVORS)
    assert run.session.take_revealed("c02", SURVIVORS, *answers["c02"]) == []
    assert run.session.open(run.total, SURVIVORS).tolist() == plain_sum(SURVIVORS)


def test_a_dealer_of_false_shares_for_some_does_not_cost_the_others_theirs():
    """One of four shares of the missing client's key is damaged, and three open it."""
    run = Sum(SENT)
    for client in SURVIVORS:
        keys, seeds = run.parties[client].reveal("first", SURVIVORS)
        if client == "c01":  # c04 dealt it something else than it announced
            keys = [flipped(keys[0])]
        run.session.take_revealed(client, SURVIVORS, keys, seeds)
    assert run.session.open(run.total, SURVIVORS).tolist() == plain_sum(SURVIVORS)


OTHER_NUMBERS = {
    "a seed less": lambda k, s: (k, s[1:]),
    "no key": lambda k, s: ([], s),
    "one more": lambda k, s: ([*k, s[0]], s),
    "nothing": lambda k, s: ([], []),
}


@pytest.mark.parametrize("change", OTHER_NUMBERS.values(), ids=OTHER_NUMBERS.keys())
def test_the_server_refuses_another_number_of_shares_and_keeps_none_of_the_answer(change):
    run = Sum(SENT)
    answer = run.parties["c01"].reveal("first", SURVIVORS)
    with pytest.raises(ReplyRefusedError, match="malformed: another number of shares than was"):
        run.session.take_revealed("c01", SURVIVORS, *change(*answer))
    assert run.session._shares == {}


def test_the_server_leaves_out_the_shares_of_another_client():
    run = Sum(SENT)
    answer = run.parties["c01"].reveal("first", SURVIVORS)
    damaged = run.session.take_revealed("c02", SURVIVORS, *answer)
    assert damaged == ["c00", "c01", "c02", "c03", "c04"]
    assert run.session._shares == {}


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
