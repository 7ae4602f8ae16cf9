"""Clients that deal false shares, and clients that only say that another one did."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from apps import make, message_app, run_strategy
from flwr.app import ConfigRecord, Context, Message
from parties import deal, join, masked, new_parties, new_session, summed
from sum_session import flipped

from flwr_privacy.clients import SecureSumClient, as_mod
from flwr_privacy.secure_sum import NotOpenedError, SecureSum, Session
from flwr_privacy.secure_sum.messages import DEAL, OPEN
from flwr_privacy.strategies import FedAvg

NAMES = "abcde"
Change = Callable[[dict[str, Any]], None]


def told(
    disagreeing: Collection[int],
    *,
    gone: bool = False,
    clients: int = 5,
    threshold: int = 3,
    colluders: int = 1,
) -> tuple[Session, bool]:
    """Return a session in which holders disagree with the first dealer, and whether it opened."""
    parties = new_parties(clients)
    names = sorted(parties)
    session = new_session(parties, threshold=threshold)
    session.colluders = colluders
    deal(session, parties, names)
    join(session, parties, names)
    total = summed(masked(session, parties, names)).total
    for place, client in enumerate(names):
        keys, seeds = parties[client].reveal("first", names)
        if place in disagreeing:
            seeds = [flipped(seeds[0]), *seeds[1:]]
        if place or not gone:
            session.take_revealed(client, names, keys, seeds)
    try:
        session.open(total, names)
    except NotOpenedError:
        return session, False
    return session, True


@pytest.mark.parametrize(
    ("disagreeing", "gone", "false"),
    [
        ((1, 2), False, False),  # of five, two may be missing
        ((1, 2, 3), False, True),
        ((1, 2, 3, 4), False, True),
        ((0, 1, 2), False, True),  # its own share is false too
        ((0, 1), False, False),
        ((1, 2), True, True),  # it stays away, so that two are enough to end the sum
        ((1,), True, False),
    ],
)
def test_a_dealer_is_false_if_more_disagree_than_may_be_missing(
    disagreeing: tuple[int, ...], gone: bool, false: bool
) -> None:
    session, opened = told(disagreeing, gone=gone)
    others = len(set(disagreeing) - {0})
    why = f"{others} clients hold other shares than it announced"
    assert session.false_dealers() == ({"c00": why} if false else {})
    assert opened != false


@pytest.mark.parametrize(("colluders", "most"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_as_many_as_may_lie_together_frame_nobody_where_nobody_may_be_missing(
    colluders: int, most: int
) -> None:
    for count in range(1, 5):
        session, opened = told(range(1, count + 1), threshold=5, colluders=colluders)
        assert not opened
        assert set(session.false_dealers()) == ({"c00"} if count > most else set())
        following = session.go_on("second", sorted(session.rosters), session.bounds)
        assert following.colluders == colluders


def test_one_lying_holder_frames_nobody_who_stays_away() -> None:
    session, opened = told((1,), gone=True, clients=4, colluders=0)
    assert not opened
    assert session.false_dealers() == {}


def trained(
    folder: Path,
    liars: str,
    record: str,
    change: Change,
    secure_sum: SecureSum = SecureSum(value_range=64.0),  # noqa: B008
) -> Any:
    """Train over five nodes, of which some change what they send of a secure sum."""

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        reply = as_mod(SecureSumClient)(message, context, call_next)
        if (
            context.node_config["client-id"] in liars
            and reply.has_content()
            and record in reply.content
        ):
            changed = dict(reply.content.config_records[record])
            change(changed)
            reply.content[record] = ConfigRecord(changed)
        return reply

    return run_strategy(
        make(FedAvg, seed=1, fraction_evaluate=0.0, secure_sum=secure_sum),
        message_app([mod]),
        nodes=[{"client-id": name, "partition-id": i} for i, name in enumerate(NAMES)],
        num_rounds=5,
        state=folder,
    )


def other_digests(dealt: dict[str, Any]) -> None:
    if "digests" in dealt:
        dealt["digests"] = [bytes(len(digest)) for digest in dealt["digests"]]


def other_commitment(dealt: dict[str, Any]) -> None:
    if "commitment" in dealt:
        dealt["commitment"] = bytes(len(dealt["commitment"]))


def other_seeds(revealed: dict[str, Any]) -> None:
    revealed["seeds"] = [flipped(seed) for seed in revealed["seeds"]]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_digests, "client d: 4 clients hold other shares than it announced"),
        (other_commitment, "client d: it dealt another seed than it announced"),
    ],
)
def test_a_false_dealer_is_left_out_after_three_rounds_and_the_run_trains(
    change: Change, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = trained(tmp_path, "d", DEAL, change)
    lines = result.history[1:]
    assert [line["scheme"]["sum_opened"] for line in lines] == [0, 0, 0, 4, 4]
    assert [line["refused"] for line in lines] == [{"malformed": 1}] * 3 + [{}] * 2
    assert [line["asked"] for line in lines] == [5, 5, 5, 4, 4]
    assert caplog.text.count(why) == 3
    assert "client d is left out of this run" in caplog.text


@pytest.mark.parametrize(("liars", "threshold"), [("a", 3), ("ab", 3), ("a", 5)])
def test_clients_that_lie_about_all_their_shares_get_nobody_honest_left_out(
    liars: str, threshold: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SecureSum(threshold=threshold, value_range=64.0)
    result = trained(tmp_path, liars, OPEN, other_seeds, secure_sum=settings)
    opened = 5 if threshold == 3 else 0
    assert [line["scheme"]["sum_opened"] for line in result.history[1:]] == [opened] * 5
    assert [line["refused"] for line in result.history[1:]] == [{}] * 5
    assert "is left out of this run" not in caplog.text
