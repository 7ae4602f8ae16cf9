"""Training tasks that several simulated clients can run together."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any, Generic, Self, TypeVar

__all__ = ["BatchedTask", "carried_out", "stand"]

Result = TypeVar("Result")


class BatchedTask(ABC, Generic[Result]):
    """A training task of one client that can run together with those of other clients.

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
        """Tell whether other clients may run before this task, as far as the trainer can see."""

    @abstractmethod
    def leave(self) -> None:
        """Copy everything that another client's code could change before the task runs."""

    @abstractmethod
    def alone(self) -> Result:
        """Run the task for this client alone; after `leave`, on the copies."""

    @abstractmethod
    def fits(self, other: "BatchedTask[Any]") -> bool:
        """Tell whether both tasks can run together."""

    @abstractmethod
    def together(self, tasks: Sequence[Self]) -> list[Any]:
        """Run several tasks that fit this one; return the argument of `finish` for each.

        Nothing of the clients' may change: if it raises, each does its work alone.
        """

    @abstractmethod
    def alike(self, done: Any) -> bool:
        """Run the task alone; tell whether the result equals that of the batch up to rounding."""

    @abstractmethod
    def finish(self, done: Any) -> Result:
        """Return this client's result from that of the batch."""


Stand = Callable[["BatchedTask[Any]"], Any]

stand: ContextVar[Stand | None] = ContextVar("flwr_privacy_stand", default=None)
"""What a client does with a task where it goes on side by side with others."""


def carried_out(task: BatchedTask[Result]) -> Result:
    """Run a task: together with other clients' tasks if they run side by side, or else alone."""
    standing = stand.get()
    return task.alone() if standing is None else standing(task)
