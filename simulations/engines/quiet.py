"""Keeps what a training logs to itself, where it is a part of something else."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet"]


@contextmanager
def quiet(least: int = logging.WARNING) -> Iterator[None]:
    """Log nothing below a level meanwhile.

    Parameters
    ----------
    least : int, default logging.WARNING
        The level.
    """
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(least)
    try:
        yield
    finally:
        logger.setLevel(before)
