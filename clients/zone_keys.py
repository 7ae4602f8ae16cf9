"""Keys of a trusted zone: what a node says of its own, and the channels to its neighbours.

A neighbour is believed by the identity that this node has pinned, never by what a server says.
"""

from typing import Any

from flwr_privacy.channel import Channel, Part
from flwr_privacy.experiment_keys import check_signature, own_pair, signature_of

from .custody import Custody

__all__ = ["channel_to", "introduction"]

_SCHEME = "m2fdp"


def introduction(custody: Custody, experiment_id: str) -> dict[str, Any]:
    """Return the node's public key and its signature; nothing without a long-term identity."""
    if custody.identity is None:
        return {}
    public = own_pair(custody, _SCHEME, experiment_id).public
    return {"key": public, "signature": signature_of(custody, _SCHEME, experiment_id, public)}


def channel_to(
    custody: Custody, experiment_id: str, peer: str, public: Any, signature: Any
) -> Channel:
    """Return the channel to a neighbour whose identity this node has pinned.

    Parameters
    ----------
    custody : Custody
        What the node keeps.
    experiment_id : str
        The experiment.
    peer : str
        The neighbour.
    public, signature : bytes
        What is said to be its key, and its signature.

    Raises
    ------
    ProtocolError
        If the node pins nobody, or not this neighbour, or the signature is not the neighbour's.
    """
    check_signature(custody, _SCHEME, experiment_id, peer, public, signature)
    context: tuple[Part, ...] = (_SCHEME, 1, experiment_id)
    pair = own_pair(custody, _SCHEME, experiment_id)
    return Channel(pair, public, me=custody.client_id, peer=peer, context=context)
