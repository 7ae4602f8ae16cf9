"""Several sums of the same clients in one round: none of them over fewer than the first."""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from parties import (
    BOUNDS,
    deal,
    join,
    masked,
    new_parties,
    new_session,
    plain_sum,
    reveal,
    summed,
    vector_of,
)

from flwr_privacy.errors import ProtocolError
from flwr_privacy.secure_sum import Bounds, NotOpenedError, Participant, SecureSum, Session, graph
from flwr_privacy.wire.documents import dumps, loads

CLIENTS = [f"c{i:02}" for i in range(5)]
FOUR = CLIENTS[:4]  # those in the first sum


class Steps:
    """The sums of a round, one after another; the last client is lost in the first one."""

    def __init__(self, last: int = 0) -> None:
        self.parties = new_parties(5)
        self.begin()
        for step in range(last):
            self.open()
            self.begin_step(f"step {step + 1}")

    def begin(self, name: str = "step 0", server_round: int = 1) -> None:
        self.session = new_session(self.parties, name=name, server_round=server_round)
        deal(self.session, self.parties, CLIENTS)

    def begin_step(self, name: str) -> None:
        self.session = self.session.go_on(name, FOUR, BOUNDS)
        deal(self.session, self.parties, FOUR)

    def send(self) -> None:
        self.session.check_dealers()
        join(self.session, self.parties, self.session.dealers)
        self.vectors = masked(self.session, self.parties, FOUR)

    def open(self) -> list[int]:
        if "masked" not in self.parties["c00"].state["sessions"][self.session.name]:
            self.send()
        reveal(self.session, self.parties, FOUR, FOUR)
        self.sum = self.session.open(summed(self.vectors).total, FOUR).tolist()
        return self.sum

    def invitation(self, client: str = "c01", **change: Any) -> Any:
        following = self.session.go_on("following", FOUR, BOUNDS)
        return replace(following.invitation(client), **change)


@contextmanager
def refused(party: Participant, text: str) -> Iterator[None]:
    """Expect a refusal with this text that leaves what the client remembers as it was."""
    before = copy.deepcopy(party.state)
    with pytest.raises(ProtocolError, match=re.escape(text)):
        yield
    assert party.state == before


def test_three_steps_of_two_rounds_open_the_same_clients_with_restarts_in_between():
    run = Steps()
    for server_round in (1, 4):
        if server_round > 1:
            run.begin(f"round {server_round}", server_round)
        for step in range(3):
            if step:
                run.begin_step(f"round {server_round}, step {step}")
            for party in run.parties.values():
                party.state = loads(dumps(party.state))
            for client in FOUR:
                seat = run.parties[client].seat(run.session.name, server_round, step)
                assert seat == (3, 4 if step else 5)
            assert run.open() == plain_sum(FOUR)
            assert run.parties["c00"].state["opened"] == [server_round, step]


def test_after_a_later_step_a_client_remembers_no_secret_but_shares_of_seeds():
    run = Steps(2)
    own = copy.deepcopy(run.parties["c01"].state["sessions"]["step 2"])
    run.open()
    party = run.parties["c01"]
    assert list(party.state["sessions"]) == ["step 2"]
    session = party.state["sessions"]["step 2"]
    assert session["private"] == session["seed"] == session["own"] == b""
    assert [len(share) for share in session["shares"]] == [32] * 4
    everything = dumps(party.state)
    assert all(own[secret].hex().encode() not in everything for secret in ("private", "seed"))


def test_the_step_before_may_be_asked_for_again_until_the_next_one_is_opened():
    run = Steps()
    run.open()
    first, answer = run.session, run.parties["c01"].reveal("step 0", FOUR)
    run.begin_step("step 1")
    assert run.parties["c01"].reveal("step 0", FOUR) == answer
    run.open()
    with refused(run.parties["c01"], "session 'step 0' is not known here, or is over"):
        run.parties["c01"].reveal("step 0", first.survivors_around("c01", FOUR))


