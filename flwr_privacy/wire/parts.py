"""Work on the parts of a large array by several threads: NumPy and the ciphers let others go on."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["PART", "in_parts"]

PART = 1 << 18
"""Entries of a part: less is done sooner than a thread is started, more takes more memory."""


def in_parts(work: Callable[[int], None], size: int) -> None:
    """Call `work` with the first place of each part of an array, in any order.

    Parameters
    ----------
    work : callable
        Works on the `PART` entries from a place on, or as many as there are.
    size : int
        Entries of the array.

    Raises
    ------
    Exception
        What `work` raises; other parts may be done or not.

    Notes
    -----
    The threads are as many as OMP_NUM_THREADS says, which torch follows too, or there are
    processors.
    """
    starts = range(0, size, PART)
    said = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(int(said) if said.isdecimal() else os.cpu_count() or 1, len(starts))
    if threads < 2:
        for start in starts:
            work(start)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, starts))
