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

KILLED = 9


class Computer:
    """A file system that dies at the k-th step, and may then lose what was not flushed.

    `loss` is "nothing" (a process is killed), "content" (a power cut: a file keeps only half of the
    bytes that were not flushed) or "names" (a power cut: a file whose folder was not flushed is not
    there).
    """

    def __init__(self, k: int, loss: str) -> None:
        self.left = k
        self.loss = loss
        self.opened: dict[int, str] = {}
        self.flushed: dict[str, int] = {}  # bytes of each file that are on the disk
        self.named: set[str] = set()  # files whose folder was flushed since they were made
        names = ("open", "close", "fsync", "pwrite", "ftruncate")
        self.real = {name: getattr(os, name) for name in names}
        self.real_flock = fcntl.flock
        for name in self.real:
            setattr(os, name, getattr(self, name))
        fcntl.flock = self.flock

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.lose()
            os._exit(KILLED)

    def lose(self) -> None:
        for path, flushed in self.flushed.items():
            if self.loss == "content":
                os.truncate(path, (flushed + os.path.getsize(path) + 1) // 2)
            if self.loss == "names" and path not in self.named:
                Path(path).unlink()

    def call(self, function: Callable[..., object], *arguments: object) -> object:
        self.step()
        result = function(*arguments)
        self.step()
        return result

    def open(self, path, flags, mode=0o777):
        path = str(path)
        there = os.path.exists(path)
        descriptor = self.call(self.real["open"], path, flags, mode)
        self.opened[descriptor] = path
        if path.endswith(".ledger") and path not in self.flushed:
            self.flushed[path] = os.path.getsize(path)
            if there:
                self.named.add(path)
        return descriptor

    def close(self, descriptor):
        self.call(self.real["close"], descriptor)

    def flock(self, descriptor, operation):
        self.call(self.real_flock, descriptor, operation)

    def fsync(self, descriptor):
        self.call(self.real["fsync"], descriptor)
        path = self.opened[descriptor]
        if os.path.isdir(path):
            self.named.update(one for one in self.flushed if os.path.dirname(one) == path)
        else:
            self.flushed[path] = os.path.getsize(path)

    def pwrite(self, descriptor, content, place):
        """Write a part, as the kernel may, and then the rest of what it was called with."""
        middle = len(content) // 2
        written = 0
        for part in (content[:middle], content[middle:]):
            written += self.call(self.real["pwrite"], descriptor, part, place + written)
        return written

    def ftruncate(self, descriptor, length):
        self.call(self.real["ftruncate"], descriptor, length)


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