def test_a_step_may_be_dealt_for_again_before_it_is_opened():
    run = Steps()
    run.open()
    first = run.session
    run.begin_step("attempt 1")
    run.send()
    run.session = first
    run.begin_step("attempt 2")
    with refused(run.parties["c01"], "session 'attempt 1' is not known here, or is over"):
        run.parties["c01"].reveal("attempt 1", FOUR)
    assert run.open() == plain_sum(FOUR)


# What a client refuses.


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize(
    ("roster", "threshold"), [(FOUR[:3], 3), (CLIENTS, 3), (["c00", "c01", "c02", "c04"], 3)]
)
def test_another_roster_than_the_survivors_is_refused(last, roster, threshold):
    run = Steps(last)
    run.open()
    keys = [run.session.keys[client][0] for client in roster]
    invitation = run.invitation(
        roster=roster, keys=keys, signatures=[b""] * len(roster), threshold=threshold
    )
    text = (
        f"the roster of step {last + 1} of round 1 is not who survived the sum before: sums over "
        "different clients would give a vector away"
    )
    with refused(run.parties["c01"], text):
        run.parties["c01"].deal(invitation)
    run.begin_step("honest")
    assert run.open() == plain_sum(FOUR)


def test_another_threshold_than_before_is_refused():
    run = Steps()
    run.open()
    with refused(run.parties["c01"], "threshold 4 for step 1 of round 1: it stays 3 within a ro"):
        run.parties["c01"].deal(run.invitation(threshold=4))


def not_just_opened(step: int) -> str:
    before = f"step {step - 1} of round 1" if step > 1 else "round 1"
    return f"step {step} of round 1 is refused: this client has not just opened the sum of {before}"


def test_a_step_is_dealt_for_only_after_the_one_before_was_opened():
    run = Steps()
    for step in (1, 2):
        with refused(run.parties["c01"], not_just_opened(step)):
            run.parties["c01"].deal(run.invitation(step=step))
    run.send()
    with refused(run.parties["c01"], not_just_opened(1)):
        run.parties["c01"].deal(run.invitation())
    run.open()
    with refused(run.parties["c01"], not_just_opened(2)):
        run.parties["c01"].deal(run.invitation(step=2))
    with refused(run.parties["c01"], "step 1 of round 2 is refused: this client has not just op"):
        run.parties["c01"].deal(run.invitation(server_round=2))
    others = [*CLIENTS[:3], "c04"]
    keys = [run.session.keys[client][0] for client in others]
    with refused(run.parties["c04"], not_just_opened(1)):  # it is in no sum
        run.parties["c04"].deal(run.invitation("c03", roster=others, keys=keys))
    run.begin_step("honest")
    assert run.open() == plain_sum(FOUR)


def test_no_step_is_dealt_for_once_it_or_a_later_one_was_opened():
    run = Steps(1)
    run.open()
    later = "step 1 of round 1, whose sum this client has opened: another sum over the same round"
    for step, name in ((0, "round 1"), (1, "step 1 of round 1")):
        with refused(run.parties["c01"], f"{name} does not follow {later}"):
            run.parties["c01"].deal(run.invitation(step=step))
    again = new_session(run.parties, name="again")
    with refused(run.parties["c00"], f"round 1 does not follow {later}"):
        run.parties["c00"].deal(again.invitation("c00"))


def test_a_round_that_was_left_for_the_next_one_does_not_go_on():
    run = Steps(1)
    left = run.session
    run.begin("round 2", server_round=2)
    invitation = replace(left.invitation("c01"), session="again")
    with refused(run.parties["c01"], not_just_opened(1)):
        run.parties["c01"].deal(invitation)
    assert run.open() == plain_sum(FOUR)


@pytest.mark.parametrize("server_round", [1, 2])
def test_a_step_before_the_first_is_refused(server_round):
    run = Steps()
    run.open()
    with refused(run.parties["c01"], "step -1 of a round: the first one is step 0"):
        run.parties["c01"].deal(run.invitation(server_round=server_round, step=-1))


