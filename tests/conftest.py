"""What all tests share: who runs alone, and what waiting costs.

What starts Ray and what starts a deployment each goes one after the other, beside each other.

Within this process nobody waits: the server's loop and the inline grid look at a clock that only
their own sleeping moves, so that a deadline of a second takes no time and a busy machine misses
none. Tests of the loop itself, which are in `tests/strategies`, and whatever asks for `real_time`
see the real clock. Nor is anything flushed to the disk but in the tests of what flushes, which are
in `tests/flwr_privacy`: that guards against power cuts alone, which these are the tests of.
"""

import os
import sys

import pytest

ALONE = ("ray", "deployed")
TIMED = (
    "flwr_privacy.simulations.inline.grid",
    "flwr_privacy.strategies.conversation",
    "flwr_privacy.strategies.exchange",
    "flwr_privacy.strategies.federation",
)
"""Modules that wait for answers: they use no more of `time` than `VirtualTime` has."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in ALONE:
            if item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.xdist_group(name))


class VirtualTime:
    """In place of the module `time`: seconds pass while somebody sleeps, and at no other time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 1e-6  # one sleeps a little too long


@pytest.fixture
def real_time() -> None:
    """Ask for the real clock."""


@pytest.fixture(autouse=True)
def nobody_waits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = request.path.parent.name
    if folder != "strategies" and "real_time" not in request.fixturenames:
        clock = VirtualTime()
        for name in TIMED:
            if name in sys.modules:  # otherwise the test does without
                monkeypatch.setattr(sys.modules[name], "time", clock)
    if "tests/flwr_privacy" not in request.path.as_posix():
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
