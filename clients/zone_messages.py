"""What the members of a trusted zone seal for each other, and what both ends must agree on."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flwr_privacy.channel import Channel, Part
from flwr_privacy.documents import dumps, loads
from flwr_privacy.errors import DeclinedError, ProtocolError
from flwr_privacy.grid import CODE_LIMIT
from flwr_privacy.m2fdp import DOWN, UP, Duty, Reach, Terms, Upload
from flwr_privacy.wire import Fields

from .custody import Custody
from .zone_keys import channel_to

__all__ = ["going_down", "going_up", "packed", "trusted_channel", "unpacked"]


def trusted_channel(custody: Custody, parent: str, experiment_id: str, fields: Fields) -> Channel:
    """Return the channel to a parent, if the node's own policy trusts it.

    Raises
    ------
    DeclinedError
        If it does not.
    """
    if parent not in (custody.policy.trusted_parents or ()):
        raise DeclinedError(
            f"the parent '{parent[:64]}' is not trusted: this node's policy has trusted_parents = "
            f"{list(custody.policy.trusted_parents or ())}"
        )
    return channel_to(
        custody, experiment_id, parent, fields.get("parent-key"), fields.get("parent-signature")
    )


def going_up(
    experiment_id: str,
    server_round: int,
    terms: Terms | Duty,
    *,
    sender: str,
    tier: int,
    receiver: str,
    children: Sequence[str],
) -> tuple[Part, ...]:
    """Return what an answer to a parent is bound to: the event, both ends, all who were asked.

    Parameters
    ----------
    experiment_id, server_round : str, int
        The round.
    terms : Terms or Duty
        What one of the two ends was asked.
    sender, tier : str, int
        Who sends it, from which tier.
    receiver : str
        Who is to get it.
    children : sequence of str
        All children of the receiver that were asked.
    """
    event = [terms.event, terms.tier, terms.period]
    ends: list[Part] = [sender, tier, receiver]
    return ("m2fdp", experiment_id, server_round, event, UP, ends, list(children))


def going_down(
    experiment_id: str,
    server_round: int,
    event: Any,
    *,
    sender: str,
    receiver: str,
    tier: int,
    children: Sequence[str],
) -> tuple[Part, ...]:
    """Return what a model for a child is bound to; `tier` is the child's.

    Raises
    ------
    ProtocolError
        If the event has no number.
    """
    if type(event) is not int:
        raise ProtocolError("the question does not say which event a sealed model is of")
    ends: list[Part] = [sender, receiver, tier]
    return ("m2fdp", experiment_id, server_round, event, DOWN, ends, list(children))


def packed(upload: Upload, terms: Terms | Duty) -> bytes:
    """Return an upload as bytes, with what sender and receiver must agree on."""
    reach, codes = upload.reach, upload.codes
    if max(codes.max(initial=0), -codes.min(initial=0)) <= CODE_LIMIT:
        codes = codes.astype(np.int32)
    return dumps(
        {
            "codes": codes,
            "anchor": reach.anchor,
            "shared": reach.shared,
            "nearer": [list(step) for step in reach.nearer],
            "own": reach.own,
            "floor": upload.floor,
            "agreed": _agreed(terms),
        }
    )


def unpacked(content: bytes, terms: Terms | Duty) -> Upload:
    """Return the upload of a member of the zone.

    Raises
    ------
    ProtocolError
        If it was asked for other noise, another grid or another unit than this node.
    """
    state = loads(content)
    if state["agreed"] != _agreed(terms):
        raise ProtocolError("a member of the zone was asked for another noise, grid or unit")
    reach = Reach(
        anchor=state["anchor"],
        shared=state["shared"],
        nearer=tuple((tier, length) for tier, length in state["nearer"]),
        own=state["own"],
    )
    return Upload(np.asarray(state["codes"]).astype(np.int64), reach, state["floor"])


def _agreed(terms: Terms | Duty) -> list[Any]:
    return [
        terms.unit,
        terms.noise_multiplier,
        terms.sampling,
        terms.grid,
        terms.period,
        terms.law,
        terms.growth,
        terms.depth,
        sorted(terms.keep_back),
    ]


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ProtocolError("the question does not say who was asked")
    return value
