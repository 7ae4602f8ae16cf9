"""The messages between server and clients of a secure sum.

As records they are what `flwr_privacy.wire.fields` makes of them.
"""

from dataclasses import dataclass, field

__all__ = [
    "DEAL",
    "JOIN",
    "KEYS",
    "OPEN",
    "OWN",
    "SHARES",
    "SIGNED",
    "Dealt",
    "Invitation",
    "Joined",
    "Opening",
    "Revealed",
]

KEYS, SHARES = "keys", "shares"
"""Phases: telling the public key; dealing shares for a round, revealing shares of another."""

JOIN, DEAL, OPEN = "flwr-privacy.join", "flwr-privacy.deal", "flwr-privacy.open"
"""Records of a request that asks for a masked vector, for shares, or to open a sum; the answers
to the last two have the same names."""


SIGNED = "secure-sum"
"""What clients sign their keys as: `flwr_privacy.pipeline.experiment_keys.signature_of`."""

OWN = {JOIN: ("dealers", "mask-keys", "sealed")}
"""What no two clients have alike of a request for a vector."""


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """The request to deal the secrets of a sum.

    Parameters
    ----------
    session : str
        Name of the attempt; never used twice.
    server_round : int
        Round.
    step : int
        Number of the sum within its round, from 0.
    threshold : int
        Number of shares that open a secret: more than half of the roster, and the same in all steps
        of a round.
    roster : list of str
        With whom the client shares masks, itself included, sorted; at a later step those who
        survived the one before.
    keys : list of bytes
        Their public keys.
    signatures : list of bytes
        Signatures of the keys by long-term keys, empty where there is none.
    needed : list of str
        Those of the roster without whose vectors the sum is not opened, sorted; by default nobody.
    """

    session: str
    server_round: int
    step: int
    threshold: int
    roster: list[str]
    keys: list[bytes]
    signatures: list[bytes]
    needed: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """The shares and keys that a client deals; all of them go through the server.

    Parameters
    ----------
    mask_key : bytes
        Public key of the pairwise masks of this session.
    commitment : bytes
        Hash of the seed.
    digests : list of bytes
        For each member of the roster the hashes of its two shares, so that a changed one shows.
    sealed : list of bytes
        For each member its two shares, which only it can open; empty for the client itself.
    """

    mask_key: bytes
    commitment: bytes
    digests: list[bytes]
    sealed: list[bytes]


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The request to join a sum: the session's dealers, and their sealed shares for the client.

    Parameters
    ----------
    session : str
        Name of the session.
    threshold : int
        Least number of clients in the sum.
    dealers : list of str
        Who of the roster dealt, sorted, the client included.
    mask_keys : list of bytes
        Their public keys of the pairwise masks.
    sealed : list of bytes
        Their shares for the client; empty for its own.
    """

    session: str
    threshold: int
    dealers: list[str]
    mask_keys: list[bytes]
    sealed: list[bytes]


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
