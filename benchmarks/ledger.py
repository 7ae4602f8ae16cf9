"""The rows of a node's ledger: a long one in a fresh process, and a short one in a simulation."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from flwr_privacy.accounting import Charge
from flwr_privacy.privacy.ledger import Entry, Ledger, Question
from flwr_privacy.privacy.ledger.journal import Journal

from .report import Comparison

__all__ = ["ledger"]

LONG, EXPERIMENTS, REPEATS = 100_000, 100, 7
SHORT, CLIENTS = 10, 300
LONG_BUDGET, SHORT_BUDGET = 0.1, 0.0003  # seconds

_FRESH = """
import json, sys, time
from pathlib import Path
from benchmarks.ledger import entry
from flwr_privacy.pipeline import charging  # what a node has imported before
from flwr_privacy.privacy.ledger import Ledger
path, witness, server_round = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
began = time.perf_counter()
ledger = Ledger(path, data_set="a", durable=False, witness=witness)
new = entry(0, server_round)
with ledger.locked() as locked:
    assert not locked.charges_of(new.question)
    assert locked.totals(new.question.experiment_id).count and locked.totals().count
    locked.charge(new)
print(json.dumps(time.perf_counter() - began))
"""


def ledger() -> Iterator[Comparison]:
    """Compare what a ledger costs a message with a budget."""
    yield Comparison(
        what=f"read, verify, charge: {LONG} entries",
        rival="100 ms, the budget; a fresh process after its imports, with a witness",
        ours=_long(),
        theirs=[LONG_BUDGET],
        at_most=1.0,
    )
    yield Comparison(
        what=f"charge and answer, simulated, {SHORT} entries",
        rival="0.3 ms, the budget",
        ours=_short(),
        theirs=[SHORT_BUDGET],
        at_most=1.0,
    )


def entry(experiment: int, server_round: int) -> Entry:
    """Return a charge of one of the experiments, each with a noise of its own."""
    question = Question(
        experiment_id=f"{experiment:032x}", phase="train", server_round=server_round
    )
    charge = Charge(neighbours="replace_one", noise_multiplier=1.0 + experiment)
    return Entry(question=question, scheme="udp", unit="user", charge=charge, digest="0" * 32)


def _long() -> list[float]:
    seconds = []
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as name:
        path = Path(name, "a.ledger")
        journal = Journal(path, "a")
        for number in range(LONG):
            experiment, server_round = divmod(number, LONG // EXPERIMENTS)
            journal.extend(journal.charged(entry(experiment, server_round)))
            journal.extend(journal.answered(number))
        path.write_bytes(journal.content)
        Ledger(path, data_set="a", witness=Path(name)).begin_witness()
        for repeat in range(REPEATS):
            command = [sys.executable, "-c", _FRESH, str(path), name, str(LONG + repeat)]
            done = subprocess.run(command, capture_output=True, check=True, text=True)
            seconds.append(json.loads(done.stdout))
    return seconds


def _short() -> list[float]:
    seconds = []
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as name:
        ledgers = [
            Ledger(Path(name, f"{k}.ledger"), data_set=str(k), durable=False)
            for k in range(CLIENTS)
        ]
        for server_round in range(SHORT + 1):
            began = time.perf_counter()
            for one in ledgers:
                _charge_and_answer(one, entry(0, server_round))
            seconds.append((time.perf_counter() - began) / CLIENTS)
    return seconds[-3:]


def _charge_and_answer(one: Ledger, new: Entry) -> None:
    """Do what a release does: look, charge, and later answer."""
    with one.locked() as locked:
        locked.charges_of(new.question)
        locked.totals(new.question.experiment_id)
        number = locked.charge(new)
    with one.locked() as locked:
        locked.answer(number)
