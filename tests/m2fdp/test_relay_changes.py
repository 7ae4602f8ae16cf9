"""A server that changes messages of M2FDP's nodes on their way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from apps import make, message_app, run_strategy
from flwr.app import ConfigRecord, Message, RecordDict
from hostile_relay import CLEAN, PLAIN, ZONE, ZONES
from zones import zone_nodes

from flwr_privacy.clients import M2FDPClient, as_mod
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.strategies import M2FDP
from flwr_privacy.wire.message import RECORD

pytestmark = pytest.mark.usefixtures("no_settling", "one_accountant")


def _meddle(change: Callable[[Message, str], Message | None]) -> Callable[[Any], None]:
    """Return a hook that changes every reply that a grid carries; None loses it."""

    def before(grid: Any) -> None:
        pull = grid.pull_messages

        def pull_messages(ids: Any) -> Any:
            for reply in pull(ids):
                fields = reply.content.get(RECORD, {}) if reply.has_content() else {}
                changed = change(reply, str(fields.get("phase", "")))
                if changed is not None:
                    yield changed

        grid.pull_messages = pull_messages

    return before


def _changed(reply: Message, **fields: Any) -> Message:
    record = ConfigRecord({**reply.content[RECORD], **fields})
    reply.content = RecordDict({**reply.content, RECORD: record})
    return reply


def meddled(tree: TierTree, folder: Path, change: Any, **options: Any) -> tuple[Any, M2FDP]:
    strategy = make(
        M2FDP,
        **{"tree": tree, "experiment_id": "e", "relay": True, "clipping_norm": 0.5, **options},
    )
    result = run_strategy(
        strategy,
        message_app([as_mod(M2FDPClient)]),
        nodes=zone_nodes(tree, folder),
        before=_meddle(change),
        num_rounds=1,
    )
    return result, strategy


def test_an_aggregator_does_not_answer_for_another_subtree(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(reply: Message, phase: str) -> Message:
        return _changed(reply, **{"client-id": "t1-1"}) if phase == "aggregate" else reply

    result, _ = meddled(ZONES, tmp_path, change, **PLAIN)
    assert "unknown client" in caplog.text
    assert "'t1-1' does not sit there" in caplog.text
    assert result.history[1]["scheme"]["noise_sigma_t1"] > 0
    # Only the answer of t1-1 itself is used: one noise instead of the mean of two.
    scheme = result.history[1]["scheme"]
    assert scheme["noise_var"] == pytest.approx(scheme["noise_sigma_t1"] ** 2)


BENT: dict[str, Callable[[Message], Message]] = {
    "no sigma": lambda reply: _changed(reply, sigma="much"),
    "a negative sigma": lambda reply: _changed(reply, sigma=-1.0),
    "nan": lambda reply: _changed(reply, sigma=float("nan")),
}


@pytest.mark.parametrize("what", BENT)
def test_a_malformed_answer_of_an_aggregator_is_refused(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(reply: Message, phase: str) -> Message:
        return BENT[what](reply) if phase == "aggregate" else reply

    result, _ = meddled(ZONE, tmp_path, change, **PLAIN)
    assert "no standard deviation of the noise" in caplog.text
    assert "noise_sigma_t1" not in result.history[1]["scheme"]
    assert result.history[1]["scheme"]["noise_sigma_t2"] > 0
    assert not result.history[1]["skipped"]


def test_a_device_that_seals_nothing_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(reply: Message, phase: str) -> Message:
        mine = phase == "train" and "sealed" in reply.content[RECORD]
        return _changed(reply, sealed="open") if mine else reply

    result, _ = meddled(ZONE, tmp_path, change, **PLAIN)
    assert "nothing sealed for its parent" in caplog.text
    assert result.history[1]["refused"] == {"malformed": 3}


def test_one_message_per_child_comes_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def change(reply: Message, phase: str) -> Message:
        sealed = reply.content[RECORD].get("sealed") if phase == "aggregate" else None
        return _changed(reply, sealed=sealed[:-1]) if isinstance(sealed, list) else reply

    result, _ = meddled(ZONE, tmp_path, change, **CLEAN)
    assert "not one sealed message for each child" in caplog.text
    assert not result.history[1]["skipped"]
