"""Computes the expected seconds of a round under every reading of the paper's delays.

Source: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split
Models" (ICML 2023), section 6.2. The readings decide whether FedVS is faster than waiting for
everybody; `flwr_privacy.fedvs.delays` says what the paper leaves open.
"""

from typing import NamedTuple

from flwr_privacy.coding.thresholds import recovery_threshold
from flwr_privacy.errors import check_integer
from flwr_privacy.fedvs.delays import BATCHES, LOG_BASES, batch_rows, expected_wait, sharing_factor

__all__ = ["Convention", "conventions"]


class Convention(NamedTuple):
    """Expected seconds of a round under one reading of section 6.2."""

    log_base: str
    batch: str
    factor: float
    """``(log^2 N) / |B|``."""
    share: float
    """Until all shares of weights are there."""
    upload: float
    """From then until as many uploads are there as decoding takes."""
    wait: float
    """Of a server that waits for all uploads and shares nothing."""

    @property
    def speedup(self) -> float:
        """How many times faster a round of FedVS is than one that waits for all."""
        return self.wait / (self.share + self.upload)


def conventions(N: int, K: int, T: int, batch_size: int) -> list[Convention]:
    """Return the expected seconds of a round under all four readings of ``(log^2 N) / |B|``.

    Parameters
    ----------
    N, K, T : int
        Clients, segments and colluders; decoding takes ``2 (K + T - 1) + 1`` uploads.
    batch_size : int
        Real rows in a batch. It has ``batch_size / K`` coded rows, here not rounded.

    Raises
    ------
    InvalidParameterError
        If decoding would take more uploads than there are clients.

    Examples
    --------
    >>> [round(one.speedup, 1) for one in conventions(28, 6, 1, 256)]
    [3.6, 16.3, 1.8, 9.2]
    """
    check_integer("K", K, minimum=1)
    check_integer("T", T, minimum=1)
    check_integer("batch_size", batch_size, minimum=1)
    needed = recovery_threshold(K, T)
    check_integer("N", N, minimum=needed)
    wait, upload = expected_wait(N, N), expected_wait(N, needed)
    found = []
    for log_base in LOG_BASES:
        for batch in BATCHES:
            factor = sharing_factor(N, batch_rows(batch_size, K, batch), log_base=log_base)
            found.append(Convention(log_base, batch, factor, factor * wait, upload, wait))
    return found
