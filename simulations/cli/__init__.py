"""The command line `flwr-privacy`: a module for each group of commands."""

from .commands import app, main

__all__ = ["app", "main"]
