import copy
import itertools
import math
import re

import numpy as np
import pytest
from parties import (
    deal,
    join,
    masked,
    new_parties,
    new_session,
    plain_sum,
    reveal,
    summed,
)

from flwr_privacy.errors import ProtocolError
from flwr_privacy.secure_sum import Bounds, NotOpenedError, SecureSum, graph

CLIENTS = [f"c{i:02}" for i in range(5)]
THRESHOLD = 3


def subsets(members):
    return [
        list(some)
        for size in range(len(members) + 1)
        for some in itertools.combinations(members, size)
    ]


def missing(did: str, count: int, needed: int = THRESHOLD) -> str:
    return re.escape(
        f"the sum of round 1 is not opened: {count} of at least {needed} clients {did}, "
        f"{needed - count} are missing"
    )


def test_every_drop_out_pattern_of_five_clients_opens_the_exact_sum_or_nothing():
    # A pattern is who deals, who of them sends, who of them reveals: 4**5 in all. What happens up
    # to a phase does not depend on who drops out later, so patterns go on from copies.
    opened, patterns = 0, 0
    for dealers in subsets(CLIENTS):
        parties = new_parties(5)
        session = new_session(parties)
        deal(session, parties, dealers)
        if len(dealers) < THRESHOLD:
            patterns += 3 ** len(dealers)
            with pytest.raises(NotOpenedError, match=missing("dealt their secrets", len(dealers))):
                session.check_dealers()
            continue
        session.check_dealers()
        join(session, parties, dealers)
        vectors = masked(session, parties, dealers)
        for survivors in subsets(dealers):
            total = summed({client: vectors[client] for client in survivors})
            if len(survivors) < THRESHOLD:
                patterns += 2 ** len(survivors)
                few = missing("sent a vector that can be used", len(survivors))
                for refuse in (
                    lambda: session.check_survivors(survivors),  # noqa: B023
                    lambda: session.open(total.total, survivors),  # noqa: B023
                ):
                    with pytest.raises(NotOpenedError, match=few):
                        refuse()
                continue
            answered = copy.deepcopy(parties)
            answers = {c: answered[c].reveal(session.name, survivors) for c in survivors}
            for revealing in subsets(survivors):
                patterns += 1
                attempt = copy.deepcopy(session)
                for client in revealing:
                    attempt.take_revealed(client, survivors, *answers[client])
                if len(revealing) < THRESHOLD:
                    few = missing("revealed their shares", len(revealing))
                    with pytest.raises(NotOpenedError, match=few):
                        attempt.open(total.total, survivors)
                    continue
                values = attempt.open(total.total, survivors)
                assert values.dtype == np.int64
                assert values.tolist() == plain_sum(survivors), (dealers, survivors, revealing)
                opened += 1
    assert patterns == 4**5
    # Of five clients k reveal: comb(5, k) choices, three fates for each of the others.
    assert opened == 10 * 3**2 + 5 * 3 + 1


def test_the_sum_does_not_depend_on_who_reveals():
    parties = new_parties(5)
    session = new_session(parties)
    deal(session, parties, CLIENTS)
    join(session, parties, CLIENTS)
    total = summed(masked(session, parties, CLIENTS[:4]))
    reveal(session, parties, CLIENTS[:4], CLIENTS[:4])
    everything = copy.deepcopy(session)
    for holders in itertools.combinations(range(4), THRESHOLD):
        session._shares = {
            secret: {holder: shares[holder] for holder in holders}
            for secret, shares in everything._shares.items()
        }
        assert session.open(total.total, CLIENTS[:4]).tolist() == plain_sum(CLIENTS[:4])


def test_every_drop_out_counts_where_the_threshold_is_the_cohort():
    for lost in [None, *CLIENTS]:
        parties = new_parties(5)
        session = new_session(parties, threshold=5)
        deal(session, parties, CLIENTS)
        join(session, parties, CLIENTS)
        survivors = [client for client in CLIENTS if client != lost]
        total = summed(masked(session, parties, survivors))
        if lost is None:
            reveal(session, parties, CLIENTS, CLIENTS)
            assert session.open(total.total, CLIENTS).tolist() == plain_sum(CLIENTS)
            continue
        with pytest.raises(NotOpenedError, match=r"4 of at least 5 clients sent .*, 1 are missing"):
            session.open(total.total, survivors)
        with pytest.raises(ProtocolError, match="4 clients survived, 1 fewer than the threshold"):
            parties[survivors[0]].reveal(session.name, survivors)


@pytest.mark.parametrize("threshold", [2, 3, 4])
def test_smallest_cohorts(threshold):
    bounds = Bounds(cohort=threshold, code_limit=100, largest_weight=8, modulus_bits=13)
    parties = new_parties(threshold)
    session = new_session(parties, threshold=threshold, bounds=bounds)
    deal(session, parties, parties)
    join(session, parties, parties)
    total = summed(masked(session, parties, parties), bounds)
    reveal(session, parties, list(parties), parties)
    assert session.open(total.total, list(parties)).tolist() == plain_sum(parties, bounds)