def test_a_question_for_another_step_is_refused():
    run = Steps(1)
    for question, name in (((1, 0), "round 1"), ((1, 2), "step 2 of round 1")):
        text = f"session 'step 1' is of step 1 of round 1, not of {name}"
        with refused(run.parties["c01"], text):
            run.parties["c01"].seat("step 1", *question)
    run.open()
    run.begin("next", 2)
    with refused(run.parties["c01"], "session 'next' is of round 2, not of step 1 of round 2"):
        run.parties["c01"].seat("next", 2, 1)


FEWER = (
    "1 of 4 clients are missing in step 1 of round 1: a sum over fewer clients than the step "
    "before would give a vector away"
)


def test_a_client_sends_nothing_at_a_later_step_unless_all_dealt():
    run = Steps(1)
    del run.session._dealt["c03"]
    with pytest.raises(NotOpenedError, match=re.escape(not_opened("dealt their secrets"))):
        run.session.check_dealers()
    with refused(run.parties["c01"], FEWER):
        run.parties["c01"].join(run.session.joined("c01"))


def not_opened(did: str) -> str:
    return (
        f"the sum of step 1 of round 1 is not opened: 3 of at least 4 clients {did}, 1 are missing"
    )


def test_a_client_that_drops_out_of_a_later_step_ends_it_on_both_sides():
    run = Steps(1)
    run.send()
    three = FOUR[:3]
    total = summed({client: run.vectors[client] for client in three}).total
    few = re.escape(not_opened("sent a vector that can be used"))
    for attempt in (run.session.check_survivors, lambda s: run.session.open(total, s)):
        with pytest.raises(NotOpenedError, match=few):
            attempt(three)
    # A server that asks all the same is refused; so it is by those with more than the threshold.
    for client in three:
        with refused(run.parties[client], FEWER):
            run.parties[client].reveal("step 1", three)
    with pytest.raises(NotOpenedError):
        run.session.open(total, three)
    # The training goes on.
    run.begin("next", server_round=2)
    assert run.open() == plain_sum(FOUR)


def test_who_does_not_reveal_at_a_later_step_does_not_stop_it_before_the_threshold():
    run = Steps(1)
    run.send()
    reveal(run.session, run.parties, FOUR, FOUR[:2])
    total = summed(run.vectors).total
    with pytest.raises(NotOpenedError, match="2 of at least 3 clients revealed their shares"):
        run.session.open(total, FOUR)
    reveal(run.session, run.parties, FOUR, FOUR[2:3])
    assert run.session.open(total, FOUR).tolist() == plain_sum(FOUR)


def test_without_the_rule_the_difference_of_two_sums_is_the_vector_of_the_missing_one(monkeypatch):
    run = Steps(1)
    first = np.array(run.sum)
    monkeypatch.setattr(Session, "least", property(lambda session: session.threshold))
    run.send()
    three = FOUR[:3]
    total = summed({client: run.vectors[client] for client in three}).total
    with pytest.raises(ProtocolError, match="would give a vector away"):
        reveal(run.session, run.parties, three, three)  # the clients keep to it by themselves
    monkeypatch.setattr(Participant, "_check_nobody_left", lambda *_: None)
    reveal(run.session, run.parties, three, three)
    second = run.session.open(total, three)
    codes, weight = vector_of("c03")
    assert (first - second).tolist() == [*(codes * weight).tolist(), weight]


def test_old_shares_under_the_name_of_an_earlier_step_are_refused():
    run = Steps(1)
    run.open()
    old = run.session
    run.begin_step("step 2")
    run.open()
    # The name of step 1 is free again: its shares must not pass for those of step 3.
    replayed = old.go_on("step 1", FOUR, BOUNDS).invitation("c01")
    party = run.parties["c01"]
    fresh = party.deal(replace(replayed, step=3))
    joined = old.joined("c01")
    keys = [joined.mask_keys[0], fresh.mask_key, *joined.mask_keys[2:]]
    with refused(party, "the share of client c00 cannot be used: damaged, or sealed for another"):
        party.join(replace(joined, mask_keys=keys))


