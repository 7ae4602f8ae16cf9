"""Deployed nodes that train under UDP, and ledgers of theirs that somebody has changed."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from apps import make, message_app, run_strategy
from conformance import Killed
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.ledger import Entry, Ledger
from flwr_privacy.strategies import UDP

NAMES = ("a", "b", "c", "d")
EXPERIMENT = "e"

Change = Callable[[Message, Message, Context], None]
"""Changes a reply; it gets the question, the reply and the context."""


def rewritten(ledger: Ledger, entries: Sequence[Entry]) -> None:
    """Put other entries into a ledger's file, all of them answered."""
    ledger.path.unlink(missing_ok=True)
    quick = Ledger(ledger.path, data_set=ledger.data_set, durable=False)
    if entries:
        with quick.locked() as locked:
            for entry in entries:
                locked.answer(locked.charge(entry))


class Wards:
    """Four nodes with keys of their own, and a server that keeps a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        for name in NAMES:
            (folder / name).mkdir()

    def ledger(self, name: str) -> Ledger:
        return Ledger(self.folder / name / f"{name}.ledger", data_set=name)

    def card(self) -> PrivacyCard:
        return PrivacyCard.from_json((self.run_dir / "privacy-card.json").read_text())

    def config(self, index: int) -> dict[str, Any]:
        name = NAMES[index]
        return {
            "client-id": name,
            "partition-id": index,
            "num-partitions": len(NAMES),
            "privacy-simulated": False,
            "privacy-state": str(self.folder / name),
        }

    def app(self, change: Change | None) -> ClientApp:
        def mod(message: Message, context: Context, call_next: Any) -> Message:
            reply = as_mod(UDPClient)(message, context, call_next)
            if change is not None:
                change(message, reply, context)
            return reply

        return message_app([mod])

    def train(
        self,
        rounds: int,
        *,
        planned: int = 6,
        killed: int | None = None,
        change: Change | None = None,
        nodes: Sequence[str] = NAMES,
        **loop: Any,
    ) -> UDP:
        """Train until `rounds`, or until the server is killed after a round."""

        def on_round(line: dict[str, Any]) -> None:
            if line["round"] == killed:
                raise Killed

        loop.setdefault("resume", (self.run_dir / "checkpoint.bin").exists())
        options = {"epsilon": 50.0, "rounds": planned, "run_dir": self.run_dir, "seed": 1, **loop}
        strategy: UDP = make(
            UDP,
            experiment_id=EXPERIMENT,
            on_round=on_round,
            min_available_nodes=1,
            min_train_nodes=1,
            **options,
        )
        configs = [self.config(NAMES.index(name)) for name in nodes]
        with suppress(Killed):
            run_strategy(strategy, self.app(change), nodes=configs, num_rounds=rounds)
        return strategy


def heads_of(card: PrivacyCard) -> dict[str, tuple[int, str]]:
    """Return how many charges each client's head counts, and why it is unlike the card's."""
    return {shown.signed.client: (shown.signed.head.count, shown.unlike) for shown in card.heads}
