"""Kill processes that charge a ledger; prints what they had released. See test_ledger.py.

ledger_crash.py steps FOLDER LOSS     at every step of two charges, each time on a new ledger;
                                      LOSS is that of `Computer`, or "unflushed": "nothing" on
                                      ledgers that are not durable
ledger_crash.py random FOLDER         at random times, on one ledger
ledger_crash.py together FOLDER CAP   not at all: two processes charge up to a cap
"""

import fcntl
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flwr_privacy.accounting import Charge
from flwr_privacy.privacy.ledger import Entry, Ledger, Question
from flwr_privacy.wire import files

KILLED = 9


class Computer:
    """A file system that dies at the k-th step, and may then lose what was not flushed.

    `loss` is "nothing" (a process is killed), "content" (a power cut: files keep their new names,
    but only half of what was not flushed) or "names" (a power cut: files have their old names).
    """

    def __init__(self, k: int, loss: str) -> None:
        self.left = k
        self.loss = loss
        self.opened: dict[int, str] = {}
        self.unflushed: set[str] = set()
        self.renamed: list[tuple[str, bytes | None]] = []
        self.real = {name: getattr(os, name) for name in ("open", "close", "fsync", "replace")}
        self.real_flock = fcntl.flock
        for name in self.real:
            setattr(os, name, getattr(self, name))
        fcntl.flock = self.flock
        files.open = self.open_file

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.lose()
            os._exit(KILLED)

    def lose(self) -> None:
        if self.loss == "content":
            for path in self.unflushed:
                os.truncate(path, os.path.getsize(path) // 2)
        if self.loss == "names":
            for path, old in reversed(self.renamed):
                Path(path).unlink() if old is None else Path(path).write_bytes(old)

    def call(self, function: Callable[..., object], *arguments: object) -> object:
        self.step()
        result = function(*arguments)
        self.step()
        return result

    def open(self, path, flags, mode=0o777):
        descriptor = self.call(self.real["open"], path, flags, mode)
        self.opened[descriptor] = str(path)
        return descriptor

    def close(self, descriptor):
        self.call(self.real["close"], descriptor)

    def flock(self, descriptor, operation):
        self.call(self.real_flock, descriptor, operation)

    def fsync(self, descriptor):
        self.call(self.real["fsync"], descriptor)
        path = self.opened[descriptor]
        self.unflushed.discard(path)
        self.renamed = [] if os.path.isdir(path) else self.renamed

    def replace(self, source, target):
        source, target = str(source), str(target)
        self.step()
        old = Path(target).read_bytes() if os.path.exists(target) else None
        self.real["replace"](source, target)
        self.renamed.append((target, old))
        if source in self.unflushed:
            self.unflushed = (self.unflushed - {source}) | {target}
        self.step()

    def open_file(self, path, mode, opener):
        return TornFile(self, path, open(path, mode, buffering=0, opener=opener))


class TornFile:
    """A file whose write may stop half way."""

    def __init__(self, computer, path, file):
        self.computer, self.path, self.file = computer, str(path), file

    def write(self, content):
        self.computer.unflushed.add(self.path)
        middle = len(content) // 2
        for part in (content[:middle], content[middle:]):
            self.computer.call(self.file.write, part)

    def flush(self):
        self.computer.step()

    def fileno(self):
        return self.file.fileno()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()
        self.computer.step()


def ledger_in(folder: Path, number: int = 0, *, durable: bool = True) -> Ledger:
    return Ledger(folder / f"{number}.ledger", data_set="ward-7", durable=durable)


def release(ledger: Ledger, *, server_round: int, request: int = 0, cap: int = 10**9) -> None:
    question = Question(
        experiment_id="e", phase="train", server_round=server_round, request=request
    )
    with ledger.locked(timeout=60) as locked:
        if locked.count < cap:
            charge = Charge(neighbours="replace_one", noise_multiplier=1.0)
            locked.charge(Entry(question=question, scheme="udp", unit="user", charge=charge))


def start(child: Callable[[int], None]) -> tuple[int, int]:
    """Fork; the child gets the end of a pipe into which it writes a byte per release."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            child(writing)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    return pid, reading


def finish(pid: int, reading: int) -> tuple[int, int]:
    with open(reading, "rb") as pipe:
        released = len(pipe.read())
    return os.waitpid(pid, 0)[1], released


def steps(folder: Path, loss: str) -> None:
    durable = loss != "unflushed"
    for k in itertools.count(1):

        def two_releases(pipe: int, k: int = k) -> None:
            Computer(k, loss if durable else "nothing")
            for server_round in range(2):
                release(ledger_in(folder, k, durable=durable), server_round=server_round)
                os.write(pipe, b".")

        status, released = finish(*start(two_releases))
        print(json.dumps(released))
        if status == 0:
            return
        if os.waitstatus_to_exitcode(status) != KILLED:
            sys.exit(f"step {k}: the process failed by itself")


def at_random(folder: Path) -> None:
    def releases(pipe: int) -> None:
        for server_round in itertools.count():
            release(ledger_in(folder), server_round=server_round)
            os.write(pipe, b".")

    draws = random.Random(1)
    for _ in range(15):
        before = len(ledger_in(folder).entries())
        pid, reading = start(releases)
        first = len(os.read(reading, 1))  # it works now
        time.sleep(draws.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        released = first + finish(pid, reading)[1]
        print(json.dumps([before, released, len(ledger_in(folder).entries())]))


def together(folder: Path, cap: int) -> None:
    waiting, going = os.pipe()

    def fifty(request: int) -> None:
        os.close(going)
        os.read(waiting, 1)  # until the parent closes the other end
        for server_round in range(50):
            release(ledger_in(folder), server_round=server_round, request=request, cap=cap)

    children = [start(lambda _, request=request: fifty(request)) for request in range(2)]
    os.close(going)
    if any(finish(*child)[0] for child in children):
        sys.exit("a process failed")


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "steps":
        steps(where, sys.argv[3])
    elif what == "random":
        at_random(where)
    else:
        together(where, int(sys.argv[3]))
