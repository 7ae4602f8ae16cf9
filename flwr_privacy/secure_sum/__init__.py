"""Secure sums: the server opens the sum of the clients' vectors and nothing else.

After Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning",
CCS 2017 (double masking, drop-out recovery), and for large cohorts Bell et al., "Secure
Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020 (a sparse graph of
neighbours). `Participant` is a client's side, `Session` the server's.
"""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from .masked import MaskedSum
    from .messages import Invitation, Joined
    from .participant import Participant
    from .session import NotOpenedError, Session
    from .settings import Bounds, SecureSum
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Bounds",
    "Invitation",
    "Joined",
    "MaskedSum",
    "NotOpenedError",
    "Participant",
    "SecureSum",
    "Session",
]
