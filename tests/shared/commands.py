"""How a command of `flwr-privacy` ended that a test ran in its own process."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Command", "Done"]


@dataclass(frozen=True)
class Done:
    """How a command ended.

    Attributes
    ----------
    returncode : int
        Its exit code.
    stdout, stderr : str
        What it printed.
    """

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]
