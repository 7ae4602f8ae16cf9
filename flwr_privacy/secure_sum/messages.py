"""The messages between server and clients of a secure sum.

As records they are what `flwr_privacy.wire.fields` makes of them.
"""

from dataclasses import dataclass

__all__ = ["DEAL", "JOIN", "KEYS", "OPEN", "OWN", "SHARES", "Opening", "Revealed"]

KEYS, SHARES = "keys", "shares"
"""Phases: telling the public key; dealing shares for a round, revealing shares of another."""

JOIN, DEAL, OPEN = "flwr-privacy.join", "flwr-privacy.deal", "flwr-privacy.open"
"""Records of a question that asks for a masked vector, for shares, or to open a sum; the answers
to the last two have the same names."""


OWN = {JOIN: ("dealers", "mask-keys", "sealed")}
"""What no two clients have alike of a question for a vector."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The request to reveal shares of a session.

    Parameters
    ----------
    session : str
        Name of the session.
    survivors : list of str
        Dealers of the client's roster whose vectors are in the sum.
    """

    session: str
    survivors: list[str]


@dataclass(frozen=True, kw_only=True)
class Revealed:
    """The shares that a client reveals; see `Participant.reveal`.

    Parameters
    ----------
    keys, seeds : list of bytes
        Shares of the keys of the missing, and of the seeds of the survivors.
    """

    keys: list[bytes]
    seeds: list[bytes]
