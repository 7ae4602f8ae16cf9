"""Terms as a server may ask for them; a test says what it changes."""

from typing import Any

from flwr_privacy.central_dp.terms import CentralDPTerms
from flwr_privacy.udp import LossTerms, UDPTerms


def udp_terms(**changes: Any) -> UDPTerms:
    """Return terms of an update at user level, with some values of one's own."""
    usual: dict[str, Any] = {
        "unit": "user",
        "noise_multiplier": 5.0,
        "epsilon": 8.0,
        "delta": 1e-5,
        "gap": 1e-3,
        "clipping_norm": 1.0,
        "grid": -16,
    }
    return UDPTerms(**{**usual, **changes})


def loss_terms(**changes: Any) -> LossTerms:
    """Return terms of a loss at user level, with some values of one's own."""
    usual: dict[str, Any] = {
        "unit": "user",
        "cap": 4.0,
        "noise_multiplier": 5.0,
        "epsilon": 8.0,
        "delta": 1e-5,
        "gap": 1e-2,
    }
    return LossTerms(**{**usual, **changes})


def central_terms(**changes: Any) -> CentralDPTerms:
    """Return terms of an update whose noise is dealt out, with some values of one's own."""
    usual: dict[str, Any] = {
        "noise": "distributed",
        "sampling": "fixed",
        "neighbours": "replace_one",
        "noise_multiplier": 5.0,
        "count_share": 0.1,
        "epsilon": 8.0,
        "delta": 1e-5,
        "gap": 1e-3,
        "clipping_norm": 1.0,
        "grid": -20,
        "parties": 3,
    }
    return CentralDPTerms(**{**usual, **changes})
