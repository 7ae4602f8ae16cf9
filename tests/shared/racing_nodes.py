"""Nodes of any scheme that are asked in several processes."""

import hashlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scheme_node import Case, Node, Said, plain
from users_code import nothing

from flwr_privacy.clients.node.rehearsal import rehearsing

FORK = multiprocessing.get_context("fork")
STEPS = (
    *("answer", "plan", "charge_for", "write_checksummed", "close", "run"),
    *("measure", "noise", "keep", "superseded", "settle"),
    *("answer_step", "opened", "embed", "deal", "embed_plainly", "seal", "keep_dealt"),
)
"""Functions of ours at whose entry a node is killed, the first time that they are entered."""


def watch(entered: Callable[[str], None]) -> None:
    """Call something with the name of each of `STEPS` that is entered, and of the user's code."""

    def profile(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_name
        ours = frame.f_globals.get("__name__", "").startswith("flwr_privacy")
        if event == "call" and name in STEPS and ours:
            entered(frame.f_code.co_qualname)

    sys.setprofile(profile)


def settled(folder: Path, case: Case) -> Case:
    """Return a case whose question is a fixed one: what others send for it is no step of it."""
    node = Node(folder, case)
    fields, model = (of(node) if callable(of) else of for of in (case.fields, case.model))
    return replace(case, fields=fields, model=model)


def told(pipe: int, case: Case) -> Callable[..., Any]:
    """Return the user's code, which tells that it runs on data."""

    def user(*given: Any) -> Any:
        if not rehearsing():
            os.write(pipe, b"ran\n")
        return case.user(*given)

    return user


def killed_when(folder: Path, case: Case, dies: Callable[[str], bool]) -> list[bytes]:
    reader, pipe = os.pipe()
    child = os.fork()
    if not child:
        node = Node(folder, case, told(pipe, case))
        watch(lambda name: os._exit(0) if dies(name) else None)
        os.write(pipe, name_of(node.ask()) + b"\n")
        os._exit(0)
    os.close(pipe)
    with open(reader, "rb") as file:
        said = file.read()
    os.waitpid(child, 0)
    return said.splitlines()


def name_of(said: Said) -> bytes:
    """Return a short name of what left a node."""
    return hashlib.sha256(repr(plain(said)).encode()).hexdigest().encode()


def race(folder: Path, case: Case, changes: list[dict[str, Any]]) -> list[tuple[str, bytes]]:
    """Ask a node in as many processes at once as there are changes of the question."""
    barrier, queue = FORK.Barrier(len(changes)), FORK.SimpleQueue()
    # Else the second comes no further than the charge, or than the lock of what is remembered.
    waits = not (case.once or case.remembers or case.user is nothing)

    def user(*given: Any) -> Any:
        if waits:
            barrier.wait(60)
        return case.user(*given)

    def asked(change: dict[str, Any]) -> None:
        node = Node(folder, case, user)
        if not waits:
            barrier.wait(60)
        said = node.ask(**change)
        queue.put((said[0], name_of(said)))

    processes = [FORK.Process(target=asked, args=(change,)) for change in changes]
    for process in processes:
        process.start()
    said = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return said
