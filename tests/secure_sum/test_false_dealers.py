"""Clients that deal false shares, and clients that only say that another one did."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from apps import make, message_app, run_strategy
from flwr.app import ConfigRecord, Context, Error, Message
from parties import masked
from sum_session import CLIENTS, DEALT, JOINED, REVEALED, SENT, SURVIVORS, Sum, flipped

from flwr_privacy.clients import SecureSumClient, as_mod
from flwr_privacy.errors import ProtocolError, RefusedPeersError
from flwr_privacy.secure_sum import NotOpenedError, SecureSum, Session
from flwr_privacy.secure_sum.conflicts import Conflict, apart, liars
from flwr_privacy.secure_sum.graph import local_threshold, rosters
from flwr_privacy.secure_sum.messages import DEAL, JOIN, OPEN
from flwr_privacy.strategies import FedAvg
from flwr_privacy.wire.channel import KeyPair
from flwr_privacy.wire.message import ERROR_CODE, REFUSED_PEERS_CODE

NAMES = "abcde"
Change = Callable[[dict[str, Any]], None]


def conflicts(pairs: str) -> set[Conflict]:
    return {Conflict(pair) for pair in pairs.split()}


# -- What conflicts lead to ------------------------------------------------------------------------


def test_no_two_of_those_who_stay_are_in_conflict_and_nobody_stays_away_for_nothing() -> None:
    pairs = conflicts("ab ac bd")
    for server_round in range(50):
        there = set(apart("abcdef", pairs, seed=3, server_round=server_round))
        assert not any(pair <= there for pair in pairs)
        assert there >= {"e", "f"}
        for away in set("abcdef") - there:
            assert any(away in pair and pair & there for pair in pairs)


@pytest.mark.parametrize("client", "ac")
def test_each_of_two_who_contradict_each_other_stays_in_half_of_the_rounds(client: str) -> None:
    pairs = conflicts("ac xb")  # x is not there
    rounds = [apart("abcde", pairs, seed=3, server_round=r) for r in range(900)]
    stays = sum(client in there for there in rounds)
    assert abs(stays - 450) < 4 * 900**0.5 / 2  # four standard errors


def test_who_contradicts_most_others_stays_away() -> None:
    for server_round in range(20):
        there = apart("abcde", conflicts("ab ac de"), seed=3, server_round=server_round)
        assert there in (["b", "c", "d"], ["b", "c", "e"])


def test_without_conflicts_everybody_stays() -> None:
    assert apart("cab", [], seed=1, server_round=1) == ["a", "b", "c"]
    assert apart("cab", conflicts("xy ax"), seed=1, server_round=1) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("pairs", "most", "found"),
    [
        ("", 1, ""),
        ("ab", 1, ""),
        ("ab ac", 1, "a"),
        ("ab ac", 2, ""),
        ("ac ad ae bc bd be", 2, "ab"),  # two against three: not the three
        ("ab ac ad ae bc bd be", 1, "ab"),
        ("ac bc", 2, ""),  # as many as may lie together frame nobody
        ("ad bd cd", 2, "d"),
        ("ad bd cd ae be", 2, "d"),
    ],
)
def test_who_contradicts_more_than_may_lie_together_is_a_liar(
    pairs: str, most: int, found: str
) -> None:
    assert "".join(liars(conflicts(pairs), lambda client: most)) == found


def test_each_client_has_a_limit_of_its_own() -> None:
    limits = {"a": 3, "b": 1}
    found = conflicts("ac ad ae bc bd")
    assert liars(found, lambda client: limits.get(client, 4)) == ["b"]


@pytest.mark.parametrize("cohort", [150, 300, 1000])
def test_in_a_sparse_graph_those_around_a_client_count(cohort: int) -> None:
    """Whoever all refuse is a liar; whoever fewer refuse than can open its secrets is not."""
    settings, names = SecureSum(), [f"c{i}" for i in range(cohort)]
    graph = rosters(names, settings, seed=1, server_round=1)
    assert len(graph["c7"]) < cohort
    session = Session(
        name="s",
        experiment_id="e",
        server_round=1,
        rosters=graph,
        keys={},
        threshold=settings.threshold_of(cohort),
        bounds=settings.bounds(cohort, code_limit=2**20, largest_weight=1),
        liars=settings.liars_of(cohort),
    )
    local = local_threshold(len(graph["c7"]), session.threshold, cohort)
    accusers = [client for client in graph["c7"] if client != "c7"]
    for client in accusers[: local - 1]:
        session.take_accusation(client, ["c7"])
    assert liars(session.conflicts, session.liars_around) == []
    session.take_accusation(accusers[local - 1], ["c7"])
    assert liars(session.conflicts, session.liars_around) == ["c7"]


@pytest.mark.parametrize(
    ("settings", "cohort", "most"),
    [
        (SecureSum(), 2, 1),
        (SecureSum(), 5, 2),
        (SecureSum(), 100, 49),
        (SecureSum(threshold=5), 5, 1),
        (SecureSum(threshold=90), 100, 20),
        (SecureSum(threshold=90, colluders=3), 100, 10),
    ],
)
def test_as_many_may_lie_as_may_be_missing_or_collude(
    settings: SecureSum, cohort: int, most: int
) -> None:
    assert settings.liars_of(cohort) == most


# -- One sum ---------------------------------------------------------------------------------------


def test_a_client_names_all_dealers_whose_shares_it_cannot_open_and_stays_out() -> None:
    run = Sum(DEALT)
    joined = run.session.joined("c01")
    for dealer in ("c02", "c04"):
        joined.sealed[CLIENTS.index(dealer)] = bytes(92)
    with pytest.raises(RefusedPeersError) as raised:
        run.parties["c01"].join(joined)
    assert raised.value.peers == ("c02", "c04")
    assert "the share of client c02 cannot be used: damaged" in str(raised.value)
    assert str(raised.value).endswith("; and 1 more clients")
    with pytest.raises(ProtocolError, match="has no vector of this client"):
        run.parties["c01"].reveal("first", SURVIVORS)
    with pytest.raises(ProtocolError, match="has no place for this client's vector"):
        masked(run.session, run.parties, ["c01"])


def test_who_accuses_is_missing_like_one_who_is_lost_and_one_secret_of_each_is_opened() -> None:
    """The accused one's seed and the accuser's key are revealed, and never both of anybody."""
    run = Sum(JOINED)
    run.session.take_accusation("c04", ["c00"])  # the one that sends no vector
    run.advance(SENT)
    for client in SURVIVORS:
        keys, seeds = run.parties[client].reveal("first", SURVIVORS)
        assert (len(keys), len(seeds)) == (1, 4)
        run.session.take_revealed(client, SURVIVORS, keys, seeds)
        with pytest.raises(ProtocolError, match="both secrets of somebody"):
            run.parties[client].reveal("first", CLIENTS)
    assert {kind for dealer, kind in run.session._shares if dealer == "c04"} == {"key"}
    assert {kind for dealer, kind in run.session._shares if dealer == "c00"} == {"seed"}
    assert run.session.conflicts == {Conflict({"c00", "c04"})}
    run.phase = REVEALED
    run.assert_opens()


def test_a_client_names_all_whose_keys_are_others_than_before() -> None:
    run = Sum(DEALT)
    run.begin(name="second", server_round=2)
    invitation = run.session.invitation("c01")
    for client in ("c00", "c03"):
        invitation.keys[CLIENTS.index(client)] = KeyPair().public
    with pytest.raises(RefusedPeersError, match="the key of client c00 is another") as raised:
        run.parties["c01"].deal(invitation)
    assert raised.value.peers == ("c00", "c03")
    assert set(run.parties["c01"].state["sessions"]) == {"first"}


def test_an_accusation_of_itself_or_of_strangers_has_no_effect() -> None:
    run = Sum(DEALT)
    run.session.take_accusation("c01", ["c01", "x", "c02 c03", "", 7])
    assert run.session.conflicts == set()


def test_a_share_unlike_what_its_dealer_announced_is_a_conflict_unless_it_is_its_own() -> None:
    run = Sum(SENT)
    for client in SURVIVORS:
        keys, seeds = run.parties[client].reveal("first", SURVIVORS)
        if client in ("c00", "c01"):
            seeds = [flipped(seeds[0]), *seeds[1:]]
        run.session.take_revealed(client, SURVIVORS, keys, seeds)
    assert run.session.conflicts == {Conflict({"c00", "c01"})}
    with pytest.raises(NotOpenedError, match="2 of at least 3 clients have a share of client c00"):
        run.session.open(run.total, SURVIVORS)
    assert run.session.misfits == {}


# -- A run -----------------------------------------------------------------------------------------

Answer = Callable[[str, Message, Message], Message]


def trained(folder: Path, answer: Answer, *, rounds: int = 6, **settings: Any) -> Any:
    """Train over five nodes, some of which answer something else."""

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        reply = as_mod(SecureSumClient)(message, context, call_next)
        return answer(str(context.node_config["client-id"]), message, reply)

    strategy = make(
        FedAvg,
        seed=1,
        fraction_evaluate=0.0,
        secure_sum=SecureSum(**{"value_range": 64.0, **settings}),
    )
    return run_strategy(
        strategy,
        message_app([mod]),
        nodes=[{"client-id": name, "partition-id": i} for i, name in enumerate(NAMES)],
        num_rounds=rounds,
        state=folder,
    )


def changing(liars: str, record: str, change: Change) -> Answer:
    def answer(client: str, message: Message, reply: Message) -> Message:
        if client in liars and reply.has_content() and record in reply.content:
            changed = dict(reply.content.config_records[record])
            change(changed)
            reply.content[record] = ConfigRecord(changed)
        return reply

    return answer


def accusing(accused: Mapping[str, str]) -> Answer:
    """Some clients say that they cannot open the shares of some others."""

    def answer(client: str, message: Message, reply: Message) -> Message:
        if client in accused and JOIN in message.content:
            return Message(Error(REFUSED_PEERS_CODE, " ".join(accused[client])), reply_to=message)
        return reply

    return answer


def unsealing(count: int) -> Change:
    """Seals for so many others do not open: the first of the cohort."""

    def change(dealt: dict[str, Any]) -> None:
        if "sealed" in dealt:
            places = range(len(dealt["sealed"]))
            chosen = [p for p in places if dealt["sealed"][p]][:count]
            dealt["sealed"] = [bytes(92) if p in chosen else dealt["sealed"][p] for p in places]

    return change


def other_digests(dealt: dict[str, Any]) -> None:
    if "digests" in dealt:
        dealt["digests"] = [bytes(len(digest)) for digest in dealt["digests"]]


def other_commitment(dealt: dict[str, Any]) -> None:
    if "commitment" in dealt:
        dealt["commitment"] = bytes(len(dealt["commitment"]))


def other_seeds(revealed: dict[str, Any]) -> None:
    revealed["seeds"] = [flipped(seed) for seed in revealed["seeds"]]


def opened(result: Any) -> list[int]:
    return [line["scheme"]["sum_opened"] for line in result.history[1:]]


CONTRADICTS = "it contradicts more than 2 others of a secure sum"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (unsealing(4), CONTRADICTS),
        (unsealing(3), CONTRADICTS),
        (other_digests, CONTRADICTS),
        (other_commitment, "it dealt another seed than it announced"),
    ],
)
def test_a_false_dealer_costs_one_round_and_is_left_out(
    change: Change, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = trained(tmp_path, changing("d", DEAL, change), rounds=4)
    assert opened(result) == [0, 4, 4, 4]
    assert [line["asked"] for line in result.history[1:]] == [5, 4, 4, 4]
    left_out = [r.getMessage() for r in caplog.records if "is left out" in r.getMessage()]
    assert len(left_out) == 1
    assert left_out[0].startswith("client d (node ")
    assert left_out[0].endswith(f"is left out of this run: {why}")


def and_silent(liar: str, answer: Answer) -> Answer:
    """A client that does the most it can: it sends no vector either."""

    def silent(client: str, message: Message, reply: Message) -> Message:
        if client == liar and JOIN in message.content:
            return Message(Error(ERROR_CODE, "silent"), reply_to=message)
        return answer(client, message, reply)

    return silent


@pytest.mark.parametrize("count", [1, 2])
def test_a_dealer_that_lies_to_as_many_as_may_be_missing_ends_one_round(
    count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of five, two may be missing: it stays away, too, so that two victims end a sum."""
    lies = changing("d", DEAL, unsealing(count))
    result = trained(tmp_path, and_silent("d", lies), rounds=12)
    assert opened(result)[0] == (0 if count == 2 else 3)
    assert opened(result).count(0) == 1
    # Those to whom it lied before are in every sum again, without it.
    assert opened(result)[-8:] == [4] * 8
    assert caplog.text.count("contradict each other") == 2
    assert "is left out of this run" not in caplog.text


