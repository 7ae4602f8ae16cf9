"""The command line `flwr-privacy`: a module for each group of commands."""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from .commands import app
    from .entry import main
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["app", "main"]
