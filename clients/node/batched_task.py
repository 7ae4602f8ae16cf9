"""Work that a client's trainer comes to, and that may be done for several clients at once."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any, Generic, Self, TypeVar

__all__ = ["BatchedTask", "carried_out", "stand"]

Result = TypeVar("Result")


class BatchedTask(ABC, Generic[Result]):
    """Work of one client that may be done for several at once.

    Attributes
    ----------
    kind : hashable
        What the work is like: for each kind it is found out whether doing several at once is right
        and pays.
    nbytes : int
        Memory that it takes, about, while it waits and is done with others.
    records : int
        How many records it goes through: its time is measured per record.
    """

    kind: Hashable
    nbytes: int
    records: int

    @abstractmethod
    def may_wait(self) -> bool:
        """Tell whether other clients may go on meanwhile, as far as the trainer can see."""

    @abstractmethod
    def leave(self) -> None:
        """Copy what the code of another client could change before the work is done."""

    @abstractmethod
    def alone(self) -> Result:
        """Do the work for this client alone, after `leave` with what was copied."""

    @abstractmethod
    def fits(self, other: "BatchedTask[Any]") -> bool:
        """Tell whether both can be done at once."""

    @abstractmethod
    def together(self, jobs: Sequence[Self]) -> list[Any]:
        """Do the work of some jobs that fit this one; return what `finish` takes, for each.

        Nothing of the clients' may change: if it raises, each does its work alone.
        """

    @abstractmethod
    def alike(self, done: Any) -> bool:
        """Do the work alone to see whether it comes, up to rounding, to what was done together."""

    @abstractmethod
    def finish(self, done: Any) -> Result:
        """Give this client what was done together."""


Stand = Callable[["BatchedTask[Any]"], Any]

stand: ContextVar[Stand | None] = ContextVar("flwr_privacy_stand", default=None)
"""What a client does with a job where it goes on side by side with others."""


def carried_out(job: BatchedTask[Result]) -> Result:
    """Do a job: with those of other clients where they go side by side, or else alone."""
    standing = stand.get()
    return job.alone() if standing is None else standing(job)