def test_one_who_accuses_everybody_is_left_out_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = trained(tmp_path, accusing({"a": "bcde"}))
    assert opened(result) == [4] * 6
    assert caplog.text.count("is left out of this run") == 1
    assert "client a (node" in caplog.text


@pytest.mark.parametrize("accused", [{"a": "c"}, {"a": "cd"}])
def test_who_may_lie_alone_gets_no_honest_client_left_out_and_ends_no_sum(
    accused: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = trained(tmp_path, accusing(accused), rounds=12)
    assert "is left out of this run" not in caplog.text
    assert min(opened(result)) >= 3
    assert caplog.text.count("contradict each other") == sum(map(len, accused.values()))


@pytest.mark.parametrize(
    ("liars", "threshold", "left"), [("a", 3, "a"), ("ab", 3, "ab"), ("a", 5, "a")]
)
def test_clients_that_lie_about_all_their_shares_get_themselves_left_out(
    liars: str, threshold: int, left: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = trained(tmp_path, changing(liars, OPEN, other_seeds), threshold=threshold)
    assert opened(result)[0] == (5 if threshold == 3 else 0)
    if threshold == 3:
        assert min(opened(result)) >= 3
    assert caplog.text.count("is left out of this run") == len(left)
    for client in left:
        assert f"client {client} (node" in caplog.text
