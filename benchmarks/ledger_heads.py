"""The heads of the nodes' ledgers: their bytes in a reply, and what they cost a large cohort."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from flwr_privacy.accounting import Charge
from flwr_privacy.privacy.ledger import Entry, Ledger, Question
from flwr_privacy.privacy.ledger.shown import COUNT, VALUE, shown
from flwr_privacy.privacy.ledger.signed_head import SignedHead
from flwr_privacy.strategies.requests.ledger_heads import ChargeName, LedgerHeads
from flwr_privacy.wire.message import RECORD, Header
from flwr_privacy.wire.payload import payload_bytes
from flwr_privacy.wire.pins import Identity

from .report import Comparison

__all__ = ["ledger_heads"]

CLIENTS, ROUNDS, PARAMETERS = 1000, 20, 10_000
MOST_BYTES, MOST_SHARE = 200.0, 0.02
SERVER_BUDGET, NODE_BUDGET = 0.1, 0.5  # seconds for all clients of a round
EXPERIMENT = "0" * 32
CHARGE = Charge(noise_multiplier=5.0, neighbours="replace_one", gap=1e-3)


def ledger_heads() -> Iterator[Comparison]:
    """Compare the heads' bytes and seconds with budgets."""
    with tempfile.TemporaryDirectory() as folder:
        ledgers = [_ledger(Path(folder), str(client)) for client in range(CLIENTS)]
        nodes, server = _rounds(ledgers)
    what = f"heads of {CLIENTS} simulated clients"
    for name, seconds, budget in (
        ("their nodes", nodes, NODE_BUDGET),
        ("the server", server, SERVER_BUDGET),
    ):
        yield Comparison(
            what=f"{what}, {name}",
            rival=f"{budget:g} s, the budget of a round",
            ours=seconds,
            theirs=[budget],
            at_most=1.0,
        )
    head, exchange = _bytes()
    rival = f"{MOST_BYTES:g} B, the budget of a reply"
    yield Comparison(
        what="signed head in a reply",
        rival=rival,
        ours=[head],
        theirs=[MOST_BYTES],
        unit="B",
        at_most=1.0,
    )
    yield Comparison(
        what="signed head in a reply",
        rival=f"an exchange about {PARAMETERS:.0e} parameters",
        ours=[head],
        theirs=[exchange],
        unit="B",
        at_most=MOST_SHARE,
    )


def _ledger(folder: Path, client: str) -> Ledger:
    return Ledger(folder / f"{client}.ledger", data_set=client, durable=False)


def _rounds(ledgers: list[Ledger]) -> tuple[list[float], list[float]]:
    """Return the seconds of each round: of the nodes that show heads, and of the server."""
    experiment: Any = SimpleNamespace(id=EXPERIMENT)
    heads = LedgerHeads(experiment, lambda client: "")
    nodes, server = [], []
    clients = [str(client) for client in range(len(ledgers))]
    for number in range(1, ROUNDS + 1):
        name = ChargeName("train", number, 0)
        question = Question(experiment_id=EXPERIMENT, phase="train", server_round=number)
        for ledger in ledgers:
            with ledger.locked() as locked:
                locked.charge(Entry(question=question, scheme="udp", unit="user", charge=CHARGE))
        began = time.perf_counter()
        told = [ledger.head(EXPERIMENT) for ledger in ledgers]
        nodes.append(time.perf_counter() - began)
        began = time.perf_counter()
        heads.asked(dict.fromkeys(clients, (name, CHARGE)))
        for client, head in zip(clients, told, strict=True):
            fields = {COUNT: head.count, VALUE: head.value}
            heads.take(client, fields, asked=name, simulated=True)
        heads.charged(name, clients)
        server.append(time.perf_counter() - began)
        if any(one.unlike or one.signed.head.count != number for one in heads.shown()):
            raise RuntimeError("a head does not follow")
    return nodes, server


def _bytes() -> tuple[float, float]:
    """Return the bytes of a signed head in a reply, and those of question and reply with it."""
    model = ArrayRecord({"w": Array(np.zeros(PARAMETERS, np.float32))})
    codes = ArrayRecord({"w": Array(np.zeros(PARAMETERS, np.int32))})
    header = Header(
        scheme="udp", experiment_id=EXPERIMENT, phase="train", server_round=100, client_id="ward-7"
    )
    identity = Identity.generate()
    with tempfile.TemporaryDirectory() as folder:
        head = _ledger(Path(folder), "a").head(EXPERIMENT)
    signed = SignedHead.sign(identity, experiment=EXPERIMENT, client="ward-7", head=head)
    bare, whole = (
        RecordDict({"arrays": codes, RECORD: ConfigRecord(header.write(own))})
        for own in ({}, shown(signed))
    )
    question = RecordDict({"arrays": model, RECORD: ConfigRecord(header.write())})
    added = payload_bytes(whole) - payload_bytes(bare)
    return float(added), float(payload_bytes(question) + payload_bytes(whole))
