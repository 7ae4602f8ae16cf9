"""A secure sum that opens only with the vectors of some clients, as those of a noise committee."""

import itertools
import re
from dataclasses import replace

import pytest
from lying_server import groups_of, laid_open, stories
from parties import deal, join, masked, new_parties, new_session, plain_sum, reveal, summed
from sum_session import CLIENTS, DEALT, SENT, SURVIVORS, Sum

from flwr_privacy.errors import ProtocolError, RefusedPeersError
from flwr_privacy.privacy.distributed_noise import honest_members
from flwr_privacy.secure_sum import NotOpenedError
from flwr_privacy.secure_sum.conflicts import Conflict, apart
from flwr_privacy.secure_sum.trust import withstood_colluders

NEEDED = ["c01", "c03"]


def new_sum(phase: int) -> Sum:
    run = Sum(0)
    run.session = replace(run.session, needed=NEEDED)
    run.advance(phase)
    return run


def test_it_opens_with_all_that_it_needs() -> None:
    new_sum(DEALT).assert_opens()


def test_nobody_reveals_anything_of_a_sum_without_one() -> None:
    run = new_sum(SENT)
    for without in NEEDED:
        there = [c for c in CLIENTS if c != without]
        for client in there[:-1]:
            with pytest.raises(ProtocolError, match="1 of 2 clients have not survived"):
                run.parties[client].reveal("first", there)
    run.assert_opens()  # a refusal leaves no trace


def test_nobody_sends_a_vector_into_a_sum_for_which_one_has_not_dealt() -> None:
    run = new_sum(DEALT)
    for without in NEEDED:
        joined = run.session.joined("c00")
        place = joined.dealers.index(without)
        fewer = {
            name: [value for i, value in enumerate(getattr(joined, name)) if i != place]
            for name in ("dealers", "mask_keys", "sealed")
        }
        with pytest.raises(ProtocolError, match="1 of 2 clients have not dealt"):
            run.parties["c00"].join(replace(joined, **fewer))
    run.assert_opens()


@pytest.mark.parametrize("told", [[], ["c01"], ["c00", *NEEDED]])
def test_who_was_told_of_others_cannot_open_what_is_dealt(told: list[str]) -> None:
    """Otherwise it would reveal the key of somebody who is needed, as that of one who is missing.

    Planted bug: without the names in the associated data of the shares, it can.
    """
    parties = new_parties(5)
    session = replace(new_session(parties), needed=NEEDED)
    for client in CLIENTS:
        invitation = session.invitation(client)
        if client == "c04":
            invitation = replace(invitation, needed=told)
        session.take_dealt(client, parties[client].deal(invitation))
    for client in CLIENTS:
        others = CLIENTS[:4] if client == "c04" else ["c04"]
        with pytest.raises(RefusedPeersError) as refused:
            parties[client].join(session.joined(client))
        assert sorted(refused.value.peers) == others


@pytest.mark.parametrize("needed", [["c05"], ["c03", "c01"], ["c01", "c01"]])
def test_an_invitation_names_members_of_the_roster_once(needed: list[str]) -> None:
    run = Sum(0)
    invitation = replace(run.session.invitation("c00"), needed=needed)
    with pytest.raises(ProtocolError, match=re.escape("no members of the roster, each once")):
        run.parties["c00"].deal(invitation)


def test_the_server_does_not_ask_for_a_sum_without_one() -> None:
    parties = new_parties(5)
    session = replace(new_session(parties), needed=["c04"])
    deal(session, parties, SURVIVORS)
    with pytest.raises(NotOpenedError, match=re.escape("['c04'] have not dealt their secrets")):
        session.check_dealers()
    deal(session, parties, ["c04"])
    session.check_dealers()
    join(session, parties, CLIENTS)
    total = summed(masked(session, parties, CLIENTS)).total
    with pytest.raises(NotOpenedError, match=re.escape("['c04'] have not sent a vector")):
        session.check_survivors(SURVIVORS)
    reveal(session, parties, CLIENTS, CLIENTS)
    assert session.open(total, CLIENTS).tolist() == plain_sum(CLIENTS)


def test_a_state_of_an_older_version_needs_nobody() -> None:
    run = Sum(DEALT)
    for party in run.parties.values():
        del party.state["sessions"]["first"]["needed"]
    assert run.parties["c00"].needed("first") == []
    run.assert_opens()


@pytest.mark.parametrize(("clients", "threshold"), [(3, 2), (4, 3), (5, 4)])
def test_no_story_of_a_lying_server_opens_a_sum_without_one(clients: int, threshold: int) -> None:
    """Goes through everything that a server may tell, and what masks and seeds it then knows."""
    needed = {0, 1}
    options = [
        [(d, s) for d, s in stories(client, clients, threshold) if needed <= d & s]
        for client in range(clients)
    ]
    found = list[set[int]]()
    for told in itertools.product(*options):
        found += groups_of(told, threshold)
    assert found
    assert all(needed <= group for group in found)


@pytest.mark.parametrize(("clients", "threshold"), [(3, 2), (4, 3), (5, 4)])
def test_more_colluders_than_are_withstood_open_a_vector(clients: int, threshold: int) -> None:
    """Two of three is a threshold of two thirds, and one colluder opens the third one's vector."""
    withstood = withstood_colluders(
        threshold=threshold, roster=clients, local_threshold=threshold, needed=2
    )
    for count in (withstood, withstood + 1):
        colluding, open_ = set(range(count)), set[int]()
        honest = sorted(set(range(clients)) - colluding)
        options = [
            [(d, s) for d, s in stories(client, clients, threshold) if {0, 1} <= d & s]
            for client in honest
        ]
        for told in itertools.product(*options):
            open_ |= laid_open(dict(zip(honest, told, strict=True)), threshold, colluding)
        assert bool(open_) == (count > withstood)


def test_what_a_node_needs_of_the_threshold() -> None:
    """A fifth of those that it knows beside them colludes, and everybody whom it does not know."""

    def of(threshold: int, **values: int) -> int:
        told = {"roster": 25, "local_threshold": threshold, "needed": 5, **values}
        return withstood_colluders(threshold=threshold, **told)

    assert [of(t) for t in (14, 15, 16, 17)] == [0, 0, 2, 4]
    assert [of(17, needed=n) for n in (0, 1, 6, 25)] == [3, 4, 5, 8]
    assert [of(17, pinned=p) for p in (19, 20, 21, 22)] == [0, 0, 1, 2]
    assert not of(17, max_cohort=12)
    assert not of(17, local_threshold=9)  # a sparse graph


# With (named, members, nodes, threshold): one colluder more than a fifth of all nodes are.
@pytest.mark.parametrize("case", [(5, 2, 3, 2), (10, 3, 4, 3), (20, 5, 6, 4), (50, 11, 12, 8)])
def test_a_small_roster_does_not_hide_how_many_members_may_collude(
    case: tuple[int, int, int, int],
) -> None:
    named, members, nodes, threshold = case
    assert honest_members(members, trusted=named) >= 1
    withstood = withstood_colluders(
        threshold=threshold, roster=nodes, local_threshold=threshold, needed=members, pinned=100
    )
    assert withstood < max(1, named // 5)


def test_who_contradicts_somebody_that_is_needed_stays_away() -> None:
    lies = [Conflict({"a", "m"}), Conflict({"b", "c"})]
    for server_round in range(6):
        there = apart("abcm", lies, seed=1, server_round=server_round, needed=["m"])
        assert there in (["b", "m"], ["c", "m"])