# A sparse graph: who joins, answers and is opened depends on who is left around each client.

SPARSE = Bounds(cohort=30, code_limit=100, largest_weight=8, modulus_bits=16)


def sparse_rosters(monkeypatch, seed):
    monkeypatch.setattr(graph, "LARGEST_INSECURITY", 60.0)  # so few neighbours are not safe
    settings = SecureSum(threshold=16, colluders=0, neighbours=12)
    clients = [f"c{i:02}" for i in range(30)]
    return graph.rosters(clients, settings, seed=seed, server_round=1)


def test_random_drop_outs_on_a_sparse_graph_open_the_exact_sum_or_nothing(monkeypatch):
    refused, opened, kept_out = 0, 0, 0
    local = 7  # more than half of 13, and 16 of 30 of them
    for seed, share in enumerate([0.0, 0.03, 0.06, 0.06, 0.09, 0.09, 0.12, 0.15, 0.15, 0.2, 0.35]):
        rosters = sparse_rosters(monkeypatch, seed)
        parties = new_parties(30)
        session = new_session(parties, threshold=16, rosters=rosters, bounds=SPARSE)
        draws = np.random.default_rng(seed)

        def left(clients, share=share, draws=draws):
            return [client for client in clients if draws.random() >= share]

        def around(client, clients, rosters=rosters):
            return len(set(rosters[client]) & set(clients))

        dealers = left(parties)
        deal(session, parties, dealers)
        joining = [client for client in dealers if around(client, dealers) >= local]
        for client in set(dealers).difference(joining):
            kept_out += 1
            with pytest.raises(ProtocolError, match="fewer than the threshold"):
                parties[client].join(session.joined(client))
        join(session, parties, joining)
        survivors = left(joining)
        total = summed(masked(session, parties, survivors), SPARSE)
        answering = [client for client in survivors if around(client, survivors) >= local]
        assert answering == [c for c in survivors if session.can_answer(c, survivors)]
        revealing = left(answering)
        reveal(session, parties, survivors, revealing)
        needed = [*survivors, *(c for c in set(dealers) - set(survivors) if around(c, survivors))]
        enough = all(around(client, revealing) >= local for client in needed)
        if enough and min(len(survivors), len(revealing)) >= 16:
            opened += 1
            values = session.open(total.total, survivors).tolist()
            assert values == plain_sum(survivors, SPARSE)
        else:
            refused += 1
            with pytest.raises(NotOpenedError, match=r"of at least \d+ clients .* are missing"):
                session.open(total.total, survivors)
    assert opened >= 4
    assert refused >= 3
    assert kept_out


def test_a_dealer_whose_neighbours_never_dealt_is_in_nobodys_way():
    names = [f"c{i:02}" for i in range(12)]  # a circle of five neighbours each, itself included
    rosters = {
        name: sorted(names[(place + step) % 12] for step in range(-2, 3))
        for place, name in enumerate(names)
    }
    parties = new_parties(12)
    session = new_session(parties, threshold=7, rosters=rosters, bounds=SPARSE)
    dealers = [name for name in names if name not in ("c03", "c04", "c06", "c07")]
    deal(session, parties, dealers)
    with pytest.raises(ProtocolError, match="1 clients dealt, 2 fewer than the threshold"):
        parties["c05"].join(session.joined("c05"))
    survivors = [name for name in dealers if name != "c05"]
    join(session, parties, survivors)
    total = summed(masked(session, parties, survivors), SPARSE)
    reveal(session, parties, survivors, survivors)
    assert session.open(total.total, survivors).tolist() == plain_sum(survivors, SPARSE)


def test_in_a_sparse_graph_a_client_with_too_few_dealers_around_is_left_out(monkeypatch):
    monkeypatch.setattr(graph, "LARGEST_INSECURITY", math.inf)
    settings = SecureSum(neighbours=6, colluders=0)
    clients = [f"c{index:02}" for index in range(15)]
    around = graph.rosters(clients, settings, seed=0, server_round=1)
    lonely = clients[0]
    silent = [member for member in around[lonely] if member != lonely][:4]
    parties = new_parties(15)
    bounds = Bounds(cohort=15, code_limit=100, largest_weight=8, modulus_bits=15)
    threshold = settings.threshold_of(15)
    session = new_session(parties, rosters=around, threshold=threshold, bounds=bounds)
    deal(session, parties, [client for client in clients if client not in silent])
    assert lonely in session.dealers
    session.check_dealers()
    assert lonely not in session.dealers
    there = session.dealers
    join(session, parties, there)
    total = summed(masked(session, parties, there), bounds).total
    reveal(session, parties, there, [c for c in there if session.can_answer(c, there)])
    assert session.open(total, there).tolist() == plain_sum(there, bounds)
