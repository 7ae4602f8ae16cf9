"""Tests without waiting: within them seconds pass only while somebody sleeps.

A deadline of a second takes no time then, and a busy machine misses none.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["TIMED", "VirtualTime", "no_flushing", "virtual_time"]

TIMED = (
    "flwr_privacy.simulations.engines.inline.grid",
    "flwr_privacy.simulations.reliability.grid",
    "flwr_privacy.strategies.requests.messenger",
    "flwr_privacy.strategies.requests.exchange",
    "flwr_privacy.strategies.requests.federation",
)
"""Modules that wait for answers: they use no more of `time` than `VirtualTime` has."""


class VirtualTime:
    """In place of the module `time`: seconds pass while somebody sleeps, and at no other time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the seconds that passed."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let seconds pass."""
        self.now += seconds + 1e-6  # one sleeps a little too long


@contextmanager
def virtual_time() -> Iterator[None]:
    """Have everybody who waits for answers use one virtual clock.

    Modules that are not loaded yet keep the real one.
    """
    clock = VirtualTime()
    with pytest.MonkeyPatch.context() as patch:
        for name in TIMED:
            if name in sys.modules:
                patch.setattr(sys.modules[name], "time", clock)
        yield


@contextmanager
def no_flushing() -> Iterator[None]:
    """Leave files to the operating system: flushing them guards against power cuts alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
