"""What can go wrong on a node, at the place in a training that the plan names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from clock import set_clock
from flwr.app import Context, Message
from plan import PlannedFaults, digest_of

from flwr_privacy.privacy.ledger import ledger
from flwr_privacy.simulations.engines.inline import Fault

CLOCKS = {"clock ahead": timedelta(days=365), "clock behind": timedelta(days=-365)}
DAMAGES = ("corrupt", "nan", "infinity", "reshape")
FULL = Path("/dev/full")  # a file on a disk without space


def mischief(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Answer a question, unless the plan has it that something goes wrong."""
    plan = PlannedFaults(context.run_config)
    entry: Any = message.content.get("flwr-privacy", {})
    if not plan.strikes or entry.get("phase") != "train":
        return call_next(message, context)
    client, server_round = str(context.node_config["client-id"]), int(entry["round"])
    fault = plan.strikes.get((server_round, client), "")
    if fault == "killed before":
        plan.wait(plan.request("move", client, server_round))
    if fault in CLOCKS:
        set_clock(CLOCKS[fault].total_seconds())
    if fault == "disk full":
        with full_disk(Path(str(context.node_config["privacy-state"]), f"{client}.ledger")):
            return call_next(message, context)
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    plan.note("answers", client, server_round, digest_of(reply.content))
    if fault in DAMAGES:
        Fault(kind=fault).damage(reply)
    elif fault == "crash":
        plan.wait(plan.request("move", client, server_round))
    elif fault == "superlink killed":
        plan.wait(plan.request("superlink", client, server_round))
    elif fault == "delay":
        plan.wait(f"heard.{server_round}")
    elif fault == "late":
        plan.wait(f"over.{server_round}")
    return reply


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Have what is written to a ledger go to a disk without space."""

    def write(target: Path, _descriptor: int, content: bytes, **_: Any) -> None:
        assert target == path.resolve()
        with FULL.open("wb", buffering=0) as full:
            full.write(content)

    with patch.object(ledger, "append", write):
        yield