# A sparse graph.

SPARSE = Bounds(cohort=30, code_limit=100, largest_weight=8, modulus_bits=16)


def sparse_parties(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Session]:
    monkeypatch.setattr(graph, "LARGEST_INSECURITY", 60.0)  # so few neighbours are not safe
    parties = new_parties(30)
    rosters = graph.rosters(
        sorted(parties),
        SecureSum(threshold=16, colluders=0, neighbours=12),
        seed=seed,
        server_round=1,
    )
    return parties, new_session(parties, threshold=16, rosters=rosters, bounds=SPARSE)


@pytest.mark.parametrize("lost", [[], ["c07"], ["c00", "c11", "c12", "c29"]])
def test_on_a_sparse_graph_later_steps_are_over_the_graph_of_those_left(lost, monkeypatch):
    parties, session = sparse_parties(1, monkeypatch)
    whole = session.rosters
    deal(session, parties, parties)
    left = [client for client in parties if client not in lost]
    for step in range(3):
        session.check_dealers()
        join(session, parties, session.dealers)
        total = summed(masked(session, parties, left), SPARSE).total
        reveal(session, parties, left, left)
        assert session.open(total, left).tolist() == plain_sum(left, SPARSE)
        session = session.go_on(f"step {step + 1}", left, SPARSE)
        for client in left:
            assert session.rosters[client] == [c for c in whole[client] if c not in lost]
            # The share of the threshold stays: with fewer more colluders around would be enough.
            assert session.invitation(client).threshold == 7
        deal(session, parties, left)
    assert session.step == 3


def test_on_a_sparse_graph_a_client_with_too_few_around_ends_the_round(monkeypatch):
    parties, session = sparse_parties(1, monkeypatch)
    deal(session, parties, parties)
    lonely = "c07"
    lost = [c for c in session.rosters[lonely] if c != lonely][:7]  # 6 of its roster are left
    join(session, parties, parties)
    left = [client for client in parties if client not in lost]
    answering = [client for client in left if session.can_answer(client, left)]
    assert lonely not in answering
    total = summed(masked(session, parties, left), SPARSE).total
    reveal(session, parties, left, answering)
    with pytest.raises(NotOpenedError, match="have a share of client"):
        session.open(total, left)
    following = session.go_on("step 1", left, SPARSE)
    with refused(parties[lonely], "threshold 7 for 6 clients: it must be more than half of them"):
        parties[lonely].deal(following.invitation(lonely))


@pytest.mark.parametrize("odd", [None, "c01"])
def test_what_one_client_was_asked_otherwise_spoils_this_sum_and_the_later_ones(
    odd: str | None,
) -> None:
    run = Steps()
    session = run.session
    session.check_dealers()
    for step, who in enumerate((CLIENTS, FOUR, FOUR)):
        for client in who:
            asked = b"something else" if client == odd and step == 0 else b"question %d" % step
            run.parties[client].join(session.joined(client), asked)
        total = summed(masked(session, run.parties, FOUR)).total
        reveal(session, run.parties, FOUR, FOUR)
        opened = session.open(total, FOUR, b"question %d" % step).tolist()
        assert (opened == plain_sum(FOUR)) == (odd is None)
        session = session.go_on(f"step {step + 1}", FOUR, BOUNDS, b"question %d" % step)
        deal(session, run.parties, FOUR)
        session.check_dealers()


def test_a_client_is_asked_once_in_a_session() -> None:
    run = Steps()
    run.session.check_dealers()
    joined = run.session.joined("c01")
    run.parties["c01"].join(joined, b"question")
    with refused(run.parties["c01"], "has this client's vector already"):
        run.parties["c01"].join(joined, b"another")
